"""Agreement of several rankings of the same networks: Kendall's W."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import chdtrc
from scipy.stats import rankdata

from flatlens.errors import BadInput
from flatlens.progress import count_of
from flatlens.statistics.coefficients import Array
from flatlens.statistics.correlations import ALIKE, require_counts
from flatlens.statistics.draws import Seed, generator
from flatlens.statistics.statistic import NAN, Statistic


def kendall_w(
    scores: pd.DataFrame | Any,
    *,
    ranked: bool = False,
    permuted: int = 9999,
    seed: Seed = 0,
    name: str = "Kendall's W",
) -> Statistic:
    """Return Kendall's coefficient of concordance, between 0 (the rankings cancel) and 1 (they are equal).

    `scores` has one row per ranking and one column per network; only the order of its numbers counts. `ranked` says
    that they are ranks already. Ties get their mean rank, and W is corrected for them. A ranking is left out if all
    networks tie in it, or if a value is missing. p is one-sided, from independent permutations of each ranking; the
    null hypothesis is that the rankings are independent. `permuted=0` takes the chi-square distribution with n - 1
    degrees of freedom, which is accurate from about 8 networks on.

    >>> kendall_w([[1, 2, 3, 4], [1, 2, 3, 4], [2, 1, 3, 4]], permuted=0)
    Kendall's W = 0.911, p = 0.042 (n = 4; 3 rankings)
    """
    require_counts(permuted=permuted)
    table = pd.DataFrame(scores).astype(np.float64)
    if table.shape[1] < 2:
        raise BadInput(f"kendall_w(...): rankings of at least 2 networks are needed, got {table.shape[1]} networks")
    values = table.to_numpy()
    whole = ~np.isnan(values).any(1)
    ranks = values[whole] if ranked else rankdata(values[whole], axis=1)
    distinct = np.ptp(ranks, axis=1) > 0 if len(ranks) else np.zeros(0, dtype=bool)
    ranks, n = ranks[distinct], table.shape[1]
    left = [(f"{(~whole).sum()} left out: a value is missing", not whole.all())]
    left += [(f"{(~distinct).sum()} left out: all networks tie", not distinct.all())]
    note = "; ".join([count_of(len(ranks), "ranking"), *(why for why, there in left if there)])
    if len(ranks) < 2:
        return Statistic(name, NAN, n, note=f"{note}; at least 2 are needed")
    value = float(concordance(ranks))
    if not permuted:
        p = float(chdtrc(n - 1, len(ranks) * (n - 1) * value))
        return Statistic(name, value, n, p=p, method=f"p: chi-square, {n - 1} degrees of freedom", note=note)
    drawn = concordance(_permuted(ranks, permuted, seed))
    p = float((1 + (drawn >= value - ALIKE).sum()) / (1 + permuted))
    return Statistic(name, value, n, p=p, method=f"p: {permuted} permutations of each ranking", note=note)


def concordance(ranks: Array) -> Array:
    """Return W of ranks (..., rankings, networks): the variance of their sums, over that of equal rankings.

    With mean ranks for ties this is the tie-corrected W: a ranking's own variance is (n^3 - n - sum(t^3 - t)) / 12n.

    >>> float(concordance(np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])))
    1.0
    """
    ranks = ranks - ranks.mean(-1, keepdims=True)
    of_sums = (ranks.sum(-2) ** 2).sum(-1)
    return np.asarray(of_sums / (ranks.shape[-2] * (ranks**2).sum((-2, -1))))


def _permuted(ranks: Array, number: int, seed: Seed) -> Array:
    """Return independent random orders of each ranking, (number, rankings, networks)."""
    orders = np.argsort(generator(seed).random((number, *ranks.shape)), axis=-1)
    return np.take_along_axis(np.broadcast_to(ranks, orders.shape), orders, axis=-1)
