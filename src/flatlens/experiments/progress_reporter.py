"""Report of progress while tasks run: of all tasks together, and of each task in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeAlias, TypeVar

from flatlens.aside import Aside
from flatlens.estimate import Progress

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
