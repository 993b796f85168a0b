"""Statistics for predictions about many cases: kinds of networks, each with its own relation between two columns.

Networks of different kinds are never pooled: their numbers differ in size, and would correlate for this reason alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.papers.contrasts import bootstrapped, complete
from flatlens.papers.evidence import Evidence, Table, over_groups
from flatlens.papers.predictions import Results
from flatlens.statistics import Statistic, pearson
from flatlens.statistics.coefficients import Array

CASE = "case"
"""Name of the column with the case of each network."""

Over: TypeAlias = Callable[..., Array]
"""Function of Pearson's r of one or two pairs of columns in every case: (cases, B) each -> (B,)."""


def across(table: Table, pairs: Sequence[tuple[str, str]], over: Over, name: str) -> Evidence:
    """Return `over` of Pearson's r of each pair of columns in every case, bootstrapped over networks."""

    def found(results: Results) -> Statistic:
        networks = table(results)
        networks = networks.assign(**{CASE: networks.groupby(CASE).ngroup()})
        kept, lost = complete(networks, [CASE, *(column for pair in pairs for column in pair)])
        members = [(kept[CASE] == case).to_numpy() for case in sorted(kept[CASE].unique())]
        of = {column: kept[column].to_numpy() for column in kept}

        def coefficient(counts: Array) -> Array:
            in_cases = [_in_each(members, of[x], of[y], counts) for x, y in pairs]
            with warnings.catch_warnings():  # a small case may be constant in a resample, and then has no r
                warnings.simplefilter("ignore", RuntimeWarning)
                return np.asarray(over(*in_cases))

        return bootstrapped(name, coefficient, len(kept), lost)

    return found


def by_part(table: Table, part: Callable[[pd.DataFrame], pd.Series], x: str, y: str, name: str) -> Evidence:
    """Return the mean over cases of Pearson's r of two columns over a part of the networks minus that over all."""

    def found(results: Results) -> Statistic:
        networks = table(results)
        cases = networks.groupby(CASE).ngroup() if CASE in networks else 0
        kept, lost = complete(networks.assign(**{CASE: cases, "part": part(networks)}), [CASE, "part", x, y])
        members = [(kept[CASE] == case).to_numpy() for case in sorted(kept[CASE].unique())]
        a, b, chosen = kept[x].to_numpy(), kept[y].to_numpy(), kept["part"].to_numpy() > 0

        def coefficient(counts: Array) -> Array:
            of_part, of_all = (_in_each(cut, a, b, counts) for cut in ([mine & chosen for mine in members], members))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                return margin(of_part, of_all)

        return bootstrapped(name, coefficient, len(kept), lost)

    return found


def _in_each(members: Sequence[Array], x: Array, y: Array, counts: Array) -> Array:
    """Return Pearson's r over each set of networks, shape (sets, B)."""
    return np.stack([pearson(x[mine], y[mine], counts[:, mine]) for mine in members])


def ranked(table: Table, columns: Sequence[str]) -> Table:
    """Return the ranks of the columns within each case: Pearson's r of the ranks is Spearman's coefficient."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        ranks = networks.groupby(CASE)[list(columns)].rank()
        return networks.assign(**{column: ranks[column] for column in columns})

    return found


def least(r: Array) -> Array:
    """Return the smallest r of all cases, shape (B,)."""
    return np.asarray(np.nanmin(r, 0))


def usual_size(r: Array) -> Array:
    """Return the median of |r| over the cases, shape (B,)."""
    return np.asarray(np.nanmedian(np.abs(r), 0))


def margin(r: Array, other: Array) -> Array:
    """Return the mean over cases of the first pair's r minus the second's, shape (B,)."""
    return np.asarray(np.nanmean(r - other, 0))


def least_margin(r: Array, other: Array) -> Array:
    """Return the smallest over cases of the first pair's r minus the second's, shape (B,)."""
    return least(r - other)


def mean(r: Array) -> Array:
    """Return the mean of r over the cases, shape (B,)."""
    return np.asarray(np.nanmean(r, 0))


def alike(r: Array, other: Array) -> Array:
    """Return Pearson's r over the cases of the two pairs' r: high if both correlate in the same cases."""
    pairs = np.where(np.isnan(r + other), np.nan, [r, other])
    a, b = pairs - np.nanmean(pairs, 1, keepdims=True)
    return np.asarray(np.nansum(a * b, 0) / np.sqrt(np.nansum(a * a, 0) * np.nansum(b * b, 0)))


def with_over_without(table: Table, setting: str, column: str, same: Sequence[str]) -> Evidence:
    """Return the mean of log(b / a) over groups equal in `same`: a at setting 0, b the mean at larger settings."""

    def log_ratio(group: pd.Series) -> float:
        a, b = group[group.index == 0].mean(), group[group.index > 0].mean()
        return float(np.log(b / a)) if a > 0 and b > 0 else np.nan

    return over_groups(table, setting, column, same, log_ratio, f"log of {column} with {setting} over that without")


def first_step(table: Table, setting: str, column: str, same: Sequence[str]) -> Evidence:
    """Return the mean of log(b / a) over groups equal in `same`: a at the setting's smallest value, b at the next."""

    def found(results: Results) -> Statistic:
        values = sorted(table(results)[setting].unique())[:2]

        def log_ratio(group: pd.Series) -> float:
            a, b = (*group.reindex(values), np.nan)[:2]
            return float(np.log(b / a)) if a > 0 and b > 0 else np.nan

        name = f"log of {column} at the second {setting} over that at the first"
        return over_groups(table, setting, column, same, log_ratio, name)(results)

    return found
