"""Everything that decides the digits of a training run, but the network and the data."""

from __future__ import annotations

from dataclasses import dataclass

from flatlens.errors import BadInput
from flatlens.training.ascent import Ascent
from flatlens.training.augmentation import Augmentation, Mixup
from flatlens.training.losses import LossName, TrainingLoss
from flatlens.training.optimisers import Optimiser
from flatlens.training.penalties import Penalty
from flatlens.training.schedules import Constant, Schedule
from flatlens.training.stopping import Until


@dataclass(frozen=True)
class Training:
    """Settings of a training run.

    >>> from flatlens.training import SGD
    >>> sgd = Training(SGD(lr=0.1, momentum=0.9), batch_size=128, max_epochs=90, augmentation=Augmentation())
    >>> gd = Training(SGD(lr=0.08), ghost_batch=5000, max_steps=300, label_smoothing=0.5)  # full batch
    """

    optimiser: Optimiser
    batch_size: int | None = None  #: None: all samples in every step, in their own order (gradient descent)
    ghost_batch: int | None = None  #: a batch goes through the network in parts of so many; the gradient is that of all
    loss: LossName = "cross_entropy"
    label_smoothing: float = 0.0
    schedule: Schedule = Constant()  # noqa: RUF009 (frozen)
    warmup: int = 0  #: the learning rate rises linearly over the first so many steps
    augmentation: Augmentation | None = None
    mixup: Mixup | None = None
    ascent: Ascent | None = None
    penalties: tuple[Penalty, ...] = ()
    until: Until = Until()  # noqa: RUF009 (frozen)
    max_steps: int | None = None
    max_epochs: int | None = None
    check_every: int = 10  #: steps between two looks at the loss over all data
    seed: int = 0  #: of the order of the samples, and of all noise

    def __post_init__(self) -> None:
        object.__setattr__(self, "penalties", tuple(self.penalties))
        TrainingLoss(self.loss, self.label_smoothing)
        for name in ("batch_size", "ghost_batch", "max_steps", "max_epochs", "check_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"Training({name}={value}): at least 1 is needed")
        if self.warmup < 0:
            raise BadInput(f"Training(warmup={self.warmup}): it must not be negative")
        if self.max_steps is None and self.max_epochs is None:
            raise BadInput("Training: give max_steps or max_epochs, so that it ends whatever happens")

    @property
    def objective(self) -> TrainingLoss:
        """What is minimised, but for the penalties."""
        return TrainingLoss(self.loss, self.label_smoothing)

    def steps(self, n: int) -> int:
        """How many steps there are at most on n samples."""
        each = 1 if self.batch_size is None else -(-n // self.batch_size)
        bounds = [self.max_steps, None if self.max_epochs is None else self.max_epochs * each]
        return min(bound for bound in bounds if bound is not None)

    def factor(self, step: int, epoch: int) -> float:
        """What the optimiser's learning rate is multiplied by in a step, counted from 0."""
        rising = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return rising * self.schedule.factor(step, epoch)
