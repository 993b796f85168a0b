"""The findings of a study, sentences made from computed numbers and their intervals; answer.py has the first three."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from flatlens.experiments.overrides import TOGETHER, but_seeds, paths
from flatlens.experiments.quantities import GAP, SHARPNESS, Quantity, in_words, measure_names
from flatlens.experiments.settings import Study
from flatlens.experiments.tables import OVERALL, held_fixed, unit_column
from flatlens.progress import count_of
from flatlens.statistics.inference import FEWEST_DESCRIBED
from flatlens.training import REACHED, TrainedElsewhere

ONLY_SEED = "where only the seed differs"
FEW_UNITS = 20
"""Fewer units than this make rough intervals."""


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
        *_settings(study.quantities, relations),
        *_within(study, within),
        *_reversals(study, relations, within, coefficients),
        *_twins(study.base.measures, networks),
        _intervals(study, kept),
    ]


def _population(
    study: Study, networks: pd.DataFrame, kept: pd.DataFrame, unfinished: int, failed: int
) -> Iterator[str]:
    elsewhere = isinstance(study.base.training, TrainedElsewhere)
    steps = "" if elsewhere or not len(kept) else f", after {_range(kept['steps'], ',')} steps"
    first = f"{len(kept)} of {len(study.networks())} networks {_goal(study)}{steps}."
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


def _goal(study: Study) -> str:
    if isinstance(study.base.training, TrainedElsewhere):
        return "(trained outside flatlens) are measured"
    train, until = study.base.data.train, study.base.training.until
    samples = f"{train} training samples" if train else "training samples"
    low = "" if until.loss_below is None else f"loss below {until.loss_below:g}"
    if until.accuracy == 1 and low:
        return f"interpolate their {samples} (accuracy 1, {low})"
    conditions = [
        low,
        "" if until.accuracy is None else f"accuracy at least {until.accuracy:g}",
        "" if until.gradient_norm is None else f"gradient norm at most {until.gradient_norm:g}",
    ]
    told = " and ".join(filter(None, conditions))
    return f"reach {told} on their {samples}" if told else f"completed training on their {samples}"


def _against_gap(quantities: Sequence[Quantity], relations: pd.DataFrame) -> Iterator[str]:
    rows = with_gap(measure_names(quantities), relations)
    found = strongest_first(clear(rows))
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


def _settings(quantities: Sequence[Quantity], relations: pd.DataFrame) -> Iterator[str]:
    for setting in (q for q in quantities if q.role == "setting"):
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


def _within(study: Study, within: pd.DataFrame) -> Iterator[str]:
    for group, words in trained_alike(study).items():
        if not (rows := with_fixed(within, group, measure_names(study.quantities))):
            continue
        found = strongest_first(clear(rows))
        more = f": {'the three strongest are ' if len(found) > 3 else ''}{_listed(found[:3])}" if found else ""
        of = f"{how_many(found, len(rows))} with the gap"
        yield f"Within {words} ({rows[0]['groups']} groups, pooled), {of}{more}."


def _reversals(
    study: Study, relations: pd.DataFrame, within: pd.DataFrame, coefficients: pd.DataFrame
) -> Iterator[str]:
    """Yield which measures have another sign, both clearly, where settings are held fixed, or between kinds."""
    names = measure_names(study.quantities)
    overall = {other_than_gap(row): row for row in clear(with_gap(names, relations))}
    for group, words in trained_alike(study).items():
        inside = {row["x"]: row for row in clear(with_fixed(within, group, names))}
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


def _twins(measures: Sequence[str], networks: pd.DataFrame) -> Iterator[str]:
    present = [name for name in measures if name in networks and networks[name].nunique() > 1]
    for a, b in combinations(present, 2):
        if np.allclose(networks[a], networks[b], 1e-9, 0, equal_nan=True):
            yield f"On these networks {b} equals {a}, for this loss and activation."


def _intervals(study: Study, kept: pd.DataFrame) -> str:
    column = unit_column(study.varied)
    units, unit = kept[column].nunique(), "network" if column == "key" else "seed"
    if not units:
        return "There are no intervals: no network reached the end of its training."
    independent = count_of(units, f"independent {unit}")
    if units < FEWEST_DESCRIBED:
        few = f"{independent} {is_or_are(units)} too few"
        return f"There are no intervals: {few}. No finding is certain."
    said = f"The intervals are 95% intervals over {independent}"
    if unit == "seed":
        said += ": networks of one seed share their initial weights and the order of their batches"
    rough = f" With {count_of(units, unit)} they are rough." if units < FEW_UNITS else ""
    return f"{said}. Correlation is not causation.{rough}"


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
    rows = coefficients[(coefficients["kind"] != "") & (coefficients["coefficient"] == OVERALL["pearson"])]
    rows = rows.rename(columns={"value": "pearson", "low": "pearson_low", "high": "pearson_high"})
    ends = {
        str(name): same.loc[[same["pearson_low"].idxmax(), same["pearson_high"].idxmin()]]
        for name, same in rows.dropna(subset=["pearson_low", "pearson_high"]).groupby("quantity", sort=False)
    }
    return {name: two for name, two in ends.items() if two["pearson_low"].iloc[0] > 0 > two["pearson_high"].iloc[1]}


def trained_alike(study: Study) -> dict[str, str]:
    """Return each way of holding settings fixed, in words."""
    ways, told = held_fixed(study.varied), {}
    same_start = any({"seed", "model.seed"} & {*axis.split(TOGETHER)} for axis in study.varied) and _have_one_model(
        study
    )
    for names in ways:
        more = f", {ONLY_SEED}" if ("seed",) in ways and len(names) > 1 else ""
        if names == ("seed",) and same_start:
            more = ", where all networks start from the same weights"
        told[", ".join(names)] = f"a fixed {' and '.join(map(in_words, names))}{more}"
    return told


def _have_one_model(study: Study) -> bool:
    settings = {name for axis in study.varied for name in but_seeds(axis)}
    if "model" in settings or isinstance(study.base.training, TrainedElsewhere):
        return False
    return not any(path.startswith("model.") for name in settings for path in paths(study.base, name))


def other_than_gap(row: pd.Series) -> str:
    """Return the quantity of a relation with the gap."""
    return str(row["y"] if row["x"] == GAP.name else row["x"])


def is_clear(row: pd.Series, coefficient: str = "pearson") -> bool:
    """Return whether a coefficient's interval leaves out zero."""
    return bool(row[f"{coefficient}_low"] > 0 or row[f"{coefficient}_high"] < 0)


def clear(rows: Sequence[pd.Series]) -> list[pd.Series]:
    """Return the relations whose interval leaves out zero."""
    return [row for row in rows if is_clear(row)]


def strongest_first(rows: Sequence[pd.Series]) -> list[pd.Series]:
    """Return relations by the size of Pearson's r."""
    return sorted(rows, key=lambda row: -abs(row["pearson"]))


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
