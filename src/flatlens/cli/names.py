"""Options that take names, separated by commas or given several times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from cyclopts import Parameter

Names = Annotated[Sequence[str], Parameter(negative="", show_default=False)]


def all_names(parts: Iterable[str]) -> list[str]:
    """Return the names in an option that is given once or several times."""
    return [name for part in parts for name in split_names(part)]


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated list; a comma between brackets belongs to a measure's options.

    >>> split_names("mls, local_volume(top_k=3, log=True),nmls")
    ['mls', 'local_volume(top_k=3, log=True)', 'nmls']
    """
    names, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names if name.strip()]
