"""The answer of a study: at most three sentences, each filled with numbers of its tables.

Levels of an axis of words come first: is one flatter than another? Then the measure that correlates most with the
generalisation gap, given the training loss where that differs between networks. The last one says how certain this is,
and what speaks against it. A correlation is claimed where Pearson's p and that of ranks are below 5% after Holm's
correction over the measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from flatlens.comparing.group_answers import group_answer
from flatlens.experiments.levels import Levels
from flatlens.experiments.narrative import (
    FEW_UNITS,
    ONLY_SEED,
    how_many,
    interval_of,
    is_clear,
    trained_alike,
    turned_by_kind,
    with_fixed,
)
from flatlens.experiments.quantities import measure_names
from flatlens.experiments.settings import Study
from flatlens.experiments.tables import GIVEN_LOSS, OVERALL, held_fixed
from flatlens.progress import count_of
from flatlens.statistics import holm
from flatlens.statistics.group_differences import SIGNIFICANCE
from flatlens.statistics.inference import FEWEST_UNITS

MOST_CAVEATS = 2
"""Number of caveats that the answer names; the findings have all."""


def answer_of_study(
    study: Study,
    within: pd.DataFrame,
    coefficients: pd.DataFrame,
    levels: Sequence[Levels],
    left_out: int,
    unfinished: int,
) -> list[str]:
    """Return at most three sentences: what is the case, how certain, what speaks against it.

    Args:
        study: its settings.
        within: the relations with the gap inside groups of equal settings.
        coefficients: the relations with the gap, also given the training loss, and in each kind of networks:
            `gap_correlations`.
        levels: the differences between the levels of each axis of words.
        left_out: number of networks that failed, or are left out of every relation.
        unfinished: number of networks that are not finished.
    """
    names = measure_names(study.quantities)
    rows, given = (_with_gap(names, coefficients, of) for of in (OVERALL, GIVEN_LOSS))
    first = level_sentences(levels[0])[:1] if levels else []
    caveats = [*_counts(left_out, unfinished)]
    if not rows:
        none = "No measure can be correlated with the generalisation gap"
        caveat = [f"Caveat: {'; '.join(caveats)}."] if caveats else []
        return [*first, f"{none}: too few networks are left, or there is no gap.", *caveat]
    # the same relation among networks that share all settings but the seed, or the first one
    best = _headline(given or rows)
    words = trained_alike(study)
    groups = [", ".join(group) for group in held_fixed(study.varied) if group != ("seed",)]
    alike = [
        (found[0], words[group]) for group in reversed(groups) if (found := with_fixed(within, group, [best["x"]]))
    ]
    inside, fixed = alike[0] if alike else (None, "")
    among = "networks that differ in the seed alone" if ONLY_SEED in fixed else f"networks with {fixed}"
    certain = _certain(rows, None if inside is None else f"among {among}, r = {interval_of(inside, 'pearson')}")
    if best["p_holm"] < SIGNIFICANCE and inside is not None and not is_clear(inside):
        caveats.append("the settings may move both sides")
    caveats = [*caveats, *_turned(coefficients)][:MOST_CAVEATS]
    last = "; ".join([*caveats, "correlation is not causation"])
    what = _what(rows, given, best)
    return [*first, what, f"{certain}; caveat: {last}."] if first else [what, f"{certain}.", f"Caveat: {last}."]


def closest(names: Sequence[str], coefficients: pd.DataFrame) -> str | None:
    """Return the measure that the answer names, None if there is none.

    It is the one that correlates most with the gap; where training losses differ, given the training loss.
    """
    rows = _with_gap(names, coefficients, GIVEN_LOSS) or _with_gap(names, coefficients, OVERALL)
    return str(_headline(rows)["x"]) if rows else None


def level_sentences(levels: Levels) -> list[str]:
    """Return what the differences between the levels of one axis say: flatter, less sensitive, how certain."""
    return group_answer(levels.differences, levels.meanings, paired=levels.paired)


def _with_gap(names: Sequence[str], coefficients: pd.DataFrame, titles: Mapping[str, str]) -> list[pd.Series]:
    """Return the rows of Pearson's r of measures with the gap, strongest first, with Holm's p as `p_holm`.

    It is that of the larger p of r and of the ranks' correlation; Pearson's alone claims too often over a dozen seeds
    (docs/sizes.md). Given the training loss there are rows only where training losses differ.
    """
    kept = coefficients[(coefficients["kind"] == "") & coefficients["quantity"].isin(names)]
    rows, ranks = (kept[kept["coefficient"] == titles[of]] for of in ("pearson", "spearman"))
    rows = rows.dropna(subset=["value"])
    of_ranks = rows["quantity"].map(ranks.set_index("quantity")["p"])
    p = np.fmax(rows["p"].to_numpy(dtype=float), of_ranks.to_numpy(dtype=float))
    corrected = np.full(len(p), np.nan)
    corrected[p == p] = holm(p[p == p])
    rows = rows.rename(columns={"quantity": "x", "value": "pearson", "low": "pearson_low", "high": "pearson_high"})
    found = [row for _, row in rows.assign(p_holm=corrected).iterrows()]
    return sorted(found, key=lambda row: -abs(row["pearson"]))


def _significant(rows: Sequence[pd.Series]) -> list[pd.Series]:
    return [row for row in rows if row["p_holm"] < SIGNIFICANCE]


def _headline(rows: Sequence[pd.Series]) -> pd.Series:
    return (_significant(rows) or rows)[0]


def _what(rows: Sequence[pd.Series], given: Sequence[pd.Series], best: pd.Series) -> str:
    across, name, r = f"Across {rows[0]['n']} networks", best["x"], f"r = {interval_of(best, 'pearson')}"
    if given:
        whole = next((interval_of(row, "pearson") for row in rows if row["x"] == name), "undefined")
        r = f"{r} given the training loss, r = {whole} without it"
    found, of = _significant(given or rows), len(given or rows)
    counts = f"{'given the loss, ' if given else ''}{how_many(found, of)}"
    if found:
        return f"{across}, {name} correlates most strongly with the generalisation gap: {r}; {counts}."
    none = "no measure correlates significantly with the generalisation gap"
    if given:
        return f"{across}, {none} given the training loss; most is left of {name}: {r}."
    return f"{across}, {none}; the strongest is {name}: {r}."


def _certain(rows: Sequence[pd.Series], inside: str | None) -> str:
    units = int(rows[0]["units"])
    independent = count_of(units, f"independent {'seed' if units < rows[0]['n'] else 'network'}")
    if units < FEWEST_UNITS:
        few = f"{'is' if units == 1 else 'are'} too few to decide"
        return f"How certain: {independent} {few}; take {FEWEST_UNITS} or more, as in --set seed=0:6"
    corrected = f"Holm-corrected over {count_of(len(rows), 'measure')}"
    rough = f", rough below {FEW_UNITS}" if units < FEW_UNITS else ""
    told = f"How certain: 95% intervals over {independent}{rough}, {corrected}"
    return f"{told}; {inside}" if inside else told


def _counts(left_out: int, unfinished: int) -> Iterator[str]:
    if unfinished:
        yield f"{count_of(unfinished, 'network')} of the study not finished"
    if left_out:
        yield f"{count_of(left_out, 'network')} left out of every correlation"


def _turned(coefficients: pd.DataFrame) -> Iterator[str]:
    if turned := turned_by_kind(coefficients):
        name, two = next(iter(turned.items()))
        kinds = f": {two['kind'].iloc[0]}, {two['kind'].iloc[1]}" if len(turned) == 1 else ""
        told = f"{len(turned)} measures correlate" if len(turned) > 1 else f"{name} correlates"
        yield f"{told} positively in one kind of networks and negatively in another{kinds}"
