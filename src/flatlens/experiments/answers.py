"""The answer of a study in three lines: what goes with the gap, how surely, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from flatlens.experiments.findings import (
    FEW,
    clearly,
    interval_of,
    is_clear,
    other_than_gap,
    relation_of,
    trained_alike,
    turned_by_kind,
    with_fixed,
)
from flatlens.experiments.quantities import GAP, measure_names
from flatlens.experiments.settings import Study
from flatlens.experiments.tables import held_fixed
from flatlens.progress import count_of
from flatlens.statistics.clustered import FEWEST_DESCRIBED

WHAT, SURELY, BEWARE = "What goes with the gap", "How surely", "Beware"


def answers(
    study: Study,
    relations: pd.DataFrame,
    within: pd.DataFrame,
    with_gap: pd.DataFrame,
    left_out: int,
    unfinished: int,
) -> list[tuple[str, str]]:
    """Return three pairs of a heading and a line; every number is one of the tables.

    Args:
        study: its settings.
        relations: the relations of all pairs.
        within: the relations with the gap inside groups of equal settings.
        with_gap: the relations with the gap, also in each kind of networks: `gap_correlations`.
        left_out: number of networks that failed, or are left out of every relation.
        unfinished: number of networks that are not finished.
    """
    names = measure_names(study.quantities)
    rows = sorted(_with_gap(names, relations), key=lambda r: -abs(r["pearson"]))
    certain = [row for row in rows if is_clear(row, "pearson")]
    alike, words = _among_alike(study, within, names)
    return [
        (WHAT, _what(rows, certain)),
        (SURELY, _surely(rows, alike, words)),
        (BEWARE, _beware(certain, alike, words, with_gap, left_out, unfinished)),
    ]


def closest(names: Sequence[str], relations: pd.DataFrame) -> str | None:
    """Return the measure that goes most closely with the gap: of those that clearly do, if there are any."""
    rows = _with_gap(names, relations)
    best = max(rows, key=lambda row: (is_clear(row, "pearson"), abs(row["pearson"])), default=None)
    return None if best is None else other_than_gap(best)


def _with_gap(names: Sequence[str], relations: pd.DataFrame) -> list[pd.Series]:
    """Return the relations of these measures with the gap, without those that are undefined."""
    rows = [row for name in names if (row := relation_of(relations, GAP.name, name)) is not None]
    return [row for row in rows if row["pearson"] == row["pearson"]]


def _what(rows: Sequence[pd.Series], certain: Sequence[pd.Series]) -> str:
    if not rows:
        return "No measure can be compared with the generalisation gap: too few networks are left, or there is no gap."
    n = rows[0]["n"]
    best = (certain or rows)[0]
    closest_one = f"{other_than_gap(best)}, Pearson r = {interval_of(best, 'pearson')}"
    of = count_of(len(rows), "measure")
    if not certain:
        return f"Across {n} networks, {clearly(certain, of, 'it')}. The closest is {closest_one}."
    return f"Across {n} networks, {clearly(certain, of, 'it')}, most closely {closest_one}."


def _surely(rows: Sequence[pd.Series], alike: Sequence[pd.Series], words: str) -> str:
    if not rows:
        return "There is nothing to be sure of yet."
    units = int(rows[0]["units"])
    unit = "seed" if units < rows[0]["n"] else "network"
    if units < FEWEST_DESCRIBED:
        said = f"With {count_of(units, f'independent {unit}')} there are no intervals, so nothing here is sure."
    else:
        rough = ", so they are rough" if units < FEW else ""
        said = f"The 95% intervals are over {count_of(units, f'independent {unit}')}{rough}."
    if not alike:
        return said
    certain = [row for row in alike if is_clear(row, "pearson")]
    of = count_of(len(alike), "measure")
    return f"{said} Within {words}, {clearly(certain, of, 'the gap')}."


def _beware(
    certain: Sequence[pd.Series],
    alike: Sequence[pd.Series],
    words: str,
    with_gap: pd.DataFrame,
    left_out: int,
    unfinished: int,
) -> str:
    said = []
    if unfinished:
        said.append(f"{count_of(unfinished, 'network')} of the study not finished yet.")
    if left_out:
        said.append(f"{count_of(left_out, 'network')} left out of every relation.")
    inside = {row["x"]: row for row in alike}
    lost = [r for r in certain if (i := inside.get(other_than_gap(r))) is not None and not is_clear(i, "pearson")]
    if lost:
        one = f"the relation of {other_than_gap(lost[0])} is"
        told = f"{len(lost)} of these relations are" if len(lost) > 1 else one
        said.append(f"Within {words}, {told} no longer clear: the settings may move both sides.")
    if turned := turned_by_kind(with_gap):
        name, two = next(iter(turned.items()))
        told = f"{len(turned)} measures go" if len(turned) > 1 else f"{name} goes"
        kinds = f" ({', '.join(two['kind'])})" if len(turned) == 1 else ""
        said.append(f"{told} with the gap in one kind of networks and against it in another{kinds}.")
    return " ".join([*said, "A correlation is no proof of a cause."])


def _among_alike(study: Study, within: pd.DataFrame, names: Sequence[str]) -> tuple[list[pd.Series], str]:
    """Return the relations among networks that share all settings but the seed, and these settings in words."""
    groups = [group for group in held_fixed(study.varied) if group != ("seed",)]
    told = trained_alike(study)
    for group in reversed(groups):
        name = ", ".join(group)
        if rows := with_fixed(within, name, names):
            return rows, told[name]
    return [], ""
