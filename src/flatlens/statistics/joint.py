"""Several statistics as one claim (it holds in all cases, or in some), and many claims at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from flatlens.statistics.clustered import two_sided
from flatlens.statistics.coefficients import Array
from flatlens.statistics.statistic import NAN, Statistic, Tails

Holds: TypeAlias = Literal["all", "some"]


def in_cases(
    parts: Mapping[str, Statistic], holds: Holds, name: str, side: Literal["above", "below"] = "above"
) -> Statistic:
    """Return one statistic for a claim that each of "all" cases is on a side of a number, or that "some" case is.

    That every case is on a side has the largest of their p-values: if one is not on it, already that one's p is rarely
    small by chance (intersection-union test, Berger 1982). That one case is on a side has the smallest p times the
    number of cases (Holm 1979): each has a chance of its own. "All" is believed on every case, and rejected on one;
    "some" is believed on one, and rejected on every case. Value and interval are those of the case that decides: the
    one furthest from the side for "all", the nearest for "some".

    >>> parts = {"a": Statistic("r", 0.5, 9, tails=lambda _: (0.02, 0.98)),
    ...          "b": Statistic("r", 0.7, 9, tails=lambda _: (0.015, 0.985))}
    >>> in_cases(parts, "all", "r").tails(0.0), in_cases(parts, "some", "r").tails(0.0)
    ((0.02, 1.0), (0.03, 0.985))
    """
    if len(parts) == 1:
        return replace(next(iter(parts.values())), name=name)
    known = {case: one for case, one in parts.items() if one.value == one.value}
    every_above = (holds == "all") == (side == "above")
    pick = min if every_above else max
    if not known:
        return Statistic(name, NAN, max((one.n for one in parts.values()), default=0), parts=parts,
                         note="undefined in every case")  # fmt: skip
    case = pick(known, key=lambda case: known[case].value)
    shown = known[case]
    undecided = [case for case, one in parts.items() if one.tails is None]
    each = [one.tails or _open for one in parts.values()]
    tails = _joint(each, every_above=every_above) if len(undecided) < len(parts) else None
    growing = [one.grown for one in parts.values() if one.grown is not None]

    def grown(times: float) -> Tails:
        return _joint([each(times) for each in growing], every_above=every_above)

    note = f"{'least' if every_above else 'largest'} of {len(parts)} cases: {case}"
    if undecided:
        note += f"; no interval for {', '.join(undecided)}"
    return Statistic(
        name, shown.value, shown.n, shown.low, shown.high,
        NAN if tails is None else two_sided(tails(0.0)), shown.excluded, shown.method, note, parts,
        units=shown.units, unit=shown.unit,
        leave_one_out=shown.leave_one_out, of_ranks=shown.of_ranks,
        correlation=holds == "all" and all(one.correlation for one in known.values()), tails=tails,
        grown=grown if len(growing) == len(parts) else None,
    )  # fmt: skip


def _open(_: float) -> tuple[float, float]:
    """Return the p of a case without an interval: nothing is believed."""
    return 1.0, 1.0


def _joint(each: Sequence[Tails], *, every_above: bool) -> Tails:
    """Return the p that every case is above and that one is below; or that one is above and every one below."""

    def tails(than: float) -> tuple[float, float]:
        above, below = (np.array(side) for side in zip(*(one(than) for one in each), strict=True))
        if every_above:
            return float(above.max()), float(holm(below).min())
        return float(holm(above).min()), float(below.max())

    return tails


def holm(p: Array) -> Array:
    """Return the p-values corrected for their number, in the same order (Holm 1979).

    >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    raised = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    found = np.empty(len(p))
    found[order] = np.minimum(raised, 1.0)
    return found


def benjamini_hochberg(p: Array) -> Array:
    """Return the smallest false discovery rate at which each is declared (Benjamini and Hochberg 1995); NaN stays NaN.

    >>> benjamini_hochberg(np.array([0.01, float("nan"), 0.04, 0.03])).round(3).tolist()
    [0.03, nan, 0.04, 0.04]
    """
    found = np.full(len(p), np.nan)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(-p[known])]
    found[order] = np.minimum.accumulate(p[order] * len(known) / np.arange(len(known), 0, -1))
    return np.asarray(np.minimum(found, 1.0))
