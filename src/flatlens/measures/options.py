"""Checks of the options that measures share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flatlens.errors import BadOption


def require_tolerance(rtol: object) -> None:
    """Refuse a tolerance outside (0, 1)."""
    if not (isinstance(rtol, int | float) and 0 < rtol < 1):
        raise BadOption(f"option rtol={rtol!r}: a number between 0 and 1 is needed")


def require_positive(**options: object) -> None:
    """Refuse anything but positive finite numbers."""
    for name, value in options.items():
        if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
            raise BadOption(f"option {name}={value!r}: a positive number is needed")


def require_count(least: int, **options: object) -> None:
    """Refuse anything but whole numbers of at least `least`."""
    for name, value in options.items():
        if isinstance(value, bool) or not (isinstance(value, int) and value >= least):
            raise BadOption(f"option {name}={value!r}: a whole number of at least {least} is needed")


def require_one_of(known: Iterable[str], **options: object) -> None:
    """Refuse anything but the known words."""
    words = tuple(known)
    for name, value in options.items():
        if value not in words:
            raise BadOption(f"option {name}={value!r}: one of {', '.join(map(repr, words))} is needed")
