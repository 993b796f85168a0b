"""Differences between the levels of each axis of words, such as SAM and none: over pairs of networks, or groups.

Networks of a pair have the same seed and the same other settings. Where no level shares a seed with another, the levels
are groups of independent networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from flatlens.column import Column, split_at_commas
from flatlens.comparing.comparison import BESIDE, direction
from flatlens.comparing.rankings import proportional
from flatlens.experiments.overrides import is_seed
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.tables import unit_column, without_seeds
from flatlens.measures import MEASURES, named
from flatlens.measures.definition import RESCALINGS
from flatlens.statistics import GroupDifference, group_differences
from flatlens.statistics.group_differences import as_frame

_ROUNDING = 1e-9
"""Largest difference of two columns that are multiples of each other, relative to their values."""
_HELD_OUT = "test_loss"
"""It is tested together with the measures that decide."""
_SHARES = ("accuracy", "test_accuracy", "generalisation_gap")
"""Numbers near 0 or 1, of which a ratio says nothing."""


@dataclass(frozen=True)
class Levels:
    """The differences between the levels of one axis of words: of each column, between each level and the first."""

    setting: str
    differences: list[GroupDifference]  #: those of `meanings` first
    meanings: dict[str, tuple[str, str]]
    """By column that decides: the meaning of a small value, "flat" or "compressed", and the measure's family. Such a
    measure is invariant under rescaling of the weights."""
    paired: bool


def level_differences(networks: pd.DataFrame, quantities: Sequence[Quantity], varied: Sequence[str]) -> list[Levels]:
    """Return the differences between the levels of each setting whose values are not numbers.

    Args:
        networks: the included networks, a study's table.
        quantities: those with role "measure" are compared, and losses, accuracies and the gap, as far as they are
            columns of the table.
        varied: the study's axes.
    """
    settings = without_seeds(networks, varied)
    columns = {name: networks[name].to_numpy(float) for name in _columns(networks, quantities)}
    # the columns that decide, each one once: a column that is a multiple of another says the same
    meanings: dict[str, tuple[str, str]] = {}
    for name, values in columns.items():
        if (meaning := _meaning(name)) and not any(proportional(values, columns[one], _ROUNDING) for one in meanings):
            meanings[name] = meaning
    found = []
    for setting, levels in settings.items():
        known = (levels != "nan").to_numpy()  # of trainings elsewhere, some may be without it
        parts = pd.Series([part for level in levels[known].unique() for part in split_at_commas(level)])  # set together
        if levels[known].nunique() < 2 or pd.to_numeric(parts, errors="coerce").notna().all():
            continue
        rows, others = networks[known], settings[known].drop(columns=setting)
        pairs, units = _pairs(rows, others, levels[known], varied)
        differences = group_differences(
            {name: values[known] for name, values in columns.items()},
            levels[known],
            pairs,
            units,
            first=[*meanings, _HELD_OUT],
            untested=[name for name in BESIDE if name in columns and name != _HELD_OUT],
            linear=[name for name in columns if name in _SHARES or _is_logarithm(name)],
        )
        found.append(Levels(str(setting), differences, meanings, pairs is not None))
    return found


def table_of(found: Sequence[Levels]) -> pd.DataFrame:
    """Return the tidy table of differences: `setting`, what `GroupDifference` has, `decides`, `small_means`."""
    tables = [
        as_frame(one.differences).assign(
            setting=one.setting,
            decides=[difference.name in (*one.meanings, _HELD_OUT) for difference in one.differences],
            small_means=[one.meanings.get(difference.name, ("", ""))[0] for difference in one.differences],
        )
        for one in found
    ]
    whole = pd.concat(tables or [as_frame([]).assign(setting=[], decides=[], small_means=[])], ignore_index=True)
    return whole[["setting", *(name for name in whole if name != "setting")]].rename(columns={"name": "column"})


def _columns(networks: pd.DataFrame, quantities: Sequence[Quantity]) -> list[str]:
    measured = [q.column for q in quantities if q.role == "measure" and q.column in networks]
    deciding = [name for name in measured if _meaning(name)]
    risks = [name for name in BESIDE if name in networks]
    kept = dict.fromkeys([*deciding, *measured, *risks])
    return [name for name in kept if pd.api.types.is_numeric_dtype(networks[name])]


def _meaning(name: str) -> tuple[str, str] | None:
    """Return the meaning and the family of an invariant number of the whole network that has a direction."""
    column = Column.parse(name)
    if column.name not in MEASURES or column.transform or column.layer is not None or column.part:
        return None
    one = named([column.measure])[0]
    meaning = direction(one.card)
    return (meaning, one.card.family) if meaning and one.invariant_under >= RESCALINGS else None


def _is_logarithm(name: str) -> bool:
    one = MEASURES.get(Column.parse(name).name)
    return one is not None and one.card.unit == "log"


def _pairs(
    networks: pd.DataFrame, others: pd.DataFrame, levels: pd.Series, varied: Sequence[str]
) -> tuple[pd.Series | None, pd.Series | None]:
    """Return the pair of each network, None where no two levels share one, and its unit, None where it is its own."""
    seeds = [name for name in ["seed", *filter(is_seed, varied)] if name in networks]
    unit = unit_column(varied)
    units = None if unit == "key" else networks[unit]
    if networks["seed"].isna().any():  # of networks trained elsewhere
        return None, None
    pairs = pd.concat([others, networks[seeds].astype(str)], axis=1).agg(" | ".join, axis=1)
    shared = levels.groupby(pairs.to_numpy()).nunique() > 1
    return (pairs if shared.any() else None), units
