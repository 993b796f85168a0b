"""The mean of a quantity over networks, with its interval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from flatlens.statistics.bootstrap import FEWEST_POINTS, with_interval
from flatlens.statistics.coefficients import Array
from flatlens.statistics.correlations import methods, require_counts
from flatlens.statistics.draws import Seed, generator, resamples
from flatlens.statistics.exclusions import keep
from flatlens.statistics.statistic import NAN, Statistic


def average(values: Any, *, name: str = "x", resampled: int = 2000, seed: Seed = 0) -> Statistic:
    """Return the mean over networks, of one number per network; the interval is a BCa bootstrap of networks.

    >>> average([1.0, 2.0, 3.0, float("nan"), 6.0], resampled=0)
    Mean of x = 3 (n = 4; 1 left out: x is missing)
    """
    require_counts(resampled=resampled)
    kept = keep(pd.DataFrame({name: values}).reset_index(drop=True), [name])
    x = kept.table[name].to_numpy()
    title = f"Mean of {name}"
    if len(x) < FEWEST_POINTS:
        note = f"{len(x)} networks are left, at least {FEWEST_POINTS} are needed"
        return Statistic(title, NAN, len(x), excluded=kept.excluded, note=note)

    def mean(counts: Array) -> Array:
        return np.asarray(counts @ x / counts.sum(1))

    found = with_interval(mean, resamples(len(x), generator(seed), resampled))
    return Statistic(
        title, found.value, found.n, found.low, found.high, excluded=kept.excluded, method=methods(resampled, 0)
    )
