"""The checks of every architecture's settings; each error is one line that names the setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from flatlens.errors import BadInput


def require_known(setting: str, value: object, known: Iterable[object]) -> None:
    """Refuse a value that is not among the known ones; `setting` reads `Class(name=...)`.

    >>> require_known("MLP(activation=...)", "sine", ["relu", "tanh"])
    Traceback (most recent call last):
        ...
    flatlens.errors.BadInput: MLP(activation='sine'): known are relu, tanh
    """
    known = list(known)
    if value not in known:
        raise BadInput(f"{setting.replace('...', repr(value))}: known are {', '.join(map(str, known))}")


def require_sizes(setting: str, sizes: Sequence[object]) -> None:
    """Refuse sizes that are not whole numbers of at least 1."""
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        shown = sizes[0] if len(sizes) == 1 else tuple(sizes)
        raise BadInput(f"{setting}: every size must be a whole number of at least 1, not {shown}")


def scaled(owner: str, sizes: Sequence[int], width: float) -> list[int]:
    """Return the sizes times `width`, rounded; none may become 0.

    >>> scaled("VGG11", (64, 512), 0.125)
    [8, 64]
    """
    if not (width > 0 and math.isfinite(width)):
        raise BadInput(f"{owner}(width={width!r}): it must be positive and finite")
    found = [round(size * width) for size in sizes]
    if min(found, default=1) < 1:
        raise BadInput(f"{owner}(width={width!r}): no channel would be left where the network has {min(sizes)}")
    return found


def pooled(owner: str, image: int, poolings: int) -> int:
    """Return the side of an image after this number of poolings by 2, each rounding down.

    >>> pooled("VGG11", 32, 5)
    1
    """
    side = image >> poolings
    if side < 1:
        raise BadInput(f"{owner}(image={image}): {poolings} poolings by 2 need at least {1 << poolings} pixels a side")
    return side
