"""The answer of a study: at most three sentences, each filled with numbers of its tables.

Levels of an axis of words come first: is one flatter than another? Then the measure that correlates most with the
generalisation gap, given the training loss where that differs between networks. The last one says how certain this is,
and what speaks against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from flatlens.comparing.group_answers import group_answer
from flatlens.experiments.levels import Levels
from flatlens.experiments.narrative import (
    FEW,
    ONLY_SEED,
    clear,
    how_many,
    interval_of,
    is_clear,
    other_than_gap,
    strongest_first,
    trained_alike,
    turned_by_kind,
    with_fixed,
    with_gap,
)
from flatlens.experiments.quantities import measure_names
from flatlens.experiments.settings import Study
from flatlens.experiments.tables import GIVEN_LOSS, held_fixed
from flatlens.progress import count_of
from flatlens.statistics.inference import FEWEST_DESCRIBED, FEWEST_UNITS

MOST_CAVEATS = 2
"""Number of caveats that the answer names; the findings have all."""


def answer_of_study(
    study: Study,
    relations: pd.DataFrame,
    within: pd.DataFrame,
    coefficients: pd.DataFrame,
    levels: Sequence[Levels],
    left_out: int,
    unfinished: int,
) -> list[str]:
    """Return at most three sentences: what is the case, how certain, what speaks against it.

    Args:
        study: its settings.
        relations: the relations of all pairs.
        within: the relations with the gap inside groups of equal settings.
        coefficients: the relations with the gap, also given the training loss, and in each kind of networks:
            `gap_correlations`.
        levels: the differences between the levels of each axis of words.
        left_out: number of networks that failed, or are left out of every relation.
        unfinished: number of networks that are not finished.
    """
    names = measure_names(study.quantities)
    rows = strongest_first(with_gap(names, relations))
    given = strongest_first(given_loss(names, coefficients))
    # the relations among networks that share all settings but the seed, and these settings in words
    words = trained_alike(study)
    groups = [", ".join(group) for group in held_fixed(study.varied) if group != ("seed",)]
    alike = [(found, words[group]) for group in reversed(groups) if (found := with_fixed(within, group, names))]
    inside, fixed = alike[0] if alike else ([], "")
    among = "networks that differ in the seed alone" if ONLY_SEED in fixed else f"networks with {fixed}"
    first = level_sentences(levels[0])[:1] if levels else []
    certain = _certain(rows, inside, among)
    caveats = [*_caveats(rows, inside, among, coefficients, left_out, unfinished)][:MOST_CAVEATS]
    last = f"Caveat: {'; '.join([*caveats, *(['correlation is not causation'] if rows else [])])}."
    if not rows:
        return [*first, _what(rows, given), *([last] if caveats else [])]
    if first:
        return [*first, _what(rows, given), f"{certain.removesuffix('.')}; c{last[1:]}"]
    return [_what(rows, given), certain, last]


def closest(names: Sequence[str], relations: pd.DataFrame, coefficients: pd.DataFrame) -> str | None:
    """Return the measure that the answer names: of those that correlate clearly with the gap, or of all, the strongest.

    Where training losses differ, given the training loss.
    """
    rows = strongest_first(given_loss(names, coefficients)) or strongest_first(with_gap(names, relations))
    best = next(iter(clear(rows) or rows), None)
    return None if best is None else other_than_gap(best)


def given_loss(names: Sequence[str], coefficients: pd.DataFrame) -> list[pd.Series]:
    """Return what is left of the correlation of each measure with the gap, given the training loss.

    None where the training losses do not differ. The rows have the names of those of `relations`.
    """
    rows = coefficients[(coefficients["kind"] == "") & (coefficients["coefficient"] == GIVEN_LOSS)]
    rows = rows[rows["quantity"].isin(names)].dropna(subset=["value"])
    rows = rows.rename(columns={"quantity": "x", "value": "pearson", "low": "pearson_low", "high": "pearson_high"})
    return [row for _, row in rows.assign(y="").iterrows()]


def level_sentences(levels: Levels) -> list[str]:
    """Return what the differences between the levels of one axis say: flatter, less sensitive, how certain."""
    return group_answer(levels.differences, levels.meanings, paired=levels.paired)


def _what(rows: Sequence[pd.Series], given: Sequence[pd.Series]) -> str:
    if not rows:
        return (
            "No measure can be correlated with the generalisation gap: too few networks are left, or there is no gap."
        )
    across = f"Across {rows[0]['n']} networks"
    if not given:
        return _strongest(across, rows)
    # where losses differ, the measure of which most is left
    found = clear(given)
    best = (found or given)[0]
    name = other_than_gap(best)
    whole = next((interval_of(row, "pearson") for row in rows if other_than_gap(row) == name), "undefined")
    left = f"r = {interval_of(best, 'pearson')} given the training loss, r = {whole} without it"
    if found:
        counts = f"given the loss, {how_many(found, len(given))}"
        return f"{across}, {name} correlates most strongly with the generalisation gap: {left}; {counts}."
    none = "no measure correlates clearly with the generalisation gap given the training loss"
    return f"{across}, {none}; most is left of {name}: {left}."


def _strongest(across: str, rows: Sequence[pd.Series]) -> str:
    found = clear(rows)
    best = (found or rows)[0]
    r = f"r = {interval_of(best, 'pearson')}"
    if found:
        strongest = f"{other_than_gap(best)} correlates most strongly with the generalisation gap: {r}"
        return f"{across}, {strongest}; {how_many(found, len(rows))}."
    none = "no measure correlates clearly with the generalisation gap"
    return f"{across}, {none}; the strongest is {other_than_gap(best)}: {r}."


def _certain(rows: Sequence[pd.Series], alike: Sequence[pd.Series], among: str) -> str:
    if not rows:
        return ""
    units = int(rows[0]["units"])
    unit = "seed" if units < rows[0]["n"] else "network"
    independent = count_of(units, f"independent {unit}")
    if units < FEWEST_DESCRIBED:
        verb, more = (
            "gives" if units == 1 else "give",
            f"take {FEWEST_UNITS} or more, as in --set seed=0:{FEWEST_UNITS}",
        )
        return f"How certain: {independent} {verb} no interval; {more}."
    rough = f", rough below {FEW}" if units < FEW else ""
    inside = f"; among {among}, {how_many(clear(alike), len(alike))}" if alike else ""
    return f"How certain: 95% intervals over {independent}{rough}{inside}."


def _caveats(
    rows: Sequence[pd.Series],
    alike: Sequence[pd.Series],
    among: str,
    coefficients: pd.DataFrame,
    left_out: int,
    unfinished: int,
) -> Iterator[str]:
    if unfinished:
        yield f"{count_of(unfinished, 'network')} of the study not finished"
    if left_out:
        yield f"{count_of(left_out, 'network')} left out of every correlation"
    unclear = {row["x"] for row in alike if not is_clear(row)}
    if lost := [name for name in map(other_than_gap, clear(rows)) if name in unclear]:
        told = f"{len(lost)} correlations are" if len(lost) > 1 else f"the correlation of {lost[0]} is"
        yield f"{told} not clear among {among}: the settings may move both sides"
    if turned := turned_by_kind(coefficients):
        name, two = next(iter(turned.items()))
        kinds = f": {two['kind'].iloc[0]}, {two['kind'].iloc[1]}" if len(turned) == 1 else ""
        told = f"{len(turned)} measures correlate" if len(turned) > 1 else f"{name} correlates"
        yield f"{told} positively in one kind of networks and negatively in another{kinds}"
