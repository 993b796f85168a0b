"""Inference over independent units: networks of one unit (a seed, a start) share random draws, and count once.

A statistic is computed again without each unit in turn. The standard error is that of the delete-one-group jackknife
(Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans, ch. 3), which for a mean over units of equal size
is the usual one, and in regression is the estimator CR3 of Bell and McCaffrey (2002). Quantiles are Student's with
units - 1 degrees of freedom, as Cameron, Gelbach and Miller (2008) advise for few clusters. Correlations are taken on
Fisher's scale z = arctanh r. docs/sizes.md has the simulated error rates.

`average` and `share` are means over units; `in_cases` is a verdict over several cases; `holm` and `benjamini_hochberg`
correct p-values for their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, lgamma
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import beta, false_discovery_control
from scipy.stats import t as student

from flatlens.statistics.resampling import Coefficient, GroupNumbers, generator
from flatlens.statistics.statistic import NAN, Array, Statistic, Tails, as_columns, keep

Holds: TypeAlias = Literal["all", "some"]

FEWEST_UNITS = 6  #: smallest number of independent units for an interval on which a verdict hangs
FEWEST_DESCRIBED = 3  #: the same to describe a study: the interval is wide, and errors are below 3% a side
MOST_GROUPS = 200  #: largest number of groups of units left out in turn; more units are joined to as many groups
_LEVEL = 0.025  #: share of wrong intervals on each side
RANK_LEVEL = 2.0  #: factor on the level at which ranks have to agree: 5% a side for a correlation tested at 2.5%
_LARGEST = 700.0  #: largest logarithm of a number that float64 holds
ROUNDING_SHARE = 1e-12  #: a standard error below this share of the value is rounding


def clustered(
    name: str,
    coefficient: Coefficient,
    units: Any,
    *,
    unit: str = "network",
    fisher: bool = False,
    folded: bool = False,
    ranks: Coefficient | None = None,
    excluded: tuple[tuple[str, int], ...] = (),
    note: str = "",
    fewest: int = FEWEST_UNITS,
    ordered: Sequence[Array] = (),
) -> Statistic:
    """Return a statistic with its 95% interval over independent units.

    With fewer than `fewest` units there is no interval. Where a statistic is the same without any one unit, its
    standard error is 0; its one-sided p is then 2^-units, that of units that all fall on one side by chance.

    Args:
        name: the statistic's name.
        coefficient: function of counts (B, n) -> (B,), one row of counts per subset of the n networks, the first of
            all of them.
        units: label of each network's unit, (n,).
        unit: what a unit is, in one word.
        fisher: the statistic is a correlation, and errors are taken of arctanh of it.
        folded: its size is asked for, whatever its sign.
        ranks: the same of ranks; then p is at least half of theirs, so that a verdict at 2.5% a side needs theirs at
            5%: one outlier can make a correlation, and not one of ranks.
        excluded: (reason, number) of networks left out.
        note: further remark.
        fewest: smallest number of units for an interval.
        ordered: the columns whose ranks the statistic (or `ranks`, if given) correlates. By chance alone, each order of
            a column is as likely as any other, so p is at least one over their number. A column of few values and few
            units has few orders: of three 0 and three 1 there are 20. With fewer than 80 orders there is no interval:
            those of two of them have to be rarer than 2.5%.

    >>> x, units = np.array([1.0, 2.0, 3.0, 6.0, 2.0, 1.0]), range(6)
    >>> clustered("mean", lambda counts: counts @ x / counts.sum(1), units)
    mean = 2.5 [0.537, 4.46], p = 0.022 (n = 6, 6 networks)
    """
    # The value, and its values without each unit in turn
    numbers, labels = pd.factorize(np.asarray(units, dtype=object))
    n, known, groups = len(numbers), len(labels), in_groups(numbers, labels)
    plain = Statistic(name, NAN, n, excluded=excluded, note=note, units=known, unit=unit, correlation=fisher)
    if n == 0:
        return replace(plain, note="no network is left")
    value, left_out = _with_and_without(coefficient, groups)
    plain = replace(plain, value=abs(value) if folded else value)
    if not np.isfinite(value):
        return replace(plain, note=_and(note, "undefined: a column is constant, or too few networks are left"))
    each = np.abs(left_out) if folded else left_out
    plain = replace(plain, leave_one_out=(float(each.min()), float(each.max())))
    # Too few units, or too few orders of a column, leave the value without an interval
    if known < fewest:
        return replace(plain, note=_and(note, f"fewer than {fewest} independent units"))
    if not np.isfinite(left_out).all():
        return replace(plain, note=_and(note, f"undefined without one {unit}"))
    least = max((1 / _orders(column, numbers) for column in ordered), default=0.0)
    if 2 * least > _LEVEL and ranks is None:
        return replace(plain, note=_and(note, f"the values have only {1 / least:.0f} orders: too few for an interval"))
    found = _interval(plain, value, left_out, 0.0 if ranks else least, fisher=fisher, folded=folded)
    if known < FEWEST_UNITS and found.low == found.high:
        return replace(plain, note=_and(note, f"all values without one {unit} agree: too few units for an interval"))
    return found if ranks is None else _with_ranks(found, ranks, groups, least, fisher=fisher, folded=folded)


def _interval(
    plain: Statistic, value: float, left_out: Array, least: float, *, fisher: bool, folded: bool = False
) -> Statistic:
    """The statistic with interval, p and tails, from its values without each unit; `least` is the smallest p."""
    to, back = (fishers_z, np.tanh) if fisher else (np.asarray, np.asarray)
    groups, at = len(left_out), float(to(np.array(value)))
    error = float(np.sqrt((groups - 1) / groups * ((to(left_out) - at) ** 2).sum()))
    error = 0.0 if error <= ROUNDING_SHARE * max(abs(at), 1e-300) else error
    reach = student.ppf(1 - _LEVEL, groups - 1) * error
    low, high = (float(back(np.array(end))) for end in (at - reach, at + reach))
    if folded:
        low, high = (0.0 if low < 0 < high else min(abs(low), abs(high))), max(abs(low), abs(high))
    centre = abs(at) if folded else at

    def grown(times: float, than: float) -> tuple[float, float]:
        distance, many = centre - float(to(np.array(than))), min(times * groups, MOST_GROUPS)
        if error == 0:
            above = 0.5 if distance == 0 else 0.5**many if distance > 0 else 1 - 0.5**many
        else:
            above = float(student.sf(distance / error * times**0.5, many - 1))
        return max(above, least**times), max(1 - above, least**times)

    tails = partial(grown, 1.0)
    scale = ", of Fisher's z" if fisher else ""
    method = f"95% interval: Student's t, {groups - 1} degrees of freedom, delete-one-{plain.unit} jackknife{scale}"
    return replace(
        plain, low=low, high=high, p=two_sided(tails(0.0)), tails=tails, method=method,
        grown=lambda times: partial(grown, times),
    )  # fmt: skip


def two_sided(tails: tuple[float, float]) -> float:
    """Return the two-sided p of two one-sided ones."""
    return min(1.0, 2 * min(tails))


def _with_ranks(
    found: Statistic, ranks: Coefficient, groups: GroupNumbers, least: float, *, fisher: bool, folded: bool
) -> Statistic:
    value, left_out = _with_and_without(ranks, groups)
    beside = replace(found, name=f"{found.name}, of ranks", value=value, leave_one_out=(NAN, NAN))
    if not np.isfinite([value, *left_out]).all():
        return replace(found, low=NAN, high=NAN, p=NAN, tails=None, note=_and(found.note, "undefined of ranks"))
    beside = _interval(beside, value, left_out, least, fisher=fisher, folded=folded)
    own, theirs = found.grown, beside.grown
    assert own is not None  # both have intervals
    assert theirs is not None

    # p is at least half of that of the ranks
    def grown(times: float) -> Tails:
        of_value, of_ranks = own(times), theirs(times)

        def tails(than: float) -> tuple[float, float]:
            above, below = (max(p, q / RANK_LEVEL) for p, q in zip(of_value(than), of_ranks(than), strict=True))
            return above, below

        return tails

    tails = grown(1.0)
    method = f"{found.method}; p: the larger of its own and half of that of ranks"
    return replace(
        found, tails=tails, grown=grown, p=two_sided(tails(0.0)), method=method,
        of_ranks=abs(value) if folded else value,
    )  # fmt: skip


def in_groups(numbers: GroupNumbers, labels: Any) -> GroupNumbers:
    """Return the group of each network that is left out in turn: its unit, or one of 200 groups of units."""
    known = len(labels)
    if known <= MOST_GROUPS:
        return numbers
    # Drawn by their labels, always the same: the order of the rows does not count, as neighbours may be alike
    by_label = sorted(range(known), key=lambda unit: (str(labels[unit]), type(labels[unit]).__name__))
    group = np.empty(known, dtype=np.int64)
    group[by_label] = generator(0).permutation(known) * MOST_GROUPS // known
    return np.asarray(group[numbers])


def _orders(column: Array, numbers: GroupNumbers) -> float:
    """Return how many different orders a column has if units are exchanged, and the networks of each unit.

    >>> round(_orders(np.array([0.0, 0, 0, 1, 1, 1]), np.arange(6)))
    20
    >>> round(_orders(np.array([0.0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 2])))  # 3 units, and 2 orders in one
    12
    """
    rows_of = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
    of_units = [Counter(column[rows].tolist()) for rows in rows_of]
    alike = [frozenset((value, times / of.total()) for value, times in of.items()) for of in of_units]
    return exp(min(_log_orders(alike) + sum(_log_orders(of.elements()) for of in of_units), _LARGEST))


def _log_orders(values: Iterable[Hashable]) -> float:
    times = Counter(values)
    return lgamma(times.total() + 1) - sum(lgamma(each + 1) for each in times.values())


def _with_and_without(coefficient: Coefficient, groups: GroupNumbers) -> tuple[float, Array]:
    counts = np.ones((2 + int(groups.max()), len(groups)))
    counts[1 + groups, np.arange(len(groups))] = 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.asarray(coefficient(counts), dtype=np.float64)
    return float(values[0]), values[1:]


def beyond_errors(a: Array, b: Array) -> Array:
    """Return the sum over rows of products of a's and b's deviations from their means, less what errors add, (B,).

    a and b are (rows, B): column 0 is of all networks, the others are without one unit each, and give the errors by the
    jackknife.
    """
    groups = a.shape[1] - 1
    of_a, of_b = (each - each.mean(0) for each in (a, b))
    moved = (of_a[:, 1:] - of_a[:, :1]) * (of_b[:, 1:] - of_b[:, :1])
    errors = (groups - 1) / max(groups, 1) * np.nansum(moved)  # NaN without the only unit: then there is no interval
    return np.asarray((of_a * of_b).sum(0) - errors)


def fishers_z(r: Array) -> Array:
    """Return Fisher's z of correlations, arctanh r; finite for r = 1.

    >>> fishers_z(np.tanh([0.5, -2.0]))
    array([ 0.5, -2. ])
    """
    return np.asarray(np.arctanh(np.clip(r, -1 + 1e-12, 1 - 1e-12)))


def _and(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def average(
    values: Any,
    units: Any = None,
    *,
    name: str = "x",
    unit: str = "network",
    ranks: Any = None,
    correlations: bool = False,
    shares: bool = False,
    cases: Any = None,
) -> Statistic:
    """Return the mean over networks, of one number per network; the interval is Student's over independent units.

    `units` are the labels of the networks' units; by default each network is a unit. If the units' means take two
    values only, Student's distribution is a bad approximation: the interval is then the exact binomial one (Clopper and
    Pearson 1934) of the share of units with the larger value, if the units have equally many networks of one kind. If
    all have one value, the interval is this value, and p is that of a sign test: 2^-units, as all are on one side.

    `correlations`: the numbers lie between -1 and 1. If all units have one value, the interval is that of the share of
    units on their side of 0.
    `shares`: the numbers are 1 where something holds, else 0. If all units have one of them, the interval is the exact
    binomial one, too.
    `ranks`: where the numbers are correlations, the same of ranks; a verdict then needs both means (`clustered`).
    `cases`: label of each network's kind. The mean is then over kinds, of the mean within each: a kind of which there
    are more networks does not count for more.

    >>> average([1.0, 2.0, 3.0, float("nan"), 6.0, 2.0, 1.0])
    Mean of x = 2.5 [0.537, 4.46], p = 0.022 (n = 6, 6 networks; 1 left out: x is missing)
    """
    labels = np.arange(len(values)) if units is None else np.asarray(units, dtype=object)
    columns = {name: values} if ranks is None else {name: values, f"{name}, of ranks": ranks}
    numbers = {column: np.asarray(one, dtype=np.float64) for column, one in columns.items()}
    kind = np.zeros(len(labels)) if cases is None else pd.factorize(np.asarray(cases, dtype=object))[0]
    kept = keep(as_columns(**numbers, _unit=labels, _case=kind), list(columns), present=["_unit", "_case"])
    x, *of_ranks = (kept.table[column].to_numpy() for column in columns)
    member = np.equal.outer(kept.table["_case"].to_numpy(), np.unique(kept.table["_case"])).astype(float)
    found = clustered(
        f"Mean of {name}", partial(_mean_over_cases, x, member), kept.table["_unit"], unit=unit,
        ranks=partial(_mean_over_cases, of_ranks[0], member) if of_ranks else None, excluded=kept.excluded,
    )  # fmt: skip
    found = replace(found, correlation=ranks is not None)
    each = pd.Series(x).groupby(kept.table["_unit"].to_numpy())
    means = each.mean().to_numpy()
    if of_ranks or len(means) < FEWEST_UNITS:
        return found
    # Units with one or two values are a binomial sample, unless their sizes or kinds differ
    values, alike = np.unique(means), each.size().nunique() == member.shape[1] == 1
    if len(values) == 1 and correlations:
        size = abs(float(values[0]))
        method = "95% interval: of a sign test, as all units have one value"
        return replace(_binomial(found, means, -size, size), value=found.value, method=method) if size else found
    if shares and set(values) <= {0.0, 1.0} and (len(values) == 1 or alike):
        return _binomial(found, means, 0.0, 1.0)
    return _binomial(found, means, *map(float, values)) if len(values) == 2 and alike else found


def _mean_over_cases(x: Array, member: Array, counts: Array) -> Array:
    # (B,); `member` (n, cases) is 1 in each network's own case
    means = (counts * x) @ member / (counts @ member)
    known = np.isfinite(means)
    return np.asarray(np.where(known, means, 0.0).sum(1) / known.sum(1))


def share(holds: Any, units: Any = None, *, name: str = "it", unit: str = "network") -> Statistic:
    """Return the share of units in all of whose networks something holds, with its exact binomial interval.

    >>> share([1, 1, 1, 1, 0, 1], list("aabcde") , name="it").value
    0.8
    """
    labels = np.arange(len(holds)) if units is None else np.asarray(units, dtype=object)
    table = as_columns(holds=np.asarray(holds, dtype=np.float64), unit=labels).dropna()
    whole = table.groupby("unit")["holds"].min()
    found = average(whole.to_numpy(), whole.index.to_numpy(), name=name, unit=unit, shares=True)
    left = len(holds) - len(table)
    excluded = ((f"{name} is not known", left),) if left else ()
    return replace(found, name=f"Share of {unit}s with {name}", n=len(table), excluded=excluded)


def clopper_pearson(k: float, n: int) -> tuple[float, float]:
    """Return the ends of the exact 95% interval of k in n; k need not be whole, unlike for scipy's `binomtest`."""
    low = 0.0 if k == 0 else float(beta.ppf(0.025, k, n - k + 1))
    return low, 1.0 if k == n else float(beta.ppf(0.975, k + 1, n - k))


def _binomial(found: Statistic, means: Array, low: float, high: float) -> Statistic:
    """The statistic with the exact interval of a mean of units that are `low` or `high`.

    A mean of such units cannot lie outside: against a number there, or at an end, p is that of a sign test, in which
    units that have this number do not count.
    """
    n, k = len(means), int((means == high).sum())
    from_share = high - low

    def tails(than: float) -> tuple[float, float]:
        p = float(np.clip((than - low) / from_share, 0.0, 1.0))
        # P(at least k of n) and P(at most k of n), each with probability p; beyond an end all units are on one side
        above = float(than >= low) if k == 0 else float(beta.cdf(p, k, n - k + 1))
        below = float(than <= high) if k == n else float(beta.sf(p, k + 1, n - k))
        least = 0.5 ** int((means != than).sum())
        return max(above, least if than <= low else 0.0), max(below, least if than >= high else 0.0)

    bounds = [low + from_share * end for end in clopper_pearson(k, n)]
    method = "95% interval: exact binomial (Clopper-Pearson) of units with one of two values"
    return replace(
        found, value=low + from_share * k / n, low=bounds[0], high=bounds[1],
        p=two_sided(tails(0.0)), tails=tails, grown=None, method=method,
    )  # fmt: skip


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
    # The case that decides: the one furthest from the side for "all", the nearest for "some"
    known = {case: one for case, one in parts.items() if one.value == one.value}
    every_above = (holds == "all") == (side == "above")
    pick = min if every_above else max
    if not known:
        n = max((one.n for one in parts.values()), default=0)
        return Statistic(name, NAN, n, parts=parts, note="undefined in every case")
    case = pick(known, key=lambda case: known[case].value)
    # The joint p of all cases
    undecided = [case for case, one in parts.items() if one.tails is None]
    each = [one.tails or (lambda _: (1.0, 1.0)) for one in parts.values()]  # without an interval nothing is believed
    tails = _joint(each, every_above=every_above) if len(undecided) < len(parts) else None
    growing = [one.grown for one in parts.values() if one.grown is not None]

    def grown(times: float) -> Tails:
        return _joint([each(times) for each in growing], every_above=every_above)

    note = f"{'least' if every_above else 'largest'} of {len(parts)} cases: {case}"
    if undecided:
        note += f"; no interval for {', '.join(undecided)}"
    return replace(
        known[case], name=name, p=NAN if tails is None else two_sided(tails(0.0)), note=note, parts=parts, tails=tails,
        correlation=holds == "all" and all(one.correlation for one in known.values()),
        grown=grown if len(growing) == len(parts) else None,
    )  # fmt: skip


def in_readings(parts: Mapping[str, Statistic], name: str) -> Statistic:
    """Return one statistic for a claim that can be read in several ways, with the first one's value and interval.

    >>> two = {"r": Statistic("r", 0.5, 9), "ranks": Statistic("rho", -0.1, 9)}
    >>> found = in_readings(two, "correlation")
    >>> found.value, found.readings, found.note
    (0.5, True, 'first of 2 readings: r')
    """
    said, first = next(iter(parts.items()))
    return replace(first, name=name, note=f"first of {len(parts)} readings: {said}", parts=parts, readings=True,
                   p=NAN, tails=None, grown=None, correlation=False, of_ranks=NAN)  # fmt: skip


def _joint(each: Sequence[Tails], *, every_above: bool) -> Tails:
    """The p that every case is above and that one is below; or that one is above and every one below."""

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
    found, known = np.full(len(p), np.nan), np.isfinite(p)
    found[known] = false_discovery_control(p[known])
    return found
