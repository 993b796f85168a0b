"""Run many tasks on any executor, recover from lost workers, and report progress."""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from flatlens.errors import BadFolder, BadInput, one_line
from flatlens.estimate import Progress
from flatlens.experiments.executors import WorkerProcesses, adapted
from flatlens.progress import Aside

LOOK_EVERY = 1.0
"""Seconds between two looks at the tasks in progress."""

_T = TypeVar("_T", bound=Hashable)
InProgress: TypeAlias = Callable[[], Mapping[_T, tuple[int, int]]]
"""Returns (done, total) of each task in progress."""


class ProgressReporter(Generic[_T]):
    """Calls the caller's `progress` for all tasks together and for each task in progress."""

    def __init__(
        self,
        progress: Progress,
        label: Callable[[_T], str],
        in_progress: InProgress[_T] | None,
        done: int,
        total: int,
        count: Callable[[], int] | None = None,
    ) -> None:
        self.progress = Aside("the report of progress", progress)
        self.label, self.in_progress, self.done, self.total = label, in_progress, done, total
        self.count = count  #: returns the number of tasks that succeeded; None: they are counted as they are reported
        self.failed = 0 if count is None else done - count()
        self.runs: Mapping[_T, tuple[int, int]] = {}
        self.looked = time.monotonic()
        self._tell()

    def one_more(self, *, failed: bool = False) -> None:
        """Report that one more task has finished or failed."""
        self.failed += failed
        self.done += self.count is None
        self._tell()

    @property
    def patience(self) -> float | None:
        """Seconds until the next look; None if the tasks in progress are unknown."""
        return None if self.in_progress is None else LOOK_EVERY

    def look(self) -> None:
        """Report the tasks in progress, if a second has passed."""
        if self.in_progress is None or time.monotonic() - self.looked < LOOK_EVERY:
            return
        self._tell()  # first, so that an observer of one line at a time sees all tasks together
        self._show(self.in_progress())
        self.looked = time.monotonic()

    def end(self) -> None:
        """Report that no task is in progress any more."""
        self._show({})

    def _show(self, runs: Mapping[_T, tuple[int, int]]) -> None:
        for task, (_, total) in self.runs.items():
            if task not in runs:
                self.progress(self.label(task), total, total)
        for task, (done, total) in runs.items():
            if self.runs.get(task) != (done, total):
                self.progress(self.label(task), done, total)
        self.runs = runs

    def _tell(self) -> None:
        if self.count is not None:
            self.done = min(self.count() + self.failed, self.total)
        self.progress("networks", self.done, self.total)


MAX_DEATHS = 3
"""A task whose worker process was killed this often is given up."""

MAX_LOSSES = 2
"""A task that a given executor could not bring to an end this often is given up: it has its own retries, too."""

NoteFailure: TypeAlias = Callable[[_T, str], None]
"""Called with the task and its traceback."""


def run_all(
    tasks: Iterable[_T],
    function: Callable[[_T], object],
    note_failure: NoteFailure[_T],
    *,
    workers: int = 2,
    executor: Executor | None = None,
    pack: int | Callable[[Sequence[_T]], Iterable[tuple[_T, ...]]] = 1,
    progress: Progress | None = None,
    done: int = 0,
    label: Callable[[_T], str] = str,
    in_progress: InProgress[_T] | None = None,
    count: Callable[[], int] | None = None,
) -> None:
    """Call `function` on every task, in `workers` processes of one thread each, or on any executor.

    `function` keeps its results itself (it writes to the store), so that nothing is lost with the caller. An exception
    in it is noted, and the other tasks go on. BadFolder, such as a full disk, ends everything. If a worker is killed,
    or the executor gives up or cancels a pack, each task of the pack is run again by itself: one that kills its workers
    takes no other with it. A task that is lost too often is noted. An interrupt stops the workers at once.

    Args:
        tasks: hashable and picklable.
        function: picklable; called again on a task that may have been finished when its worker died.
        note_failure: called in this process.
        workers: number of processes, when no executor is given.
        executor: its workers see the same folder (a Dask client's, a pool of one thread); it is not shut down.
        pack: number of tasks handed out at a time, for short ones; or a function that cuts them into packs.
        progress: called with ("networks", done, total), and (label, done, total) for what is under way.
        done: how many count as done before.
        label: a task in a few words.
        in_progress: how far the tasks are that run; asked once a second.
        count: returns how many tasks have succeeded, earlier ones included; for packs whose tasks end one by one.

    Raises:
        BadFolder: from `function`.
        BadInput: `workers` or `pack` below 1, or the given executor broke.
    """
    for name, number in (("workers", workers), ("pack", pack)):
        if isinstance(number, int) and number < 1:
            raise BadInput(f"run_all({name}={number}): expected at least one")
    whole = list(tasks)
    shown = None if progress is None else ProgressReporter(progress, label, in_progress, done, done + len(whole), count)
    if isinstance(pack, int):
        packs: Iterable[tuple[_T, ...]] = (tuple(whole[at : at + pack]) for at in range(0, len(whole), pack))
    else:
        packs = pack(whole)
    if executor is not None:
        _Sweep(deque(packs), function, note_failure, shown, adapted(executor), math.inf, ours=False).run()
        return
    own = WorkerProcesses(workers)
    try:
        _Sweep(deque(packs), function, note_failure, shown, own, workers, ours=True).run()
    except BaseException:
        own.shutdown(cancel_futures=True)
        raise
    own.shutdown()


@dataclass(eq=False)
class _Sweep(Generic[_T]):
    packs: deque[tuple[_T, ...]]
    function: Callable[[_T], object]
    note_failure: NoteFailure[_T]
    shown: ProgressReporter[_T] | None
    executor: Executor
    at_once: float  #: number of packs that it takes at a time
    ours: bool  #: whether the processes are our own: then a death ends one pack alone
    alone: deque[tuple[_T, ...]] = field(default_factory=deque)  #: at the end, with nothing else in hand
    in_hand: dict[Future[list[str]], tuple[_T, ...]] = field(default_factory=dict)
    losses: Counter[_T] = field(default_factory=Counter)

    def run(self) -> None:
        """Run until nothing is left."""
        try:
            while self.packs or self.in_hand or self.alone:
                if self.shown:
                    self.shown.look()
                while self.packs and len(self.in_hand) < self.at_once:
                    self._hand_out(self.packs.popleft())
                if self.alone and not self.in_hand:
                    self._hand_out(self.alone.popleft())
                finished, _ = wait(self.in_hand, self.shown.patience if self.shown else None, FIRST_COMPLETED)
                for future in finished:
                    self._collect(future, self.in_hand.pop(future))
        finally:
            for future in self.in_hand:
                future.cancel()
            if self.shown:
                self.shown.end()

    def _hand_out(self, pack: tuple[_T, ...]) -> None:
        try:
            self.in_hand[self.executor.submit(_guarded, self.function, pack)] = pack
        except Exception as error:  # whatever it says of itself: it is shut down, broken, out of processes
            raise _broken(error) from error

    def _collect(self, future: Future[list[str]], pack: tuple[_T, ...]) -> None:
        try:
            traces = future.result()
        except BadFolder:
            raise
        except Exception as error:  # the function's own were caught in the worker: this is the executor's
            if isinstance(error, BrokenExecutor) and not self.ours:
                raise _broken(error) from error
            self._take_up_singly(pack, error)
        else:
            for task, trace in zip(pack, traces, strict=True):
                self._finish(task, trace)

    def _take_up_singly(self, pack: tuple[_T, ...], error: Exception) -> None:
        self.losses.update(pack)
        for task in reversed(pack):
            if self.losses[task] >= (MAX_DEATHS if self.ours else MAX_LOSSES):
                trace = "".join(traceback.format_exception(error))
                if isinstance(error, BrokenExecutor):
                    killed = f"the worker was killed {self.losses[task]} times while it ran this"
                    trace = f"{one_line(error)}\n{killed}: is there enough memory?\n"  # with the exit codes
                self._finish(task, trace)
            elif self.ours:
                self.packs.appendleft((task,))
            else:
                self.alone.append((task,))

    def _finish(self, task: _T, trace: str) -> None:
        if trace:
            self.note_failure(task, trace)
        if self.shown:
            self.shown.one_more(failed=bool(trace))


def _guarded(function: Callable[[_T], object], pack: tuple[_T, ...]) -> list[str]:
    """Run a pack in the worker; return exceptions as text, because not every one can be pickled; "" without one."""
    if (several := getattr(function, "several", None)) is not None:  # it takes a pack at a time
        return list(several(pack))
    return one_by_one(function, pack)


def one_by_one(function: Callable[[_T], object], pack: Sequence[_T]) -> list[str]:
    """Run the tasks of a pack; return the traceback of what went wrong in each, "" where nothing did."""
    traces = [""] * len(pack)
    for place, task in enumerate(pack):
        with traceback_in(traces, place):
            function(task)
    return traces


@contextmanager
def traceback_in(traces: list[str], place: int) -> Iterator[None]:
    """Write the traceback of what goes wrong inside, in one task of a pack, to its place; BadFolder ends all tasks."""
    try:
        yield
    except BadFolder:
        raise
    except (Exception, SystemExit):  # an exit is the task's, not the worker's
        traces[place] = traceback.format_exc()


def _broken(error: Exception) -> BadInput:
    return BadInput(
        f"the worker processes failed ({one_line(error)}): finished networks are kept; run the same command again to "
        f"continue"
    )
