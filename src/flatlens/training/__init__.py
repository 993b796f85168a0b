"""Training to a minimum: optimisers, schedules, regularisers, stopping rules, and runs that continue after a kill."""

from flatlens.training.batches import Augmentation, Mixup
from flatlens.training.objective import InputJacobian, ParameterJacobian, RelativeFlatness, TrainingLoss
from flatlens.training.optimisers import ASAM, SAM, SGD, Adam, Constant, Cosine, Ridge, RMSProp, Steps
from flatlens.training.run import REACHED, TrainingResult, Watcher, train
from flatlens.training.settings import TrainedElsewhere, Training, Until

SETTINGS: tuple[type, ...] = (
    Training, Until, SGD, Adam, RMSProp, Ridge, Constant, Steps, Cosine, Augmentation, Mixup, SAM, ASAM,
    InputJacobian, ParameterJacobian, RelativeFlatness, TrainedElsewhere,
)  # fmt: skip
"""All the types that a run's settings are made of."""

__all__ = [
    "ASAM", "REACHED", "SAM", "SETTINGS", "SGD", "Adam", "Augmentation", "Constant", "Cosine", "InputJacobian", "Mixup",
    "ParameterJacobian", "RMSProp", "RelativeFlatness", "Ridge", "Steps", "TrainedElsewhere", "Training",
    "TrainingLoss", "TrainingResult", "Until", "Watcher", "train",
]  # fmt: skip
