"""Side outputs: a log, a line of progress, a live page. One that fails takes neither numbers nor training with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import final

from flatlens.errors import typed_line


class SideOutputFailed(UserWarning):
    """A side output failed; the work goes on without it."""


@final
class Aside:
    """A side output, called as its function is. Its first error is a warning; later ones pass in silence.

    What is no `Exception`, such as KeyboardInterrupt, is raised: it stops the work.

    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     log = Aside("the log", lambda number: print(1 / number))
    ...     log(1), log(0), log(0)
    1.0
    (True, False, False)
    >>> [str(one.message) for one in told]
    ['the log failed (ZeroDivisionError: division by zero): the work goes on without it']
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
                line = f"{self.what} failed ({typed_line(error, 200)}): the work goes on without it"
                with suppress(OSError, ValueError):  # stderr is closed, or its disk full
                    warnings.warn(line, SideOutputFailed, stacklevel=2)
            return False
        return True
