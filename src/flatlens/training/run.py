"""A training run under way: its steps, its check points, and the state it can be taken up from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatlens.errors import BadData, BadInput, BadModel
from flatlens.estimate import Progress
from flatlens.training.batches import Batches, Taken
from flatlens.training.checkpoint import INTERVAL
from flatlens.training.losses import accuracy
from flatlens.training.settings import Training
from flatlens.training.step import Stepper

Outcome: TypeAlias = Literal["converged", "finished", "out of steps", "diverged"]
REACHED: tuple[Outcome, ...] = ("converged", "finished")
"""How training ends as it should: its conditions met, or its steps over where there were none."""
CURVE_SPACING = 1.05
CHUNK = 1024
"""Samples that a look at the loss sends through the network at a time."""
ROW = ("loss", "accuracy", "test_loss", "test_accuracy")
Pair: TypeAlias = tuple[Tensor, Tensor]


class Watcher(Protocol):
    """What follows a run from beside it: a `flatlens.Tracker`, say."""

    def step(self, step: int | None = None, *, optimiser: torch.optim.Optimizer | None = None) -> object:
        """Called before the first step, with 0, and after each."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists, dicts and tensors; kept in the checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class TrainingResult:
    """How a training run ended, and its curves."""

    outcome: Outcome
    steps: int
    epochs: float
    loss: float  #: mean over the whole training set, after the last step; penalties left out, label smoothing not
    accuracy: float  #: of the training set; NaN for regression
    curves: dict[str, Tensor]
    """"step" int64, and "loss", "accuracy", "test_loss", "test_accuracy" float64, at the same check points."""

    @property
    def reached(self) -> bool:
        """Whether training ended as it should."""
        return self.outcome in REACHED


class Run:
    """A training run under way."""

    def __init__(
        self, model: nn.Module, data: Pair, test: Pair | None, settings: Training, watch: Watcher | None
    ) -> None:
        require_trainable(model, len(data[0]), settings)
        self.model, self.settings, self.watch = model, settings, watch
        self.stepper = Stepper(model, settings)
        self.data = _Set(model, data, settings, "data")
        self.test = None if test is None else _Set(model, test, settings, "test")
        order = torch.Generator().manual_seed(settings.seed)
        self.batches = Batches(self.data.x, self.data.targets, settings.batch_size, order)
        self.total = settings.steps(len(self.data.x))
        self.step = 0
        self.outcome: Outcome | None = None
        self.rows: list[list[float]] = []  # step, then ROW
        self.next_row = 0
        self.last = [math.nan, math.nan]  # loss and accuracy at the last check point
        self.losses: list[float] = []  # that the end depends on, the latest ones
        self.epoch_loss = [0.0, 0.0]  # summed over this epoch's samples so far, and how many they were

    def go(self, write: Callable[[], None] | None, progress: Progress | None) -> None:
        """From here to the end; `write` now and then."""
        wrote = time.monotonic()
        if self.step == 0 and self.outcome is None:
            self._tell_watcher()
            self._look(epoch_over=False)
        if self.outcome is not None:
            return
        for batch in self.batches:
            self._take(batch)
            if progress is not None and self._is_check_point:
                progress("training steps", self.step, self.total)
            if write is not None and time.monotonic() - wrote > INTERVAL:
                write()
                wrote = time.monotonic()
            if self.outcome is not None:
                break
        if write is not None:
            write()

    @property
    def _is_check_point(self) -> bool:
        return self.step % self.settings.check_every == 0 or self.step == self.total

    def _take(self, batch: Taken) -> None:
        loss = self.stepper.take(batch.x, batch.targets, self.settings.factor(self.step, batch.epoch))
        self.step += 1
        self.epoch_loss = [self.epoch_loss[0] + loss * len(batch.x), self.epoch_loss[1] + len(batch.x)]
        self._tell_watcher()
        by_epoch = self.settings.until.loss_over == "epoch" and batch.last
        if self._is_check_point or by_epoch:
            self._look(by_epoch)
        if batch.last:
            self.epoch_loss = [0.0, 0.0]

    def _tell_watcher(self) -> None:
        if self.watch is not None:
            self.watch.step(self.step, optimiser=self.stepper.optimiser)

    def _look(self, epoch_over: bool) -> None:
        """At the loss over all data, and whether that is the end; a row of the curves when one is due."""
        until = self.settings.until
        loss, right = self.last = self.data.look()
        if until.loss_over == "data":
            self.losses.append(loss)
        elif epoch_over:
            self.losses.append(self.epoch_loss[0] / self.epoch_loss[1])
        self.losses = self.losses[-until.loss_window :]
        steep = self.data.gradient_norm(self.stepper.parameters) if until.gradient_norm is not None else math.nan
        if not math.isfinite(loss):
            self.outcome = "diverged"
        elif until.met(self.losses, right, steep):
            self.outcome = "converged"
        elif self.step >= self.total:
            self.outcome = "out of steps" if until.anything else "finished"
        if self.step >= self.next_row or self.outcome is not None:
            held_out = [math.nan, math.nan] if self.test is None else self.test.look()
            self.rows.append([self.step, loss, right, *held_out])
            self.next_row = max(self.step + 1, math.ceil(self.step * CURVE_SPACING))

    def result(self) -> TrainingResult:
        """The end of it."""
        assert self.outcome is not None
        each = math.ceil(len(self.data.x) / (self.settings.batch_size or len(self.data.x)))
        columns = torch.tensor(self.rows, dtype=torch.float64).T
        curves = {"step": columns[0].long(), **dict(zip(ROW, (c.clone() for c in columns[1:]), strict=True))}
        loss, right = self.last
        return TrainingResult(self.outcome, self.step, self.step / each, loss, right, curves)

    def state_dict(self) -> dict[str, Any]:
        """All that the digits to come depend on, and what has been seen."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.stepper.optimiser.state_dict(),
            "batches": self.batches.state_dict(),
            "noise": {name: generator.get_state() for name, generator in self.stepper.noise.items()},
            "dropout": _global_states(self.data.x.device),
            "watch": None if self.watch is None else self.watch.state_dict(),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.model.load_state_dict(state["model"])
        self.stepper.optimiser.load_state_dict(state["optimiser"])
        self.batches.load_state_dict(state["batches"])
        for name, generator in self.stepper.noise.items():
            generator.set_state(state["noise"][name])
        _set_global_states(state["dropout"], self.data.x.device)
        if self.watch is not None and state["watch"] is not None:
            self.watch.load_state_dict(state["watch"])
        for name in _PLAIN:
            setattr(self, name, state[name])


_PLAIN = ("step", "outcome", "rows", "next_row", "last", "losses", "epoch_loss")


class _Set:
    """Data on the network's device, with targets ready for the loss."""

    def __init__(self, model: nn.Module, data: Pair, settings: Training, what: str) -> None:
        x, y = data
        if len(x) != len(y) or not len(x):
            raise BadData(
                f"train({what}=...): {len(x)} inputs and {len(y)} targets: as many, and at least one, are needed"
            )
        for tensor in (x, y):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None])).any(1).sum())
                raise BadData(f"train({what}=...): {bad} of {len(x)} samples hold NaN or inf: clean or drop them")
        device = next(model.parameters()).device
        self.model, self.loss = model, settings.objective
        self.x, self.y = x.to(device), y.to(device)
        self.targets = self.loss.targets(self.y, _first_outputs(model, self.x))

    def look(self) -> list[float]:
        """Loss and accuracy over all of it."""
        with _evaluating(self.model), torch.no_grad():
            outputs = torch.cat([self.model(part) for part in torch.split(self.x, CHUNK)])
        loss = float(self.loss.values(outputs, self.targets).to(torch.float64).mean())
        return [loss, accuracy(outputs, self.y)]

    def gradient_norm(self, parameters: Sequence[Tensor]) -> float:
        """||dL/dtheta||, L the mean loss over all of it, in eval mode."""
        total = [torch.zeros_like(p) for p in parameters]
        with _evaluating(self.model):
            for x, targets in zip(torch.split(self.x, CHUNK), torch.split(self.targets, CHUNK), strict=True):
                share = self.loss.values(self.model(x), targets).sum() / len(self.x)
                slopes = torch.autograd.grad(share, parameters, allow_unused=True)
                total = [t if g is None else t + g for t, g in zip(total, slopes, strict=True)]
        return math.sqrt(sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in total))


def _first_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """What the network gives for one sample, (1, N)."""
    try:
        with _evaluating(model), torch.no_grad():
            outputs = model(x[:1])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise BadModel(
            f"train(model=...): forward failed on the first sample ({why}): do they fit together?"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise BadModel(f"train(model=...): outputs of shape (n, N) are needed, got {got}")
    return outputs


def require_trainable(model: nn.Module, n: int, settings: Training) -> None:
    """Refuse a network with nothing to train, and BatchNorm where some batch would be a single sample."""
    if not any(p.requires_grad for p in model.parameters()):
        raise BadModel("train(model=...): no parameter asks for a gradient: there is nothing to train")
    batch = settings.batch_size or n
    last = n % batch or batch
    ghost = settings.ghost_batch or batch
    parts = {min(ghost, size) for size in (batch, last)} | {size % ghost for size in (batch, last)}
    if 1 in parts and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise BadInput(
            f"Training(batch_size={settings.batch_size}, ghost_batch={settings.ghost_batch}): of {n} samples one would "
            "be normalised alone by BatchNorm: choose a size that leaves no single sample"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a look; every module is put back in its own mode after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _global_states(device: torch.device) -> list[Tensor]:
    """Of the generators that dropout draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_global_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
