"""The schedule of measurements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TypeAlias

from flatlens.errors import BadInput

Every: TypeAlias = int | Iterable[int] | Callable[[int], bool]


class Schedule:
    """The steps at which a measurement is due: every k-th step, a list of steps, or those that a function accepts.

    >>> [step for step in range(10) if Schedule(4).due(step)], Schedule([1, 2, 9]).due(2)
    ([0, 4, 8], True)
    """

    def __init__(self, every: Every) -> None:
        self._divisor, self._listed, self._says = 0, frozenset[int](), None
        if callable(every):
            self._says = every
            self.plain: int | str | list[int] = f"function {getattr(every, '__qualname__', type(every).__name__)}"
        elif isinstance(every, Iterable) and not isinstance(every, str) and getattr(every, "ndim", 1) != 0:
            self.plain = [whole(step, "every=[...]", 0) for step in every]
            if self.plain != sorted(set(self.plain)) or not self.plain:
                raise BadInput(f"Tracker(every={self.plain}): the steps must increase")
            self._listed = frozenset(self.plain)
        else:
            self.plain = self._divisor = whole(every, "every", 1)

    def due(self, step: int) -> bool:
        """Return whether to measure after this many training steps."""
        if self._says is not None:
            return bool(self._says(step))
        return step in self._listed if self._listed else step % self._divisor == 0


def whole(value: object, name: str, least: int) -> int:
    """Return a whole number of at least `least`.

    Raises:
        BadInput: anything else.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number < 2**63:  # the range of an integer column
        most = "" if number < least else ", and below 2**63,"
        raise BadInput(f"Tracker({name}={value!r}): a whole number of at least {least}{most} is needed")
    return number
