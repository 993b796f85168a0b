"""Train a network until it has converged, its steps are over, or it diverges."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from flatlens.errors import BadModel
from flatlens.estimate import Progress
from flatlens.problem.state import modes_kept
from flatlens.training import checkpoint
from flatlens.training.ridge import Ridge, solve
from flatlens.training.run import ROW, TrainingResult, TrainingRun, Watcher, require_followed
from flatlens.training.settings import Training
from flatlens.training.step import stream
from flatlens.training.training_data import Pair, TrainingData, pair


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
        watch: an observer. `watch.step(step, optimiser=...)` is called before the first step and after each step; the
            optimiser has the learning rate of the next step. It is None with SAM, which moves the edge of stability.
        save: a file for the state, written every 10 s. If the run is killed, the same call, with the network built
            anew, continues from there and ends in the same digits. The file stays; after the run, the same call
            returns the result at once.
        progress: called with ("training steps", done, total).

    Raises:
        BadData: labels or targets that do not fit the outputs.
        BadFolder: `save` cannot be written, is damaged, or belongs to another run.
    """
    if not isinstance(model, nn.Module):
        raise BadModel(
            f"train(model=...): a torch.nn.Module is needed, got {type(model).__name__}: call .build() first"
        )
    where = None if save is None else Path(save)
    with as_found(model, settings.seed):
        if isinstance(settings.optimiser, Ridge):
            if where is not None:
                checkpoint.require_place(where)
            return _solved(model, data, test, settings, settings.optimiser, watch)
        run, whose = opened(model, data, settings, test, watch, where)
        run.go(None if where is None else lambda: checkpoint.save(where, whose, run.state_dict()), progress)
        return run.result()


def opened(
    model: nn.Module, data: Pair, settings: Training, test: Pair | None, watch: Watcher | None, save: Path | None
) -> tuple[TrainingRun, str]:
    """Return the run, continued from its checkpoint if there is one, and what that belongs to; call it in `as_found`.

    Raises:
        BadFolder: as `train`.
    """
    if save is not None:
        checkpoint.require_place(save)
    data, test = _pairs(data, test)
    run = TrainingRun(model, data, test, settings, watch)
    if save is None:
        return run, ""
    whose = checkpoint.identity(model, data, test, settings)
    if (state := checkpoint.load(save, whose)) is not None:
        run.load_state_dict(state)
    return run, whose


def _pairs(data: Pair, test: Pair | None) -> tuple[Pair, Pair | None]:
    return pair(data, "data"), None if test is None else pair(test, "test")


def _solved(
    model: nn.Module, data: Pair, test: Pair | None, settings: Training, ridge: Ridge, watch: Watcher | None
) -> TrainingResult:
    """Solve a ridge regression as a run of one step; it is too short for a checkpoint."""
    require_followed(watch, model)
    data, test = _pairs(data, test)
    held = TrainingData(model, data, settings, "data")
    held_out = None if test is None else TrainingData(model, test, settings, "test")
    rows = []
    for step in (0, 1):
        if step:
            solve(model, held.x, held.targets, ridge.penalty)
        if watch is not None:
            watch.step(step)
        rows.append([*held.look(), *([math.nan, math.nan] if held_out is None else held_out.look())])
    columns = torch.tensor(rows, dtype=torch.float64).T
    curves = {"step": torch.arange(2), **dict(zip(ROW, (c.clone() for c in columns), strict=True))}
    loss, right = rows[-1][:2]
    return TrainingResult("finished" if math.isfinite(loss) else "diverged", 1, 1.0, loss, right, curves)


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
