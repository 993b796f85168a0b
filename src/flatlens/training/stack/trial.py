"""A trial of whether stacked networks end in the same bits as each alone, on this machine and shape, and faster.

Nothing promises that a batched product has the bits of the single ones. On one thread most shapes give the same bits.
Others do not, because another kernel takes small products, or those of a single output: there each lane's products are
taken by themselves, which still saves most of what a step costs. So each kind of network is tried before it is stacked:
three steps (a whole batch, the last one of an epoch, the first one of the next) and looks at the loss, also of held-out
data, with every number of lanes that can come about. Kernels are chosen by shapes, never by values. But two kernels can
agree in most values by chance, so networks with few parameters take more steps.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatlens.training.run import TrainingRun
from flatlens.training.stack.lanes import Lanes, stepping
from flatlens.training.stack.updates import update_of
from flatlens.training.stopping import Until

_STEPS, _MANY_STEPS = 3, 60
_FEW = 20_000  #: parameters; a network with fewer takes many steps
_KNOWN: dict[tuple[Hashable, int], TrialResult] = {}


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    why_alone: str  #: "" where stacking keeps the bits and is faster
    singly: bool = False  #: whether each lane's products must be taken by themselves


def trial_of(kind: Hashable, runs: Sequence[TrainingRun]) -> TrialResult:
    """Try this number of lanes, and all smaller ones, on copies of `runs`; once for each kind in a process."""
    if (known := _KNOWN.get((kind, len(runs)))) is None:
        known = _KNOWN[kind, len(runs)] = _try(runs)
    return known


def _try(runs: Sequence[TrainingRun]) -> TrialResult:
    copies = [_copy(run) for run in runs]
    seconds = [each for run in copies for each in _steps_alone(run)]
    wanted = [_digits_alone(run, [*run.data.look(), *(run.test.look() if run.test else [])]) for run in copies]
    alone = statistics.median(seconds)
    for singly in (False, True):
        if (together := _stacked([_copy(run) for run in runs], wanted, singly=singly)) is not None:
            slower = f"in a stack they would be {together / alone:.2g} times as slow" if together > alone else ""
            return TrialResult(slower, singly)
    return TrialResult("in a stack they would end in other digits here")


def _stacked(runs: Sequence[TrainingRun], wanted: list[list[Tensor]], *, singly: bool) -> float | None:
    """Return the seconds of one network's step in the stack; None where some number of lanes gives other digits."""
    begun = [run.batches.state_dict() for run in runs]
    seconds = 0.0
    for count in range(1, len(runs) + 1):
        lanes = Lanes(runs[0], count, singly=singly)
        for run, where in zip(runs[:count], begun, strict=False):
            run.step, run.epoch_loss = 0, [0.0, 0.0]
            run.batches.load_state_dict(where)
            lanes.enter(run)
        seconds = statistics.median(_timed(lanes.step) for _ in range(_steps(runs[0]))) / count
        looks = lanes.looks(range(count), [run.data for run in runs[:count]])
        if held_out := [run.test for run in runs[:count] if run.test is not None]:
            looks = [a + b for a, b in zip(looks, lanes.looks(range(count), held_out), strict=True)]
        if not all(_same(_digits(lanes, row, looks[row]), wanted[row]) for row in range(count)):
            return None
    return seconds


def _copy(run: TrainingRun) -> TrainingRun:
    """Return a new run from the same weights, before the last but one batch of an epoch, without check points."""
    each = -(-len(run.data.x) // (run.settings.batch_size or len(run.data.x)))
    settings = replace(
        run.settings, until=Until(loss_over=run.settings.until.loss_over), max_epochs=None, max_steps=999
    )
    data, test = run.data, run.test
    held_out = None if test is None else (test.x, test.y)
    other = TrainingRun(copy.deepcopy(run.model), (data.x, data.y), held_out, settings, None)
    other.batches.stand(max(each - 2, 0), over=False)
    return other


def _steps_alone(run: TrainingRun) -> list[float]:
    batches = iter(run.batches)

    def step() -> None:
        batch = next(batches)
        run.count(run.stepper.take(batch.x, batch.targets, run.settings.factor(run.step, batch.epoch)), len(batch.x))

    return [_timed(step) for _ in range(_steps(run))]


def _steps(run: TrainingRun) -> int:
    """Return the number of steps that tell two kernels apart."""
    return _MANY_STEPS if sum(p.numel() for p in run.stepper.parameters) < _FEW else _STEPS


def _timed(step: Callable[[], None]) -> float:
    """Return the seconds of this process alone: on a busy machine the clock may show many times as much."""
    start = time.process_time()
    step()
    return time.process_time() - start


def _digits_alone(run: TrainingRun, look: list[float]) -> list[Tensor]:
    """Return the state of a run after its steps: losses, weights, optimiser state."""
    of, kept = run.stepper.parameters, run.stepper.optimiser.state
    names = update_of(stepping(run)).names
    return [_losses(run, look), *(p.detach() for p in of), *(kept[p][name] for name in names for p in of)]


def _digits(lanes: Lanes, row: int, look: list[float]) -> list[Tensor]:
    """Return the same numbers of a lane."""
    rows = [lanes.theta[row], *(kept[row] for kept in lanes.state.values())]
    return [_losses(lanes.runs[row], look), *(tensor for each in rows for tensor in lanes.chain.of_row(each))]


def _losses(run: TrainingRun, look: list[float]) -> Tensor:
    by_epoch = run.epoch_loss if run.settings.until.loss_over == "epoch" else []
    return torch.tensor([*look, *by_epoch], dtype=torch.float64)


def _same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        a.shape == b.shape and bool((a.eq(b) | (a.isnan() & b.isnan())).all())
        for a, b in zip(found, wanted, strict=True)
    )
