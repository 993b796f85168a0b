"""Inference over independent units: networks of one unit (a seed, a start) share random draws, and count once.

A statistic is computed again without each unit in turn. The standard error is that of the delete-one-group jackknife
(Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans, ch. 3), which for a mean over units of equal size
is the usual one, and in regression is the estimator CR3 of Bell and McCaffrey (2002). Quantiles are Student's with
units - 1 degrees of freedom, as Cameron, Gelbach and Miller (2008) advise for few clusters. Correlations are taken on
Fisher's scale z = arctanh r. docs/sizes.md has the simulated error rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import exp, lgamma
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from flatlens.statistics.bootstrap import Coefficient
from flatlens.statistics.coefficients import Array, GroupNumbers
from flatlens.statistics.draws import generator
from flatlens.statistics.statistic import NAN, Statistic, Tails

FEWEST_UNITS = 6
"""Smallest number of independent units for which there is an interval, where a verdict hangs on it."""
FEWEST_DESCRIBED = 3
"""Smallest number of units for an interval that describes a study; it is wide, and errors are below 3% a side."""
MOST_GROUPS = 200
"""Largest number of groups of units that are left out in turn; more units are joined to as many groups."""
_LEVEL = 0.025
"""Share of wrong intervals on each side."""
RANK_LEVEL = 2.0
"""Factor on the level at which ranks have to agree with a correlation: 5% a side where it is tested at 2.5%."""
_LARGEST = 700.0
"""Largest logarithm of a number that float64 holds."""
_SAME = 1e-12
"""A standard error below this share of the value is rounding."""


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
    """Return the statistic with interval, p and tails, from its values without each unit (or group of units).

    `least` is the smallest possible p.
    """
    to, back = (fishers_z, np.tanh) if fisher else (_plain, _plain)
    groups, at = len(left_out), float(to(np.array(value)))
    error = float(np.sqrt((groups - 1) / groups * ((to(left_out) - at) ** 2).sum()))
    error = 0.0 if error <= _SAME * max(abs(at), 1e-300) else error
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
    """Return the statistic with that of ranks beside it; its p is at least half of that of the ranks."""
    value, left_out = _with_and_without(ranks, groups)
    beside = replace(found, name=f"{found.name}, of ranks", value=value, leave_one_out=(NAN, NAN))
    if not np.isfinite([value, *left_out]).all():
        return replace(found, low=NAN, high=NAN, p=NAN, tails=None, note=_and(found.note, "undefined of ranks"))
    beside = _interval(beside, value, left_out, least, fisher=fisher, folded=folded)
    own, theirs = found.grown, beside.grown
    assert own is not None  # both have intervals
    assert theirs is not None

    def grown(times: float) -> Tails:
        return least_of(own(times), theirs(times))

    tails = grown(1.0)
    method = f"{found.method}; p: the larger of its own and half of that of ranks"
    return replace(
        found, tails=tails, grown=grown, p=two_sided(tails(0.0)), method=method,
        of_ranks=abs(value) if folded else value,
    )  # fmt: skip


def least_of(own: Tails, of_ranks: Tails) -> Tails:
    """Return the one-sided p of a correlation, at least half of that of the ranks."""

    def tails(than: float) -> tuple[float, float]:
        above, below = (max(p, q / RANK_LEVEL) for p, q in zip(own(than), of_ranks(than), strict=True))
        return above, below

    return tails


def in_groups(numbers: GroupNumbers, labels: Any) -> GroupNumbers:
    """Return the group of each network that is left out in turn: its unit, or one of 200 groups of units.

    The units of a group are drawn by their labels, always the same: the order of the rows does not count, as neighbours
    in a table may be alike.
    """
    known = len(labels)
    if known <= MOST_GROUPS:
        return numbers
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
    of_units = [Counter(column[rows].tolist()) for rows in _rows_of(numbers)]
    alike = [frozenset((value, times / of.total()) for value, times in of.items()) for of in of_units]
    return exp(min(_log_orders(alike) + sum(_log_orders(of.elements()) for of in of_units), _LARGEST))


def _rows_of(numbers: GroupNumbers) -> list[Array]:
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])


def _log_orders(values: Iterable[Hashable]) -> float:
    """Return the logarithm of how many different orders these values have."""
    times = Counter(values)
    return lgamma(times.total() + 1) - sum(lgamma(each + 1) for each in times.values())


def _with_and_without(coefficient: Coefficient, groups: GroupNumbers) -> tuple[float, Array]:
    """Return the statistic of all networks, and without each unit, or each group of units."""
    counts = np.ones((2 + int(groups.max()), len(groups)))
    counts[1 + groups, np.arange(len(groups))] = 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.asarray(coefficient(counts), dtype=np.float64)
    return float(values[0]), values[1:]


def _plain(value: Any) -> Any:
    return value


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
