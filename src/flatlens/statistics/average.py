"""The mean of a quantity over networks, and the share of networks in which something holds, with their intervals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import beta

from flatlens.statistics.clustered import FEWEST_UNITS, clustered, two_sided
from flatlens.statistics.coefficients import Array
from flatlens.statistics.exclusions import as_columns, keep
from flatlens.statistics.statistic import Statistic


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
        f"Mean of {name}",
        partial(_mean_over_cases, x, member),
        kept.table["_unit"],
        unit=unit,
        ranks=partial(_mean_over_cases, of_ranks[0], member) if of_ranks else None,
        excluded=kept.excluded,
    )
    found = replace(found, correlation=ranks is not None)
    each = pd.Series(x).groupby(kept.table["_unit"].to_numpy())
    means = each.mean().to_numpy()
    if of_ranks or len(means) < FEWEST_UNITS:
        return found
    agree, alike = len(set(means)) == 1, each.size().nunique() == member.shape[1] == 1
    if agree and correlations:
        return _one_value(found, means)
    ends = _two_values(means, shares=shares) if agree or alike else None
    return found if ends is None else _binomial(found, means, *ends)


def _mean_over_cases(x: Array, member: Array, counts: Array) -> Array:
    """Return the mean over cases of the mean within each, (B,); `member` (n, cases) is 1 in each network's own case."""
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


def _two_values(means: Array, *, shares: bool) -> tuple[float, float] | None:
    """Return the two values that the units' means take; None if they take more, or one. Those of shares are 0 and 1."""
    values = np.unique(means)
    if shares and set(values) <= {0.0, 1.0}:
        return 0.0, 1.0
    return (float(values[0]), float(values[1])) if len(values) == 2 else None


def _one_value(found: Statistic, means: Array) -> Statistic:
    """Return the statistic of units that all have one value, with the interval of a sign test; its p is 2^-units."""
    size = abs(float(means[0]))
    if size == 0:
        return found
    method = "95% interval: of a sign test, as all units have one value"
    return replace(_binomial(found, means, -size, size), value=found.value, method=method)


def clopper_pearson(k: float, n: int) -> tuple[float, float]:
    """Return the ends of the exact 95% interval of a share, k of n; k need not be a whole number.

    >>> [round(end, 4) for end in clopper_pearson(0, 10)]
    [0.0, 0.3085]
    """
    low = 0.0 if k == 0 else float(beta.ppf(0.025, k, n - k + 1))
    return low, 1.0 if k == n else float(beta.ppf(0.975, k + 1, n - k))


def _binomial(found: Statistic, means: Array, low: float, high: float) -> Statistic:
    """Return the statistic with the exact interval of a mean of units that are `low` or `high`.

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
