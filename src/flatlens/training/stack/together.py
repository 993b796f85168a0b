"""Train many networks, those of a kind as lanes of one stack: the digits of each alone, in a fraction of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from flatlens.errors import BadFolder
from flatlens.estimate import Progress
from flatlens.progress import beside
from flatlens.training import checkpoint
from flatlens.training.run import TrainingResult, TrainingRun, Watcher
from flatlens.training.settings import Training
from flatlens.training.stack.kinds import kind_of, why_alone
from flatlens.training.stack.lanes import Lanes
from flatlens.training.stack.trial import trial_of
from flatlens.training.train import as_found, opened, train
from flatlens.training.training_data import Pair

LANES = 16
"""Default number of networks in a stack: for MLPs on digits, more are no faster at batch 64, a tenth faster at 4."""


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
    stacked, or would be slower so, or would end in other digits (see `trial.py`), is trained alone, by `train`. The
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
    whose: str  #: its checkpoint's
    spent: float  #: seconds, before it became a lane
    wrote: float = field(default_factory=time.monotonic)
    entered: float = math.nan  #: what the stack's clock showed

    def write(self) -> None:
        if self.member.save is not None:
            with as_found(self.run.model, self.run.settings.seed):  # the state of its dropout is that of a run alone
                checkpoint.save(self.member.save, self.whose, self.run.state_dict())
            self.wrote = time.monotonic()

    def ended(self, seconds: float, error: Exception | None = None, why: str = "") -> Ended:
        return Ended(self.number, None if error else self.run.result(), error, seconds, why)


class _Together:
    """A population in training."""

    def __init__(self, members: Iterable[Member], capacity: int) -> None:
        known = (replace(member, progress=beside(member.progress)) for member in members)
        self.members, self.capacity = enumerate(known), capacity
        self.waiting: list[_Lane] = []
        self.inside: dict[TrainingRun, _Lane] = {}
        self.kind: Hashable = None
        self.lanes: Lanes | None = None
        self.visited = time.monotonic()  #: when every lane was asked whether its checkpoint is old
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
            try:
                if why := why_alone(member.model, member.settings):
                    result = train(
                        member.model, member.data, member.settings,
                        test=member.test, watch=member.watch, save=member.save, progress=member.progress,
                    )  # fmt: skip
                    yield Ended(number, result, None, time.perf_counter() - start, why)
                    continue
                lane = _begun(number, member)
            except BadFolder:
                raise
            except Exception as error:
                yield Ended(number, None, error, time.perf_counter() - start, "")
                continue
            lane.spent = time.perf_counter() - start
            if lane.run.outcome is None:
                self.waiting.append(lane)
            else:
                lane.write()
                yield lane.ended(lane.spent)

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
            start, error = time.perf_counter(), None
            try:
                with as_found(lane.run.model, lane.run.settings.seed):
                    lane.run.go(lane.write if lane.member.save else None, lane.member.progress)
            except BadFolder:
                raise
            except Exception as caught:
                error = caught
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
            failed = self._tell_watchers(lanes) if any(run.watch is not None for run in lanes.runs) else {}
            due = [row for row, run in enumerate(lanes.runs) if run.must_look(last)]
            if due:
                self._look(lanes, due, last)
            if last:
                for run in lanes.runs:
                    run.epoch_loss = [0.0, 0.0]
        self.clock += (time.perf_counter() - start) / len(lanes.runs)
        now = time.monotonic()
        every_lane = bool(failed) or now - self.visited > checkpoint.INTERVAL / 10
        if every_lane:
            self.visited = now
        for row in reversed(range(len(lanes.runs)) if every_lane else due):  # no other can have ended
            run = lanes.runs[row]
            lane, error = self.inside[run], failed.get(run)
            if lane.member.progress is not None and run.is_check_point:
                lane.member.progress("training steps", run.step, run.total)
            over = run.outcome is not None or error is not None
            if over:
                lanes.leave(row)
                del self.inside[run]
            if error is None and (over or now - lane.wrote > checkpoint.INTERVAL) and lane.member.save is not None:
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
            try:
                with torch.enable_grad():
                    run.tell_watcher(run.batches.epoch)
            except BadFolder:
                raise
            except Exception as error:
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


def _begun(number: int, member: Member) -> _Lane:
    """Return a member's run: continued from its checkpoint if there is one, else evaluated before its first step."""
    with as_found(member.model, member.settings.seed):
        run, whose = opened(member.model, member.data, member.settings, member.test, member.watch, member.save)
        run.begin()
        return _Lane(number, member, run, whose, 0.0)
