"""Ranks of estimates; the order of overlapping 95% intervals stays open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatlens.estimate import Estimate

_Z = 1.96
_ROUNDING = 1.5e-8  # half the digits of float64


@dataclass(frozen=True)
class Place:
    """A network's place by one measure."""

    rank: float  #: 1 is the smallest; NaN where undefined
    open: tuple[str, ...] = ()  #: networks whose order is open: equal values, or overlapping intervals


def places(estimates: Mapping[str, Estimate], rounding: float = _ROUNDING) -> dict[str, Place]:
    """Return each network's place among those with a value.

    A rank is 1 + how many are surely smaller + half of how many cannot be told from it, so that ties share their mean
    rank, and so do networks with overlapping intervals. Bounds are ranked by their values.

    >>> found = places({"a": Estimate(1.0, 0.5), "b": Estimate(2.0, 0.5), "c": Estimate(9.0)})
    >>> [(place.rank, place.open) for place in found.values()]
    [(1.5, ('b',)), (1.5, ('a',)), (3.0, ())]
    """
    known = {name: one for name, one in estimates.items() if one.kind != "undefined" and one.value == one.value}
    names, larger = list(known), larger_of(list(known.values()), rounding)
    found = {}
    for name, row in zip(names, larger, strict=True):
        equals = tuple(other for other, sign in zip(names, row, strict=True) if sign == 0 and other != name)
        found[name] = Place(1 + float((row > 0).sum()) + len(equals) / 2, equals)
    return {name: found.get(name, Place(float("nan"))) for name in estimates}


def larger_of(estimates: Sequence[Estimate], rounding: float = _ROUNDING) -> NDArray[np.float64]:
    """Return which of two is surely larger, (n, n): 1 in row i, column j if i is, 0 if the order is open.

    Values closer than `rounding`, relative to the larger, tie. An unknown error leaves all orders open. An eigenvalue
    that a search found reaches as far as its residual.
    """
    values = np.array([one.value for one in estimates], dtype=np.float64)
    reach = np.array([_reach(one) for one in estimates])
    size = np.where(np.isinf(values), 0.0, np.abs(values))
    enough = reach[:, None] + reach + rounding * np.maximum(size[:, None], size)
    with np.errstate(invalid="ignore"):  # inf - inf: neither is larger
        apart = values[:, None] - values
        return np.where(np.abs(apart) > enough, np.sign(apart), 0.0)


def _reach(one: Estimate) -> float:
    searched = one.kind == "lower bound" and {"eigenvalues", "residuals"} <= one.arrays.keys()
    residual = float(one.arrays["residuals"][0]) if searched else 0.0
    return np.inf if np.isnan(one.stderr) else _Z * one.stderr + residual
