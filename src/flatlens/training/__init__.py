"""Training to a minimum: optimisers, schedules, regularisers, stopping rules, and runs that survive a kill."""

from flatlens.training.ascent import ASAM, SAM
from flatlens.training.augmentation import Augmentation, Mixup
from flatlens.training.elsewhere import TrainedElsewhere
from flatlens.training.losses import TrainingLoss
from flatlens.training.optimisers import SGD, Adam, RMSProp
from flatlens.training.penalties import InputJacobian, ParameterJacobian, RelativeFlatness
from flatlens.training.ridge import Ridge
from flatlens.training.run import REACHED, TrainingResult, Watcher
from flatlens.training.schedules import Constant, Cosine, Steps
from flatlens.training.settings import Training
from flatlens.training.stopping import Until
from flatlens.training.train import train

SETTINGS: tuple[type, ...] = (
    Training, Until, SGD, Adam, RMSProp, Ridge, Constant, Steps, Cosine, Augmentation, Mixup, SAM, ASAM,
    InputJacobian, ParameterJacobian, RelativeFlatness, TrainedElsewhere,
)  # fmt: skip
"""All the types that a run's settings are made of."""

__all__ = [
    "ASAM",
    "REACHED",
    "SAM",
    "SETTINGS",
    "SGD",
    "Adam",
    "Augmentation",
    "Constant",
    "Cosine",
    "InputJacobian",
    "Mixup",
    "ParameterJacobian",
    "RMSProp",
    "RelativeFlatness",
    "Ridge",
    "Steps",
    "TrainedElsewhere",
    "Training",
    "TrainingLoss",
    "TrainingResult",
    "Until",
    "Watcher",
    "train",
]
