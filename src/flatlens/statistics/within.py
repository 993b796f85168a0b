"""Correlation within groups of networks, after the mean of each group is subtracted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from flatlens.errors import BadInput
from flatlens.statistics.bootstrap import with_interval
from flatlens.statistics.coefficients import from_median, pearson, standardised
from flatlens.statistics.correlations import methods, p_value, require_counts
from flatlens.statistics.draws import Seed, generator, is_every, permutations, resamples
from flatlens.statistics.exclusions import as_columns, keep
from flatlens.statistics.relations import FEWEST_WITHIN
from flatlens.statistics.statistic import NAN, Statistic


def within_groups(
    x: Any,
    y: Any,
    groups: Any,
    *,
    names: tuple[str, str] = ("x", "y"),
    resampled: int = 2000,
    permuted: int = 999,
    seed: Seed = 0,
) -> Statistic:
    """Return Pearson's r of the differences from the group's mean, pooled over groups.

    `groups` has the group label of each network. The number of networks minus that of groups must be at least 10. p
    permutes y within groups. The interval resamples networks, not whole groups.

    >>> x = np.array([0, 1, 2, 3, 4, 5, 6.0] * 2)
    >>> y = np.repeat([0.0, 100.0], 7) - x
    >>> within_groups(x, y, np.repeat(["a", "b"], 7), resampled=0, permuted=0)
    Pearson r of x and y within groups = -1 (n = 14; 2 groups)
    """
    require_counts(resampled=resampled, permuted=permuted)
    if len({*names, "group"}) < 3:
        raise BadInput(f"within_groups(names={names!r}): two names, neither of them 'group', are needed")
    kept = keep(as_columns(**{names[0]: x, names[1]: y}, group=groups), names, present=["group"])
    n = len(kept.table)
    title = f"Pearson r of {names[0]} and {names[1]} within groups"
    labels, known = pd.factorize(kept.table["group"])
    if n - len(known) < FEWEST_WITHIN:
        why = f"{n} networks in {len(known)} groups, which leave {n - len(known)} points; {FEWEST_WITHIN} are needed"
        return Statistic(title, NAN, n, excluded=kept.excluded, note=why)
    a, b = (kept.table[name].to_numpy() for name in names)
    rng = generator(seed)
    found = with_interval(partial(pearson, a, b, groups=labels), resamples(n, rng, resampled))
    if np.isnan(found.value):
        note = f"{names[0]} or {names[1]} is constant within each group"
        return Statistic(title, NAN, n, excluded=kept.excluded, note=note)
    near = (from_median(v, labels) for v in (a, b))
    inside_a, inside_b = (standardised(v - _means(v, labels)) for v in near)
    orders = permutations(n, rng, permuted, labels)
    drawn = inside_b[orders] @ inside_a / n
    method = methods(resampled, len(orders), "permutations within groups", every=is_every(n, labels))
    p = p_value(found.value, drawn)
    return Statistic(title, found.value, n, found.low, found.high, p, kept.excluded, method, f"{len(known)} groups")


def _means(values: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray((np.bincount(labels, values) / np.bincount(labels))[labels])
