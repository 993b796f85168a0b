"""Bias-corrected and accelerated (BCa) bootstrap intervals of statistics that are functions of resample counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import ndtr, ndtri

from flatlens.statistics.coefficients import Array
from flatlens.statistics.statistic import NAN

Coefficient: TypeAlias = Callable[[Array], Array]
"""A statistic of fixed data, for each resample: counts (B, n) -> (B,)."""

FEWEST_POINTS = 4
"""The smallest number of points for which a correlation is given."""
FEWEST_RESAMPLED = 6
"""The smallest number of points for which it has an interval: of 4, resamples miss in 19 to 23% on one side."""


@dataclass(frozen=True)
class Correlation:
    """A coefficient with its 95% interval; NaN where undefined: a constant column, too few points."""

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
    low, high = np.quantile(draws, _levels(value, draws, coefficient(np.ones((n, n)) - np.eye(n))))
    return Correlation(value, float(low), float(high), n)


def has_interval(n: int, fewest: int = FEWEST_POINTS) -> bool:
    """Return whether n points are enough for an interval of a coefficient that needs `fewest` points for its value."""
    return n >= fewest + FEWEST_RESAMPLED - FEWEST_POINTS


def no_interval(resampled: int, n: int, fewest: int = FEWEST_POINTS) -> str:
    """Return why n points have no interval though there are resamples; an empty string if they have one."""
    few = resampled and not has_interval(n, fewest)
    return f"fewer than {fewest + FEWEST_RESAMPLED - FEWEST_POINTS} networks: no interval" if few else ""


def _levels(value: float, draws: Array, left_out: Array) -> Array:
    """Return the levels of the resamples' quantiles that bound the interval, (2,).

    `left_out` (n,) has the statistic with each point left out in turn.
    """
    below = (draws < value).mean() + 0.5 * (draws == value).mean()
    normal = ndtri([0.025, 0.975])
    if not 0 < below < 1:
        return np.array([0.025, 0.975])
    bias = ndtri(below)
    influence = left_out[np.isfinite(left_out)]
    influence = influence.mean() - influence
    scale = (influence**2).sum() ** 1.5
    acceleration = (influence**3).sum() / (6 * scale) if scale > 0 else 0.0
    shifted = bias + normal
    return np.asarray(ndtr(bias + shifted / (1 - acceleration * shifted)), dtype=np.float64)
