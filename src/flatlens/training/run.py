"""A training run: its steps, its check points, and the state from which it can be continued."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput
from flatlens.estimate import Progress
from flatlens.progress import beside
from flatlens.training.batches import Batches, Taken
from flatlens.training.checkpoint import INTERVAL
from flatlens.training.settings import Training
from flatlens.training.step import Stepper, global_states, set_global_states
from flatlens.training.training_data import Pair, TrainingData, require_trainable

Ending: TypeAlias = Literal["converged", "finished", "trained elsewhere", "out of steps", "diverged"]
REACHED: tuple[Ending, ...] = ("converged", "finished", "trained elsewhere")
"""The endings of a successful run: its conditions are met, or, without conditions, all its steps are taken."""
CURVE_SPACING = 1.05
ROW = ("loss", "accuracy", "test_loss", "test_accuracy")


class Watcher(Protocol):
    """An observer of a run, such as a `flatlens.Tracker`."""

    def step(self, step: int | None = None, *, optimiser: torch.optim.Optimizer | None = None) -> object:
        """Observe the network before the first step (step 0) and after each step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the observer's state, of numbers, strings, lists, dicts and tensors, for the checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class TrainingResult:
    """The ending of a training run, and its curves."""

    outcome: Ending
    steps: int
    epochs: float
    loss: float  #: mean over the training set after the last step, with label smoothing, without penalties
    accuracy: float  #: accuracy on the training set; NaN for regression
    curves: dict[str, Tensor]
    """"step" int64, and "loss", "accuracy", "test_loss", "test_accuracy" float64, at the same check points."""

    @property
    def reached(self) -> bool:
        """Return whether training ended successfully."""
        return self.outcome in REACHED


class TrainingRun:
    """A training run."""

    def __init__(
        self, model: nn.Module, data: Pair, test: Pair | None, settings: Training, watch: Watcher | None
    ) -> None:
        require_trainable(model, data, settings)
        require_followed(watch, model)
        self.model, self.settings, self.watch = model, settings, watch
        self.stepper = Stepper(model, settings)
        self.data = TrainingData(model, data, settings, "data")
        self.test = None if test is None else TrainingData(model, test, settings, "test")
        order = torch.Generator().manual_seed(settings.seed)
        self.batches = Batches(self.data.x, self.data.targets, settings.batch_size, order)
        self.total = settings.steps(len(self.data.x))
        self.step = 0
        self.outcome: Ending | None = None
        self.rows: list[list[float]] = []  # step, then ROW
        self.next_row = 0
        self.last = [math.nan, math.nan]  # loss and accuracy at the last check point
        self.losses: list[float] = []  # that the end depends on, the latest ones
        self.epoch_loss = [0.0, 0.0]  # summed over this epoch's samples so far, and how many they were

    def go(self, write: Callable[[], None] | None, progress: Progress | None) -> None:
        """Train to the end; call `write` at intervals."""
        wrote, progress = time.monotonic(), beside(progress)
        self.begin()
        for batch in self.batches if self.outcome is None else ():
            self._take(batch)
            if progress is not None and self.is_check_point:
                progress("training steps", self.step, self.total)
            if write is not None and time.monotonic() - wrote > INTERVAL:
                write()
                wrote = time.monotonic()
            if self.outcome is not None:
                break
        if write is not None:
            write()

    def begin(self) -> None:
        """Evaluate before the first step, unless that is done."""
        if self.step == 0 and not self.rows:
            self.tell_watcher(epoch=0)
            self._look(last=False)

    @property
    def is_check_point(self) -> bool:
        """Return whether the loss over all data is evaluated, and progress reported, at this step."""
        return self.step % self.settings.check_every == 0 or self.step == self.total

    def must_look(self, last: bool) -> bool:
        """Return whether to evaluate after this step; `last` says that it used the last batch of its epoch."""
        return self.is_check_point or (last and self.settings.until.loss_over == "epoch")

    def _take(self, batch: Taken) -> None:
        loss = self.stepper.take(batch.x, batch.targets, self.settings.factor(self.step, batch.epoch))
        self.count(loss, len(batch.x))
        self.tell_watcher(batch.epoch + batch.last)
        if self.must_look(batch.last):
            self._look(batch.last)
        if batch.last:
            self.epoch_loss = [0.0, 0.0]

    def count(self, loss: float, n: int) -> None:
        """Record a step on `n` samples whose loss was `loss` before it."""
        self.step += 1
        self.epoch_loss = [self.epoch_loss[0] + loss * n, self.epoch_loss[1] + n]

    def tell_watcher(self, epoch: int) -> None:
        """Call the watcher with the optimiser of the next step; with None if ascent moves the edge of stability."""
        if self.watch is not None:
            self.stepper.set_rate(self.settings.factor(self.step, epoch))
            self.watch.step(self.step, optimiser=None if self.stepper.ascends else self.stepper.optimiser)

    def _look(self, last: bool) -> None:
        if self.only_the_end_depends and self._goes_on():
            return
        if self.judge(self.data.look(), last):
            self.write_row([math.nan, math.nan] if self.test is None else self.test.look())

    def _goes_on(self) -> bool:
        """Return whether a few samples prove that a look at all data would not end the run."""
        until = self.settings.until
        if until.loss_below is not None:
            return self.data.surely_above(until.loss_below)
        return not until.anything and self.data.surely_above(-1.0)  # the loss is finite

    def asks_accuracy(self, loss: float) -> bool:
        """Return whether the accuracy is needed at this loss; it is not if the run continues in any case."""
        until = self.settings.until
        high = until.loss_below is not None and until.loss_window == 1 and loss >= until.loss_below
        goes_on = (high and until.loss_over == "data") or not until.anything
        return not (goes_on and math.isfinite(loss)) or self.step >= min(self.next_row, self.total)

    @property
    def only_the_end_depends(self) -> bool:
        """Return whether a look at this step only decides on the end, by this look's own loss and accuracy."""
        until = self.settings.until
        own = until.loss_over == "data" and until.loss_window == 1 and until.gradient_norm is None
        return own and self.step < min(self.next_row, self.total)

    def judge(self, seen: list[float], last: bool) -> bool:
        """Record loss and accuracy over all data, decide on the end, and return whether a row of curves is due.

        `seen` is (loss, accuracy).
        """
        until = self.settings.until
        loss, right = self.last = seen
        if until.loss_over == "data":
            self.losses.append(loss)
        elif last:
            self.losses.append(self.epoch_loss[0] / self.epoch_loss[1])
        self.losses = self.losses[-until.loss_window :]
        steep = self.data.gradient_norm(self.stepper.parameters) if until.gradient_norm is not None else math.nan
        if not math.isfinite(loss):
            self.outcome = "diverged"
        elif until.met(self.losses, right, steep):
            self.outcome = "converged"
        elif self.step >= self.total:
            self.outcome = "out of steps" if until.anything else "finished"
        return self.step >= self.next_row or self.outcome is not None

    def write_row(self, held_out: list[float]) -> None:
        """Add a row to the curves, with loss and accuracy on the held-out data."""
        self.rows.append([self.step, *self.last, *held_out])
        self.next_row = max(self.step + 1, math.ceil(self.step * CURVE_SPACING))

    def result(self) -> TrainingResult:
        """Return the result of the run."""
        assert self.outcome is not None
        each = math.ceil(len(self.data.x) / (self.settings.batch_size or len(self.data.x)))
        columns = torch.tensor(self.rows, dtype=torch.float64).T
        curves = {"step": columns[0].long(), **dict(zip(ROW, (c.clone() for c in columns[1:]), strict=True))}
        loss, right = self.last
        return TrainingResult(self.outcome, self.step, self.step / each, loss, right, curves)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the remaining run depends on, and the results so far."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.stepper.optimiser.state_dict(),
            "batches": self.batches.state_dict(),
            "noise": {name: generator.get_state() for name, generator in self.stepper.noise.items()},
            "dropout": global_states(self.data.x.device),
            "watch": None if self.watch is None else self.watch.state_dict(),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        self.model.load_state_dict(state["model"])
        self.stepper.optimiser.load_state_dict(state["optimiser"])
        self.batches.load_state_dict(state["batches"])
        for name, generator in self.stepper.noise.items():
            generator.set_state(state["noise"][name])
        set_global_states(state["dropout"], self.data.x.device)
        if (self.watch is None) != (state["watch"] is None):
            had = "with a tracker: pass it again" if self.watch is None else "without a tracker: leave watch out"
            raise BadInput(f"train(watch=...): the checkpoint was saved {had}")
        if self.watch is not None:
            self.watch.load_state_dict(state["watch"])
        for name in _PLAIN:
            setattr(self, name, state[name])


def require_followed(watch: Watcher | None, model: nn.Module) -> None:
    """Refuse a tracker whose problem is of another network."""
    followed = getattr(getattr(watch, "problem", None), "model", None)
    if isinstance(followed, nn.Module):
        own = {id(p) for p in model.parameters()}
        if not any(id(p) in own for p in followed.parameters()):
            raise BadInput(
                "train(watch=...): the tracker measures another network: make its Problem with the model that you train"
            )


_PLAIN = ("step", "outcome", "rows", "next_row", "last", "losses", "epoch_loss")
