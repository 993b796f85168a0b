"""Progress on stderr, for work that lasts."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

DELAY = 2.0
"""Seconds that pass before anything is shown."""

PAUSE = 15.0
"""Seconds between two lines where stderr is no terminal (a log file)."""


class Bar:
    """A `Progress` callback: a bar with the time left in a terminal, a line now and then elsewhere.

    `announcement` says what is to come. It is printed at the first call, if there is work left to do then: never
    before an error about the input.
    """

    def __init__(self, announcement: str = "", *, delay: float = DELAY, pause: float = PAUSE) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,  # networks finish seconds apart
            transient=True,
        )
        self._terminal = console.is_terminal
        self._announcement = announcement
        self._timer = threading.Timer(delay, self._bars.start)
        self._timer.daemon = True
        self._tasks: dict[str, _Task] = {}
        self._pause = pause
        self._spoke = time.monotonic() + delay - pause

    def __enter__(self) -> Self:
        if self._terminal:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._terminal:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Note that `done` of `total` are finished; the bar of what is finished goes."""
        self._announce(done < total)
        if what not in self._tasks:
            self._tasks[what] = _Task(self._bars.add_task(what, total=total, completed=done), done, time.monotonic())
        self._bars.update(self._tasks[what].number, completed=done, total=total)
        now = time.monotonic()
        if not self._terminal and now - self._spoke >= self._pause:
            self._spoke = now
            print(f"flatlens: {what} {done}/{total}{self._tasks[what].left(done, total)}", file=sys.stderr, flush=True)
        if done >= total:
            self._bars.remove_task(self._tasks.pop(what).number)

    def _announce(self, work: bool) -> None:
        if self._announcement and work:
            self._bars.console.print(f"flatlens: {self._announcement}", markup=False, highlight=False, soft_wrap=True)
        self._announcement = ""


class _Task:
    def __init__(self, number: int, first: int, start: float) -> None:
        from rich.progress import TaskID

        self.number, self.first, self.start = TaskID(number), first, start

    def left(self, done: int, total: int) -> str:
        if done <= self.first:
            return ""
        seconds = (time.monotonic() - self.start) * (total - done) / (done - self.first)
        return f", about {in_words(seconds)} left"


def in_words(seconds: float) -> str:
    """A duration for reading.

    >>> in_words(3.2), in_words(100), in_words(7300)
    ('3 s', '2 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
