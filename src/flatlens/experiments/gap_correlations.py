"""Correlations of each measure with the generalisation gap, by every coefficient that the field uses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from flatlens.experiments.quantities import GAP, Quantity, measure_names
from flatlens.statistics import Statistic, correlate, granulated_kendall, partial_correlation
from flatlens.statistics.bootstrap import FEWEST_POINTS

COLUMNS = ("kind", "quantity", "coefficient", "value", "low", "high", "p", "n", "units", "given", "why", "note")
OVERALL = {"pearson": "Pearson r", "spearman": "Spearman rho", "kendall": "Kendall tau-b"}
GRANULATED = "granulated Kendall"
_PARTIAL = {"pearson": "partial Pearson", "spearman": "partial Spearman"}


def gap_correlations(
    values: pd.DataFrame,
    settings: pd.DataFrame,
    quantities: Sequence[Quantity],
    units: pd.Series,
    kinds: pd.Series | None = None,
) -> pd.DataFrame:
    """Return one row per measure and coefficient, over all networks and then over each kind; the columns are COLUMNS.

    `kind` is "" for all networks; kinds of fewer than four have no rows. The coefficients are Pearson, Spearman and
    Kendall; the granulated Kendall over groups that differ in one setting alone, and its part along each setting
    ("granulated Kendall along lr"), if anything but the seed was varied; and partial correlations given the numerical
    settings (`given` names the settings held fixed). `low` and `high` bound the 95% interval over independent units, by
    the jackknife of `clustered`, and `p` is its two-sided one; fewer than 6 units give neither. `n` is the number of
    networks, `units` that of units. `why` says which networks were left out, `note` why a value is NaN, or has no
    interval.

    Args:
        values: the included networks, one column per quantity, transformed.
        settings: the same networks, one column per varied setting as text, without seeds: `without_seeds`.
        quantities: those with role "measure" are correlated with the gap.
        units: the label of each of these networks' independent unit, such as its seed.
        kinds: the kind of each of these networks: `kinds_of`. Over several kinds a measure may go with the gap only
            because both differ between kinds.
    """
    if GAP.name not in values:
        return pd.DataFrame(columns=list(COLUMNS))
    rows = _rows("", values, settings, quantities, units)
    if kinds is not None and kinds.nunique() > 1:
        for kind in kinds.unique():
            mine = kinds == kind
            if mine.sum() >= FEWEST_POINTS:
                rows += _rows(str(kind), values[mine], settings[mine], quantities, units[mine])
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(
    kind: str, values: pd.DataFrame, settings: pd.DataFrame, quantities: Sequence[Quantity], units: pd.Series
) -> list[tuple[object, ...]]:
    """Return the rows of these networks."""
    gap = values[GAP.name]
    varied = settings.loc[:, settings.nunique() > 1]  # all networks of a kind have one model
    controls = values[[q.name for q in quantities if q.role == "setting" and values[q.name].nunique() > 1]]
    rows: list[tuple[object, ...]] = []
    for name in measure_names(quantities):
        add = partial(_row, kind, name)
        same: dict[str, Any] = {"names": (name, GAP.name), "units": units}
        rows += [add(title, correlate(values[name], gap, key, **same)) for key, title in OVERALL.items()]  # type: ignore[arg-type]
        if len(varied.columns):
            psi = granulated_kendall(values[name], gap, varied, **same)
            rows.append(add(GRANULATED, psi, "all settings but one"))
            rows += [add(f"{GRANULATED} along {axis}", part, f"all but {axis}") for axis, part in psi.parts.items()]
        if len(controls.columns):
            for key, title in _PARTIAL.items():
                found = partial_correlation(values[name], gap, controls, key, **same)  # type: ignore[arg-type]
                rows.append(add(title, found, ", ".join(controls.columns)))
    return rows


def _row(kind: str, quantity: str, coefficient: str, s: Statistic, given: str = "") -> tuple[object, ...]:
    return kind, quantity, coefficient, s.value, s.low, s.high, s.p, s.n, s.units, given, s.why, s.note
