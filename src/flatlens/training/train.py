"""Train a classifier until it interpolates its training data, runs out of steps or diverges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn

from flatlens.estimate import Progress
from flatlens.training.losses import PerSampleLoss, loss_named
from flatlens.training.sgd import SGD

Outcome: TypeAlias = Literal["interpolated", "out of steps", "diverged"]
CURVE_SPACING = 1.05


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class TrainingResult:
    """How a training run ended, and its curves."""

    outcome: Outcome
    steps: int
    loss: float  #: mean over the whole training set, after the last step
    accuracy: float
    curves: dict[str, Tensor]  #: "step" int64 and "loss", "accuracy", "test_loss" float64, at the same check points

    @property
    def reached(self) -> bool:
        """Whether the stop rule was met."""
        return self.outcome == "interpolated"


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    loss: str,
    settings: SGD,
    *,
    test: tuple[Tensor, Tensor],
    progress: Progress | None = None,
) -> TrainingResult:
    """Train `model` in place on (inputs, integer labels); its outputs are (n, classes).

    Every epoch is a fresh permutation of the samples cut into batches, the last one smaller where it does not divide.
    The curves hold the first and last check point and, between, those at least 5% of the steps apart.
    Same settings, versions, machine and number of threads: same digits.

    Raises:
        UnknownName: no such loss.
    """
    run = _Run(model, data, test, loss_named(loss), settings)
    optimiser = settings.optimiser(model)
    step, outcome = 0, run.check(0)
    for step, (x, targets) in enumerate(run.batches(), start=1):
        optimiser.zero_grad()
        torch.autograd.backward(run.loss(model(x), targets).mean())
        optimiser.step()
        if step % settings.check_every == 0 or step == settings.max_steps:
            outcome = run.check(step)
            if progress is not None:
                progress("training steps", step, settings.max_steps)
            if outcome != "out of steps" or step == settings.max_steps:
                break
    optimiser.zero_grad()
    return run.result(step, outcome)


@dataclass(eq=False)
class _Run:
    """A training run under way: its data with one-hot targets and the curves so far."""

    model: nn.Module
    data: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    loss: PerSampleLoss
    settings: SGD
    rows: list[tuple[int, float, float, float]] = field(default_factory=list)
    next_row: int = 0
    last: tuple[float, float] = (math.nan, math.nan)  # loss and accuracy at the last check point

    def __post_init__(self) -> None:
        classes = self.model(self.data[0][:1]).shape[1]
        dtype = self.data[0].dtype
        self.targets = nn.functional.one_hot(self.data[1], classes).to(dtype)
        self.test_targets = nn.functional.one_hot(self.test[1], classes).to(dtype)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, one permutation an epoch."""
        generator: Generator = torch.Generator().manual_seed(self.settings.seed)
        x = self.data[0]
        while True:
            order = torch.randperm(len(x), generator=generator)
            x_epoch, targets_epoch = x[order], self.targets[order]
            for start in range(0, len(x), self.settings.batch_size):
                stop = start + self.settings.batch_size
                yield x_epoch[start:stop], targets_epoch[start:stop]

    @torch.no_grad()
    def check(self, step: int) -> Outcome:
        """Loss and accuracy over the whole training set; a row of the curves when one is due."""
        x, labels = self.data
        outputs = self.model(x)
        loss = _mean(self.loss(outputs, self.targets))
        accuracy = _mean(outputs.argmax(1) == labels)
        self.last = (loss, accuracy)
        outcome: Outcome = "out of steps"
        if not math.isfinite(loss):
            outcome = "diverged"
        elif accuracy == 1.0 and loss < self.settings.loss_below:
            outcome = "interpolated"
        if step >= self.next_row or outcome != "out of steps" or step == self.settings.max_steps:
            self.rows.append((step, loss, accuracy, _mean(self.loss(self.model(self.test[0]), self.test_targets))))
            self.next_row = max(step + 1, math.ceil(step * CURVE_SPACING))
        return outcome

    def result(self, step: int, outcome: Outcome) -> TrainingResult:
        """The end of it."""
        return TrainingResult(outcome, step, *self.last, curves=_curves(self.rows))


def _curves(rows: Sequence[tuple[int, float, float, float]]) -> dict[str, Tensor]:
    columns = list(zip(*rows, strict=True))
    names = ("loss", "accuracy", "test_loss")
    floats = {name: torch.tensor(c, dtype=torch.float64) for name, c in zip(names, columns[1:], strict=True)}
    return {"step": torch.tensor(columns[0], dtype=torch.int64), **floats}


def _mean(values: Tensor) -> float:
    return float(values.to(torch.float64).mean())
