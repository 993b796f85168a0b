"""Partial correlations: the correlation of two quantities after regression on others (controls)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from flatlens.errors import BadInput, UnknownName
from flatlens.statistics.bootstrap import FEWEST_POINTS, has_interval, no_interval, with_interval
from flatlens.statistics.coefficients import CONSTANT, Array, centred_ranks, from_median, ratio, standardised
from flatlens.statistics.correlations import methods, of_units, over_units, p_value, require_counts, undefined_because
from flatlens.statistics.draws import Seed, generator, is_every, permutations, resamples
from flatlens.statistics.exclusions import as_columns, keep
from flatlens.statistics.statistic import NAN, Statistic

_ROUNDING = 1e-26
"""The share of a resample's mean square below which its variance is rounding."""
_EXPLAINED = "the controls explain one of the two completely"


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
        raise BadInput(
            "partial_correlation(...): give two different names, and at least one other column to control for"
        )
    labels = of_units(x, units)
    kept = keep(as_columns(**{names[0]: x, names[1]: y}, **held, **labels), [*names, *held], present=list(labels))
    n, fewest = len(kept.table), FEWEST_POINTS + len(held)
    title = f"Partial {statistic.capitalize()} correlation of {names[0]} and {names[1]} given {_listed(controls)}"
    why = undefined_because(kept.table[list(names)], fewest)
    if why and not labels:
        return Statistic(title, NAN, n, excluded=kept.excluded, note=why)
    values = kept.table[[*names, *held]].to_numpy().T

    def of_counts(counts: Array) -> Array:
        return _partial(values, counts, statistic == "spearman")

    if labels:
        over = over_units(title, of_counts, kept, unit, why)
        return over if why or over.value == over.value else replace(over, note=_EXPLAINED)
    rng = generator(seed)
    counts = resamples(n, rng, resampled)
    found = with_interval(of_counts, counts, fewest)
    if np.isnan(found.value):
        return Statistic(title, NAN, n, excluded=kept.excluded, note=_EXPLAINED)
    orders = permutations(n, rng, permuted)
    p = p_value(found.value, _under_null(values, orders, statistic == "spearman"))
    enough = has_interval(n, fewest)
    method = methods(resampled * enough, len(orders), "permutations of residuals (Freedman-Lane)", every=is_every(n))
    note = no_interval(resampled, n, fewest)
    return Statistic(title, found.value, n, found.low, found.high, p, kept.excluded, method, note)


def _listed(controls: pd.DataFrame) -> str:
    return ", ".join(str(name) for name in controls)


def _partial(values: Array, counts: Array, ranked: bool) -> Array:
    """Return the partial correlation in each resample, (B,), from the rows x, y and controls of `values` (2 + k, n)."""
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
    """Return the partial correlation of x with each reordering of the residuals of y, (B,)."""
    x, y, *z = (standardised(rankdata(v) if ranked else v) for v in values)
    basis = _basis(np.stack([np.ones_like(x), *z], axis=1))
    e_x, e_y = (v - basis @ (basis.T @ v) for v in (x, y))
    drawn = e_y[orders]
    drawn = drawn - (drawn @ basis) @ basis.T
    return ratio(drawn @ e_x, np.full(len(drawn), e_x @ e_x), (drawn**2).sum(1), CONSTANT)


def _basis(columns: Array) -> Array:
    """Return an orthonormal basis of the span of columns (..., n, k), with columns of zeros where they span less."""
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(u * (s > 1e-8 * s[..., :1])[..., None, :])
