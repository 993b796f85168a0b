"""Train many networks, equal ones as lanes of a stack: bitwise identical to training alone, in a fraction of the time.

Nothing promises that a batched product has the bits of the single ones. On one thread most shapes give the same bits.
Others do not, because another kernel takes small products, or those of a single output: there each lane's products are
taken by themselves, which still saves most of what a step costs. So each kind of network is tried before it is stacked:
three steps (a whole batch, the last one of an epoch, the first one of the next) and looks at the loss, also of held-out
data, with every number of lanes that can come about. Kernels are chosen by shapes, never by values. But two kernels can
agree in most values by chance, so networks with few parameters take more steps.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from flatlens.errors import BadFolder
from flatlens.estimate import Progress
from flatlens.progress import beside
from flatlens.training.batches import Taken
from flatlens.training.evaluation import Pair
from flatlens.training.optimisers import Ridge
from flatlens.training.run import Checkpoint, TrainingResult, TrainingRun, Watcher, as_found, opened, train
from flatlens.training.settings import Training, Until
from flatlens.training.stack.chain import LayerChain, NotStackable
from flatlens.training.stack.lanes import Lanes, stepping, update_kind, update_of

_T = TypeVar("_T")


def why_alone(model: nn.Module, settings: Training) -> str:
    """Return why a network is trained alone, in a few words; "" if it can be a lane of a stack.

    >>> from flatlens.training import SGD
    >>> how = Training(SGD(0.1), max_steps=1)
    >>> why_alone(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), how)
    ''
    >>> why_alone(nn.Sequential(nn.Conv2d(1, 2, 3)), how)
    'a Conv2d: only linear layers and elementwise activations are stacked'
    """
    if isinstance(settings.optimiser, Ridge):
        return "a ridge head is solved in one step and not stacked"
    changed = {
        "augmentation": settings.augmentation is not None,
        "mixup": settings.mixup is not None,
        "an ascent": settings.ascent is not None,
        "penalties": bool(settings.penalties),
        "ghost batches": settings.ghost_batch is not None,
    }
    if there := [name for name, given in changed.items() if given]:
        return f"{there[0]} cannot be stacked"
    if any(p.device.type != "cpu" for p in model.parameters()):
        return "only networks on the CPU are stacked"
    try:
        LayerChain(model)
    except NotStackable as reason:
        return str(reason)
    return ""


def kind_of(run: TrainingRun) -> Hashable:
    """Return what runs in one stack must share: layers, loss, batch size, samples, kind of optimiser."""
    settings, chain = run.settings, LayerChain(run.model)
    assert not isinstance(settings.optimiser, Ridge)
    layers = tuple((one.inputs, one.outputs, one.bias is None, repr(one.activations)) for one in chain.layers)
    datasets = [run.data] if run.test is None else [run.data, run.test]
    tensors = [*(each for data in datasets for each in (data.x, data.targets)), *run.stepper.parameters]
    return (
        layers,
        settings.loss,
        settings.batch_size,
        update_kind(settings.optimiser),
        tuple((each.shape, each.dtype) for each in tensors),
        tuple(data.x.data_ptr() for data in datasets),  # lanes share the inputs, and each has its own targets
    )


_STEPS, _MANY_STEPS = 3, 60
_FEW = 20_000  #: parameters; a network with fewer takes many steps, as two kernels may agree in few values by chance
_KNOWN: dict[tuple[Hashable, int], TrialResult] = {}


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    why_alone: str  #: "" where stacking keeps the bits and is faster
    singly: bool = False  #: whether each lane's products must be taken by themselves


def trial_of(kind: Hashable, runs: Sequence[TrainingRun]) -> TrialResult:
    """Try this number of lanes, and all smaller ones, on copies of `runs`; once for each kind in a process."""
    if (known := _KNOWN.get((kind, len(runs)))) is not None:
        return known
    # what each network comes to by itself, and how long its steps take
    steps = _MANY_STEPS if sum(p.numel() for p in runs[0].stepper.parameters) < _FEW else _STEPS
    seconds, wanted = list[float](), list[list[Tensor]]()
    for run in [_copy(run) for run in runs]:
        batches = iter(run.batches)
        seconds += [_timed(partial(_step_alone, run, batches)) for _ in range(steps)]
        wanted.append(_digits(run, [*run.data.look(), *(run.test.look() if run.test else [])]))
    alone = statistics.median(seconds)
    # the same in a stack, by batched products where these keep the bits
    for singly in (False, True):
        for count in range(1, len(runs) + 1):
            found = _stacked([_copy(run) for run in runs[:count]], steps, wanted, singly=singly)
            if found is None:
                break
            together = found
        else:
            slower = f"in a stack they would be {together / alone:.2g} times as slow" if together > alone else ""
            return _KNOWN.setdefault((kind, len(runs)), TrialResult(slower, singly))
    unlike = TrialResult("in a stack they would not be bitwise identical to training alone")
    return _KNOWN.setdefault((kind, len(runs)), unlike)


def _copy(run: TrainingRun) -> TrainingRun:
    """Return a new run from the same weights, before the last but one batch of an epoch, without check points."""
    each = -(-len(run.data.x) // (run.settings.batch_size or len(run.data.x)))
    until = Until(loss_over=run.settings.until.loss_over)
    settings = replace(run.settings, until=until, max_epochs=None, max_steps=999)
    held_out = None if run.test is None else (run.test.x, run.test.y)
    other = TrainingRun(copy.deepcopy(run.model), (run.data.x, run.data.y), held_out, settings, None)
    other.batches.stand(max(each - 2, 0), over=False)
    return other


def _step_alone(run: TrainingRun, batches: Iterator[Taken]) -> None:
    batch = next(batches)
    run.count(run.stepper.take(batch.x, batch.targets, run.factor(batch.epoch)), len(batch.x))


def _stacked(runs: Sequence[TrainingRun], steps: int, wanted: Sequence[list[Tensor]], *, singly: bool) -> float | None:
    """Return the seconds of one network's step in a stack of these; None where one of them ends in other digits."""
    lanes = Lanes(runs[0], len(runs), singly=singly)
    for run in runs:
        lanes.enter(run)
    seconds = statistics.median(_timed(lanes.step) for _ in range(steps)) / len(runs)
    looks = lanes.looks(range(len(runs)), [run.data for run in runs])
    if held_out := [run.test for run in runs if run.test is not None]:
        looks = [a + b for a, b in zip(looks, lanes.looks(range(len(runs)), held_out), strict=True)]
    for row, (run, look) in enumerate(zip(runs, looks, strict=True)):
        lanes.put_down(row)
        pairs = zip(_digits(run, look), wanted[row], strict=True)
        if not all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs):
            return None
    return seconds


def _digits(run: TrainingRun, look: list[float]) -> list[Tensor]:
    """Return the state of a run after its steps: losses, weights, optimiser state."""
    of, kept = run.stepper.parameters, run.stepper.optimiser.state
    losses = [*look, *(run.epoch_loss if run.settings.until.loss_over == "epoch" else [])]
    state = [kept[p][name] for name in update_of(stepping(run)).names for p in of]
    return [torch.tensor(losses, dtype=torch.float64), *(p.detach() for p in of), *state]


def _timed(step: Callable[[], None]) -> float:
    """Return the seconds of this process alone: on a busy machine the clock may show many times as much."""
    start = time.process_time()
    step()
    return time.process_time() - start


LANES = 16
"""Default number of networks in a stack: for MLPs on digits, more are not faster at batch 64, a tenth faster at 4."""


@dataclass(frozen=True, eq=False)
class Member:
    """A network to train: the arguments of `train`."""

    model: nn.Module
    data: Pair
    settings: Training
    test: Pair | None = None
    watch: Watcher | None = None
    save: Path | None = None
    progress: Progress | None = None


@dataclass(frozen=True, eq=False)
class Ended:
    """A member whose training has ended, with its result or its error."""

    number: int  #: of the member, from 0
    result: TrainingResult | None
    error: Exception | None
    seconds: float  #: its share of the stack's
    why_alone: str  #: "" where it was a lane


def train_together(members: Iterable[Member], lanes: int = LANES) -> Iterator[Ended]:
    """Train every member in place, up to `lanes` of them at a time; each is given back as it ends, in no fixed order.

    Members are taken from the iterator as there is room, so that a population need not be in memory. What cannot be
    stacked, or would be slower so, or would end in other digits (see `trial_of`), is trained alone, by `train`. The
    checkpoints are those of `train`: a run begun in a stack may be finished alone, and the other way round. An error in
    one member's run ends that run alone.

    Raises:
        BadFolder: a checkpoint cannot be read or written.
    """
    yield from _Together(members, lanes).go()


@dataclass(eq=False)
class _Lane:
    """A member that is being trained."""

    number: int
    member: Member
    run: TrainingRun
    checkpoint: Checkpoint | None
    spent: float = 0.0  #: seconds, before it became a lane
    entered: float = math.nan  #: what the stack's clock showed

    def write(self) -> None:
        if self.checkpoint is not None:
            with as_found(self.run.model, self.run.settings.seed):  # the state of its dropout is that of a run alone
                self.checkpoint.save(self.run.state_dict())

    def go_alone(self) -> None:
        with as_found(self.run.model, self.run.settings.seed):
            self.run.go(self.checkpoint, self.member.progress)

    def ended(self, seconds: float, error: Exception | None = None, why: str = "") -> Ended:
        return Ended(self.number, None if error else self.run.result(), error, seconds, why)


_VISITS = 1.0  #: seconds between two questions to every lane, whether its checkpoint is due


class _Together:
    """A population in training."""

    def __init__(self, members: Iterable[Member], capacity: int) -> None:
        known = (replace(member, progress=beside(member.progress)) for member in members)
        self.members, self.capacity = enumerate(known), capacity
        self.waiting: list[_Lane] = []
        self.inside: dict[TrainingRun, _Lane] = {}
        self.kind: Hashable = None
        self.lanes: Lanes | None = None
        self.visited = time.monotonic()
        self.clock = 0.0  #: seconds of stepping, each over the lanes there were

    def go(self) -> Iterator[Ended]:
        """Train until no member is left."""
        while True:
            yield from self._fetch()
            if not self.inside:
                if not self.waiting:
                    return
                yield from self._open()
            self._enter()
            if self.lanes is not None and self.inside:
                yield from self._step(self.lanes)

    def _fetch(self) -> Iterator[Ended]:
        """Add members while there is room; return those that have ended at once, or that are trained alone."""
        while len(self.inside) + len(self.waiting) < self.capacity and (new := next(self.members, None)):
            number, member = new
            start = time.perf_counter()
            begun = _unless_it_fails(partial(_begun, number, member))
            seconds = time.perf_counter() - start
            if isinstance(begun, Exception):
                yield Ended(number, None, begun, seconds, "")
            elif isinstance(begun, Ended):
                yield replace(begun, seconds=seconds)
            elif begun.run.outcome is None:
                begun.spent = seconds
                self.waiting.append(begun)
            else:
                begun.write()
                yield begun.ended(seconds)

    def _open(self) -> Iterator[Ended]:
        """Make a stack for the first waiting lane and those of its kind; return those that are better trained alone."""
        self.lanes, self.kind = None, kind_of(self.waiting[0].run)
        alike = [lane for lane in self.waiting if kind_of(lane.run) == self.kind]
        verdict = trial_of(self.kind, [lane.run for lane in alike])
        if not verdict.why_alone:
            self.lanes = Lanes(alike[0].run, len(alike), singly=verdict.singly)
            return
        self.waiting = [lane for lane in self.waiting if lane not in alike]
        for lane in alike:
            start = time.perf_counter()
            error = _unless_it_fails(lane.go_alone)
            yield lane.ended(lane.spent + time.perf_counter() - start, error, verdict.why_alone)

    def _enter(self) -> None:
        """Add the waiting lanes of the stack's kind that are at the same batch of their epoch."""
        if self.lanes is None or not self.waiting or len(self.inside) == self.lanes.capacity:
            return
        for lane in list(self.waiting):
            here = not self.inside or lane.run.batches.taken == self.lanes.taken
            if here and len(self.inside) < self.lanes.capacity and kind_of(lane.run) == self.kind:
                self.lanes.enter(lane.run)
                self.waiting.remove(lane)
                self.inside[lane.run] = lane
                lane.entered = self.clock

    def _step(self, lanes: Lanes) -> Iterator[Ended]:
        """Take one step of all lanes; remove those that end."""
        start = time.perf_counter()
        last = lanes.last
        with torch.inference_mode(False), torch.no_grad():
            lanes.step()
            failed = self._tell_watchers(lanes)
            due = [row for row, run in enumerate(lanes.runs) if run.must_look(last)]
            if due:
                self._look(lanes, due, last)
            if last:
                for run in lanes.runs:
                    run.epoch_loss = [0.0, 0.0]
        self.clock += (time.perf_counter() - start) / len(lanes.runs)
        # only a lane that was looked at, or whose watcher failed, can have ended: the others are asked now and then
        every_lane = bool(failed) or time.monotonic() - self.visited > _VISITS
        if every_lane:
            self.visited = time.monotonic()
        # from the last row on: a lane that leaves gives its row to the last one
        for row in reversed(range(len(lanes.runs)) if every_lane else due):
            run = lanes.runs[row]
            lane, error = self.inside[run], failed.get(run)
            if lane.member.progress is not None and run.is_check_point:
                lane.member.progress("training steps", run.step, run.total)
            over = run.outcome is not None or error is not None
            if over:
                lanes.leave(row)
                del self.inside[run]
                with torch.enable_grad():
                    error = error or _unless_it_fails(run.end)
            if error is None and lane.checkpoint is not None and (over or lane.checkpoint.due):
                if not over:
                    lanes.put_down(row)
                lane.write()
            if over:
                run.model.zero_grad()
                yield lane.ended(lane.spent + self.clock - lane.entered, error)

    def _tell_watchers(self, lanes: Lanes) -> dict[TrainingRun, Exception]:
        """Show the watchers their networks; return the errors that they raised."""
        failed: dict[TrainingRun, Exception] = {}
        for row, run in enumerate(lanes.runs):
            due = getattr(run.watch, "due", None)
            if run.watch is None or (due is not None and not due(run.step)):
                continue
            lanes.put_weights(row)
            with torch.enable_grad():
                error = _unless_it_fails(partial(run.tell_watcher, run.batches.epoch))
            if error is not None:
                failed[run] = error
        return failed

    def _look(self, lanes: Lanes, due: list[int], last: bool) -> None:
        """Evaluate the runs that are due, on held-out data, too, where a row of the curves is due."""
        runs = lanes.runs
        go_on = lanes.certain_to_go_on([row for row in due if runs[row].only_the_end_depends])
        due = [row for row in due if row not in go_on]
        looks = lanes.looks(due, [runs[row].data for row in due], lambda row, loss: runs[row].asks_accuracy(loss))
        rows = []
        for row, look in zip(due, looks, strict=True):
            if runs[row].settings.until.gradient_norm is not None:
                lanes.put_weights(row)
            with torch.enable_grad():
                if runs[row].judge(look, last):
                    rows.append(row)
        held_out = {row: held for row in rows if (held := runs[row].test) is not None}
        seen = dict(zip(held_out, lanes.looks(list(held_out), list(held_out.values())), strict=True))
        for row in rows:
            runs[row].write_row(seen.get(row, [math.nan, math.nan]))


def _unless_it_fails(action: Callable[[], _T]) -> _T | Exception:
    """Return the result of one member's `action`, or the error that ends this member alone."""
    try:
        return action()
    except BadFolder:
        raise
    except Exception as error:
        return error


def _begun(number: int, member: Member) -> _Lane | Ended:
    """Return a run: from its checkpoint or evaluated before its first step; trained to its end if not to be stacked."""
    if why := why_alone(member.model, member.settings):
        result = train(
            member.model, member.data, member.settings,
            test=member.test, watch=member.watch, save=member.save, progress=member.progress,
        )  # fmt: skip
        return Ended(number, result, None, 0.0, why)
    with as_found(member.model, member.settings.seed):
        run, checkpoint = opened(member.model, member.data, member.settings, member.test, member.watch, member.save)
        run.begin()
        return _Lane(number, member, run, checkpoint)
