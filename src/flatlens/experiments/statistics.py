"""Correlations with bootstrap intervals, all pairs of a table in a second.

A bootstrap resample is a vector of counts: how often each network was drawn. Both coefficients are ratios of sums in
which those counts are weights, so all resamples of a pair are a few array operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Generator

Array: TypeAlias = NDArray[np.float64]
Coefficient: TypeAlias = Callable[[Array], Array]
"""counts (B, n) -> (B,): a statistic of fixed data, for each resample."""

FEWEST = 4
"""Fewer points than this have no correlation worth a number."""
FEWEST_WITHIN = 10
"""So many points, less one a group, must be left for a pooled correlation within groups."""
RESAMPLES = 2000
NAN = float("nan")


@dataclass(frozen=True)
class Correlation:
    """A coefficient with its 95% interval; NaN where undefined (a constant column, fewer than 4 points)."""

    value: float
    low: float
    high: float
    n: int


def pearson(x: Array, y: Array, counts: Array, groups: NDArray[np.int64] | None = None) -> Array:
    """Pearson's r of each resample, (B,); NaN where x or y is constant in it.

    With `groups` (one number a point) the pooled correlation within groups: of the distances from the group's mean.

    >>> x = np.arange(5.0)
    >>> pearson(x, 2 * x, np.ones((1, 5)))
    array([1.])
    """
    x, y = _standardised(x), _standardised(y)  # r does not change, and the sums below stay accurate
    groups = np.zeros(len(x), dtype=np.int64) if groups is None else groups
    member = np.eye(1 + int(groups.max()))[groups]

    def spread(a: Array, b: Array) -> Array:  # np.einsum, not BLAS: the same digits whatever the number of threads
        sizes, in_a, in_b = (np.einsum("bn,ng->bg", counts, member * w[:, None]) for w in (np.ones(len(a)), a, b))
        products: Array = np.einsum("bn,n->b", counts, a * b)
        means: Array = (in_a * in_b / np.maximum(sizes, 1)).sum(1)
        return np.subtract(products, means)

    var_x, var_y = spread(x, x), spread(y, y)
    defined = (var_x > 1e-9) & (var_y > 1e-9)
    r = spread(x, y) / np.sqrt(np.where(defined, var_x * var_y, 1.0))
    return np.where(defined, np.clip(r, -1.0, 1.0), np.nan)


def kendall(x: Array, y: Array, counts: Array) -> Array:
    """Kendall's tau-b of each resample, (B,); two copies of one point are a tie, as for scipy.

    >>> kendall(np.arange(5.0), np.array([1.0, 0.0, 2.0, 3.0, 4.0]), np.ones((1, 5)))
    array([0.8])
    """
    sign_x, sign_y = np.sign(x[:, None] - x), np.sign(y[:, None] - y)
    both, in_x, in_y = (((counts @ s) * counts).sum(1) for s in (sign_x * sign_y, sign_x**2, sign_y**2))
    defined = (in_x > 0) & (in_y > 0)
    return np.where(defined, both / np.sqrt(np.where(defined, in_x * in_y, 1.0)), np.nan)


def with_interval(coefficient: Coefficient, counts: Array) -> Correlation:
    """The coefficient on the data itself, with its bias-corrected and accelerated 95% interval (Efron 1987).

    Where all resamples agree the interval is that one number. `counts` (B, n) are those of `resamples`.
    """
    n = counts.shape[1]
    value = float(coefficient(np.ones((1, n)))[0]) if n >= FEWEST else NAN
    draws = coefficient(counts) if np.isfinite(value) else np.array([])
    draws = draws[np.isfinite(draws)]  # a resample of few points can be constant
    if len(draws) == 0:
        return Correlation(value, NAN, NAN, n)
    low, high = np.quantile(draws, _levels(value, draws, coefficient(np.ones((n, n)) - np.eye(n))))
    return Correlation(value, float(low), float(high), n)


def _levels(value: float, draws: Array, left_out: Array) -> Array:
    """Which quantiles of the resamples bound the interval; `left_out` has one value per point left out."""
    below = (draws < value).mean() + 0.5 * (draws == value).mean()
    plain = norm.ppf([0.025, 0.975])
    if not 0 < below < 1:
        return np.array([0.025, 0.975])
    bias = norm.ppf(below)
    pull = left_out[np.isfinite(left_out)]
    pull = pull.mean() - pull
    scale = (pull**2).sum() ** 1.5
    acceleration = (pull**3).sum() / (6 * scale) if scale > 0 else 0.0
    shifted = bias + plain
    return np.asarray(norm.cdf(bias + shifted / (1 - acceleration * shifted)), dtype=np.float64)


def resamples(n: int, generator: Generator, number: int = RESAMPLES) -> Array:
    """Counts of `number` bootstrap samples of n points, (number, n)."""
    drawn = torch.randint(max(n, 1), (number, n), generator=generator)
    counts = torch.zeros(number, n, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    return np.asarray(counts.numpy(), dtype=np.float64)


def relate_all(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Pearson and Kendall for every pair of columns; points where either is not finite are left out of that pair.

    The answer's columns: x, y, n, pearson, pearson_low, pearson_high, kendall, kendall_low, kendall_high.
    """
    rows = []
    for x_name, y_name in combinations(table.columns, 2):
        points = table[[x_name, y_name]][_finite(table, x_name, y_name)].to_numpy(dtype=np.float64)
        counts = resamples(len(points), torch.Generator().manual_seed(seed))  # the same for all pairs of equal n
        r = with_interval(partial(pearson, *points.T), counts)
        tau = with_interval(partial(kendall, *points.T), counts)
        rows.append((x_name, y_name, r.n, r.value, r.low, r.high, tau.value, tau.low, tau.high))
    coefficients = [f"{name}{end}" for name in ("pearson", "kendall") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["x", "y", "n", *coefficients])


def relate_within(table: pd.DataFrame, target: str, groupings: Mapping[str, pd.Series], seed: int = 0) -> pd.DataFrame:
    """Pooled Pearson's r within groups, of every other column with `target`; NaN where too few points are left.

    `groupings` gives, by name, each row's group number. The answer's columns: x, y, group (the grouping's name), groups
    (how many), n, pearson, pearson_low, pearson_high.
    """
    rows = []
    for grouping, name in product(groupings, table.columns.drop(target)):
        kept = _finite(table, name, target)
        x, y = table[[name, target]][kept].to_numpy(dtype=np.float64).T
        numbers, labels = pd.factorize(groupings[grouping][kept])
        r = Correlation(NAN, NAN, NAN, len(x))
        if len(x) - len(labels) >= FEWEST_WITHIN:
            counts = resamples(len(x), torch.Generator().manual_seed(seed))
            r = with_interval(partial(pearson, x, y, groups=numbers), counts)
        rows.append((name, target, grouping, len(labels), r.n, r.value, r.low, r.high))
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "n", "pearson", "pearson_low", "pearson_high"])


def _finite(table: pd.DataFrame, x: str, y: str) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(table[[x, y]].to_numpy(dtype=np.float64)).all(1))


def _standardised(values: Array) -> Array:
    """Mean 0 and variance 1; all zeros where the values are constant up to rounding."""
    if len(values) == 0 or np.ptp(values) <= 1e-13 * np.abs(values).max():
        return np.zeros_like(values)
    centred = values - values.mean()
    return np.asarray(centred / np.sqrt((centred**2).mean()))
