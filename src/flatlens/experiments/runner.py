"""Run many tasks in worker processes, and survive what happens to them."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from typing import Generic, TypeAlias, TypeVar

from loky import ProcessPoolExecutor

from flatlens.errors import BadFolder, BadInput
from flatlens.estimate import Progress

MAX_DEATHS = 3
"""A task whose worker was killed this often is given up."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

T = TypeVar("T", bound=Hashable)
NoteFailure: TypeAlias = Callable[[T, str], None]
"""Called with the task and its traceback."""


def run_all(
    tasks: Iterable[T],
    function: Callable[[T], object],
    note_failure: NoteFailure[T],
    *,
    workers: int = 2,
    executor: Executor | None = None,
    progress: Progress | None = None,
    done: int = 0,
) -> None:
    """Call `function` on every task, in `workers` processes of one thread each, or on any executor.

    What a function makes it keeps itself (it writes to the store): so nothing is lost with the caller. An exception in
    it is noted, and the rest goes on; only BadFolder, the full disk, ends everything. The tasks that a killed worker
    had in hand are run again on fresh workers, one at a time, so that a task which kills its worker takes no other
    along. After an interrupt the workers are stopped at once.

    Args:
        tasks: hashable and picklable.
        function: picklable.
        note_failure: called in this process.
        workers: how many processes, when no executor is given.
        executor: whose workers see the same folder (a Dask client's, a thread pool); it is not shut down.
        progress: called with ("networks", done, total).
        done: how many count as done before.

    Raises:
        BadFolder: from `function`.
        BadInput: `workers` below 1, or the given executor broke.
    """
    if workers < 1:
        raise BadInput(f"run_all(workers={workers}): at least one worker is needed")
    with _executor_of(executor, workers) as pool:
        sweep = _Sweep(deque(tasks), function, note_failure, pool, progress, done)
        sweep.run()


class _Pool:
    """Where tasks go: an executor, how many may be in hand at a time, and what to do when it breaks."""

    def __init__(self, workers: int, given: Executor | None) -> None:
        self.workers, self.given = workers, given
        self.executor = given or self._fresh()

    def _fresh(self) -> Executor:
        executor: Executor = ProcessPoolExecutor(
            max_workers=self.workers, initializer=_begin_worker, initargs=(os.getpid(),), env=ONE_THREAD
        )
        return executor

    def limit(self) -> float:
        """Only what runs is in hand: then a death says something about these tasks alone."""
        return self.workers if self.given is None else float("inf")

    def renew(self) -> None:
        """Replace a broken executor."""
        if self.given is not None:
            raise BadInput(
                "run_all(executor=...): the executor broke; what was finished is kept: run again with a new one"
            )
        self.close(kill=True)
        self.executor = self._fresh()

    def close(self, kill: bool) -> None:
        """Stop the workers that are ours."""
        if isinstance(self.executor, ProcessPoolExecutor) and self.given is None:
            self.executor.shutdown(wait=True, kill_workers=kill)


@contextmanager
def _executor_of(given: Executor | None, workers: int) -> Iterator[_Pool]:
    pool = _Pool(workers, given)
    try:
        yield pool
    except BaseException:
        pool.close(kill=True)
        raise
    pool.close(kill=False)


class _Sweep(Generic[T]):
    """A run of tasks under way."""

    def __init__(
        self,
        queue: deque[T],
        function: Callable[[T], object],
        note_failure: NoteFailure[T],
        pool: _Pool,
        progress: Progress | None,
        done: int,
    ) -> None:
        self.queue, self.function, self.note_failure, self.pool = queue, function, note_failure, pool
        self.progress, self.done, self.total = progress, done, done + len(queue)
        self.in_hand: dict[Future[str], T] = {}
        self.deaths: Counter[T] = Counter()

    def run(self) -> None:
        """Until nothing is left."""
        self._tell()
        try:
            while self.queue or self.in_hand:
                self._submit()
                finished, _ = wait(self.in_hand, return_when=FIRST_COMPLETED)
                self._collect(finished)
        finally:
            for future in self.in_hand:
                future.cancel()

    def _submit(self) -> None:
        while self.queue and len(self.in_hand) < self._limit():
            task = self.queue.popleft()
            try:
                self.in_hand[self.pool.executor.submit(_guarded, self.function, task)] = task
            except BrokenExecutor:  # it broke between two tasks
                self.queue.appendleft(task)
                if not self.in_hand:
                    self.pool.renew()
                return

    def _limit(self) -> float:
        suspects = [*self.in_hand.values(), *list(self.queue)[:1]]
        return 1 if any(self.deaths[task] for task in suspects) else self.pool.limit()

    def _collect(self, finished: set[Future[str]]) -> None:
        lost: list[T] = []
        for future in finished:
            task = self.in_hand.pop(future)
            try:
                self._finish(task, future.result())
            except BrokenExecutor:
                lost.append(task)
        if lost:
            self.pool.renew()
            lost += self.in_hand.values()  # broken with the others
            self.in_hand.clear()
            for task in lost:
                self._mourn(task)

    def _mourn(self, task: T) -> None:
        self.deaths[task] += 1
        if self.deaths[task] < MAX_DEATHS:
            self.queue.appendleft(task)
        else:
            self._finish(task, f"the worker was killed {MAX_DEATHS} times while it ran this: is there enough memory?")

    def _finish(self, task: T, trace: str) -> None:
        if trace:
            self.note_failure(task, trace)
        self.done += 1
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress("networks", self.done, self.total)


def _guarded(function: Callable[[T], object], task: T) -> str:
    """In the worker: the traceback of an exception as text, since not every exception survives the way home."""
    try:
        function(task)
    except BadFolder:
        raise
    except Exception:
        return traceback.format_exc()
    return ""


def _begin_worker(parent: int) -> None:
    """In a new worker: leave Ctrl-C to the parent, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # what is half written has a temporary name
