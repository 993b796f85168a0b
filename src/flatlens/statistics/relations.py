"""Tables of correlations of a study: of every pair of quantities, and within groups of equal settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import combinations, product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flatlens.statistics.bootstrap import Correlation, with_interval
from flatlens.statistics.coefficients import kendall, pearson
from flatlens.statistics.draws import resamples
from flatlens.statistics.statistic import NAN

FEWEST_WITHIN = 10
"""The smallest number of points minus number of groups for which a correlation within groups is given."""
_RESAMPLES = 2000


def relate_all(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Return Pearson's r and Kendall's tau of every pair of columns, over the points that are finite in both.

    The columns: x, y, n, pearson, pearson_low, pearson_high, kendall, kendall_low, kendall_high.
    """
    rows = []
    for x_name, y_name in combinations(table.columns, 2):
        points = table[[x_name, y_name]][_finite(table, x_name, y_name)].to_numpy(dtype=np.float64)
        counts = resamples(len(points), seed, _RESAMPLES)  # the same for all pairs of equal n
        r = with_interval(partial(pearson, *points.T), counts)
        tau = with_interval(partial(kendall, *points.T), counts)
        rows.append((x_name, y_name, r.n, r.value, r.low, r.high, tau.value, tau.low, tau.high))
    coefficients = [f"{name}{end}" for name in ("pearson", "kendall") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["x", "y", "n", *coefficients])


def relate_within(table: pd.DataFrame, target: str, groupings: Mapping[str, pd.Series], seed: int = 0) -> pd.DataFrame:
    """Return the pooled Pearson's r within groups, of every other column with `target`; NaN if too few points are left.

    `groupings` gives, by name, each row's group label. The columns: x, y, group (the grouping's name), groups (their
    number), n, pearson, pearson_low, pearson_high.
    """
    rows = []
    for grouping, name in product(groupings, table.columns.drop(target)):
        kept = _finite(table, name, target)
        x, y = table[[name, target]][kept].to_numpy(dtype=np.float64).T
        numbers, labels = pd.factorize(groupings[grouping][kept])
        r = Correlation(NAN, NAN, NAN, len(x))
        if len(x) - len(labels) >= FEWEST_WITHIN:
            counts = resamples(len(x), seed, _RESAMPLES)
            r = with_interval(partial(pearson, x, y, groups=numbers), counts)
        rows.append((name, target, grouping, len(labels), r.n, r.value, r.low, r.high))
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "n", "pearson", "pearson_low", "pearson_high"])


def _finite(table: pd.DataFrame, x: str, y: str) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(table[[x, y]].to_numpy(dtype=np.float64)).all(1))
