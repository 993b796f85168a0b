"""The bar that shows long work: in a terminal a bar, in a notebook one line, elsewhere a line from time to time.

The command line and Python show the same one, on stderr. `FLATLENS_PROGRESS=0` turns it off.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, final

from flatlens.progress import Aside, Progress, beside, in_words, no_progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID

SWITCH = "FLATLENS_PROGRESS"  #: the environment variable that turns progress off with 0
DELAY = 1.5  #: seconds before anything is shown
TICK = 0.1  #: seconds between two checks of the clock
PAUSE, REWRITE = 15.0, 0.5  #: seconds between two lines in a file, and of the line in a notebook

Shown: TypeAlias = Progress | bool | None
"""The `progress` of a call: a function, None for a bar after `DELAY` seconds, or False for none."""

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tabs and line ends, marks that change the direction of writing, and lone surrogates."""


def visible(text: str) -> str:
    r"""Replace every character that controls a terminal by a visible sign: names of layers may contain any character.

    >>> visible("fc\x1b[31mred\n"), visible("\u202etxt")
    ('fc\ufffd[31mred\n', '\ufffdtxt')
    """
    return OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


def switched_off() -> bool:
    """Return whether the environment says that no progress is shown."""
    return os.environ.get(SWITCH, "").lower() in ("0", "no", "off", "false")


@contextmanager
def progress_shown(progress: Shown, stage: str = "measuring") -> Iterator[Progress]:
    """Yield a progress that never stops the work: the one given, or for None a bar until the work ends."""
    if progress is False or (progress in (None, True) and (switched_off() or os.environ.get("RANK", "0") != "0")):
        yield no_progress
    elif progress is None or progress is True:
        with Bar(stage=stage) as bar:
            yield Aside("the report of progress", bar)
    else:
        yield beside(progress) or no_progress


@final
class Bar:
    """A `Progress`: a bar with the time left in a terminal, a line elsewhere.

    `announcement` says what work follows. It is printed at the first call, if there is work left then: never before an
    error about the input. Between the calls, the `stage` is shown with the time it has taken: a thread updates it,
    because one call into torch can take minutes. `prefix` says what the work belongs to.
    """

    def __init__(
        self,
        announcement: str = "",
        *,
        stage: str = "working",
        prefix: str = "",
        delay: float | None = None,
        pause: float | None = None,
    ) -> None:
        self.announcement = announcement
        self._prefix, self._stage = prefix, stage
        self._delay = DELAY if delay is None else delay
        self._notebook = type(sys.stderr).__module__ == "ipykernel.iostream"
        self._terminal = sys.stderr.isatty() and not self._notebook
        self._pause = (REWRITE if self._notebook else PAUSE) if pause is None else pause
        self._off = switched_off()
        self._tasks: dict[str, _Task] = {}
        self._bars: RichBars | None = None  # made when it is first shown: rich takes time to import
        self._idle: TaskID | None = None
        self._lock, self._over = threading.RLock(), threading.Event()
        self._since = time.monotonic()
        self._spoke, self._written = self._since + self._delay - self._pause, 0

    def stage(self, what: str) -> None:
        """Set the name of the work that is done between calls, from now on."""
        with self._lock:
            self._stage, self._since = what, time.monotonic()
            if self._bars is not None and self._idle is not None:
                self._bars.remove_task(self._idle)
                self._idle = None
            self._show_stage()

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        self._spoke = self._since + self._delay - self._pause
        if not self._off:
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over.set()
            if self._bars is not None:
                self._bars.stop()
            if self._notebook and self._written:
                print(f"\r{'':{self._written}}\r", end="", file=sys.stderr, flush=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` are finished; remove the bar when all are."""
        with self._lock:
            if self.announcement and done < total:
                self._print(f"flatlens: {self.announcement}")
            self.announcement = ""
            what = f"{self._prefix}{visible(what)}"
            task = self._tasks.get(what)
            if task is None or done < task.done:  # the same loop again, for another layer
                task = self._tasks[what] = _Task(done, time.monotonic(), number=None if task is None else task.number)
            task.done, task.total = done, total
            if not self._terminal and time.monotonic() - self._spoke >= self._pause:
                left = (time.monotonic() - task.start) * (total - done) / max(1, done - task.first)
                self._speak(f"{what}{task.count}{f', about {in_words(left)} left' if done > task.first else ''}")
            if self._bars is not None:
                self._show(what, task)
            if done >= total:
                del self._tasks[what]
                if self._bars is not None and task.number is not None:
                    self._bars.remove_task(task.number)
            self._show_stage()

    def _tick(self) -> None:
        begin = time.monotonic() + self._delay
        while not self._over.wait(TICK):
            with self._lock, suppress(OSError, ValueError):  # stderr is closed, or its disk full
                if self._over.is_set() or time.monotonic() < begin:
                    continue
                if self._terminal:
                    self._start()
                    return  # the bars update themselves in their own thread
                at = next(reversed(self._tasks), f"{self._prefix}{self._stage}")
                task = self._tasks.get(at)
                seconds = time.monotonic() - (task.start if task else self._since)
                self._speak(f"{at}{task.count if task else ''}, {in_words(seconds)} so far")

    def _start(self) -> None:
        """Show the bars of all tasks, from now on."""
        from rich import progress as rich
        from rich.console import Console

        self._bars = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TextColumn("left"),
            rich.TimeRemainingColumn(),
            console=Console(stderr=True, force_jupyter=False),
            speed_estimate_period=600,  # networks finish seconds apart
            transient=True,
        )
        for what, task in self._tasks.items():
            self._show(what, task)
        self._show_stage()
        self._bars.start()

    def _show(self, what: str, task: _Task) -> None:
        if self._bars is not None and task.number is None:
            task.number = self._bars.add_task(what, total=task.total, completed=task.done)
        elif self._bars is not None and task.number is not None:
            self._bars.update(task.number, completed=task.done, total=task.total)

    def _show_stage(self) -> None:
        """Show a bar without an end if there is no other bar."""
        if self._bars is None or bool(self._tasks) == (self._idle is None):
            return
        if self._idle is None:
            self._idle = self._bars.add_task(f"{self._prefix}{self._stage}", total=None)
        else:
            self._bars.remove_task(self._idle)
            self._idle = None

    def _speak(self, line: str) -> None:
        """Print a line, if there is no bar and enough time has passed since the last line."""
        now = time.monotonic()
        if self._terminal or self._off or now - self._spoke < self._pause:
            return
        self._spoke, line = now, f"flatlens: {line}"
        if self._notebook:
            print(f"\r{line:{self._written}}", end="", file=sys.stderr, flush=True)
            self._written = max(self._written, len(line))
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        if self._bars is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass
class _Task:
    first: int  #: the number that was done at the first report
    start: float
    done: int = 0
    total: int = 0
    number: TaskID | None = None  #: of its bar

    @property
    def count(self) -> str:
        return f" {self.done:,}/{self.total:,}"
