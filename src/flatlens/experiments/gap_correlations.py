"""Correlations of each measure with the generalisation gap, by every coefficient that the field uses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.vary import last_field
from flatlens.statistics import Statistic, correlate, granulated_kendall, partial_correlation

COLUMNS = ("quantity", "coefficient", "value", "low", "high", "p", "n", "given", "why", "note")
OVERALL = {"pearson": "Pearson r", "spearman": "Spearman rho", "kendall": "Kendall tau-b"}
GRANULATED = "granulated Kendall"
_PARTIAL = {"pearson": "partial Pearson", "spearman": "partial Spearman"}


def gap_correlations(values: pd.DataFrame, settings: pd.DataFrame, quantities: Sequence[Quantity]) -> pd.DataFrame:
    """Return one row per measure and coefficient: quantity, coefficient, value, low, high, p, n, given, why, note.

    The coefficients are Pearson, Spearman and Kendall over all networks; the granulated Kendall over groups that differ
    in one setting alone, and its part along each setting ("granulated Kendall along lr"), if anything but the seed was
    varied; and partial correlations given the numerical settings (`given` names the settings held fixed). `low` and
    `high` bound the BCa bootstrap's 95% interval over networks. `p` is two-sided, from permutations of the pair. `why`
    says which networks were left out, `note` why a value is NaN.

    Args:
        values: the included networks, one column per quantity, transformed.
        settings: the same networks, one column per varied setting, as it was set.
        quantities: those with role "measure" are correlated with the gap.
    """
    if GAP.name not in values:
        return pd.DataFrame(columns=list(COLUMNS))
    gap = values[GAP.name]
    seeds = [name for name in settings if last_field(str(name)) == "seed"]
    varied = settings.drop(columns=seeds).map(str)  # None is a setting, too
    controls = values[[q.name for q in quantities if q.role == "setting" and values[q.name].nunique() > 1]]
    rows: list[tuple[object, ...]] = []
    for name in (q.name for q in quantities if q.role == "measure"):
        add = partial(_row, name)
        names = (name, GAP.name)
        rows += [add(title, correlate(values[name], gap, key, names=names)) for key, title in OVERALL.items()]  # type: ignore[arg-type]
        if len(varied.columns):
            psi = granulated_kendall(values[name], gap, varied, names=names)
            rows.append(add(GRANULATED, psi, "all settings but one"))
            rows += [add(f"{GRANULATED} along {axis}", part, f"all but {axis}") for axis, part in psi.parts.items()]
        if len(controls.columns):
            for key, title in _PARTIAL.items():
                found = partial_correlation(values[name], gap, controls, key, names=names)  # type: ignore[arg-type]
                rows.append(add(title, found, ", ".join(controls.columns)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(quantity: str, coefficient: str, s: Statistic, given: str = "") -> tuple[object, ...]:
    return quantity, coefficient, s.value, s.low, s.high, s.p, s.n, given, s.why, s.note
