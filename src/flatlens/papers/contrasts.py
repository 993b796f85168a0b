"""Statistics for predictions that compare correlations or columns, over one table of networks or over many cases.

Correlations are compared as Fisher's z = arctanh r: differences and slopes of r itself have wrong error rates. A case
is a kind of networks, with its own relation between two columns. Networks of different kinds are never pooled: their
numbers differ in size, and would correlate for this reason alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.papers.evidence import (
    CASE,
    Chosen,
    Evidence,
    Table,
    complete,
    correlated,
    is_chosen,
    labelled,
    numbers_of,
    over_groups,
    these,
    trained_ones,
    units_in,
    weighed,
    where,
    word_of,
)
from flatlens.papers.experiment import Results, Side, deferred
from flatlens.statistics import Statistic, average, in_cases, in_readings, pearson, spearman
from flatlens.statistics.inference import FEWEST_UNITS, Holds, beyond_errors, fishers_z
from flatlens.statistics.statistic import Array, Retained

OfCounts: TypeAlias = Callable[[Array, Array, Array], Array]
"""A correlation of two columns in each subset of networks: `pearson` or `spearman`."""
Columns: TypeAlias = dict[str, Array]


@deferred
def stronger(results: Results, table: Table, these: Sequence[str], others: Sequence[str], y: str) -> Statistic:
    """Return Fisher's z with y of each of these columns less that of each of the others; all have to be above 0.

    So have r of these columns: the one nearer to 0 of two correlations below it is no stronger one.
    """
    name = f"Fisher's z with {y}: {', '.join(these)} minus each of {', '.join(others)}; and r of the former"
    own = {f"r of {mine}": correlated(table, mine, y)(results) for mine in these}
    return in_cases(own | _each_pair(table(results), these, others, y, "z", fishers_z), "all", name)


@deferred
def weaker(
    results: Results, table: Table, these: Sequence[str], others: Sequence[str], y: str, *, positive: bool = False
) -> Statistic:
    """Return |Fisher's z| with y of each of the others less that of each of these columns; all have to be above 0.

    `positive`: so have r of the others, where a positive correlation is said to become weaker.
    """
    name = f"Fisher's |z| with {y}: {', '.join(others)} less {', '.join(these)}{'; and r of the former' * positive}"

    def size(r: Array) -> Array:
        return np.abs(fishers_z(r))

    signs = {f"r of {other}": correlated(table, other, y)(results) for other in others if positive}
    return in_cases(signs | _each_pair(table(results), others, these, y, "|z|", size), "all", name)


def _each_pair(
    networks: pd.DataFrame,
    these: Sequence[str],
    others: Sequence[str],
    y: str,
    said: str,
    scale: Callable[[Array], Array],
) -> dict[str, Statistic]:
    parts = {}
    for mine, rival in product(these, others):
        # a maximum over layers that is one layer's in every network has that layer's correlation
        of = numbers_of(networks, [mine, rival])
        if mine != rival and of[mine].notna().any() and np.array_equal(of[mine], of[rival], equal_nan=True):
            continue

        def difference(of: Columns, r: OfCounts, counts: Array, pair: tuple[str, str] = (mine, rival)) -> Array:
            own, theirs = (scale(r(of[x], of[y], counts)) for x in pair)
            return own - theirs

        name = f"Fisher's {said} with {y}: {mine} less {rival}"
        parts[f"{mine} less {rival}"] = _of(complete(networks, [mine, rival, y]), difference, name)
    return parts


def all_of(each: Mapping[str, Evidence], name: str, side: Side = "above") -> Evidence:
    """Return one statistic for a claim that each of these holds (see `in_cases`)."""
    return lambda results: in_cases({said: one(results) for said, one in each.items()}, "all", name, side)


def readings(each: Mapping[str, Evidence], name: str) -> Evidence:
    """Return one statistic for a claim that can be read in several ways (see `in_readings`)."""
    return lambda results: in_readings({said: one(results) for said, one in each.items()}, name)


def steadier(table: Table, these: Sequence[str], others: Sequence[str], y: str) -> Evidence:
    """Return the variance over the other columns of Fisher's z with y, less that over these; without errors.

    Columns with errors of their own differ more than those that share them: what errors add is taken off.
    """
    name = f"variance of Fisher's z with {y}: over {', '.join(others)} less over {', '.join(these)}"

    def difference(of: Columns, r: OfCounts, counts: Array) -> Array:
        mine, rival = (np.stack([fishers_z(r(of[x], of[y], counts)) for x in xs]) for xs in (these, others))
        own, theirs = (beyond_errors(z, z) / (len(z) - 1) for z in (mine, rival))
        return np.asarray(theirs - own)

    return lambda results: _of(complete(table(results), [*these, *others, y]), difference, name)


def strength(table: Table, x: str, y: str) -> Evidence:
    """Return |Pearson's r| of two columns."""

    def signed(of: Columns, r: OfCounts, counts: Array) -> Array:
        return r(of[x], of[y], counts)

    name = f"|Pearson r| of {x} and {y}"
    return lambda results: _of(complete(table(results), [x, y]), signed, name, fisher=True, folded=True)


DRAWS = 100
"""How often the factors of a reparametrisation are drawn again, where its effect follows from stored numbers."""


def draws_of(column: str) -> list[str]:
    """Return the names of a column after a reparametrisation, one for each draw of its factors."""
    return [f"{column}, draw {draw}" for draw in range(DRAWS)]


def size_over_draws(table: Table, x: str, y: str) -> Evidence:
    """Return the mean over draws of |r| of a moved column with another one, by Fisher's z."""

    def size(of: Columns, r: OfCounts, counts: Array) -> Array:
        return np.asarray(np.tanh(np.abs(_over_draws(of, x, y, r, counts)).mean(0)))

    name = f"mean over draws of |Pearson r| of {x} and {y}"
    return lambda results: _of(complete(table(results), [*draws_of(x), y]), size, name, fisher=True)


def less_over_draws(table: Table, x: str, moved: str, y: str, *, size: bool = False, positive: bool = True) -> Evidence:
    """Return Fisher's z of a column with another one, less that of a moved column, in the mean over draws.

    `size`: |z|. `positive`: above 0 is asked for of r of the former, too.
    """

    def difference(of: Columns, r: OfCounts, counts: Array) -> Array:
        own, after = fishers_z(r(of[x], of[y], counts)), _over_draws(of, moved, y, r, counts)
        return np.asarray(np.abs(own) - np.abs(after).mean(0) if size else own - after.mean(0))

    name = f"mean over draws of Fisher's {'|z|' if size else 'z'} with {y}: {x} less {moved}"

    def less(results: Results) -> Statistic:
        return _of(complete(table(results), [x, *draws_of(moved), y]), difference, name)

    both = {f"r of {x}": correlated(table, x, y), f"{x} less {moved}": less}
    return all_of(both, f"{name}; and r of the former") if positive else less


def _over_draws(of: Columns, x: str, y: str, r: OfCounts, counts: Array) -> Array:
    return np.stack([fishers_z(r(of[one], of[y], counts)) for one in draws_of(x)])


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

    return lambda results: _of(complete(table(results), [group, x, y]), slope, name)


def _of(kept: Retained, over: Callable[[Columns, OfCounts, Array], Array], name: str, **options: bool) -> Statistic:
    """Return `over` of Pearson's correlations of columns, with that of Spearman's beside it, over independent units."""
    of = {str(column): kept.table[column].to_numpy() for column in kept.table}
    return weighed(name, partial(over, of, pearson), kept, ranks=partial(over, of, spearman), **options)


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


@deferred
def _mean(
    results: Results,
    table: Table,
    values: Callable[[pd.DataFrame], Array],
    name: str,
    ranks: str | None = None,
    *,
    shares: bool = False,
) -> Statistic:
    networks, untrained = trained_ones(table(results))
    units = units_in(networks)
    of_ranks = None if ranks is None else numbers_of(networks, [ranks])[ranks]
    one = average(values(networks), units, name=name, unit=word_of(units), ranks=of_ranks, shares=shares,
                  cases=networks.get(CASE))  # fmt: skip
    low, high = (one.low, one.high) if ranks is None else np.clip([one.low, one.high], -1, 1)
    return replace(one, low=low, high=high, excluded=(*untrained, *one.excluded))


@deferred
def side_by_side(results: Results, table: Table, setting: str) -> pd.DataFrame:
    """Return one row per seed, with the columns of each value of a setting side by side: "mls, high", "mls, low"."""
    wide = table(results).pivot(index="seed", columns=setting)
    wide.columns = pd.Index([", ".join(map(str, pair)) for pair in wide.columns])
    return labelled(wide.reset_index(), ["seed"])


def _log_ratio(table: pd.DataFrame, before: str, after: str) -> Array:
    networks = numbers_of(table, [before, after])
    ratios = (networks[after] / networks[before]).to_numpy()
    return np.asarray(np.log(np.where(ratios > 0, ratios, np.nan)))


Over: TypeAlias = Callable[..., Array]
"""Function of Fisher's z of one or two pairs of columns in every case: (cases, B) each -> (B,)."""
_Pair: TypeAlias = tuple[str, str]


def with_own(own: Evidence, difference: Evidence, name: str, side: Side = "above") -> Evidence:
    """Return one statistic for a claim that a correlation itself and a difference are on the side, in all cases."""

    def both(results: Results) -> Statistic:
        parts: dict[str, Statistic] = {}
        for said, found in (("correlation of the former", own(results)), ("difference", difference(results))):
            parts |= {f"{said}: {case}": one for case, one in found.parts.items()} if found.parts else {said: found}
        return in_cases(parts, "all", f"{name}; and correlation of the former", side)

    return both


def across(table: Table, pairs: Sequence[_Pair], over: Over, name: str, *, own: bool = False) -> Evidence:
    """Return `over` of Fisher's z of each pair of columns in every case; cases without a correlation do not count.

    `own`: the mean of the first pair's has to be above 0, too.
    """
    found = _across(table, pairs, over, name)
    return with_own(_across(table, pairs[:1], mean_correlation, name), found, name) if own else found


@deferred
def _across(results: Results, table: Table, pairs: Sequence[_Pair], over: Over, name: str) -> Statistic:
    back = over in (mean_correlation, alike)  # they return a correlation
    networks = table(results)
    networks = networks.assign(**{CASE: networks.groupby(CASE).ngroup()})
    kept = complete(networks, [CASE, *(column for pair in pairs for column in pair)])
    # without the cases in which a pair has no correlation: few networks, or a constant column
    related = []
    for _, case in kept.table.groupby(CASE, sort=False):
        once = np.ones((1, len(case)))
        r = [pearson(case[x].to_numpy(), case[y].to_numpy(), once) for x, y in pairs]
        if len(case) >= 3 and np.isfinite(r).all():  # r of two networks is always 1 or -1
            related.append(case)
    left = len(kept.table) - sum(map(len, related))
    excluded = (*kept.excluded, ("no correlation in their case", left)) if left else kept.excluded
    rows = pd.concat(related).sort_index() if related else kept.table.iloc[:0]
    kept = Retained(rows.reset_index(drop=True), excluded)
    members = _members(kept)

    def with_all(of: Columns, r: OfCounts, counts: Array) -> Array:
        return over(*(_in_each(members, of[x], of[y], counts, r) for x, y in pairs))

    return _of(kept, with_all, name if back else f"{name}, of Fisher's z", fisher=back)


def in_each_case(
    table: Table,
    pairs: Sequence[_Pair],
    name: str,
    holds: Holds = "all",
    side: Side = "above",
    *,
    size: bool = False,
    own: bool = False,
) -> Evidence:
    """Return Pearson's r of a pair of columns in each case, or Fisher's z of the first pair less that of the second.

    It has to be on the side in "all" cases, or in "some" case (see `in_cases`). `size`: compare |z|. `own`: the first
    pair's r has to be on the side in all cases, too.
    """
    columns = [column for pair in pairs for column in pair]

    def one(of: Columns, r: OfCounts, counts: Array) -> Array:
        each = [r(of[x], of[y], counts) for x, y in pairs]
        if len(pairs) == 1:
            return each[0]
        mine, theirs = (np.abs(fishers_z(one)) if size else fishers_z(one) for one in each)
        return mine - theirs

    def of_case(case: Table) -> Evidence:
        return lambda results: _of(complete(case(results), columns), one, name, fisher=len(pairs) == 1)

    found = of_each_case(table, of_case, name, holds, side)
    return with_own(in_each_case(table, pairs[:1], name, holds, side), found, name, side) if own else found


@deferred
def of_each_case(
    results: Results,
    table: Table,
    evidence: Callable[[Table], Evidence],
    name: str,
    holds: Holds = "all",
    side: Side = "above",
) -> Statistic:
    """Return a statistic of each case alone, which `evidence` makes of the case's table, as in `in_each_case`."""
    cases = {str(case): mine for case, mine in table(results).groupby(CASE, sort=False)}
    parts = {case: replace(evidence(these(mine))(results), name=f"{name}: {case}") for case, mine in cases.items()}
    return in_cases(parts, holds, name, side)


@deferred
def by_part(
    results: Results, table: Table, part: Chosen, x: str, y: str, name: str, *, size: bool = False
) -> Statistic:
    """Return the mean over cases of Fisher's z of two columns over a part of the networks less that over all.

    `size`: compare |z|.
    """
    networks = table(results)
    cases = networks.groupby(CASE).ngroup() if CASE in networks else 0
    kept = complete(networks.assign(**{CASE: cases, "part": is_chosen(networks, part)}), [CASE, "part", x, y])
    members, chosen = _members(kept), kept.table["part"].to_numpy() > 0
    cuts = ([np.logical_and(mine, chosen) for mine in members], members)

    def difference(of: Columns, r: OfCounts, counts: Array) -> Array:
        z, other = (_in_each(cut, of[x], of[y], counts, r) for cut in cuts)
        known = np.isfinite(z[:, 0]) & np.isfinite(other[:, 0])  # over all networks, the first of each row
        over = margin_by_size if size else margin
        return over(z[known], other[known]) if known.any() else np.full(z.shape[1], np.nan)

    return _of(kept, difference, f"{name}, of Fisher's z")


def _members(kept: Retained) -> list[Array]:
    cases = kept.table[CASE].to_numpy()
    return [cases == case for case in np.unique(cases)]


def _in_each(members: Sequence[Array], x: Array, y: Array, counts: Array, r: OfCounts) -> Array:
    """Return Fisher's z over each set of networks, shape (sets, B); NaN of fewer than three networks."""
    few = np.array([mine.sum() < 3 for mine in members])
    z = np.stack([fishers_z(r(x[mine], y[mine], counts[:, mine])) for mine in members])
    return np.where(few[:, None], np.nan, z)


@deferred
def ranked(results: Results, table: Table, columns: Sequence[str]) -> pd.DataFrame:
    """Return the ranks of the columns within each case: Pearson's r of the ranks is Spearman's coefficient."""
    return ranks_within(table(results), columns, CASE)


def ranks_within(networks: pd.DataFrame, columns: Sequence[str], by: str | None = None) -> pd.DataFrame:
    """Return the networks with the ranks of the columns, among those with the same value of `by`, or among all."""
    trained = trained_ones(networks)[0]
    numbers = numbers_of(trained, columns)
    ranks = numbers.rank() if by is None else numbers.groupby(trained[by]).rank()
    return networks.assign(**{column: ranks[column] for column in columns})


@deferred
def within(results: Results, table: Table, group: str, columns: Sequence[str]) -> pd.DataFrame:
    """Return the table with each of the columns standardised over the networks of equal `group`.

    Means alone would leave the group with the largest spread to decide: one of X14's four has 99% of the squares.
    """
    networks = table(results)
    trained, _ = trained_ones(networks)
    numbers = numbers_of(trained, columns)
    groups = numbers.groupby(trained[group])
    spread = groups.transform("std", ddof=0).replace(0.0, np.nan)
    return networks.assign(**((numbers - groups.transform("mean")) / spread)).copy()  # columns of one block


def margin(z: Array, other: Array) -> Array:
    """Return the mean over cases of the first pair's z minus the second's, shape (B,)."""
    return np.asarray((z - other).mean(0))


def margin_by_size(z: Array, other: Array) -> Array:
    """Return the mean over cases of the first pair's |z| minus the second's, shape (B,)."""
    return margin(np.abs(z), np.abs(other))


def mean_correlation(z: Array) -> Array:
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
