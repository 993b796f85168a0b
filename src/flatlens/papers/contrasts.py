"""Statistics for predictions that compare correlations or columns, over any table of networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from flatlens.papers.evidence import Evidence, Table, numbers_of
from flatlens.papers.predictions import Results
from flatlens.statistics import Statistic, average, pearson, resamples, with_interval
from flatlens.statistics.bootstrap import Coefficient
from flatlens.statistics.coefficients import Array
from flatlens.statistics.correlations import methods
from flatlens.statistics.draws import generator

RESAMPLED = 2000


def stronger(table: Table, these: Sequence[str], others: Sequence[str], y: str) -> Evidence:
    """Return the smallest Pearson's r of these columns with y minus the largest of the others."""
    name = f"Pearson r with {y}: {_one_of(these, 'the least of')} less {_one_of(others, 'the largest of')}"
    return _against(table, these, others, y, lambda mine, rival: mine.min(0) - rival.max(0), name)


def stronger_in_size(table: Table, these: Sequence[str], others: Sequence[str], y: str) -> Evidence:
    """Return the smallest |r| of these columns with y minus the largest of the others."""
    name = f"|Pearson r| with {y}: {_one_of(these, 'the least of')} less {_one_of(others, 'the largest of')}"
    return _against(table, these, others, y, lambda mine, rival: np.abs(mine).min(0) - np.abs(rival).max(0), name)


def steadier(table: Table, these: Sequence[str], others: Sequence[str], y: str) -> Evidence:
    """Return the range (largest minus smallest) of Pearson's r with y over the others minus that over these."""
    name = f"range of Pearson r with {y}: of {', '.join(others)} less of {', '.join(these)}"
    return _against(table, these, others, y, lambda mine, rival: np.ptp(rival, axis=0) - np.ptp(mine, axis=0), name)


def _against(
    table: Table, these: Sequence[str], others: Sequence[str], y: str, over: Callable[[Array, Array], Array], name: str
) -> Evidence:
    """Return `over` of Pearson's r with y of these columns and of the others: (columns, B) each -> (B,)."""

    def found(results: Results) -> Statistic:
        kept, lost = complete(table(results), [*these, *others, y])
        of = {name: kept[name].to_numpy() for name in kept}

        def coefficient(counts: Array) -> Array:
            mine, rival = (np.stack([pearson(of[x], of[y], counts) for x in xs]) for xs in (these, others))
            return np.asarray(over(mine, rival))

        return bootstrapped(name, coefficient, len(kept), lost)

    return found


def weakest(table: Table, xs: Sequence[str], y: str) -> Evidence:
    """Return the smallest Pearson's r of several columns with y."""

    def found(results: Results) -> Statistic:
        kept, lost = complete(table(results), [*xs, y])
        of = {name: kept[name].to_numpy() for name in kept}

        def coefficient(counts: Array) -> Array:
            return np.asarray(np.stack([pearson(of[x], of[y], counts) for x in xs]).min(0))

        return bootstrapped(f"least Pearson r with {y} of {', '.join(xs)}", coefficient, len(kept), lost)

    return found


def unchanged(table: Table, before: str, after: str) -> Evidence:
    """Return the mean over networks of |log(after / before)|: 0 for a number that does not change."""

    def found(results: Results) -> Statistic:
        logs = np.abs(_log_ratio(table(results), before, after))
        return average(logs, name=f"|log({after} / {before})|")

    return found


def changed(table: Table, before: str, after: str) -> Evidence:
    """Return the mean over networks of log(after / before): above 0 if the number mostly grows."""

    def found(results: Results) -> Statistic:
        return average(_log_ratio(table(results), before, after), name=f"log({after} / {before})")

    return found


def side_by_side(table: Table, setting: str) -> Table:
    """Return one row per seed, with the columns of each value of a setting side by side: "mls, high", "mls, low"."""

    def found(results: Results) -> pd.DataFrame:
        wide = table(results).pivot(index="seed", columns=setting)
        wide.columns = pd.Index([", ".join(map(str, pair)) for pair in wide.columns])
        return wide.reset_index()

    return found


def off(table: Table, column: str, published: float, spread: float) -> Evidence:
    """Return the distance of a column's mean from a published mean, in published standard deviations over networks."""

    def found(results: Results) -> Statistic:
        kept, lost = complete(table(results), [column])
        values = kept[column].to_numpy()

        def distance(counts: Array) -> Array:
            return np.asarray(np.abs(counts @ values / counts.sum(1) - published) / spread)

        return bootstrapped(f"|mean of {column} - {published:g}| / {spread:g}", distance, len(kept), lost)

    return found


def mean_of(table: Table, column: str) -> Evidence:
    """Return the mean of a column."""

    def found(results: Results) -> Statistic:
        return average(numbers_of(table(results), [column])[column], name=column)

    return found


def rising(table: Table, group: str, x: str, y: str) -> Evidence:
    """Return Kendall's tau between a setting and Pearson's r of x and y at each of its values: 1 if r always rises."""

    def found(results: Results) -> Statistic:
        kept, lost = complete(table(results), [group, x, y])
        members = [(kept[group] == value).to_numpy() for value in sorted(kept[group].unique())]
        a, b = kept[x].to_numpy(), kept[y].to_numpy()

        def coefficient(counts: Array) -> Array:
            found = [pearson(a[mine], b[mine], counts[:, mine]) for mine in members]
            signs = [np.sign(later - earlier) for earlier, later in combinations(found, 2)]
            return np.asarray(np.mean(signs, 0)) if signs else np.full(len(counts), np.nan)

        return bootstrapped(f"Kendall tau of {group} and Pearson r of {x} and {y}", coefficient, len(kept), lost)

    return found


def _log_ratio(table: pd.DataFrame, before: str, after: str) -> Array:
    networks = numbers_of(table, [before, after])
    ratios = (networks[after] / networks[before]).to_numpy()
    return np.asarray(np.log(np.where(ratios > 0, ratios, np.nan)))


def complete(table: pd.DataFrame, columns: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """Return the rows in which all columns are finite numbers, and the number of other rows."""
    numbers = numbers_of(table, columns)
    kept = numbers.loc[np.isfinite(numbers.to_numpy()).all(1)].reset_index(drop=True)
    return kept, len(numbers) - len(kept)


def _one_of(columns: Sequence[str], which: str) -> str:
    return columns[0] if len(columns) == 1 else f"{which} {', '.join(columns)}"


def bootstrapped(name: str, coefficient: Coefficient, n: int, lost: int) -> Statistic:
    """Return a coefficient of n networks with its bootstrap interval; `lost` networks were left out."""
    if n == 0:
        return Statistic(name, float("nan"), 0, note="no network is left")
    found = with_interval(coefficient, resamples(n, generator(0), RESAMPLED))
    excluded = (("a value is missing", lost),) if lost else ()
    return Statistic(name, found.value, n, found.low, found.high, excluded=excluded, method=methods(RESAMPLED, 0))


def strength(table: Table, x: str, y: str) -> Evidence:
    """Return |Pearson's r| of two columns."""

    def found(results: Results) -> Statistic:
        kept, lost = complete(table(results), [x, y])
        a, b = kept[x].to_numpy(), kept[y].to_numpy()
        return bootstrapped(f"|Pearson r| of {x} and {y}", lambda n: np.abs(pearson(a, b, n)), len(kept), lost)

    return found
