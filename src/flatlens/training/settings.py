"""The settings of a training run: with the network and the data, they determine every digit of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flatlens.errors import BadInput
from flatlens.settings_json import Options, require_setting
from flatlens.training.batches import Augmentation, Mixup
from flatlens.training.objective import LossName, Penalty, TrainingLoss
from flatlens.training.optimisers import Ascent, Constant, LearningRateSchedule, Optimiser, Ridge


@dataclass(frozen=True)
class Until:
    """Conditions at a check point: training has converged when all conditions that are set hold together.

    If none is set, training continues to the end of its steps or epochs.

    >>> rule = Until(loss_below=0.1, loss_window=2)
    >>> rule.met([0.3, 0.09], accuracy=1.0, gradient_norm=0.0), rule.met([0.1, 0.09], 1.0, 0.0)
    (False, True)
    """

    loss_below: float | None = None  #: upper limit of the mean of the last `loss_window` losses
    loss_window: int = 1  #: number of check points
    loss_over: Literal["data", "epoch"] = "data"
    """Which loss: that over all data, at check points; or the mean over an epoch's batches as they were trained on."""
    accuracy: float | None = None  #: smallest accuracy on the training data
    gradient_norm: float | None = None  #: largest ||dL/dtheta|| over all data

    def __post_init__(self) -> None:
        require_setting(self, "loss_window", self.loss_window >= 1, "expected at least 1")
        require_setting(self, "loss_over", self.loss_over in ("data", "epoch"), "expected 'data' or 'epoch'")
        for name in ("loss_below", "gradient_norm"):
            value = getattr(self, name)
            require_setting(self, name, value is None or math.isfinite(value), "expected a finite number")
        share = self.accuracy is None or 0 <= self.accuracy <= 1
        require_setting(self, "accuracy", share, "expected a share from 0 to 1")

    @property
    def anything(self) -> bool:
        """Return whether any condition is set."""
        return not (self.loss_below is None and self.accuracy is None and self.gradient_norm is None)

    def met(self, losses: Sequence[float], accuracy: float, gradient_norm: float) -> bool:
        """Return whether training has converged; `losses` are those of the last check points, or of all."""
        if not self.anything:
            return False
        recent = losses[-self.loss_window :]
        low = self.loss_below is None or (
            len(recent) == self.loss_window and math.fsum(recent) / self.loss_window < self.loss_below
        )
        right = self.accuracy is None or accuracy >= self.accuracy
        flat = self.gradient_norm is None or gradient_norm <= self.gradient_norm
        return low and right and flat


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
    until: Until = Until()
    max_steps: int | None = None
    max_epochs: int | None = None
    check_every: int = 10  #: number of steps between two evaluations of the loss over all data
    seed: int = 0  #: seed of the order of the samples and of all noise

    def __post_init__(self) -> None:
        several = self.penalties if isinstance(self.penalties, tuple | list) else (self.penalties,)
        object.__setattr__(self, "penalties", tuple(several))
        parts: list[tuple[str, object, tuple[type, ...]]] = [
            ("optimiser", self.optimiser, get_args(Optimiser)),
            ("schedule", self.schedule, get_args(LearningRateSchedule)),
            ("until", self.until, (Until,)),
            ("augmentation", self.augmentation, get_args(Augmentation | None)),
            ("mixup", self.mixup, get_args(Mixup | None)),
            ("ascent", self.ascent, get_args(Ascent | None)),
            *(("penalties", each, get_args(Penalty)) for each in self.penalties),
        ]
        for name, value, kinds in parts:
            if not isinstance(value, kinds):
                known = ", ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise BadInput(f"Training({name}={value!r}): expected one of {known}")
        TrainingLoss(self.loss, self.label_smoothing)
        for name, least in _LEAST.items():
            size = getattr(self, name)
            whole = isinstance(size, int) and not isinstance(size, bool) and size >= least
            left_out = size is None and name in MAY_BE_NONE
            require_setting(self, name, whole or left_out, f"expected a whole number, at least {least}")
        if self.max_steps is None and self.max_epochs is None:
            raise BadInput("Training: give max_steps or max_epochs, so that training always ends")
        if isinstance(self.optimiser, Ridge) and (self.loss == "cross_entropy" or self.penalties):
            mend = "set loss='half_squared_error' and no penalties"
            raise BadInput(f"Training(Ridge()): works for the squared error only: {mend}")

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


RESULTS = ("loss", "accuracy", "test_loss", "test_accuracy", "generalisation_gap")
"""Facts about a network that are results, not settings."""
SHARES = ("accuracy", "test_accuracy", "generalisation_gap")
"""Results near 0 or 1, of which a ratio says nothing."""


@dataclass(frozen=True)
class TrainedElsewhere:
    """The settings of a network that was trained outside flatlens: a checkpoint, and what is known about it.

    `known` has any facts by name: settings such as "lr" and "batch_size", and results such as "generalisation_gap",
    which take the place of those measured.

    >>> TrainedElsewhere("a.pt", "sha256", known={"lr": 0.1}).known["lr"]
    0.1
    """

    weights: str  #: the file, with its whole path
    contents: str  #: hash of the file
    loss: LossName = "cross_entropy"
    known: Mapping[str, Any] = Options()
    seed: int | None = None  #: of the training, where it is known

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", Options(self.known))
        TrainingLoss(self.loss)

    @property
    def objective(self) -> TrainingLoss:
        """The loss under which the network is measured."""
        return TrainingLoss(self.loss)

    def steps(self, samples: int) -> int:
        """Return the number of steps that it takes here: none."""
        return 0

    @property
    def settings(self) -> dict[str, Any]:
        """Return all that is known but the results."""
        return {name: value for name, value in self.known.items() if name not in RESULTS}

    @property
    def results(self) -> dict[str, Any]:
        """Return the known results."""
        return {name: value for name, value in self.known.items() if name in RESULTS}
