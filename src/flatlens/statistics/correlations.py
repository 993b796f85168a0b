"""Correlations of two quantities over networks, partial ones too, and the concordance of several rankings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import chdtrc
from scipy.stats import rankdata

from flatlens.errors import BadInput, UnknownName
from flatlens.progress import count_of
from flatlens.statistics.inference import clustered
from flatlens.statistics.resampling import (
    CONSTANT,
    FEWEST_POINTS,
    Coefficient,
    GroupNumbers,
    Seed,
    centred_ranks,
    draws,
    from_median,
    generator,
    has_interval,
    is_every,
    kendall,
    no_interval,
    pearson,
    ratio,
    signs,
    spearman,
    standardised,
    with_interval,
)
from flatlens.statistics.statistic import NAN, Array, Retained, Statistic, as_columns, keep

CoefficientName: TypeAlias = Literal["pearson", "spearman", "kendall"]
_NAMES: tuple[CoefficientName, ...] = get_args(CoefficientName)
TITLES = {"pearson": "Pearson r", "spearman": "Spearman rho", "kendall": "Kendall tau-b"}
COEFFICIENTS = {"pearson": pearson, "spearman": spearman, "kendall": kendall}
UNIT_LABELS = "independent unit"  #: name of the column with the labels of independent units
EQUAL_WITHIN = 1e-12  #: two statistics closer than this are equal up to rounding
_ROUNDING = 1e-26  #: share of a resample's mean square below which its variance is rounding
_EXPLAINED = "the controls explain one of the two completely"


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
    such as its seed, and `unit` says what a unit is: the interval is then that of `clustered`, and so is p, unless each
    network is a unit of its own.

    >>> correlate([1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5], resampled=0, permuted=0)
    Kendall tau-b of x and y = 0.6 (n = 6)
    """
    if statistic not in _NAMES:
        raise UnknownName.among("correlation", statistic, _NAMES)
    require_counts(resampled=resampled, permuted=permuted)
    if names[0] == names[1]:
        raise BadInput("expected two names", argument="names", value=names, call="correlate")
    labels = of_units(x, units)
    kept = keep(as_columns(**{names[0]: x, names[1]: y}, **labels), names, log, present=list(labels))
    if labels:
        pair = kept.table[list(names)]
        columns = tuple(pair.to_numpy().T)
        coefficient = partial(COEFFICIENTS[statistic], *columns)
        ordered = () if statistic == "pearson" else columns
        over = over_units(_title(statistic, names), coefficient, kept, unit, undefined_because(pair), ordered=ordered)
        if not _each_alone(over):
            return over
        alone = _related(kept.table, statistic, names, kept.excluded, *draws(over.n, seed, 0, permuted))
        return _with_p_of(alone, over)
    return _related(kept.table, statistic, names, kept.excluded, *draws(len(kept.table), seed, resampled, permuted))


def _each_alone(over: Statistic) -> bool:
    # Each network is a unit of its own, and they are enough for an interval
    return over.units == over.n and over.low == over.low


def _with_p_of(alone: Statistic, over: Statistic) -> Statistic:
    # By order of the networks p is exact; by the jackknife of a dozen it is below 5% too often, or far too large
    return replace(over, p=alone.p, method="; ".join(filter(None, (over.method, alone.method))))


def of_units(x: Any, units: Any) -> dict[str, Any]:
    """Return a column with the labels of the networks' independent units; none without labels."""
    if units is None:
        return {}
    labels = np.asarray(units, dtype=object)
    if labels.shape != np.shape(x):
        raise BadInput(f"units: expected one label for each network, {np.size(x)} of them; got {labels.size}")
    return {UNIT_LABELS: labels}


def over_units(
    title: str, coefficient: Coefficient, kept: Retained, unit: str, undefined: str = "", note: str = "",
    ordered: Sequence[Array] = (),
) -> Statistic:  # fmt: skip
    """Return a correlation with its interval over the units of the networks kept; `undefined` says why it has none."""
    units = kept.table[UNIT_LABELS]
    if undefined:
        n, known = len(units), units.nunique()
        return Statistic(title, NAN, n, excluded=kept.excluded, note=undefined, units=known, unit=unit)
    return clustered(title, coefficient, units, unit=unit, fisher=True, excluded=kept.excluded, note=note,
                     ordered=ordered)  # fmt: skip


def bootstrapped(
    title: str, coefficient: Coefficient, counts: Array, under_null: Array, excluded: tuple[tuple[str, int], ...],
    note: str = "", *, of: str = "permutations", groups: GroupNumbers | None = None, fewest: int = FEWEST_POINTS,
) -> Statistic:  # fmt: skip
    """Return a correlation with its BCa interval from resample counts (B, n), and its p from values `under_null`.

    `of` says what the values under the null hypothesis are of: orders of all points, or within `groups`.
    """
    found, drawn = with_interval(coefficient, counts, fewest), len(under_null)
    method = []
    if len(counts) and has_interval(found.n, fewest):
        method.append(f"95% interval: BCa bootstrap over networks, {len(counts)} resamples")
    if drawn:
        method.append(f"p: two-sided, {f'all {drawn + 1}' if is_every(found.n, groups) else drawn} {of}")
    p = p_value(found.value, under_null)
    return Statistic(title, found.value, found.n, found.low, found.high, p, excluded, "; ".join(method), note)


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
            raise UnknownName.among("column", name, map(str, table.columns), where="in log=")
    if not table.columns.is_unique:
        twice = ", ".join(table.columns[table.columns.duplicated()])
        raise BadInput(f"these column names occur twice: {twice}", call="all_pairs")
    require_counts(resampled=resampled, permuted=permuted)
    drawn: dict[int, tuple[Array, NDArray[np.int64]]] = {}
    rows = []
    for pair in combinations(table.columns, 2):
        kept = keep(table, pair, [name for name in log if name in pair])
        n = len(kept.table)
        if n not in drawn:  # the same draws for all pairs with n networks
            drawn[n] = draws(n, seed, resampled, permuted)
        for statistic in statistics:
            found = _related(kept.table, statistic, pair, kept.excluded, *drawn[n])
            rows.append((*pair, statistic, found.value, found.low, found.high, found.p, found.n, found.left_out,
                         found.why, found.note))  # fmt: skip
    columns = ["x", "y", "statistic", "value", "low", "high", "p", "n", "left_out", "why", "note"]
    return pd.DataFrame(rows, columns=columns)


def _title(statistic: CoefficientName, names: Sequence[str]) -> str:
    return f"{TITLES[statistic]} of {names[0]} and {names[1]}"


def _related(
    table: pd.DataFrame, statistic: CoefficientName, names: Sequence[str], excluded: tuple[tuple[str, int], ...],
    counts: Array, orders: NDArray[np.int64],
) -> Statistic:  # fmt: skip
    x, y = (table[name].to_numpy() for name in names)
    title = _title(statistic, names)
    if why := undefined_because(table[list(names)]):
        return Statistic(title, NAN, len(x), excluded=excluded, note=why)
    coefficient, under_null = partial(COEFFICIENTS[statistic], x, y), permuted_values(statistic, x, y, orders)
    note = no_interval(len(counts), len(x))
    return bootstrapped(title, coefficient, counts, under_null, excluded, note)


def undefined_because(table: pd.DataFrame, fewest: int = FEWEST_POINTS) -> str:
    """Return why the columns have no correlation; an empty string if they have one."""
    if len(table) < fewest:
        return f"{len(table)} networks are left, at least {fewest} are needed"
    constant = [str(name) for name in table if not from_median(table[name].to_numpy()).any()]
    return f"{' and '.join(constant)} {'are' if constant[1:] else 'is'} constant" if constant else ""


def permuted_values(statistic: CoefficientName, x: Array, y: Array, orders: NDArray[np.int64]) -> Array:
    """Return the coefficient of x with y in each of the orders, (B,)."""
    if statistic == "kendall":  # one point against all after it at a time, to save memory
        sign_x = signs(x).astype(np.float32)
        drawn = rankdata(y).astype(np.float32)[orders].T.copy()  # (n, B); halves are exact
        both = np.zeros(len(orders))
        for i in range(len(x) - 1):
            both += sign_x[i, i + 1 :] @ np.sign(drawn[i] - drawn[i + 1 :])
        return np.asarray(both / (np.sqrt(np.abs(signs(x)).sum() * np.abs(signs(y)).sum()) / 2))
    if statistic == "spearman":
        x, y = rankdata(x), rankdata(y)
    x, y = standardised(x), standardised(y)
    return np.asarray(np.einsum("bn,n->b", y[orders], x) / len(x))


def p_value(value: float, under_null: Array) -> float:
    """Return the two-sided p-value, (1 + number of `under_null` as far from 0) / (1 + number); NaN if there are none.

    >>> p_value(0.5, np.array([0.1, -0.6, 0.2]))
    0.5
    """
    if len(under_null) == 0 or not np.isfinite(value):
        return NAN
    return float((1 + (np.abs(under_null) >= abs(value) - EQUAL_WITHIN).sum()) / (1 + len(under_null)))


def require_counts(**counts: int) -> None:
    """Refuse a value that is not a number of random draws."""
    for name, number in counts.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise BadInput(f"{name}={number!r}: expected a whole number of random draws, 0 for none")


def partial_correlation(
    x: Any,
    y: Any,
    controls: pd.DataFrame | pd.Series,
    statistic: Literal["pearson", "spearman"] = "pearson",
    *,
    names: tuple[str, str] = ("x", "y"),
    resampled: int = 2000,
    permuted: int = 999,
    seed: Seed = 0,
    units: Any = None,
    unit: str = "unit",
) -> Statistic:
    r"""Return the correlation of the residuals of x and y after linear regression on the controls.

    For "spearman", ranks replace all values. With one control z it is
    (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2)(1 - r_yz^2)). It removes only linear dependence. p permutes the residuals of
    y and regresses each order on the controls again (Freedman and Lane 1983). With `units`, interval and p are those
    of `clustered`, as in `correlate`.

    >>> z = np.arange(8.0)
    >>> wave = np.array([1, -1, -1, 1, 1, -1, -1, 1.0])
    >>> round(partial_correlation(z + wave, z - wave, pd.DataFrame({"z": z}), resampled=0, permuted=0).value, 9)
    -1.0
    """
    if statistic not in ("pearson", "spearman"):
        raise UnknownName.among("partial correlation", statistic, ("pearson", "spearman"))
    require_counts(resampled=resampled, permuted=permuted)
    controls = pd.DataFrame(controls)
    held = {f"control {name}": controls[name].to_numpy() for name in controls}
    if not held or set(names) & set(held) or names[0] == names[1]:
        needed = "give two different names, and at least one other column to control for"
        raise BadInput(needed, call="partial_correlation")
    # The networks with all values: enough for the regression, or no correlation
    labels = of_units(x, units)
    kept = keep(as_columns(**{names[0]: x, names[1]: y}, **held, **labels), [*names, *held], present=list(labels))
    n, fewest = len(kept.table), FEWEST_POINTS + len(held)
    given = ", ".join(map(str, controls))
    title = f"Partial {statistic.capitalize()} correlation of {names[0]} and {names[1]} given {given}"
    why = undefined_because(kept.table[list(names)], fewest)
    if why and not labels:
        return Statistic(title, NAN, n, excluded=kept.excluded, note=why)
    ranked, values = statistic == "spearman", kept.table[[*names, *held]].to_numpy().T
    of_counts = partial(_partial, values, ranked)
    if labels:
        over = over_units(title, of_counts, kept, unit, why)
        if not _each_alone(over):
            return over if why or over.value == over.value else replace(over, note=_EXPLAINED)
        resampled = 0
    elif np.isnan(of_counts(np.ones((1, n)))[0]):
        return Statistic(title, NAN, n, excluded=kept.excluded, note=_EXPLAINED)
    # Interval and p from resamples and from permutations of the residuals
    counts, orders = draws(n, seed, resampled, permuted)
    alone = bootstrapped(
        title, of_counts, counts, _under_null(values, orders, ranked), kept.excluded, no_interval(resampled, n, fewest),
        of="permutations of residuals (Freedman-Lane)", fewest=fewest,
    )  # fmt: skip
    return _with_p_of(alone, over) if labels else alone


def _partial(values: Array, ranked: bool, counts: Array) -> Array:
    """The partial correlation in each resample, (B,), from the rows x, y and controls of `values` (2 + k, n)."""
    columns = [centred_ranks(v, counts) if ranked else np.broadcast_to(from_median(v), counts.shape) for v in values]
    stacked = np.stack(columns, axis=1)  # (B, 2 + k, n)
    weights = counts / counts.sum(1, keepdims=True)
    centred = stacked - np.einsum("bpn,bn->bp", stacked, weights)[:, :, None]
    own, raw = (np.einsum("bpn,bpn,bn->bp", each, each, weights) for each in (centred, stacked))
    length = np.sqrt(np.where(own > _ROUNDING * raw, own, np.inf))[:, :, None]  # a constant becomes 0
    scaled = centred * np.sqrt(weights)[:, None, :] / length
    pair, basis = scaled[:, :2], _basis(scaled[:, 2:].swapaxes(1, 2))
    left = pair - np.einsum("bnk,bpk->bpn", basis, np.einsum("bnk,bpn->bpk", basis, pair))
    S = np.einsum("bpn,bqn->bpq", left, left)
    return ratio(S[:, 0, 1], S[:, 0, 0], S[:, 1, 1], CONSTANT)


def _under_null(values: Array, orders: NDArray[np.int64], ranked: bool) -> Array:
    """The partial correlation of x with each reordering of the residuals of y, (B,)."""
    x, y, *z = (standardised(rankdata(v) if ranked else v) for v in values)
    basis = _basis(np.stack([np.ones_like(x), *z], axis=1))
    e_x, e_y = (v - basis @ (basis.T @ v) for v in (x, y))
    drawn = e_y[orders]
    drawn = drawn - (drawn @ basis) @ basis.T
    return ratio(drawn @ e_x, np.full(len(drawn), e_x @ e_x), (drawn**2).sum(1), CONSTANT)


def _basis(columns: Array) -> Array:
    """An orthonormal basis of the span of columns (..., n, k), with columns of zeros where they span less."""
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(u * (s > 1e-8 * s[..., :1])[..., None, :])


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
    # The ranks of the whole rankings that do not tie all networks
    table = pd.DataFrame(scores).astype(np.float64)
    if table.shape[1] < 2:
        raise BadInput(f"expected rankings of at least 2 networks, got {table.shape[1]} networks", call="kendall_w")
    values = table.to_numpy()
    whole = ~np.isnan(values).any(1)
    ranks = values[whole] if ranked else rankdata(values[whole], axis=1)
    distinct = np.ptp(ranks, axis=1) > 0 if len(ranks) else np.zeros(0, dtype=bool)
    ranks, n = ranks[distinct], table.shape[1]
    note = count_of(len(ranks), "ranking")
    for kept, why in ((whole, "a value is missing"), (distinct, "all networks tie")):
        note += "" if kept.all() else f"; {(~kept).sum()} left out: {why}"
    if len(ranks) < 2:
        return Statistic(name, NAN, n, note=f"{note}; at least 2 are needed")
    # W, and how often independent orders of each ranking have as large a W
    value = float(concordance(ranks))
    if not permuted:
        p = float(chdtrc(n - 1, len(ranks) * (n - 1) * value))
        return Statistic(name, value, n, p=p, method=f"p: chi-square, {n - 1} degrees of freedom", note=note)
    orders = np.argsort(generator(seed).random((permuted, *ranks.shape)), axis=-1)
    drawn = concordance(np.take_along_axis(np.broadcast_to(ranks, orders.shape), orders, axis=-1))
    p = float((1 + (drawn >= value - EQUAL_WITHIN).sum()) / (1 + permuted))
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
