"""Coefficients of bootstrap resamples; a resample is a vector of counts that says how often each network was drawn.

Each coefficient is a ratio of sums with these counts as weights, so all resamples of a pair take a few array
operations. Ranks and pairs come from the signs of differences: the sum of the signs of a point's differences to all
others is 2 (its rank - the mean rank); Kendall's numerator is the sum of the products of two signs.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
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
