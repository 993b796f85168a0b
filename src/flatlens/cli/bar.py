"""Progress on stderr, for long work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flatlens.aside import Aside
from flatlens.cli.output import note, visible
from flatlens.progress import in_words

if TYPE_CHECKING:
    from rich.progress import TaskID

DELAY = 1.5
"""Seconds before anything is shown."""

TICK = 0.1
"""Seconds between two checks of the clock."""

READING, TRYING, MEASURING = "reading the network and the data", "trying a few samples", "measuring"
DRAWING = "drawing the page"
"""Stages of the commands on one network."""

PAUSE = 15.0
"""Seconds between two lines where stderr is not a terminal (a log file)."""


def write_page(page: Path, bar: Bar, write: Callable[[], Path]) -> None:
    """Write the page beside a command's numbers, which are shown also if that fails."""
    bar.stage(DRAWING)
    Aside(f"--page {page}", lambda: note(f"page written: {write()}"))()


class Bar:
    """A `Progress` callback: a bar with the time left in a terminal, a line from time to time elsewhere.

    `announcement` says what work follows. It is printed at the first call, if there is work left then: never before an
    error about the input. Between the calls, the `stage` is shown with the time it has taken: a thread updates it,
    because one call into torch can take minutes.
    """

    def __init__(
        self, announcement: str = "", *, stage: str = "working", delay: float | None = None, pause: float = PAUSE
    ) -> None:
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
        self.announcement = announcement
        self._delay = DELAY if delay is None else delay
        self._tasks: dict[str, _Task] = {}
        self._idle: TaskID | None = None
        self._pause = pause
        self._lock, self._over = threading.RLock(), threading.Event()
        self.stage(stage)

    def stage(self, what: str) -> None:
        """Set the name of the work that is done between calls, from now on."""
        self._stage, self._since = what, time.monotonic()
        self._show_stage()

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        self._spoke = self._since + self._delay - self._pause
        threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over.set()
            if self._terminal:
                self._bars.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` are finished; remove the bar when all are."""
        what = visible(what)
        with self._lock:
            self._announce(done < total)
            if what not in self._tasks:
                number = self._bars.add_task(what, total=total, completed=done)
                self._tasks[what] = _Task(number, done, time.monotonic())
            self._bars.update(self._tasks[what].number, completed=done, total=total)
            self._tasks[what].count = f"{done}/{total}"
            self._speak(f"{what} {done}/{total}{self._tasks[what].left(done, total)}")
            if done >= total:
                self._bars.remove_task(self._tasks.pop(what).number)
            if bool(self._tasks) == (self._idle is not None):
                self._show_stage()

    def _tick(self) -> None:
        begin = time.monotonic() + self._delay
        while not self._over.wait(TICK):
            with self._lock:
                if self._over.is_set() or time.monotonic() < begin:
                    continue
                if self._terminal:
                    self._bars.start()
                    return  # the bars update themselves in their own thread
                at = next(reversed(self._tasks), self._stage)
                start = self._tasks[at].start if at in self._tasks else self._since
                counted = f" {self._tasks[at].count}" if at in self._tasks else ""
                self._speak(f"{at}{counted}, {in_words(time.monotonic() - start)} so far")

    def _speak(self, line: str) -> None:
        """Print a line, if there is no bar and enough time has passed since the last line."""
        now = time.monotonic()
        if not self._terminal and now - self._spoke >= self._pause:
            self._spoke = now
            print(f"flatlens: {line}", file=sys.stderr, flush=True)

    def _show_stage(self) -> None:
        """Show a bar without an end if there is no other bar."""
        with self._lock:
            if self._idle is not None:
                self._bars.remove_task(self._idle)
            self._idle = None if self._tasks else self._bars.add_task(self._stage, total=None)

    def _announce(self, work: bool) -> None:
        if self.announcement and work:
            self._bars.console.print(f"flatlens: {self.announcement}", markup=False, highlight=False, soft_wrap=True)
        self.announcement = ""


class _Task:
    def __init__(self, number: TaskID, first: int, start: float) -> None:
        self.number, self.first, self.start = number, first, start
        self.count = ""  #: "3/10"

    def left(self, done: int, total: int) -> str:
        if done <= self.first:
            return ""
        seconds = (time.monotonic() - self.start) * (total - done) / (done - self.first)
        return f", about {in_words(seconds)} left"
