"""Tables of correlations of a study: of every pair of quantities, and within groups of equal settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flatlens.statistics.bootstrap import Coefficient
from flatlens.statistics.clustered import FEWEST_DESCRIBED, clustered
from flatlens.statistics.coefficients import Array, kendall, pearson
from flatlens.statistics.correlations import undefined_because

FEWEST_WITHIN = 10
"""The smallest number of points minus number of groups for which a correlation within groups is given."""
_NOTHING = (np.nan, np.nan, np.nan)


def relate_all(table: pd.DataFrame, units: pd.Series | None = None) -> pd.DataFrame:
    """Return Pearson's r and Kendall's tau of every pair of columns, over the points that are finite in both.

    `units` labels the independent unit of each row, such as its seed; by default each row is one. The intervals are
    `clustered`'s. The columns: x, y, n, units (their number), pearson, pearson_low, pearson_high, kendall, kendall_low,
    kendall_high.
    """
    rows = []
    for names in combinations(table.columns, 2):
        kept = _usable(table, *names, units)
        x, y = table[list(names)][kept].to_numpy(dtype=np.float64).T
        labels = _labels(table, units)[kept]
        each: list[float] = []
        undefined = undefined_because(pd.DataFrame({"x": x, "y": y}))
        for coefficient, ordered in ((pearson, ()), (kendall, (x, y))):
            each += _NOTHING if undefined else _interval(partial(coefficient, x, y), labels, ordered)
        rows.append((*names, len(x), len(pd.unique(labels)), *each))
    coefficients = [f"{name}{end}" for name in ("pearson", "kendall") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["x", "y", "n", "units", *coefficients])


def relate_within(
    table: pd.DataFrame, target: str, groupings: Mapping[str, pd.Series], units: pd.Series | None = None
) -> pd.DataFrame:
    """Return the pooled Pearson's r within groups, of every other column with `target`; NaN if too few points are left.

    `groupings` gives, by name, each row's group label; `units` is as for `relate_all`. The columns: x, y, group (the
    grouping's name), groups (their number), n, units, pearson, pearson_low, pearson_high.
    """
    rows = []
    for grouping, name in product(groupings, table.columns.drop(target)):
        kept = _usable(table, name, target, units)
        x, y = table[[name, target]][kept].to_numpy(dtype=np.float64).T
        numbers, labels = pd.factorize(groupings[grouping][kept], use_na_sentinel=False)
        within, known = partial(pearson, x, y, groups=numbers), _labels(table, units)[kept]
        r = _interval(within, known) if len(x) - len(labels) >= FEWEST_WITHIN else _NOTHING
        rows.append((name, target, grouping, len(labels), len(x), len(pd.unique(known)), *r))
    ends = ["pearson", "pearson_low", "pearson_high"]
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "n", "units", *ends])


def _interval(
    coefficient: Coefficient, units: NDArray[np.object_], ordered: Sequence[Array] = ()
) -> tuple[float, float, float]:
    """Return a correlation with its interval over units; `ordered`: the columns whose ranks it correlates."""
    found = clustered("", coefficient, units, fisher=True, fewest=FEWEST_DESCRIBED, ordered=ordered)
    return found.value, found.low, found.high


def _labels(table: pd.DataFrame, units: pd.Series | None) -> NDArray[np.object_]:
    return np.asarray(np.arange(len(table)) if units is None else units.to_numpy(), dtype=object)


def _usable(table: pd.DataFrame, x: str, y: str, units: pd.Series | None) -> NDArray[np.bool_]:
    """Return the rows with two finite numbers and, where units are given, a unit."""
    finite = np.isfinite(table[[x, y]].to_numpy(dtype=np.float64)).all(1)
    return np.asarray(finite if units is None else finite & units.notna().to_numpy())
