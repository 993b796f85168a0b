"""Worker processes on this machine, of which one can die without the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from flatlens.errors import needs

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

SAFE_PATH = "PYTHONSAFEPATH"
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", SAFE_PATH), "1")
"""Variables of workers: one thread, and no import from the folder in which they start, such as of a queue.py there."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class WorkerProcesses(Executor):
    """`count` processes of one thread each, taking `count` calls at a time.

    Each process has an executor of its own: so a death is the end of one call, whose future raises BrokenExecutor, and
    is known to have happened in that call. The next call there gets a new process.
    """

    def __init__(self, count: int) -> None:
        with needs("study", "work in several processes"):
            import_module("loky")
        self._places = [_Place() for _ in range(count)]

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Call `fn` in a process that has nothing to do; RuntimeError if there is none."""
        free = next((place for place in self._places if place.free), None)
        if free is None:
            raise RuntimeError(f"all {len(self._places)} worker processes are busy")
        return free.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes: after what they are at, or at once with `cancel_futures`."""
        with ThreadPoolExecutor(len(self._places)) as hands:  # one after the other, many would take seconds
            list(hands.map(lambda place: place.close(kill=cancel_futures), self._places))


class _Place:
    """The place of one process, taken by another after its death."""

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None
        self.latest: Future[Any] | None = None

    @property
    def free(self) -> bool:
        return self.latest is None or self.latest.done()

    def submit(self, fn: Callable[..., _R], *args: Any, **kwargs: Any) -> Future[_R]:
        if self._died():
            self.close(kill=True)
        try:
            return self._submit(fn, *args, **kwargs)
        except BrokenExecutor:  # it died while it had nothing to do
            self.close(kill=True)
            return self._submit(fn, *args, **kwargs)

    def _submit(self, fn: Callable[..., _R], *args: Any, **kwargs: Any) -> Future[_R]:
        if self.pool is None:
            self.pool = _new_pool()
        with _safe_path():
            future: Future[_R] = self.pool.submit(fn, *args, **kwargs)
        self.latest = future
        return future

    def _died(self) -> bool:
        done = self.latest is not None and self.latest.done() and not self.latest.cancelled()
        return done and isinstance(self.latest and self.latest.exception(), BrokenExecutor)

    def close(self, kill: bool) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, kill_workers=kill)
        self.pool = self.latest = None


def _new_pool() -> ProcessPoolExecutor:
    """Return a pool of one process; loky's own helpers, which it starts now, get the safe path from this process."""
    from loky import ProcessPoolExecutor

    given = (os.getpid(), os.environ.get(SAFE_PATH))
    with _safe_path():
        return ProcessPoolExecutor(1, initializer=_begin_worker, initargs=given, env=ENVIRONMENT)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Let Python processes that begin inside import nothing from the current folder."""
    before = os.environ.get(SAFE_PATH)
    _set_safe_path("1")
    try:
        yield
    finally:
        _set_safe_path(before)


def _set_safe_path(value: str | None) -> None:
    os.environ.pop(SAFE_PATH, None)
    if value is not None:
        os.environ[SAFE_PATH] = value


def _begin_worker(parent: int, safe_path: str | None) -> None:
    """Prepare a new worker: leave Ctrl-C to the parent, and end when the parent is gone."""
    _set_safe_path(safe_path)  # the user's code may start programs of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the user's code prints must not come between the data on stdout
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # what is half written has a temporary name
