"""The findings of a study, and its answer: sentences made from computed numbers and their intervals.

The answer has at most three. Levels of an axis of words come first: is one flatter than another? Then the measure that
correlates most with the generalisation gap, given the training loss where that differs between networks. The last one
says how certain this is, and what speaks against it. A correlation is claimed where Pearson's p and that of ranks are
below 5% after Holm's correction over the measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from flatlens.comparing.answers import group_answer
from flatlens.experiments.overrides import TOGETHER, but_seeds, paths
from flatlens.experiments.quantities import GAP, SHARPNESS, Quantity, in_words, measure_names
from flatlens.experiments.settings import Study
from flatlens.experiments.tables import GIVEN_LOSS, Levels, held_fixed, unit_column
from flatlens.progress import count_of
from flatlens.statistics import holm
from flatlens.statistics.correlations import TITLES
from flatlens.statistics.group_differences import SIGNIFICANCE
from flatlens.statistics.inference import FEWEST_DESCRIBED, FEWEST_UNITS
from flatlens.training import REACHED, TrainedElsewhere

ONLY_SEED = "where only the seed differs"
FEW_UNITS = 20
"""Fewer units than this make rough intervals."""


# ---- the answer


def answer_of_study(
    study: Study,
    within: pd.DataFrame,
    coefficients: pd.DataFrame,
    levels: Sequence[Levels],
    left_out: int,
    unfinished: int,
) -> list[str]:
    """Return at most three sentences: what is the case, how certain, what speaks against it.

    `within` and `coefficients` are a result's tables (`gap_correlations`), `levels` those of each axis of words;
    `left_out` networks failed, or are left out of every relation.
    """
    names = measure_names(study.quantities)
    rows, given = (_with_gap(names, coefficients, of) for of in (TITLES, GIVEN_LOSS))
    first = level_sentences(levels[0])[:1] if levels else []
    caveats = [f"{count_of(unfinished, 'network')} of the study not finished"] if unfinished else []
    caveats += [f"{count_of(left_out, 'network')} left out of every correlation"] if left_out else []
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
    if best["p_holm"] < SIGNIFICANCE and inside is not None and not is_clear(inside):
        caveats.append("the settings may move both sides")
    if turned := turned_by_kind(coefficients):
        name, two = next(iter(turned.items()))
        kinds = f": {two['kind'].iloc[0]}, {two['kind'].iloc[1]}" if len(turned) == 1 else ""
        told = f"{len(turned)} measures correlate" if len(turned) > 1 else f"{name} correlates"
        caveats.append(f"{told} positively in one kind of networks and negatively in another{kinds}")
    last = "; ".join([*caveats[:2], "correlation is not causation"])  # the findings have all
    # what is the case: the measure that correlates most, and how many do
    across, name, r = f"Across {rows[0]['n']} networks", best["x"], f"r = {interval_of(best, 'pearson')}"
    if given:
        whole = next((interval_of(row, "pearson") for row in rows if row["x"] == name), "undefined")
        r = f"{r} given the training loss, r = {whole} without it"
    found, of = _significant(given or rows), len(given or rows)
    counts = f"{'given the loss, ' if given else ''}{how_many(found, of)}"
    none = "no measure correlates significantly with the generalisation gap"
    if found:
        what = f"{across}, {name} correlates most strongly with the generalisation gap: {r}; {counts}."
    elif given:
        what = f"{across}, {none} given the training loss; most is left of {name}: {r}."
    else:
        what = f"{across}, {none}; the strongest is {name}: {r}."
    # how certain that is
    units = int(rows[0]["units"])
    independent = count_of(units, f"independent {'seed' if units < rows[0]['n'] else 'network'}")
    if units < FEWEST_UNITS:
        few = f"{'is' if units == 1 else 'are'} too few to decide"
        certain = f"How certain: {independent} {few}; take {FEWEST_UNITS} or more, as in --set seed=0:6"
    else:
        rough = f", rough below {FEW_UNITS}" if units < FEW_UNITS else ""
        corrected = f"Holm-corrected over {count_of(len(rows), 'measure')}"
        certain = f"How certain: 95% intervals over {independent}{rough}, {corrected}"
        if inside is not None:
            certain += f"; among {among}, r = {interval_of(inside, 'pearson')}"
    return [*first, what, f"{certain}; caveat: {last}."] if first else [what, f"{certain}.", f"Caveat: {last}."]


def closest(names: Sequence[str], coefficients: pd.DataFrame) -> str | None:
    """Return the measure that the answer names, None if there is none.

    It is the one that correlates most with the gap; where training losses differ, given the training loss.
    """
    rows = _with_gap(names, coefficients, GIVEN_LOSS) or _with_gap(names, coefficients, TITLES)
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
    return sorted(found, key=_strongest)


def _significant(rows: Sequence[pd.Series]) -> list[pd.Series]:
    return [row for row in rows if row["p_holm"] < SIGNIFICANCE]


def _headline(rows: Sequence[pd.Series]) -> pd.Series:
    return (_significant(rows) or rows)[0]


# ---- the findings


def findings(
    study: Study,
    networks: pd.DataFrame,
    relations: pd.DataFrame,
    within: pd.DataFrame,
    coefficients: pd.DataFrame,
    unfinished: int,
    failed: int,
) -> list[str]:
    """Return the sentences, most important first."""
    kept = networks[networks["outcome"].isin(REACHED)]
    return [
        *_population(study, networks, kept, unfinished, failed),
        *_against_gap(study.quantities, relations),
        *_over_settings(study, relations, within),
        *_reversals(study, relations, within, coefficients),
        *_certainty(study, networks, kept),
    ]


def _population(
    study: Study, networks: pd.DataFrame, kept: pd.DataFrame, unfinished: int, failed: int
) -> Iterator[str]:
    elsewhere = isinstance(study.base.training, TrainedElsewhere)
    steps = "" if elsewhere or not len(kept) else f", after {_range(kept['steps'], ',')} steps"
    if isinstance(study.base.training, TrainedElsewhere):
        goal = "(trained outside flatlens) are measured"
    else:
        train, until = study.base.data.train, study.base.training.until
        samples = f"{train} training samples" if train else "training samples"
        low = None if until.loss_below is None else f"loss below {until.loss_below:g}"
        right = None if until.accuracy is None else f"accuracy at least {until.accuracy:g}"
        flat = None if until.gradient_norm is None else f"gradient norm at most {until.gradient_norm:g}"
        told = " and ".join(filter(None, (low, right, flat)))
        goal = f"reach {told} on their {samples}" if told else f"completed training on their {samples}"
        if until.accuracy == 1 and low:
            goal = f"interpolate their {samples} (accuracy 1, {low})"
    first = f"{len(kept)} of {len(study.networks())} networks {goal}{steps}."
    if {"test_accuracy", GAP.column} <= set(kept) and len(kept):
        yield (
            f"{first} Their test accuracy is {_range(kept['test_accuracy'])}, their generalisation gap (test loss "
            f"minus training loss) {_range(kept[GAP.column])}."
        )
    elif elsewhere and GAP.column in kept:
        yield f"{first} Their generalisation gap, from the table of checkpoints, is {_range(kept[GAP.column])}."
    else:
        yield first
        if elsewhere:
            yield ("No measure is compared with the generalisation gap: the data has no test samples, and the table of "
                   "checkpoints no column gap.")  # fmt: skip
    for outcome, how in (("out of steps", "ran out of steps"), ("diverged", "diverged")):
        if number := int((networks["outcome"] == outcome).sum()):
            yield f"{count_of(number, 'network')} {how} and {is_or_are(number)} excluded from every correlation below."
    if failed:
        yield f"{count_of(failed, 'network')} failed and {is_or_are(failed)} missing."
    if unfinished:
        yield f"{count_of(unfinished, 'network')} {is_or_are(unfinished)} not finished: this is a partial result."


def _against_gap(quantities: Sequence[Quantity], relations: pd.DataFrame) -> Iterator[str]:
    rows = with_gap(measure_names(quantities), relations)
    found = sorted(filter(is_clear, rows), key=_strongest)
    if found:
        best = found[0]
        yield (
            f"Across {best['n']} networks {other_than_gap(best)} correlates most strongly with the generalisation gap: "
            f"Pearson r = {interval_of(best, 'pearson')}, Kendall tau = {interval_of(best, 'kendall')}."
        )
    for how, sign in (("positively", 1), ("negatively", -1)):
        if group := [row for row in found[1:] if row["pearson"] * sign > 0]:
            yield f"The gap also correlates {how} with {_listed(group)}."
    if unclear := [row for row in rows if not is_clear(row)]:
        known = any(row["pearson_low"] == row["pearson_low"] for row in unclear)
        why = "the interval contains zero" if known else "there are no intervals"
        yield f"No clear correlation with the gap ({why}): {_listed(unclear)}."


def _over_settings(study: Study, relations: pd.DataFrame, within: pd.DataFrame) -> Iterator[str]:
    """Yield what correlates with a setting, and what with the gap where settings are fixed."""
    for setting in (q for q in study.quantities if q.role == "setting"):
        name = setting.name.removesuffix(" (log)")
        for target, fewer, more in (
            (SHARPNESS, "flatter minima", "sharper minima"), (GAP, "smaller gaps", "larger gaps"),
        ):  # fmt: skip
            row = _relation_of(relations, setting.name, target.name)
            if row is None or row["kendall"] != row["kendall"]:
                continue
            tau = f"Kendall tau of {name} and {target.name} = {interval_of(row, 'kendall')} (n = {row['n']})"
            if is_clear(row, "kendall"):
                yield f"A larger {name} correlates with {fewer if row['kendall'] < 0 else more}: {tau}."
            else:
                yield f"No clear effect of the {name} on the {target.name}: {tau}."
    for group, words in trained_alike(study).items():
        if not (rows := with_fixed(within, group, measure_names(study.quantities))):
            continue
        found = sorted(filter(is_clear, rows), key=_strongest)
        more = f": {'the three strongest are ' if len(found) > 3 else ''}{_listed(found[:3])}" if found else ""
        of = f"{how_many(found, len(rows))} with the gap"
        yield f"Within {words} ({rows[0]['groups']} groups, pooled), {of}{more}."


def _reversals(
    study: Study, relations: pd.DataFrame, within: pd.DataFrame, coefficients: pd.DataFrame
) -> Iterator[str]:
    """Yield which measures have another sign, both clearly, where settings are held fixed, or between kinds."""
    names = measure_names(study.quantities)
    overall = {other_than_gap(row): row for row in filter(is_clear, with_gap(names, relations))}
    for group, words in trained_alike(study).items():
        inside = {row["x"]: row for row in filter(is_clear, with_fixed(within, group, names))}
        turned = [
            f"{name}, {row['pearson']:.2f} overall but {interval_of(inside[name], 'pearson')}"
            for name, row in overall.items()
            if name in inside and row["pearson"] * inside[name]["pearson"] < 0
        ]
        if turned:
            yield f"Within {words}, the sign of r changes for {_first_four(turned)}."
    between = []
    for name, two in turned_by_kind(coefficients).items():
        said = [f"{interval_of(row, 'pearson')} in {row['kind']}" for _, row in two.iterrows()]
        between.append(f"{name}, {' but '.join(said)}")
    if between:
        yield f"Between kinds of networks the sign of r changes for {_first_four(between)}."


def _certainty(study: Study, networks: pd.DataFrame, kept: pd.DataFrame) -> Iterator[str]:
    """Yield which measures are the same number here, then how certain the intervals are."""
    present = [name for name in study.base.measures if name in networks and networks[name].nunique() > 1]
    for a, b in combinations(present, 2):
        if np.allclose(networks[a], networks[b], 1e-9, 0, equal_nan=True):
            yield f"On these networks {b} equals {a}, for this loss and activation."
    column = unit_column(study.varied)
    units, unit = kept[column].nunique(), "network" if column == "key" else "seed"
    independent = count_of(units, f"independent {unit}")
    if not units:
        yield "There are no intervals: no network reached the end of its training."
    elif units < FEWEST_DESCRIBED:
        yield f"There are no intervals: {independent} {is_or_are(units)} too few. No finding is certain."
    else:
        why = ": networks of one seed share their initial weights and the order of their batches"
        shared = why if unit == "seed" else ""
        rough = f" With {count_of(units, unit)} they are rough." if units < FEW_UNITS else ""
        yield f"The intervals are 95% intervals over {independent}{shared}. Correlation is not causation.{rough}"


# ---- relations, and their words


def _relation_of(relations: pd.DataFrame, a: str, b: str) -> pd.Series | None:
    either = ((relations["x"] == a) & (relations["y"] == b)) | ((relations["x"] == b) & (relations["y"] == a))
    return relations[either].iloc[0] if either.any() else None


def with_gap(names: Sequence[str], relations: pd.DataFrame) -> list[pd.Series]:
    """Return the relations of these measures with the gap, without those that are undefined."""
    rows = [row for name in names if (row := _relation_of(relations, GAP.name, name)) is not None]
    return [row for row in rows if row["pearson"] == row["pearson"]]


def with_fixed(within: pd.DataFrame, group: str, names: Sequence[str]) -> list[pd.Series]:
    """Return the relations of these measures with the gap where this group of settings is fixed; no undefined ones."""
    rows = [row for _, row in within[within["group"] == group].iterrows() if row["x"] in names]
    return [row for row in rows if row["pearson"] == row["pearson"]]


def turned_by_kind(coefficients: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the measures that correlate clearly with the gap: positively in one kind of networks, negatively in one.

    Each has two rows: Pearson's r in one kind, and in the other.
    """
    rows = coefficients[(coefficients["kind"] != "") & (coefficients["coefficient"] == TITLES["pearson"])]
    rows = rows.rename(columns={"value": "pearson", "low": "pearson_low", "high": "pearson_high"})
    ends = {
        str(name): same.loc[[same["pearson_low"].idxmax(), same["pearson_high"].idxmin()]]
        for name, same in rows.dropna(subset=["pearson_low", "pearson_high"]).groupby("quantity", sort=False)
    }
    return {name: two for name, two in ends.items() if two["pearson_low"].iloc[0] > 0 > two["pearson_high"].iloc[1]}


def trained_alike(study: Study) -> dict[str, str]:
    """Return each way of holding settings fixed, in words."""
    ways, told = held_fixed(study.varied), {}
    settings = {name for axis in study.varied for name in but_seeds(axis)}
    one_model = "model" not in settings and not isinstance(study.base.training, TrainedElsewhere)
    if one_model:
        one_model = not any(path.startswith("model.") for name in settings for path in paths(study.base, name))
    same_start = one_model and any({"seed", "model.seed"} & {*axis.split(TOGETHER)} for axis in study.varied)
    for names in ways:
        more = f", {ONLY_SEED}" if ("seed",) in ways and len(names) > 1 else ""
        if names == ("seed",) and same_start:
            more = ", where all networks start from the same weights"
        told[", ".join(names)] = f"a fixed {' and '.join(map(in_words, names))}{more}"
    return told


def other_than_gap(row: pd.Series) -> str:
    """Return the quantity of a relation with the gap."""
    return str(row["y"] if row["x"] == GAP.name else row["x"])


def is_clear(row: pd.Series, coefficient: str = "pearson") -> bool:
    """Return whether a coefficient's interval leaves out zero."""
    return bool(row[f"{coefficient}_low"] > 0 or row[f"{coefficient}_high"] < 0)


def _strongest(row: pd.Series) -> float:
    return -abs(float(row["pearson"]))


def how_many(clear: Sequence[pd.Series], of: int) -> str:
    """Return how many of all measures, `of`, correlate clearly, and in which direction.

    >>> how_many([pd.Series({"pearson": r}) for r in (0.5, 0.7, -0.6)], 20), how_many([], 1)
    ('2 of 20 measures correlate positively and 1 negatively', '0 of 1 measure correlates clearly')
    """
    up = sum(bool(row["pearson"] > 0) for row in clear)
    counts = [f"{number} {how}" for number, how in ((up, "positively"), (len(clear) - up, "negatively")) if number]
    if not counts:
        return f"0 of {count_of(of, 'measure')} {'correlates' if of == 1 else 'correlate'} clearly"
    (first, how), rest = counts[0].split(), counts[1:]
    verb = "correlates" if first == "1" else "correlate"
    return " and ".join([f"{first} of {count_of(of, 'measure')} {verb} {how}", *rest])


def _listed(rows: Sequence[pd.Series]) -> str:
    return "; ".join(f"{other_than_gap(row)}, r = {interval_of(row, 'pearson')}" for row in rows)


def _first_four(turned: Sequence[str]) -> str:
    more = f"; and for {len(turned) - 4} more" if len(turned) > 4 else ""
    return "; ".join(turned[:4]) + more


def interval_of(row: pd.Series, coefficient: str) -> str:
    """Return a coefficient with its interval, if it has one."""
    low, high = row[f"{coefficient}_low"], row[f"{coefficient}_high"]
    return f"{row[coefficient]:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low == low else "")


def is_or_are(number: int) -> str:
    """Return the verb that agrees with a number."""
    return "is" if number == 1 else "are"


def _range(values: pd.Series, form: str = ".3g") -> str:
    low, high = f"{values.min():{form}}", f"{values.max():{form}}"
    return low if low == high else f"{low} to {high}"
