"""Statistics for predictions about many cases: kinds of networks, each with its own relation between two columns.

Networks of different kinds are never pooled: their numbers differ in size, and would correlate for this reason alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.papers.contrasts import OfCounts
from flatlens.papers.evidence import Evidence, Table, complete, over_groups, these, weighed, where
from flatlens.papers.predictions import Results, Side
from flatlens.papers.units import CASE, trained_ones
from flatlens.statistics import Statistic, in_cases, pearson, spearman
from flatlens.statistics.clustered import FEWEST_UNITS, beyond_errors, fishers_z
from flatlens.statistics.coefficients import Array
from flatlens.statistics.exclusions import Retained
from flatlens.statistics.joint import Holds

Over: TypeAlias = Callable[..., Array]
"""Function of Fisher's z of one or two pairs of columns in every case: (cases, B) each -> (B,)."""
_Pair: TypeAlias = tuple[str, str]
_FEWEST = 3
"""Smallest number of networks of a case: r of two is always 1 or -1."""


def across(table: Table, pairs: Sequence[_Pair], over: Over, name: str) -> Evidence:
    """Return `over` of Fisher's z of each pair of columns in every case; cases without a correlation do not count."""
    back = over in (mean, alike)  # they return a correlation

    def found(results: Results) -> Statistic:
        networks = table(results)
        networks = networks.assign(**{CASE: networks.groupby(CASE).ngroup()})
        kept = _related(complete(networks, [CASE, *(column for pair in pairs for column in pair)]), pairs)
        of = {column: kept.table[column].to_numpy() for column in kept.table}
        members = [of[CASE] == case for case in np.unique(of[CASE])]

        def with_all(r: OfCounts, counts: Array) -> Array:
            return over(*(_in_each(members, of[x], of[y], counts, r) for x, y in pairs))

        said = name if back else f"{name}, of Fisher's z"
        return weighed(said, partial(with_all, pearson), kept, fisher=back, ranks=partial(with_all, spearman))

    return found


def _related(kept: Retained, pairs: Sequence[_Pair]) -> Retained:
    """Return the networks of cases in which each pair of columns has a correlation; the others are left out."""

    def has_each(case: pd.DataFrame) -> bool:
        every = np.ones((1, len(case)))
        correlations = [pearson(case[x].to_numpy(), case[y].to_numpy(), every) for x, y in pairs]
        return len(case) >= _FEWEST and bool(np.isfinite(correlations).all())

    cases = [mine for _, mine in kept.table.groupby(CASE, sort=False) if has_each(mine)]
    left = len(kept.table) - sum(map(len, cases))
    excluded = (*kept.excluded, ("no correlation in their case", left)) if left else kept.excluded
    table = pd.concat(cases).sort_index() if cases else kept.table.iloc[:0]
    return Retained(table.reset_index(drop=True), excluded)


def in_each_case(
    table: Table, pairs: Sequence[_Pair], name: str, holds: Holds = "all", side: Side = "above", *, size: bool = False
) -> Evidence:
    """Return Pearson's r of a pair of columns in each case, or Fisher's z of the first pair less that of the second.

    It has to be on the side in "all" cases, or in "some" case (see `in_cases`). `size`: compare |z|.
    """
    return of_each_case(table, lambda case: lambda results: _case(case(results), pairs, name, size), name, holds, side)


def of_each_case(
    table: Table, evidence: Callable[[Table], Evidence], name: str, holds: Holds = "all", side: Side = "above"
) -> Evidence:
    """Return a statistic of each case alone, which `evidence` makes of the case's table.

    It has to be on the side in "all" cases, or in "some" case (see `in_cases`).
    """

    def found(results: Results) -> Statistic:
        cases = {str(case): mine for case, mine in table(results).groupby(CASE, sort=False)}
        parts = {case: replace(evidence(these(mine))(results), name=f"{name}: {case}") for case, mine in cases.items()}
        return in_cases(parts, holds, name, side)

    return found


def _case(networks: pd.DataFrame, pairs: Sequence[_Pair], name: str, size: bool) -> Statistic:
    """Return r of a pair over the networks of a case, or Fisher's z of one pair less that of another."""
    kept = complete(networks, [column for pair in pairs for column in pair])
    of = {column: kept.table[column].to_numpy() for pair in pairs for column in pair}

    def one(r: OfCounts, counts: Array) -> Array:
        each = [r(of[x], of[y], counts) for x, y in pairs]
        if len(pairs) == 1:
            return each[0]
        own, theirs = (np.abs(fishers_z(one)) if size else fishers_z(one) for one in each)
        return own - theirs

    return weighed(name, partial(one, pearson), kept, fisher=len(pairs) == 1, ranks=partial(one, spearman))


def by_part(table: Table, part: Callable[[pd.DataFrame], pd.Series], x: str, y: str, name: str) -> Evidence:
    """Return the mean over cases of Fisher's z of two columns over a part of the networks less that over all."""

    def found(results: Results) -> Statistic:
        networks = table(results)
        cases = networks.groupby(CASE).ngroup() if CASE in networks else 0
        kept = complete(networks.assign(**{CASE: cases, "part": part(networks)}), [CASE, "part", x, y])
        of = {column: kept.table[column].to_numpy() for column in kept.table}
        members, chosen = [of[CASE] == case for case in np.unique(of[CASE])], of["part"] > 0

        def difference(r: OfCounts, counts: Array) -> Array:
            cuts = ([mine & chosen for mine in members], members)
            return _margin_of_known(*(_in_each(cut, of[x], of[y], counts, r) for cut in cuts))

        said = f"{name}, of Fisher's z"
        return weighed(said, partial(difference, pearson), kept, ranks=partial(difference, spearman))

    return found


def _in_each(members: Sequence[Array], x: Array, y: Array, counts: Array, r: OfCounts) -> Array:
    """Return Fisher's z over each set of networks, shape (sets, B); NaN of fewer than three networks."""
    few = np.array([mine.sum() < _FEWEST for mine in members])
    z = np.stack([fishers_z(r(x[mine], y[mine], counts[:, mine])) for mine in members])
    return np.where(few[:, None], np.nan, z)


def _margin_of_known(z: Array, other: Array) -> Array:
    """Return `margin` of the cases in which both have a correlation over all networks, the first of each row."""
    known = np.isfinite(z[:, 0]) & np.isfinite(other[:, 0])
    return margin(z[known], other[known]) if known.any() else np.full(z.shape[1], np.nan)


def ranked(table: Table, columns: Sequence[str]) -> Table:
    """Return the ranks of the columns within each case: Pearson's r of the ranks is Spearman's coefficient."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        ranks = trained_ones(networks)[0].groupby(CASE)[list(columns)].rank()
        return networks.assign(**{column: ranks[column] for column in columns})

    return found


def margin(z: Array, other: Array) -> Array:
    """Return the mean over cases of the first pair's z minus the second's, shape (B,)."""
    return np.asarray((z - other).mean(0))


def mean(z: Array) -> Array:
    """Return the correlation of the mean z over the cases, shape (B,)."""
    return np.asarray(np.tanh(z.mean(0)))


def alike(z: Array, other: Array) -> Array:
    """Return Pearson's r over the cases of the two pairs' z: high if both correlate in the same cases.

    Both are measured on the same networks, so their errors correlate, too: their part is taken off. NaN where errors
    explain all of the variance, and for fewer than six cases.
    """
    if len(z) < FEWEST_UNITS:
        return np.full(z.shape[1], np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        own, theirs = (np.sqrt(beyond_errors(each, each)) for each in (z, other))  # NaN below 0
        return np.asarray(np.clip(beyond_errors(z, other) / (own * theirs), -1, 1))


def with_over_without(table: Table, setting: str, column: str, same: Sequence[str]) -> Evidence:
    """Return the mean of log(b / a) over groups equal in `same`: a at setting 0, b the mean at larger settings."""

    def log_ratio(group: pd.Series) -> float:
        a, b = group[group.index == 0].mean(), group[group.index > 0].mean()
        return float(np.log(b / a)) if a > 0 and b > 0 else np.nan

    return over_groups(table, setting, column, same, log_ratio, f"log of {column} with {setting} over that without")


def first_change(table: Table, setting: str, column: str, same: Sequence[str]) -> Evidence:
    """Return the mean of log(b / a) over groups equal in `same`: a at the setting's smallest value, b at the next."""

    def two(networks: pd.DataFrame) -> pd.Series:
        return networks[setting].isin(sorted(networks[setting].unique())[:2])

    def log_ratio(group: pd.Series) -> float:
        a, b = (*group.sort_index(), np.nan)[:2]
        return float(np.log(b / a)) if a > 0 and b > 0 else np.nan

    name = f"log of {column} at the second {setting} over that at the first"
    return over_groups(where(table, two), setting, column, same, log_ratio, name)
