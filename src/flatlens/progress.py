"""Progress of long work: a watch that refuses what would take too long, and the bar that shows it.

A side output (a log, a line of progress, a live page) that fails takes neither numbers nor training with it.
The command line and Python show the same bar, on stderr: in a terminal a bar, in a notebook one line, elsewhere a line
from time to time. `FLATLENS_PROGRESS=0` turns it off.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, final

from flatlens.errors import Code, Give, TooLong, typed_line

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class SideOutputFailed(UserWarning):
    """A side output failed; the work goes on without it."""


@final
@dataclass
class Aside:
    """A side output, called as its function is. Its first error is a warning; later ones pass silently.

    What is no `Exception`, such as KeyboardInterrupt, is raised: it stops the work.
    """

    what: str
    function: Callable[..., object]
    _told: bool = field(default=False, init=False)

    def __call__(self, *given: object) -> bool:
        """Call the function; return whether it succeeded."""
        try:
            self.function(*given)
        except Exception as error:
            if not self._told:
                self._told = True
                line = f"{self.what} failed ({typed_line(error, 200)}): the work continues without it"
                with suppress(OSError, ValueError):  # stderr is closed, or its disk full
                    warnings.warn(line, SideOutputFailed, stacklevel=2)
            return False
        return True


Progress: TypeAlias = Callable[[str, int, int], object]
"""Called as `progress(what, done, total)` by everything that can take longer than a second.

An error in it is a warning, and the work goes on; KeyboardInterrupt stops the work.
"""

LIMIT = 600.0
"""Seconds that the products, searches and draws of one measure may be expected to take, unless they are allowed to."""

PRODUCTS, SEARCH, ROWS = "curvature products", "products of a search", "rows"
"""Names of work that takes products; a search ends when it has converged, long before its largest number."""

_FREE = ("one pass", "spectral norms", "Jacobians of batches", "networks", "transforms")
"""Names of work that is never refused: a pass over the data, and the parts of what is asked for."""

LESS_OF_A_MEASURE = (
    "measure fewer samples (Problem.subset), layers (layers=...) or parameters (Problem(parameters=...))"
)
LESS_OF_A_BOUND = "check fewer samples (Problem.subset), or leave this bound out (bounds=...)"
"""What makes long work shorter, for the errors that refuse it."""

USUAL_SEARCH = 20  #: products that a search is expected to take; twice as many once it has taken these

SURE = 10.0  #: seconds of work before its duration is extrapolated: a busy machine can stop for some


def in_words(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count_of(number: int, noun: str) -> str:
    """Return a number and its noun.

    >>> count_of(1, "network"), count_of(48, "network")
    ('1 network', '48 networks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(items: Sequence[str], most: int | None = None) -> str:
    """Return items as an English list; those after the first `most` are counted.

    >>> listed(["4", "16", "64"]), listed(["4", "16", "64"], 2)
    ('4, 16 and 64', '4, 16 and 1 more')
    """
    if most is not None and len(items) > most:
        items = [*items[:most], f"{len(items) - most} more"]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def by_key(entries: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the second parts of entries (key, value) by the first, in their order.

    >>> by_key([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[_Key, list[_Value]] = {}
    for key, value in entries:
        found.setdefault(key, []).append(value)
    return found


def expected_of_search(done: int, most: int, usual: int = USUAL_SEARCH) -> int:
    """Return the number of products that a search is expected to take which has taken `done` of at most `most`.

    >>> expected_of_search(3, 300), expected_of_search(20, 300), expected_of_search(250, 300)
    (20, 40, 300)
    """
    while usual <= done:
        usual *= 2
    return min(usual, most)


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing: the `progress` of work inside other work that shows its own."""


def beside(progress: Progress | None) -> Progress | None:
    """Return a progress that never stops the work: it goes on without one that fails."""
    if progress is None or isinstance(progress, Aside | Watch):
        return progress
    return Aside("the report of progress", progress)


@final
@dataclass
class Watch:
    """A `Progress` that passes reports on, and refuses work whose expected duration is above the limit."""

    progress: Progress | None
    limit: float  #: in seconds
    where: str = "measure"  #: name of the call, for the error
    less: str = LESS_OF_A_MEASURE  #: the ways to less work, for the error
    within: str = ""  #: the bound that the measures belong to, which the error names in their place
    _measure: str = field(default="", init=False)
    _spent: float = field(default=0.0, init=False)  #: seconds in the measure's loops that have ended
    _expected: int = field(default=0, init=False)  #: products of all loops of the measure, and of those that have ended
    _before: int = field(default=0, init=False)
    _loops: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)  #: where and when each began

    def begin(self, measure: str) -> None:
        """Begin the work of another measure."""
        self._measure, self._spent, self._expected, self._before, self._loops = measure, 0.0, 0, 0, {}

    def expect(self, products: int) -> None:
        """Set the number of curvature products that the measure takes in all its loops together."""
        self._expected, self._before = products, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Pass the report on; raise TooLong if the measure's work is expected to exceed the limit."""
        now = time.monotonic()
        first, start = self._loops.setdefault(what, (done, now))
        if done < first:  # the same loop again, for another layer
            first, start = self._loops[what] = (done, now)
        if self.progress is not None:
            self.progress(what, done, total)
        if what in _FREE:
            return
        goal = max(total, self._expected - self._before) if what == PRODUCTS else total
        goal = max(USUAL_SEARCH, done) if what == SEARCH else goal
        if done > first and now - start > SURE:
            whole = (now - start) * max(1.0, (goal - first) / (done - first))
            self.allow(goal + self._before, self._spent + whole, what)
        if done >= total:
            self._spent += now - start
            self._before += total if what == PRODUCTS else 0
            del self._loops[what]

    def allow(self, count: int, seconds: float, what: str = PRODUCTS, mend: str = "") -> None:
        """Raise TooLong if work of this duration is above the limit; `mend` says how the measure takes less."""
        if seconds <= self.limit:
            return
        takes = f"{count:,} {what} would take about {in_words(seconds)}"
        both, less = (takes, f", more than the {in_words(self.limit)} that are allowed"), f"{mend}{self.less}"
        remedy = (f"{less}, or allow it: ", Give("anyway", True))
        raise TooLong(both, value=Code(self.within or self._measure), remedy=remedy, call=self.where)


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


@contextmanager
def progress_shown(progress: Shown, stage: str = "measuring") -> Iterator[Progress]:
    """Yield a progress that never stops the work: the one given, or for None a bar until the work ends."""
    if progress is None or progress is True:
        with Bar(stage=stage) if os.environ.get("RANK", "0") == "0" else nullcontext(no_progress) as bar:
            yield Aside("the report of progress", bar)
    else:
        yield beside(progress or None) or no_progress


@final
class Bar:
    """A `Progress`: a bar with the time left in a terminal, a line elsewhere.

    `announcement` says what work follows. It is printed at the first call, if there is work left then: never before an
    error about the input. Between the calls, the `stage` is shown with the time it has taken: a thread updates it,
    because one call into torch can take minutes. `prefix` says what the work belongs to.
    """

    def __init__(
        self, announcement: str = "", *, stage: str = "working", prefix: str = "", delay: float | None = None,
        pause: float | None = None,
    ) -> None:  # fmt: skip
        self.announcement = announcement
        self._prefix, self._stage = prefix, stage
        self._delay = DELAY if delay is None else delay
        self._notebook = type(sys.stderr).__module__ == "ipykernel.iostream"
        self._terminal = sys.stderr.isatty() and not self._notebook
        self._pause = (REWRITE if self._notebook else PAUSE) if pause is None else pause
        self._off = os.environ.get(SWITCH, "").lower() in ("0", "no", "off", "false")
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
            what = f"{self._prefix}{what}"
            task = self._tasks.get(what)
            if task is None or done < task.done:  # the same loop again, for another layer
                task = self._tasks[what] = _Task(done, time.monotonic(), number=None if task is None else task.number)
            task.done, task.total = done, total
            if not self._terminal and time.monotonic() - self._spoke >= self._pause:
                left = (time.monotonic() - task.start) * (total - done) / max(1, done - task.first)
                self._speak(f"{what}{task.count}{f', about {in_words(left)} left' if done > task.first else ''}")
            if done >= total:
                del self._tasks[what]
            if self._bars is not None:
                self._show(what, task)
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
        assert self._bars is not None
        if task.number is None:
            task.number = self._bars.add_task(visible(what), total=task.total)
        self._bars.update(task.number, completed=task.done, total=task.total)
        if task.done >= task.total:
            self._bars.remove_task(task.number)

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
        self._spoke, line = now, f"flatlens: {visible(line)}"
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
