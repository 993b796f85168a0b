"""Correlations of two quantities over networks, and of all pairs of a table's columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from flatlens.errors import BadInput, UnknownName
from flatlens.statistics.bootstrap import FEWEST_POINTS, Coefficient, has_interval, no_interval, with_interval
from flatlens.statistics.clustered import clustered
from flatlens.statistics.coefficients import Array, from_median, kendall, pearson, signs, spearman, standardised
from flatlens.statistics.draws import Seed, generator, is_every, permutations, resamples
from flatlens.statistics.exclusions import Retained, as_columns, keep
from flatlens.statistics.statistic import NAN, Statistic

CoefficientName: TypeAlias = Literal["pearson", "spearman", "kendall"]
_NAMES: tuple[CoefficientName, ...] = get_args(CoefficientName)
TITLES = {"pearson": "Pearson r", "spearman": "Spearman rho", "kendall": "Kendall tau-b"}
COEFFICIENTS = {"pearson": pearson, "spearman": spearman, "kendall": kendall}
UNIT_LABELS = "independent unit"
"""Name of the column with the labels of independent units."""
ALIKE = 1e-12  #: two statistics closer than this are equal up to rounding


def correlate(
    x: Any,
    y: Any,
    statistic: CoefficientName = "kendall",
    *,
    names: tuple[str, str] = ("x", "y"),
    log: Collection[str] = (),
    resampled: int = 2000,
    permuted: int = 999,
    seed: Seed = 0,
    units: Any = None,
    unit: str = "unit",
) -> Statistic:
    """Return the correlation of two quantities over networks, with one number per network in each of `x` and `y`.

    The interval is a bias-corrected and accelerated bootstrap of networks, from `resampled` resamples; fewer than 6
    networks have none, as it would miss too often (docs/sizes.md). p is two-sided, from `permuted` random orders of y:
    (1 + number as far from 0) / (1 + number); the null hypothesis is that x and y are independent. With at most 7
    networks p is exact: all orders are taken. 0 leaves out the interval or p. Quantities named in `log` are replaced by
    their logarithms.

    Both take networks for independent. Where they are not, `units` has the label of each network's independent unit,
    such as its seed, and `unit` says what a unit is: interval and p are then those of `clustered`.

    >>> correlate([1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5], resampled=0, permuted=0)
    Kendall tau-b of x and y = 0.6 (n = 6)
    """
    if statistic not in _NAMES:
        raise UnknownName.among("correlation", statistic, _NAMES)
    require_counts(resampled=resampled, permuted=permuted)
    if names[0] == names[1]:
        raise BadInput(f"correlate(names={names!r}): two names are needed")
    labels = of_units(x, units)
    kept = keep(as_columns(**{names[0]: x, names[1]: y}, **labels), names, log, present=list(labels))
    if labels:
        pair = kept.table[list(names)]
        columns = tuple(pair.to_numpy().T)
        coefficient = partial(COEFFICIENTS[statistic], *columns)
        ordered = () if statistic == "pearson" else columns
        return over_units(_title(statistic, names), coefficient, kept, unit, undefined_because(pair), ordered=ordered)
    rng = generator(seed)
    counts = resamples(len(kept.table), rng, resampled)
    orders = permutations(len(kept.table), rng, permuted)
    return _related(kept.table, statistic, names, kept.excluded, counts, orders)


def of_units(x: Any, units: Any) -> dict[str, Any]:
    """Return a column with the labels of the networks' independent units; none without labels.

    Raises:
        BadInput: there is not one label for each network.
    """
    if units is None:
        return {}
    labels = np.asarray(units, dtype=object)
    if labels.shape != np.shape(x):
        raise BadInput(f"units: one label for each network is needed, {np.size(x)} of them; got {labels.size}")
    return {UNIT_LABELS: labels}


def over_units(
    title: str,
    coefficient: Coefficient,
    kept: Retained,
    unit: str,
    undefined: str = "",
    note: str = "",
    ordered: Sequence[Array] = (),
) -> Statistic:
    """Return a correlation with its interval over the units of the networks kept; `undefined` says why it has none.

    `ordered`: the columns whose ranks it correlates, as in `clustered`.
    """
    units = kept.table[UNIT_LABELS]
    if undefined:
        return Statistic(
            title, NAN, len(units), excluded=kept.excluded, note=undefined, units=units.nunique(), unit=unit
        )
    return clustered(
        title, coefficient, units, unit=unit, fisher=True, excluded=kept.excluded, note=note, ordered=ordered
    )


def all_pairs(
    table: pd.DataFrame,
    statistics: Sequence[CoefficientName] = _NAMES,
    *,
    log: Collection[str] = (),
    resampled: int = 1000,
    permuted: int = 0,
    seed: int = 0,
) -> pd.DataFrame:
    """Return `correlate` of all pairs of columns, one row per pair and statistic.

    The columns: x, y, statistic, value, low, high, p, n, left_out, why, note. A network is left out of a pair if one of
    its two values is missing. The p-values are not corrected for the number of pairs: of 190, about ten are below 0.05
    by chance alone.
    """
    for statistic in statistics:
        if statistic not in _NAMES:
            raise UnknownName.among("correlation", statistic, _NAMES)
    for name in log:
        if name not in table.columns:
            raise UnknownName.among("column to take the logarithm of", name, map(str, table.columns))
    if not table.columns.is_unique:
        twice = ", ".join(table.columns[table.columns.duplicated()])
        raise BadInput(f"all_pairs(...): these column names occur twice: {twice}")
    require_counts(resampled=resampled, permuted=permuted)
    drawn: dict[int, tuple[Array, NDArray[np.int64]]] = {}
    rows = []
    for pair in combinations(table.columns, 2):
        kept = keep(table, pair, [name for name in log if name in pair])
        n = len(kept.table)
        if n not in drawn:  # the same draws for all pairs with n networks
            rng = generator(seed)
            drawn[n] = resamples(n, rng, resampled), permutations(n, rng, permuted)
        for statistic in statistics:
            found = _related(kept.table, statistic, pair, kept.excluded, *drawn[n])
            rows.append((*pair, statistic, found.value, found.low, found.high, found.p, found.n, found.left_out,
                         found.why, found.note))  # fmt: skip
    columns = ["x", "y", "statistic", "value", "low", "high", "p", "n", "left_out", "why", "note"]
    return pd.DataFrame(rows, columns=columns)


def _title(statistic: CoefficientName, names: Sequence[str]) -> str:
    return f"{TITLES[statistic]} of {names[0]} and {names[1]}"


def _related(
    table: pd.DataFrame,
    statistic: CoefficientName,
    names: Sequence[str],
    excluded: tuple[tuple[str, int], ...],
    counts: Array,
    orders: NDArray[np.int64],
) -> Statistic:
    x, y = (table[name].to_numpy() for name in names)
    title = _title(statistic, names)
    if why := undefined_because(table[list(names)]):
        return Statistic(title, NAN, len(x), excluded=excluded, note=why)
    found = with_interval(partial(COEFFICIENTS[statistic], x, y), counts)
    p = p_value(found.value, permuted_values(statistic, x, y, orders))
    method = methods(len(counts) * has_interval(len(x)), len(orders), every=is_every(len(x)))
    note = no_interval(len(counts), len(x))
    return Statistic(title, found.value, found.n, found.low, found.high, p, excluded, method, note)


def undefined_because(table: pd.DataFrame, fewest: int = FEWEST_POINTS) -> str:
    """Return why the columns have no correlation; an empty string if they have one."""
    if len(table) < fewest:
        return f"{len(table)} networks are left, at least {fewest} are needed"
    constant = [str(name) for name in table if not from_median(table[name].to_numpy()).any()]
    return f"{' and '.join(constant)} {'are' if constant[1:] else 'is'} constant" if constant else ""


def permuted_values(statistic: CoefficientName, x: Array, y: Array, orders: NDArray[np.int64]) -> Array:
    """Return the coefficient of x with y in each of the orders, (B,)."""
    if statistic == "kendall":
        return _permuted_kendall(x, y, orders)
    if statistic == "spearman":
        x, y = rankdata(x), rankdata(y)
    x, y = standardised(x), standardised(y)
    return np.asarray(np.einsum("bn,n->b", y[orders], x) / len(x))


def _permuted_kendall(x: Array, y: Array, orders: NDArray[np.int64]) -> Array:
    """Return tau-b of x with y in each order, (B,): one point against all after it at a time, to save memory."""
    sign_x = signs(x).astype(np.float32)
    drawn = rankdata(y).astype(np.float32)[orders].T.copy()  # (n, B); halves are exact
    both = np.zeros(len(orders))
    for i in range(len(x) - 1):
        both += sign_x[i, i + 1 :] @ np.sign(drawn[i] - drawn[i + 1 :])
    pairs = np.sqrt(np.abs(signs(x)).sum() * np.abs(signs(y)).sum()) / 2
    return np.asarray(both / pairs)


def p_value(value: float, under_null: Array) -> float:
    """Return the two-sided p-value, (1 + number of `under_null` as far from 0) / (1 + number); NaN if there are none.

    >>> p_value(0.5, np.array([0.1, -0.6, 0.2]))
    0.5
    """
    if len(under_null) == 0 or not np.isfinite(value):
        return NAN
    return float((1 + (np.abs(under_null) >= abs(value) - ALIKE).sum()) / (1 + len(under_null)))


def methods(resampled: int, permuted: int, of: str = "permutations", *, every: bool = False) -> str:
    """Return in words how the interval and p were computed; `every` says that all permutations were taken."""
    number = f"all {permuted + 1}" if every else permuted
    parts = [f"95% interval: BCa bootstrap over networks, {resampled} resamples"] if resampled else []
    return "; ".join([*parts, *([f"p: two-sided, {number} {of}"] if permuted else [])])


def require_counts(**counts: int) -> None:
    """Refuse a value that is not a number of random draws."""
    for name, number in counts.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise BadInput(f"{name}={number!r}: a whole number of random draws is needed, 0 for none")
