"""Ranks of estimates, and their agreement: Kendall's W, tau of each pair, tau with the generalisation gap.

The order of overlapping 95% intervals stays open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import factorial, nan

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flatlens.estimate import Estimate
from flatlens.progress import count_of
from flatlens.statistics import Statistic, kendall_w, permutations
from flatlens.statistics.correlations import p_value
from flatlens.statistics.resampling import ratio
from flatlens.statistics.statistic import Array

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
    reach = np.array([np.inf if np.isnan(one.margin) else one.margin for one in estimates])
    for at, one in enumerate(estimates):
        if one.kind == "lower bound" and {"eigenvalues", "residuals"} <= one.arrays.keys():
            reach[at] += float(one.arrays["residuals"][0])
    size = np.where(np.isinf(values), 0.0, np.abs(values))
    enough = reach[:, None] + reach + rounding * np.maximum(size[:, None], size)
    with np.errstate(invalid="ignore"):  # inf - inf: neither is larger
        apart = values[:, None] - values
        return np.where(np.abs(apart) > enough, np.sign(apart), 0.0)


PERMUTED = 9999
ALL_EQUAL = ("All networks have equal values: are these the same weights?",)
_Table = Mapping[str, Mapping[str, Estimate]]  #: estimates by measure and network


@dataclass(frozen=True, eq=False)  # == would compare tables
class Agreement:
    """The agreement of rankings.

    >>> import torch, flatlens as fl
    >>> nets = {name: torch.nn.Linear(3, 2) for name in "abc"}
    >>> data = (torch.ones(4, 3), torch.zeros(4, 2))
    >>> lenses = {name: fl.Lens(fl.Problem(net, "mse", data)) for name, net in nets.items()}
    >>> fl.compare(lenses, ["mls", "nmls"]).agreement().taus.shape[1] > 1
    True
    """

    networks: int  #: number of networks that are ranked; fewer than two have no ranks
    overall: Statistic  #: Kendall's W of all counted measures
    surviving: Statistic  #: the same for measures invariant under both rescalings of the weights
    counted: list[str]  #: the measures that are counted
    left_out: Mapping[str, str]  #: the other measures, with the reason
    equal: bool  #: whether every measure has the same value on all networks
    taus: pd.DataFrame  #: Kendall's tau-b of each two measures that rank all networks; NaN if one ties them all
    gap: pd.DataFrame  #: measure, tau (with the generalisation gap), p; empty without held-out data
    remarks: tuple[str, ...]  #: conclusions from the numbers, in words

    @property
    def has_ranks(self) -> bool:
        """Return whether there are two networks to rank."""
        return self.networks > 1

    @property
    def informative(self) -> bool:
        """Return whether the rankings differ between networks, so that they can agree or not."""
        return self.has_ranks and not self.equal


def agreement(
    estimates: _Table,
    pointing: Collection[str],
    surviving: Collection[str],
    gaps: Mapping[str, Estimate],
    rounding: float,
) -> Agreement:
    """Return the agreement of rankings in which ties and overlapping intervals stay open.

    `pointing` are the measures of which a small value is known to mean flat or compressed, `surviving` those invariant
    under rescaling; values that are relatively closer than `rounding` tie.
    """
    # Kendall's W over the measures that count
    left_out, equal = not_counted(estimates, pointing, rounding), all_equal(estimates, rounding)
    counted = [name for name in estimates if name not in left_out]
    models = list(next(iter(estimates.values()), {}))
    ranks = pd.DataFrame(
        [[place.rank for place in places(estimates[name], rounding).values()] for name in counted],
        index=counted, columns=models,
    )  # fmt: skip
    kept = [name for name in counted if name in surviving]
    overall = _w(ranks, "Kendall's W, all measures")
    of_function = _w(ranks.loc[kept], "Kendall's W, measures invariant under rescaling")
    # tau of any two measures
    signs = {
        name: larger_of(list(row.values()), rounding)
        for name, row in estimates.items()
        if all(e.value == e.value for e in row.values())
    }
    taus = pd.DataFrame(
        [[_tau(a, b) for b in signs.values()] for a in signs.values()], index=list(signs), columns=list(signs)
    )
    # each measure's tau with the measured gap, and its p from permuted gaps, over networks that have a gap
    rows, at_gap = [], [at for at, gap in enumerate(gaps.values()) if np.isfinite(gap.value)]
    known = [gap for gap in gaps.values() if np.isfinite(gap.value)]
    if known:
        order = larger_of([Estimate(gap.value) for gap in known], rounding)
        drawn = [order[np.ix_(one, one)] for one in permutations(len(known), 0, PERMUTED // 10)]
        for name, all_signs in signs.items():
            mine = all_signs[np.ix_(at_gap, at_gap)]
            tau = _tau(mine, order)
            under_null = np.array([(mine * other).sum() for other in drawn])
            rows.append((name, tau, p_value(float((mine * order).sum()), under_null) if tau == tau else np.nan))
    with_gap = pd.DataFrame(rows, columns=["measure", "tau", "p"])
    # in words: W and its limits, networks without a gap, and how many pairs of gaps the held-out data cannot order
    told = []
    if overall.value != overall.value:
        told.append(f"The agreement of the rankings is undefined: {overall.note}.")
    else:
        told.append(
            "The p-value of W assumes independent rankings. Measures of the same weights are not independent, and some "
            "bound each other: some agreement is expected, and p is too small."
        )
        if len(models) < 5:  # these can hardly show agreement beyond chance
            orders = factorial(len(models))
            told.append(f"W says little about {len(models)} networks: they have only {orders} orders.")
        if len(models) == 2:
            a, b = models
            first, second = (int((ranks[x] < ranks[y]).sum()) for x, y in ((a, b), (b, a)))
            ties = len(ranks) - first - second
            tied = f"{ties} {'tie' if ties == 1 else 'ties'}" if ties else "no ties"
            told.append(f"{a} is smaller by {count_of(first, 'measure')}, {b} by {second}; {tied}.")
    if unknown := ", ".join(model for model, gap in gaps.items() if not np.isfinite(gap.value)):
        told.append(f"Excluded from tau with the gap (no finite generalisation gap): {unknown}.")
    pairs = len(known) * (len(known) - 1) // 2
    if undecided := pairs - int((larger_of(known, rounding) > 0).sum()):
        told.append(
            f"The 95% intervals of the generalisation gap overlap for {undecided} of {pairs} pairs of networks: tau "
            "with the gap uses the order of the measured gaps."
        )
    remarks = ALL_EQUAL if equal else tuple(told)
    return Agreement(len(models), overall, of_function, counted, left_out, equal, taus, with_gap, remarks)


def all_equal(estimates: _Table, rounding: float) -> bool:
    """Return whether every measure has the same value on all networks."""
    known = any(e.value == e.value for row in estimates.values() for e in row.values())
    return known and all(_equal(row, rounding) for row in estimates.values())


def not_counted(estimates: _Table, pointing: Collection[str], rounding: float) -> dict[str, str]:
    """Return the measures that do not count as a ranking of their own, with the reason."""
    found: dict[str, str] = {}
    before: dict[str, Array] = {}
    for name, row in estimates.items():
        values = np.array([e.value for e in row.values()])
        missing = [model for model, e in row.items() if e.kind == "undefined" or e.value != e.value]
        twin = next((other for other, seen in before.items() if proportional(values, seen, rounding)), None)
        if name not in pointing:
            found[name] = "smaller is not necessarily better"
        elif missing:
            found[name] = f"undefined on {'every network' if len(missing) == len(row) else ', '.join(missing)}"
        elif len(row) < 2:
            found[name] = "one network alone fits the data"
        elif _equal(row, rounding):
            found[name] = "the same value on all networks"
        elif twin is not None:
            found[name] = f"on these networks equal to {twin} times a constant"
        else:
            before[name] = values
    return found


def _equal(row: Mapping[str, Estimate], rounding: float) -> bool:
    # The same value, or none, on all of several networks
    values = np.array([e.value for e in row.values()])
    return len(values) > 1 and bool(np.isnan(values).all() or np.allclose(values, values[0], rtol=rounding, atol=0))


def proportional(a: Array, b: Array, rounding: float) -> bool:
    """Return whether one row of values is a positive multiple of another one."""
    if not (np.isfinite(a).all() and np.isfinite(b).all() and a.any() and b.any()):
        return False
    at = int(np.abs(a).argmax())
    return bool(b[at] * a[at] > 0 and np.allclose(a / a[at], b / b[at], rtol=rounding, atol=0))


def _w(ranks: pd.DataFrame, name: str) -> Statistic:
    if ranks.shape[1] < 2:
        return Statistic(name, nan, ranks.shape[1], note="no two networks to rank")
    return kendall_w(ranks, ranked=True, permuted=PERMUTED, name=name)


def _tau(a: Array, b: Array) -> float:
    # Kendall's tau-b of two orders, given as the signs of all differences
    both, in_a, in_b = (np.array([signs.sum()]) for signs in (a * b, a**2, b**2))
    return float(ratio(both, in_a, in_b)[0])
