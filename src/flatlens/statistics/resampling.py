"""Bootstrap resamples, their coefficients, permutations, and bias-corrected and accelerated (BCa) intervals.

A resample is a vector of counts that says how often each network was drawn. Each coefficient is a ratio of sums with
these counts as weights, so all resamples of a pair take a few array operations. Ranks and pairs come from the signs of
differences: the sum of the signs of a point's differences to all others is 2 (its rank - the mean rank); Kendall's
numerator is the sum of the products of two signs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.random import MT19937, Generator, RandomState
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from flatlens.statistics.statistic import NAN, Array

GroupNumbers: TypeAlias = NDArray[np.int64]

CONSTANT = 1e-13  #: variance below which values, scaled to variance 1, count as constant: rounding is some 1e-15
_ROUNDING = 1e-12  #: share of a resample's sum of squares below which its variance is rounding


def pearson(x: Array, y: Array, counts: Array, groups: GroupNumbers | None = None) -> Array:
    """Return Pearson's r of each resample, (B,); NaN where x or y is constant in the resample.

    With `groups` (one group number per point) it is the pooled correlation within groups: that of the differences from
    the group's mean.

    >>> x = np.arange(5.0)
    >>> pearson(x, 2 * x, np.ones((1, 5)))
    array([1.])
    """
    x, y = from_median(x, groups), from_median(y, groups)  # r stays, and sums are accurate without outliers, too
    groups = np.zeros(len(x), dtype=np.int64) if groups is None else groups
    member = np.eye(1 + int(groups.max()))[groups]

    def spread(a: Array, b: Array) -> Array:  # np.einsum, not BLAS: the same digits whatever the number of threads
        sizes, in_a, in_b = (np.einsum("bn,ng->bg", counts, member * w[:, None]) for w in (np.ones(len(a)), a, b))
        products: Array = np.einsum("bn,n->b", counts, a * b)
        means: Array = (in_a * in_b / np.maximum(sizes, 1)).sum(1)
        return np.subtract(products, means)

    def known(w: Array) -> Array:
        own = spread(w, w)
        return np.where(own > _ROUNDING * np.einsum("bn,n->b", counts, w * w), own, 0.0)

    return ratio(spread(x, y), known(x), known(y))


def spearman(x: Array, y: Array, counts: Array) -> Array:
    """Return Spearman's rho of each resample, (B,): Pearson's r of the ranks in the resample; ties get the mean rank.

    >>> spearman(np.arange(5.0), np.array([1.0, 0.0, 2.0, 3.0, 9.0]), np.ones((1, 5)))
    array([0.9])
    """
    in_x, in_y = centred_ranks(x, counts), centred_ranks(y, counts)
    return ratio((counts * in_x * in_y).sum(1), (counts * in_x**2).sum(1), (counts * in_y**2).sum(1))


def kendall(x: Array, y: Array, counts: Array) -> Array:
    """Return Kendall's tau-b of each resample, (B,); two copies of one point are a tie, as in scipy.

    >>> kendall(np.arange(5.0), np.array([1.0, 0.0, 2.0, 3.0, 4.0]), np.ones((1, 5)))
    array([0.8])
    """
    sign_x, sign_y = signs(x), signs(y)
    both, in_x, in_y = (((counts @ s) * counts).sum(1) for s in (sign_x * sign_y, sign_x**2, sign_y**2))
    return ratio(both, in_x, in_y)


def signs(values: Array) -> Array:
    """Return the signs of values[i] - values[j], (n, n)."""
    return np.sign(values[:, None] - values)


def centred_ranks(values: Array, counts: Array) -> Array:
    """Return 2 (rank - mean rank) of each point in each resample, (B, n): integers, so sums are exact.

    >>> centred_ranks(np.array([3.0, 1.0, 3.0]), np.ones((1, 3)))
    array([[ 1., -2.,  1.]])
    """
    found: Array = counts @ signs(values).T
    return found


def ratio(both: Array, in_x: Array, in_y: Array, above: float = 0.0) -> Array:
    """Return covariance / sqrt(variance x variance), in [-1, 1]; NaN where a variance is not larger than `above`."""
    defined = (in_x > above) & (in_y > above)
    found = both / np.sqrt(np.where(defined, in_x * in_y, 1.0))
    return np.where(defined, np.clip(found, -1.0, 1.0), np.nan)


def from_median(values: Array, groups: GroupNumbers | None = None) -> Array:
    """Return the values' distances from their median, the largest 1; all zeros if they are constant up to rounding.

    With `groups` (one group number per point) the distances are those from the group's own median.

    >>> from_median(np.array([0.0, 1.0, 3.0]))
    array([-0.5,  0. ,  1. ])
    >>> from_median(np.array([15.0, 16.0, 5.0, 5.0]), np.array([0, 0, 1, 1]))
    array([-1.,  1.,  0.,  0.])
    """
    groups = np.zeros(len(values), dtype=np.int64) if groups is None else groups
    centred = values / (np.abs(values).max(initial=0.0) or 1.0)  # first, so that no difference overflows
    for group in np.unique(groups):
        mine = groups == group
        centred[mine] = 0.0 if _is_constant(centred[mine]) else centred[mine] - np.median(centred[mine])
    return np.asarray(centred / (np.abs(centred).max(initial=0.0) or 1.0))


def _is_constant(values: Array) -> bool:
    """Return whether there are no values, or they are the same up to rounding."""
    largest = np.abs(values).max(initial=0.0)
    return bool(largest == 0 or np.ptp(values / largest) <= 1e-13)


def standardised(values: Array) -> Array:
    """Return the values scaled to mean 0 and variance 1; all zeros if they are constant up to rounding."""
    if _is_constant(values):
        return np.zeros_like(values)
    centred = values - values.mean()
    return np.asarray(centred / np.sqrt((centred**2).mean()))


Seed: TypeAlias = int | Generator
EVERY_ORDER = math.factorial(7)  #: largest number of orders that are all taken, instead of some at random


def generator(seed: Seed) -> Generator:
    """Return the generator given, or a new one with the seed given."""
    if isinstance(seed, Generator):
        return seed
    # A Mersenne twister, seeded as its authors and torch seed it: `resamples` draws the numbers of `torch.randint`
    bits = MT19937()
    bits.state = RandomState(seed).get_state(legacy=False)  # type: ignore[assignment]  # the stubs lack this type
    return Generator(bits)


def resamples(n: int, seed: Seed, number: int) -> Array:
    """Return the counts of `number` bootstrap samples of n points, (number, n).

    >>> resamples(3, 0, 2).sum(1)
    array([3., 3.])
    """
    # the remainder makes small numbers more likely, by the share n / 2^32 at most
    drawn = generator(seed).integers(2**32, size=(number, n), dtype=np.uint32) % max(n, 1)
    where = drawn.astype(np.int64) + n * np.arange(number)[:, None]
    return np.bincount(where.ravel(), minlength=number * n).reshape(number, n).astype(np.float64)


def is_every(n: int, groups: GroupNumbers | None = None) -> bool:
    """Return whether `permutations` returns every order: there are at most 5040, as of 7 points.

    >>> is_every(7), is_every(8), is_every(8, np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    (True, False, True)
    """
    sizes = [n] if groups is None else np.bincount(groups).tolist()
    return sum(math.lgamma(size + 1) for size in sizes) <= math.log(EVERY_ORDER) + 1e-9


def permutations(n: int, seed: Seed, number: int, groups: GroupNumbers | None = None) -> NDArray[np.int64]:
    """Return `number` random orders of n points, (number, n); with `groups`, orders within each group alone.

    Where `is_every`, all orders but the points' own are returned instead, unless `number` is 0: then p is exact.

    >>> len(permutations(4, 0, 9)), len(permutations(9, 0, 9))
    (23, 9)
    >>> orders = permutations(4, 0, 9, np.array([0, 1, 0, 1]))
    >>> set(orders[:, 0].tolist()), set(orders[:, 1].tolist())
    ({0, 2}, {1, 3})
    """
    if number and is_every(n, groups):
        of_points = np.zeros(n, dtype=np.int64) if groups is None else groups
        places = [np.flatnonzero(of_points == group) for group in range(1 + max(of_points, default=0))]
        every = []
        for orders in itertools.product(*map(itertools.permutations, places)):
            order = np.arange(n)
            for place, moved in zip(places, orders, strict=True):
                order[place] = moved
            every.append(order)
        return np.array(every[1:], dtype=np.int64).reshape(len(every) - 1, n)  # the points' own order comes first
    drawn = generator(seed).random((number, n))
    if groups is None:
        return np.argsort(drawn, axis=1)
    found = np.empty((number, n), dtype=np.int64)
    found[:, np.argsort(groups, kind="stable")] = np.argsort(drawn + groups, axis=1)
    return found


def draws(
    n: int, seed: Seed, resampled: int, permuted: int, groups: GroupNumbers | None = None
) -> tuple[Array, NDArray[np.int64]]:
    """Return the counts of bootstrap resamples and the orders of permutations, both from one generator."""
    rng = generator(seed)
    return resamples(n, rng, resampled), permutations(n, rng, permuted, groups)


Coefficient: TypeAlias = Callable[[Array], Array]
"""A statistic of fixed data, for each resample: counts (B, n) -> (B,)."""

FEWEST_POINTS = 4  #: smallest number of points for which a correlation is given
_MORE = 2  #: points beyond those for a value that an interval needs: of 4, resamples miss in 19 to 23% on one side


@dataclass(frozen=True)
class Correlation:
    """A coefficient with its 95% interval; NaN where undefined: a constant column, too few points.

    >>> Correlation(0.8, 0.5, 0.9, n=20).low
    0.5
    """

    value: float
    low: float
    high: float
    n: int


def with_interval(coefficient: Coefficient, counts: Array, fewest: int = FEWEST_POINTS) -> Correlation:
    """Return the coefficient on the data itself, with its BCa 95% interval (Efron 1987).

    `counts` (B, n) are those of `resamples`. If all resamples agree, both ends of the interval are their value. A
    coefficient of `fewest` points needs two more for an interval (`has_interval`).
    """
    n = counts.shape[1]
    value = float(coefficient(np.ones((1, n)))[0]) if n >= fewest else NAN
    draws = coefficient(counts) if np.isfinite(value) and has_interval(n, fewest) else np.array([])
    draws = draws[np.isfinite(draws)]  # a resample of few points can be constant
    if len(draws) == 0:
        return Correlation(value, NAN, NAN, n)
    # The levels of the resamples' quantiles that bound the interval, with bias and acceleration
    levels, below = np.array([0.025, 0.975]), (draws < value).mean() + 0.5 * (draws == value).mean()
    if 0 < below < 1:
        left_out = coefficient(np.ones((n, n)) - np.eye(n))
        influence = left_out[np.isfinite(left_out)]
        influence = influence.mean() - influence
        scale = (influence**2).sum() ** 1.5
        acceleration = (influence**3).sum() / (6 * scale) if scale > 0 else 0.0
        shifted = ndtri(below) + ndtri(levels)
        levels = ndtr(ndtri(below) + shifted / (1 - acceleration * shifted))
    low, high = np.quantile(draws, levels)
    return Correlation(value, float(low), float(high), n)


def has_interval(n: int, fewest: int = FEWEST_POINTS) -> bool:
    """Return whether n points are enough for an interval of a coefficient that needs `fewest` points for its value."""
    return n >= fewest + _MORE


def no_interval(resampled: int, n: int, fewest: int = FEWEST_POINTS) -> str:
    """Return why n points have no interval though there are resamples; an empty string if they have one."""
    return f"fewer than {fewest + _MORE} networks: no interval" if resampled and not has_interval(n, fewest) else ""
