"""Progress of long work and side outputs: a watch that refuses what would take too long.

A side output (a log, a line of progress, a live page) that fails takes neither numbers nor training with it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, final

from flatlens.errors import Code, Give, TooLong, typed_line


class SideOutputFailed(UserWarning):
    """A side output failed; the work goes on without it."""


@final
class Aside:
    """A side output, called as its function is. Its first error is a warning; later ones pass silently.

    What is no `Exception`, such as KeyboardInterrupt, is raised: it stops the work.

    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     log = Aside("the log", lambda number: print(1 / number))
    ...     log(1), log(0), log(0)
    1.0
    (True, False, False)
    >>> [str(one.message) for one in told]
    ['the log failed (ZeroDivisionError: division by zero): the work continues without it']
    """

    def __init__(self, what: str, function: Callable[..., object]) -> None:
        self.what, self.function = what, function
        self._told = False

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
    """Return a duration in words.

    >>> in_words(3.2), in_words(100), in_words(7300)
    ('3 s', '2 min', '2.0 h')
    """
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
class Watch:
    """A `Progress` that passes reports on, and refuses work whose expected duration is above the limit.

    Args:
        progress: Gets the reports; None: nobody.
        limit: The seconds that the work of one measure or bound may be expected to take.
        where: The name of the call, for the error.
        less: The ways to less work, for the error.
    """

    def __init__(
        self, progress: Progress | None, limit: float, where: str = "measure", less: str = LESS_OF_A_MEASURE
    ) -> None:
        self._progress, self.limit, self._where, self._less = progress, limit, where, less
        self.within = ""  #: the bound that the measures belong to, which the error names in their place
        self.begin("")

    def begin(self, measure: str) -> None:
        """Begin the work of another measure."""
        self._measure, self._spent, self._expected, self._before = measure, 0.0, 0, 0
        self._loops: dict[str, tuple[int, float]] = {}

    def expect(self, products: int) -> None:
        """Set the number of curvature products that the measure takes in all its loops together."""
        self._expected, self._before = products, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Pass the report on; raise TooLong if the measure's work is expected to exceed the limit."""
        now = time.monotonic()
        first, start = self._loops.setdefault(what, (done, now))
        if done < first:  # the same loop again, for another layer
            first, start = self._loops[what] = (done, now)
        if self._progress is not None:
            self._progress(what, done, total)
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
        """Refuse work of this duration if it is above the limit; `mend` says how the measure takes less.

        Raises:
            TooLong: it is.
        """
        if seconds <= self.limit:
            return
        takes = f"{count:,} {what} would take about {in_words(seconds)}"
        raise TooLong(
            (takes, f", more than the {in_words(self.limit)} that are allowed"),
            value=Code(self.within or self._measure),
            remedy=(f"{mend}{self._less}, or allow it: ", Give("anyway", True)),
            call=self._where,
        )
