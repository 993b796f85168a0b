"""Train a network until it has converged, its steps are over, or it diverges: `train`, its runs and their steps."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from flatlens.errors import BadFolder, BadInput, BadModel
from flatlens.estimate import Progress
from flatlens.files import require_writable, write_whole
from flatlens.grams.record import record
from flatlens.problem.batches import checksum
from flatlens.problem.eval_context import modes_kept
from flatlens.problem.op_overrides import plain_weight_norms
from flatlens.progress import beside
from flatlens.settings_json import as_plain, canonical
from flatlens.training.batches import Batches
from flatlens.training.evaluation import Pair, TrainingData, pair, require_trainable
from flatlens.training.objective import Pass
from flatlens.training.optimisers import Ridge, SharpnessAware, solve
from flatlens.training.settings import Training

Ending: TypeAlias = Literal["converged", "finished", "trained elsewhere", "out of steps", "diverged"]
REACHED: tuple[Ending, ...] = ("converged", "finished", "trained elsewhere")
"""The endings of a successful run: its conditions are met, or, without conditions, all its steps are taken."""
CURVE_SPACING = 1.05
_ROW = ("loss", "accuracy", "test_loss", "test_accuracy")

FORMAT = 1
INTERVAL = 10.0  #: seconds between two checkpoints: the most training time that a kill loses


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
    """The ending of a training run, and its curves.

    >>> import torch
    >>> from flatlens.training import SGD, Training, train
    >>> net, data = torch.nn.Linear(2, 1), (torch.ones(4, 2), torch.zeros(4, 1))
    >>> train(net, data, Training(SGD(lr=0.1), loss="half_squared_error", max_steps=3)).steps
    3
    """

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


def train(
    model: nn.Module,
    data: Pair,
    settings: Training,
    *,
    test: Pair | None = None,
    watch: Watcher | None = None,
    save: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> TrainingResult:
    """Train `model` in place on (inputs, labels) or (inputs, numbers); its outputs are (n, N).

    The curves hold the first and the last check point, and check points between them whose steps differ by 5% or more.
    The same settings, versions, machine and number of threads give the same digits. A model in eval mode is trained in
    train mode. If the model is in train mode, its modules in eval mode (such as a frozen BatchNorm) stay in eval mode.
    Afterwards every module has its former mode, and no parameter has a gradient.

    Args:
        model: any module; it stays on its device.
        data: inputs (n, ...), and labels (n,) or targets (n, N): tensors or arrays.
        settings: the settings of the run.
        test: held-out data; used for the curves only.
        watch: an observer. `watch.step(step, optimiser=...)` is called before the first step and after each step,
            `watch.close(step, optimiser=...)` at the end, if it is there; the
            optimiser has the learning rate of the next step. With SAM or ASAM it is one around it, with their radius.
            If the observer has a `batch_size` that is None, it is set.
        save: a file for the state, written every 10 s. If the run is killed, the same call, with the network built
            anew, continues from there and ends in the same digits. The file stays; after the run, the same call
            returns the result at once.
        progress: called with ("training steps", done, total).

    Raises:
        BadData: labels or targets that do not fit the outputs.
        BadFolder: `save` cannot be written, is damaged, or belongs to another run.
    """
    if not isinstance(model, nn.Module):
        raise BadModel(f"expected a torch.nn.Module, got {type(model).__name__}: call .build() first", call="train")
    where = None if save is None else Path(save)
    with as_found(model, settings.seed):
        if isinstance(settings.optimiser, Ridge):
            return _solved(model, data, test, settings, settings.optimiser, watch, where)
        run, checkpoint = opened(model, data, settings, test, watch, where)
        if getattr(watch, "batch_size", 0) is None:
            n = len(run.data.x)
            vars(watch)["batch_size"] = min(settings.batch_size or n, n)
        run.go(checkpoint, progress)
        return run.result()


@contextmanager
def as_found(model: nn.Module, seed: int) -> Iterator[None]:
    """Put the model in train mode and seed the global generator, which dropout uses; restore both afterwards."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with modes_kept(model), torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(stream(seed, "dropout").initial_seed())
        if not model.training:
            model.train()
        try:
            yield
        finally:
            model.zero_grad()


def opened(
    model: nn.Module, data: Pair, settings: Training, test: Pair | None, watch: Watcher | None, save: Path | None
) -> tuple[TrainingRun, Checkpoint | None]:
    """Return the run, continued from its checkpoint if there is one; call it in `as_found`."""
    _require_place(save)
    data, test = pair(data, "data"), None if test is None else pair(test, "test")
    run = TrainingRun(model, data, test, settings, watch)
    if save is None:
        return run, None
    checkpoint = Checkpoint(save, model, data, test, settings)
    if (state := checkpoint.load()) is not None:
        run.load_state_dict(state)
    return run, checkpoint


def _require_place(save: Path | None) -> None:
    """Check before the training that its checkpoints can be written."""
    if save is not None:
        require_writable(save, f"train(save={str(save)!r})")


def _solved(
    model: nn.Module, data: Pair, test: Pair | None, settings: Training, ridge: Ridge, watch: Watcher | None,
    save: Path | None,
) -> TrainingResult:  # fmt: skip
    """Solve a ridge regression as a run of one step; it is too short for a checkpoint."""
    _require_place(save)
    _require_followed(watch, model)
    held = TrainingData(model, pair(data, "data"), settings, "data")
    held_out = None if test is None else TrainingData(model, pair(test, "test"), settings, "test")
    rows = []
    for step in (0, 1):
        if step:
            solve(model, held.x, held.targets, ridge.penalty)
        if watch is not None:
            watch.step(step)
        rows.append([step, *held.look(), *([math.nan, math.nan] if held_out is None else held_out.look())])
    if callable(close := getattr(watch, "close", None)):
        close(1)
    _, loss, right, *_ = rows[-1]
    return TrainingResult("finished" if math.isfinite(loss) else "diverged", 1, 1.0, loss, right, _curves(rows))


def _curves(rows: list[list[float]]) -> dict[str, Tensor]:
    columns = torch.tensor(rows, dtype=torch.float64).T
    return {"step": columns[0].long(), **dict(zip(_ROW, (c.clone() for c in columns[1:]), strict=True))}


class TrainingRun:
    """A training run: its steps, its check points, and the state from which it can be continued."""

    def __init__(
        self, model: nn.Module, data: Pair, test: Pair | None, settings: Training, watch: Watcher | None
    ) -> None:
        require_trainable(model, data, settings)
        _require_followed(watch, model)
        self.model, self.settings, self.watch = model, settings, watch
        self.stepper = Stepper(model, settings)
        self.data = TrainingData(model, data, settings, "data")
        self.test = None if test is None else TrainingData(model, test, settings, "test")
        order = torch.Generator().manual_seed(settings.seed)
        self.batches = Batches(self.data.x, self.data.targets, settings.batch_size, order)
        self.total = settings.steps(len(self.data.x))
        self.step = 0
        self.outcome: Ending | None = None
        self.rows: list[list[float]] = []  # step, then _ROW
        self.next_row = 0
        self.last = [math.nan, math.nan]  # loss and accuracy at the last check point
        self.losses: list[float] = []  # that the end depends on, the latest ones
        self.epoch_loss = [0.0, 0.0]  # summed over this epoch's samples so far, and how many they were

    def go(self, checkpoint: Checkpoint | None, progress: Progress | None) -> None:
        """Train to the end; write the checkpoint at intervals."""
        progress = beside(progress)
        self.begin()
        for batch in self.batches if self.outcome is None else ():
            self.count(self.stepper.take(batch.x, batch.targets, self.factor(batch.epoch)), len(batch.x))
            self.tell_watcher(batch.epoch + batch.last)
            if self.must_look(batch.last):
                self._look(batch.last)
            if batch.last:
                self.epoch_loss = [0.0, 0.0]
            if progress is not None and self.is_check_point:
                progress("training steps", self.step, self.total)
            if checkpoint is not None and checkpoint.due:
                checkpoint.save(self.state_dict())
            if self.outcome is not None:
                break
        self.end()
        if checkpoint is not None:
            checkpoint.save(self.state_dict())

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

    def factor(self, epoch: int) -> float:
        """Return the factor on the optimiser's learning rate in the next step."""
        return self.settings.factor(self.step, epoch)

    def count(self, loss: float, n: int) -> None:
        """Record a step on `n` samples whose loss was `loss` before it."""
        self.step += 1
        self.epoch_loss = [self.epoch_loss[0] + loss * n, self.epoch_loss[1] + n]

    def tell_watcher(self, epoch: int) -> None:
        """Call the watcher with the optimiser of the next step."""
        if self.watch is not None:
            self.stepper.set_rate(self.factor(epoch))
            self.watch.step(self.step, optimiser=self.stepper.shown)

    def end(self) -> None:
        """Tell the watcher that training is over, if it asks: a `flatlens.Tracker` measures the last step."""
        if callable(close := getattr(self.watch, "close", None)):
            self.stepper.set_rate(self.factor(self.batches.epoch))
            close(self.step, optimiser=self.stepper.shown)

    def _look(self, last: bool) -> None:
        # a few samples may prove that a look at all data would not end the run: a loss above -1 is finite
        until = self.settings.until
        bound = -1.0 if until.loss_below is None else until.loss_below
        may_prove = self.only_the_end_depends and (until.loss_below is not None or not until.anything)
        if may_prove and self.data.surely_above(bound):
            return
        if self.judge(self.data.look(), last):
            self.write_row([math.nan, math.nan] if self.test is None else self.test.look())

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
        """Record (loss, accuracy) over all data, decide on the end, and return whether a row of curves is due."""
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
        loss, right = self.last
        return TrainingResult(self.outcome, self.step, self.step / each, loss, right, _curves(self.rows))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the remaining run depends on, and the results so far."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.stepper.optimiser.state_dict(),
            "batches": self.batches.state_dict(),
            "noise": {name: generator.get_state() for name, generator in self.stepper.noise.items()},
            "dropout": _global_states(self.data.x.device),
            "watch": None if self.watch is None else self.watch.state_dict(),
            **{name: getattr(self, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        self.model.load_state_dict(state["model"])
        self.stepper.optimiser.load_state_dict(state["optimiser"])
        self.batches.load_state_dict(state["batches"])
        for name, generator in self.stepper.noise.items():
            generator.set_state(state["noise"][name])
        _set_global_states(state["dropout"], self.data.x.device)
        if (self.watch is None) != (state["watch"] is None):
            had = "with a tracker: pass it again" if self.watch is None else "without a tracker: leave watch out"
            raise BadInput(f"the checkpoint was saved {had}", argument="watch", call="train")
        if self.watch is not None:
            self.watch.load_state_dict(state["watch"])
        for name in _COUNTERS:
            setattr(self, name, state[name])


_COUNTERS = ("step", "outcome", "rows", "next_row", "last", "losses", "epoch_loss")


def _require_followed(watch: Watcher | None, model: nn.Module) -> None:
    """Refuse a tracker whose problem is of another network."""
    followed, own = getattr(getattr(watch, "problem", None), "model", None), {id(p) for p in model.parameters()}
    if isinstance(followed, nn.Module) and not any(id(p) in own for p in followed.parameters()):
        mend = "make its Problem with the model that you train"
        raise BadInput("the tracker measures another network", argument="watch", remedy=mend, call="train")


class Checkpoint:
    """The state of a training run on disk, for runs that are killed: one file, replaced whole, never unpickled.

    It belongs to a run of these settings, data, network and initial weights.
    """

    def __init__(self, path: Path, model: nn.Module, data: Pair, test: Pair | None, settings: Training) -> None:
        self.path, self.wrote = path, time.monotonic()
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        said = f"{canonical(as_plain(settings))}{model!r}{frozen}{list(model.state_dict())}"
        total = zlib.crc32(said.encode())
        for tensor in [*data, *(test or ()), *model.state_dict().values()]:
            total = checksum(tensor, start=zlib.crc32(str(tuple(tensor.shape)).encode(), total))
        self.of = f"{total:08x}"

    @property
    def due(self) -> bool:
        """Return whether it is time to write it again."""
        return time.monotonic() - self.wrote > INTERVAL

    def save(self, state: dict[str, Any]) -> None:
        """Write the state of the run; BadFolder where the file cannot be written."""
        inside = io.BytesIO()
        torch.save(state, inside)
        whole = torch.frombuffer(bytearray(inside.getvalue()), dtype=torch.uint8)
        content = io.BytesIO()
        torch.save({"format": FORMAT, "of": self.of, "checksum": checksum(whole), "state": whole}, content)
        try:
            write_whole(self.path, content.getvalue())
        except OSError as error:
            told = f"the checkpoint {str(self.path)!r} cannot be written: {error.strerror or error}"
            mend = "make room, or name another folder; the run continues from its last checkpoint"
            raise BadFolder(f"{told}; {mend}") from error
        self.wrote = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the state of the run, or None if there is no file; BadFolder if it is damaged, or of another run."""
        if not self.path.exists():
            return None
        try:
            outside = torch.load(self.path, map_location="cpu", weights_only=True)
            found = outside["format"], outside["of"]
            if checksum(outside["state"]) != outside["checksum"]:
                raise ValueError("its checksum does not fit")
            inside = io.BytesIO(outside["state"].numpy().tobytes())
            state: dict[str, Any] = torch.load(inside, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
            told = f"the checkpoint {str(self.path)!r} cannot be read ({type(error).__name__})"
            raise BadFolder(f"{told}: delete it to start the run again") from error
        if found != (FORMAT, self.of):
            same = "build the network again with its initial weights, and use the same data, test data and settings"
            mend = f"To continue that run, {same}; to start another run, name another file"
            raise BadFolder(f"the checkpoint {str(self.path)!r} belongs to another run. {mend}")
        return state


class Stepper:
    """The steps of a run. Each kind of noise has its own generator: to draw one kind does not change the others."""

    def __init__(self, model: nn.Module, settings: Training) -> None:
        self.model, self.settings = model, settings
        self.loss = settings.objective
        self.penalties = tuple(penalty for penalty in settings.penalties if penalty.coefficient > 0)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        assert not isinstance(settings.optimiser, Ridge)  # takes no steps: see train
        self.optimiser = settings.optimiser.build(self.parameters)
        self.noise = {name: stream(settings.seed, name) for name in ("augmentation", "mixup", "penalties")}

    def take(self, x: Tensor, targets: Tensor, factor: float) -> float:
        """Take one step at `factor` times the optimiser's learning rate; return the loss of the batch before it."""
        settings = self.settings
        if settings.augmentation is not None:
            x = settings.augmentation.apply(x, self.noise["augmentation"])
        if settings.mixup is not None:
            x, targets = settings.mixup.apply(x, targets, self.noise["mixup"])
        self.set_rate(factor)
        loss = self._at_the_worst_place(x, targets) if self.ascends else self.differentiate(x, targets)
        self.optimiser.step()
        return loss

    @property
    def shown(self) -> torch.optim.Optimizer:
        """Return the optimiser as a watcher gets it: inside one with the radius of the ascent, if there is one."""
        ascent = self.settings.ascent
        return self.optimiser if ascent is None or not self.ascends else SharpnessAware(self.optimiser, ascent)

    def set_rate(self, factor: float) -> None:
        """Set the learning rate to a multiple of the optimiser's own."""
        for group in self.optimiser.param_groups:
            group["lr"] = factor * self.settings.optimiser.lr

    @property
    def ascends(self) -> bool:
        """Return whether the gradient is taken at other weights than the current ones."""
        return self.settings.ascent is not None and self.settings.ascent.rho > 0

    def differentiate(self, x: Tensor, targets: Tensor) -> float:
        """Write the gradient of loss and penalties into `.grad`, and return the loss."""
        self.optimiser.zero_grad()
        n, loss = len(x), 0.0
        most = self.settings.ghost_batch or n
        for start in range(0, n, most):  # ghost batches, each weighted by its number of samples
            part, wanted = x[start : start + most], targets[start : start + most]
            risk, penalty = self._forward(part, wanted, n)
            torch.autograd.backward(risk if penalty is None else risk + penalty, inputs=self.parameters)
            loss += float(risk.detach())
        return loss

    def _forward(self, x: Tensor, targets: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
        """Return a part's share of the mean loss over n samples, and of the penalties."""
        if not self.penalties:
            return self.loss.values(self.model(x), targets).sum() / n, None
        x = x.detach().clone()
        if x.is_floating_point():
            x.requires_grad_()
        with plain_weight_norms(self.model), record(self.model) as tape:  # penalties are differentiated again
            outputs = self.model(x)
            seen = Pass(x, outputs, self.parameters, tape.linear, self.loss)
            values = [p.coefficient * p.value(seen, self.noise["penalties"]) for p in self.penalties]
        return self.loss.values(outputs, targets).sum() / n, torch.stack(values).sum() * (len(x) / n)

    def _at_the_worst_place(self, x: Tensor, targets: Tensor) -> float:
        """Write the gradient at theta + eps into `.grad`; return the loss at theta."""
        assert self.settings.ascent is not None
        noise, dropout = self.noise["penalties"].get_state(), _global_states(x.device)
        loss = self.differentiate(x, targets)
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        here = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for p, eps in zip(self.parameters, self.settings.ascent.move(here, slopes), strict=True):
                p.add_(eps)
        # probes and dropout are those of the gradient from which eps came
        self.noise["penalties"].set_state(noise)
        _set_global_states(dropout, x.device)
        with _statistics_left_alone(self.model):
            self.differentiate(x, targets)
        with torch.no_grad():
            for p, before in zip(self.parameters, here, strict=True):
                p.copy_(before)  # exactly: adding and taking away leaves rounding
        return loss


def stream(seed: int, name: str) -> Generator:
    """Return a generator for one kind of noise; the order of the samples uses the seed itself."""
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@contextmanager
def _statistics_left_alone(model: nn.Module) -> Iterator[None]:
    """Keep the running statistics of BatchNorms unchanged inside this context; they still normalise by their batch."""
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                name, value = ("track_running_stats", False) if isinstance(module, _BatchNorm) else ("momentum", 0.0)
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        yield


def _global_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that dropout uses."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_global_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
