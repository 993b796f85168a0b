"""Statistics for predictions that compare correlations or columns, over any table of networks.

Correlations are compared as Fisher's z = arctanh r: differences and slopes of r itself have wrong error rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.papers.evidence import Evidence, Table, complete, correlated, numbers_of, weighed
from flatlens.papers.predictions import Results
from flatlens.papers.units import CASE, labelled, trained_ones, units_in, word_of
from flatlens.statistics import Statistic, average, in_cases, pearson, spearman
from flatlens.statistics.clustered import beyond_errors, fishers_z
from flatlens.statistics.coefficients import Array

OfCounts: TypeAlias = Callable[[Array, Array, Array], Array]
"""A correlation of two columns in each subset of networks: `pearson` or `spearman`."""
Columns: TypeAlias = dict[str, Array]


def stronger(table: Table, these: Sequence[str], others: Sequence[str], y: str) -> Evidence:
    """Return Fisher's z with y of each of these columns less that of each of the others; all have to be above 0.

    So have r of these columns: the one nearer to 0 of two correlations below it is no stronger one.
    """
    name = f"Fisher's z with {y}: {', '.join(these)} less {', '.join(others)}; and r of the former"

    def found(results: Results) -> Statistic:
        own = {f"r of {mine}": correlated(table, mine, y)(results) for mine in these}
        return in_cases(own | _each_pair(table(results), these, others, y, "z", fishers_z), "all", name)

    return found


def weaker(table: Table, these: Sequence[str], others: Sequence[str], y: str, *, positive: bool = False) -> Evidence:
    """Return |Fisher's z| with y of each of the others less that of each of these columns; all have to be above 0.

    `positive`: so have r of the others, where a positive correlation is said to become weaker.
    """
    name = f"Fisher's |z| with {y}: {', '.join(others)} less {', '.join(these)}{'; and r of the former' * positive}"

    def size(r: Array) -> Array:
        return np.abs(fishers_z(r))

    def found(results: Results) -> Statistic:
        signs = {f"r of {other}": correlated(table, other, y)(results) for other in others if positive}
        return in_cases(signs | _each_pair(table(results), others, these, y, "|z|", size), "all", name)

    return found


def _each_pair(
    networks: pd.DataFrame,
    these: Sequence[str],
    others: Sequence[str],
    y: str,
    said: str,
    scale: Callable[[Array], Array],
) -> dict[str, Statistic]:
    """Return the difference of scaled correlations with y of each of these columns and each of the others."""
    parts = {}
    for mine, rival in product(these, others):
        if _same_numbers(networks, mine, rival):
            continue  # a maximum over layers that is one layer's in every network has that layer's correlation

        def difference(of: Columns, r: OfCounts, counts: Array, pair: tuple[str, str] = (mine, rival)) -> Array:
            own, theirs = (scale(r(of[x], of[y], counts)) for x in pair)
            return own - theirs

        name = f"Fisher's {said} with {y}: {mine} less {rival}"
        parts[f"{mine} less {rival}"] = _of(networks, [mine, rival, y], difference, name)
    return parts


def _same_numbers(networks: pd.DataFrame, a: str, b: str) -> bool:
    of = numbers_of(networks, [a, b])
    return a != b and bool(of[a].notna().any()) and np.array_equal(of[a], of[b], equal_nan=True)


def steadier(table: Table, these: Sequence[str], others: Sequence[str], y: str) -> Evidence:
    """Return the variance over the other columns of Fisher's z with y, less that over these; without errors.

    Columns with errors of their own differ more than those that share them: what errors add is taken off.
    """
    name = f"variance of Fisher's z with {y}: over {', '.join(others)} less over {', '.join(these)}"

    def difference(of: Columns, r: OfCounts, counts: Array) -> Array:
        mine, rival = (np.stack([fishers_z(r(of[x], of[y], counts)) for x in xs]) for xs in (these, others))
        own, theirs = (beyond_errors(z, z) / (len(z) - 1) for z in (mine, rival))
        return np.asarray(theirs - own)

    return lambda results: _of(table(results), [*these, *others, y], difference, name)


def strength(table: Table, x: str, y: str) -> Evidence:
    """Return |Pearson's r| of two columns."""

    def size(of: Columns, r: OfCounts, counts: Array) -> Array:
        return r(of[x], of[y], counts)

    return lambda results: _of(table(results), [x, y], size, f"|Pearson r| of {x} and {y}", fisher=True, folded=True)


def rising(table: Table, group: str, x: str, y: str) -> Evidence:
    """Return the slope of Fisher's z of x and y over a setting: least squares through z at each of its values."""
    name = f"slope over {group} of Fisher's z of {x} and {y}"

    def slope(of: Columns, r: OfCounts, counts: Array) -> Array:
        values = np.unique(of[group])
        members = [of[group] == value for value in values]
        z = np.stack([fishers_z(r(of[x][mine], of[y][mine], counts[:, mine])) for mine in members])
        centred = values - values.mean()
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(centred @ z / (centred @ centred))

    return lambda results: _of(table(results), [group, x, y], slope, name)


def _of(
    networks: pd.DataFrame,
    columns: Sequence[str],
    over: Callable[[Columns, OfCounts, Array], Array],
    name: str,
    *,
    fisher: bool = False,
    folded: bool = False,
) -> Statistic:
    """Return `over` of Pearson's correlations of columns, with that of Spearman's beside it, over independent units."""
    kept = complete(networks, columns)
    of = {column: kept.table[column].to_numpy() for column in columns}
    return weighed(
        name, partial(over, of, pearson), kept, fisher=fisher, folded=folded, ranks=partial(over, of, spearman)
    )


def unchanged(table: Table, before: str, after: str) -> Evidence:
    """Return the mean over networks of |log(after / before)|: 0 for a number that does not change."""
    return _mean(table, lambda networks: np.abs(_log_ratio(networks, before, after)), f"|log({after} / {before})|")


def changed(table: Table, before: str, after: str) -> Evidence:
    """Return the mean over networks of log(after / before): above 0 if the number mostly grows."""
    return _mean(table, lambda networks: _log_ratio(networks, before, after), f"log({after} / {before})")


def mean_of(table: Table, column: str, ranks: str | None = None, *, shares: bool = False) -> Evidence:
    """Return the mean of a column; if it holds correlations, `ranks` may hold those of ranks, which have to agree.

    `shares`: the column is 1 where something holds, else 0.
    """
    return _mean(table, lambda of: numbers_of(of, [column])[column].to_numpy(), column, ranks, shares=shares)


def _mean(
    table: Table, values: Callable[[pd.DataFrame], Array], name: str, ranks: str | None = None, *, shares: bool = False
) -> Evidence:
    def found(results: Results) -> Statistic:
        networks, untrained = trained_ones(table(results))
        units = units_in(networks)
        of_ranks = None if ranks is None else numbers_of(networks, [ranks])[ranks]
        one = average(values(networks), units, name=name, unit=word_of(units), ranks=of_ranks, shares=shares,
                      cases=networks.get(CASE))  # fmt: skip
        low, high = (one.low, one.high) if ranks is None else np.clip([one.low, one.high], -1, 1)
        return replace(one, low=low, high=high, excluded=(*untrained, *one.excluded))

    return found


def side_by_side(table: Table, setting: str) -> Table:
    """Return one row per seed, with the columns of each value of a setting side by side: "mls, high", "mls, low"."""

    def found(results: Results) -> pd.DataFrame:
        wide = table(results).pivot(index="seed", columns=setting)
        wide.columns = pd.Index([", ".join(map(str, pair)) for pair in wide.columns])
        return labelled(wide.reset_index(), ["seed"])

    return found


def _log_ratio(table: pd.DataFrame, before: str, after: str) -> Array:
    networks = numbers_of(table, [before, after])
    ratios = (networks[after] / networks[before]).to_numpy()
    return np.asarray(np.log(np.where(ratios > 0, ratios, np.nan)))
