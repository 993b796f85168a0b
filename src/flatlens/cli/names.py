"""Options that take names, separated by commas or given several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from flatlens.column import split_at_commas
from flatlens.errors import BadInput

Names = Annotated[Sequence[str], Parameter(negative="", show_default=False)]


def all_names(parts: Sequence[str], option: str) -> list[str]:
    """Return the names in an option that is given once or several times.

    >>> all_names([""], "--measures")
    Traceback (most recent call last):
    ...
    flatlens.errors.BadInput: --measures: names are needed: give at least one, or leave the option out

    Raises:
        BadInput: it is given, and has no name in it.
    """
    names = [name for part in parts for name in split_names(part)]
    if parts and not names:
        raise BadInput(f"{option}: names are needed: give at least one, or leave the option out")
    return names


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated list; a comma between brackets belongs to a measure's options.

    >>> split_names("mls, local_volume(top_k=3, log=True),nmls")
    ['mls', 'local_volume(top_k=3, log=True)', 'nmls']
    """
    return [name for name in split_at_commas(text) if name]
