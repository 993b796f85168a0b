"""The settings of a training run: with the network and the data, they determine every digit of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from flatlens.errors import BadInput
from flatlens.training.ascent import Ascent
from flatlens.training.augmentation import Augmentation, Mixup
from flatlens.training.losses import LossName, TrainingLoss
from flatlens.training.optimisers import Optimiser
from flatlens.training.penalties import Penalty
from flatlens.training.ridge import Ridge
from flatlens.training.schedules import Constant, LearningRateSchedule
from flatlens.training.stopping import Until

_LEAST = {"batch_size": 1, "ghost_batch": 1, "max_steps": 0, "max_epochs": 1, "check_every": 1, "warmup": 0, "seed": 0}
MAY_BE_NONE = ("batch_size", "ghost_batch", "max_steps", "max_epochs")


@dataclass(frozen=True)
class Training:
    """Settings of a training run.

    >>> from flatlens.training import SGD
    >>> sgd = Training(SGD(lr=0.1, momentum=0.9), batch_size=128, max_epochs=90, augmentation=Augmentation())
    >>> gd = Training(SGD(lr=0.08), ghost_batch=5000, max_steps=300, label_smoothing=0.5)  # full batch
    """

    optimiser: Optimiser
    batch_size: int | None = None  #: None for all samples in every step, in the data's order (gradient descent)
    ghost_batch: int | None = None  #: largest part of a batch that passes at once; the gradient is still the batch's
    loss: LossName = "cross_entropy"
    label_smoothing: float = 0.0
    schedule: LearningRateSchedule = Constant()  # noqa: RUF009 (frozen)
    warmup: int = 0  #: number of first steps during which the learning rate rises linearly
    augmentation: Augmentation | None = None
    mixup: Mixup | None = None
    ascent: Ascent | None = None
    penalties: tuple[Penalty, ...] = ()
    until: Until = Until()  # noqa: RUF009 (frozen)
    max_steps: int | None = None
    max_epochs: int | None = None
    check_every: int = 10  #: number of steps between two evaluations of the loss over all data
    seed: int = 0  #: seed of the order of the samples and of all noise

    def __post_init__(self) -> None:
        several = self.penalties if isinstance(self.penalties, tuple | list) else (self.penalties,)
        object.__setattr__(self, "penalties", tuple(several))
        self._require_types()
        TrainingLoss(self.loss, self.label_smoothing)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"Training({name}={value!r}): a whole number, at least {least} is needed")
        if self.max_steps is None and self.max_epochs is None:
            raise BadInput("Training: give max_steps or max_epochs, so that training always ends")
        if isinstance(self.optimiser, Ridge) and (self.loss == "cross_entropy" or self.penalties):
            raise BadInput(
                "Training(Ridge()): works for the squared error only: set loss='half_squared_error' and no penalties"
            )

    def _require_types(self) -> None:
        """Refuse settings of the wrong type."""
        wanted: dict[str, tuple[type, ...]] = {
            "optimiser": get_args(Optimiser),
            "schedule": get_args(LearningRateSchedule),
            "until": (Until,),
            "augmentation": get_args(Augmentation | None),
            "mixup": get_args(Mixup | None),
            "ascent": get_args(Ascent | None),
        }
        parts = [(name, getattr(self, name), kinds) for name, kinds in wanted.items()]
        parts += [("penalties", each, get_args(Penalty)) for each in self.penalties]
        for name, value, kinds in parts:
            if not isinstance(value, kinds):
                known = ", ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise BadInput(f"Training({name}={value!r}): one of {known} is needed")

    @property
    def objective(self) -> TrainingLoss:
        """Return the loss that is minimised, without the penalties."""
        return TrainingLoss(self.loss, self.label_smoothing)

    def steps(self, n: int) -> int:
        """Return the largest number of steps on n samples."""
        each = 1 if self.batch_size is None else -(-n // self.batch_size)
        bounds = [self.max_steps, None if self.max_epochs is None else self.max_epochs * each]
        return min(bound for bound in bounds if bound is not None)

    def factor(self, step: int, epoch: int) -> float:
        """Return the factor on the optimiser's learning rate at a step, counted from 0."""
        rising = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return rising * self.schedule.factor(step, epoch)
