"""A study in sentences, made from computed numbers and their intervals: its findings, and its answer in three lines."""

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

FEW = 20
"""Fewer units than this make rough intervals."""
WHAT, SURELY, BEWARE = "What goes with the gap", "How surely", "Beware"


# ---- the answer in three lines


def answers(
    study: Study, relations: pd.DataFrame, within: pd.DataFrame, with_gap: pd.DataFrame, left_out: int, unfinished: int
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
    rows = _strongest_first(_with_gap(names, relations))
    certain = _clear(rows)
    # the relations among networks that share all settings but the seed, and these settings in words
    words = trained_alike(study)
    groups = [", ".join(group) for group in held_fixed(study.varied) if group != ("seed",)]
    alike = [(found, words[group]) for group in reversed(groups) if (found := _with_fixed(within, group, names))]
    inside, fixed = alike[0] if alike else ([], "")
    return [
        (WHAT, _what(rows, certain)),
        (SURELY, _surely(rows, inside, fixed)),
        (BEWARE, _beware(certain, inside, fixed, with_gap, left_out, unfinished)),
    ]


def closest(names: Sequence[str], relations: pd.DataFrame) -> str | None:
    """Return the measure that goes most closely with the gap: of those that clearly do, if there are any."""
    rows = _with_gap(names, relations)
    best = max(rows, key=lambda row: (_is_clear(row), abs(row["pearson"])), default=None)
    return None if best is None else _other_than_gap(best)


def _what(rows: Sequence[pd.Series], certain: Sequence[pd.Series]) -> str:
    if not rows:
        return "No measure can be compared with the generalisation gap: too few networks are left, or there is no gap."
    best = (certain or rows)[0]
    closest_one = f"{_other_than_gap(best)}, Pearson r = {interval_of(best, 'pearson')}"
    told = f"Across {rows[0]['n']} networks, {_how_many(certain, count_of(len(rows), 'measure'), 'it')}"
    return f"{told}, most closely {closest_one}." if certain else f"{told}. The closest is {closest_one}."


def _surely(rows: Sequence[pd.Series], alike: Sequence[pd.Series], words: str) -> str:
    if not rows:
        return "There is nothing to be sure of yet."
    units = int(rows[0]["units"])
    independent = count_of(units, f"independent {'seed' if units < rows[0]['n'] else 'network'}")
    if units < FEWEST_DESCRIBED:
        said = f"With {independent} there are no intervals, so nothing here is sure."
    else:
        said = f"The 95% intervals are over {independent}{', so they are rough' if units < FEW else ''}."
    if alike:
        said += f" Within {words}, {_how_many(_clear(alike), count_of(len(alike), 'measure'), 'the gap')}."
    return said


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
    unclear = {row["x"] for row in alike if not _is_clear(row)}
    if lost := [name for name in map(_other_than_gap, certain) if name in unclear]:
        told = f"{len(lost)} of these relations are" if len(lost) > 1 else f"the relation of {lost[0]} is"
        said.append(f"Within {words}, {told} no longer clear: the settings may move both sides.")
    if turned := _turned_by_kind(with_gap):
        name, two = next(iter(turned.items()))
        told = f"{len(turned)} measures go" if len(turned) > 1 else f"{name} goes"
        kinds = f" ({', '.join(two['kind'])})" if len(turned) == 1 else ""
        said.append(f"{told} with the gap in one kind of networks and against it in another{kinds}.")
    return " ".join([*said, "A correlation is no proof of a cause."])


# ---- the findings


def findings(
    study: Study,
    networks: pd.DataFrame,
    relations: pd.DataFrame,
    within: pd.DataFrame,
    with_gap: pd.DataFrame,
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
        *_reversals(study, relations, within, with_gap),
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
        yield f"{first} Their generalisation gap, as the table of checkpoints has it, is {_range(kept[GAP.column])}."
    else:
        yield first
        if elsewhere:
            yield ("No measure is compared with the generalisation gap: the data has no test samples, and the table of "
                   "checkpoints no column gap.")  # fmt: skip
    for outcome, how in (("out of steps", "ran out of steps"), ("diverged", "diverged")):
        if number := int((networks["outcome"] == outcome).sum()):
            yield f"{count_of(number, 'network')} {how} and {is_or_are(number)} left out of every relation below."
    if failed:
        yield f"{count_of(failed, 'network')} ended in an error and {is_or_are(failed)} missing."
    if unfinished:
        yield f"{count_of(unfinished, 'network')} {is_or_are(unfinished)} not finished: this is a partial result."


def _goal(study: Study) -> str:
    if isinstance(study.base.training, TrainedElsewhere):
        return "that were trained elsewhere are measured"
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
    return f"reach {told} on their {samples}" if told else f"are trained on their {samples} to the end of their steps"


def _against_gap(quantities: Sequence[Quantity], relations: pd.DataFrame) -> Iterator[str]:
    rows = _with_gap(measure_names(quantities), relations)
    clear = _strongest_first(_clear(rows))
    if clear:
        best = clear[0]
        yield (
            f"Across {best['n']} networks the generalisation gap {'rises' if best['pearson'] > 0 else 'falls'} with "
            f"{_other_than_gap(best)} most closely: Pearson r = {interval_of(best, 'pearson')}, Kendall tau = "
            f"{interval_of(best, 'kendall')}."
        )
    for verb, sign in (("rises", 1), ("falls", -1)):
        if group := [row for row in clear[1:] if row["pearson"] * sign > 0]:
            yield f"The gap {verb} also with {_listed(group)}."
    if unclear := [row for row in rows if not _is_clear(row)]:
        known = any(row["pearson_low"] == row["pearson_low"] for row in unclear)
        why = "the interval contains zero" if known else "there are no intervals"
        yield f"No clear relation with the gap ({why}): {_listed(unclear)}."


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
            if _is_clear(row, "kendall"):
                yield f"A larger {name} goes with {fewer if row['kendall'] < 0 else more}: {tau}."
            else:
                yield f"No clear effect of the {name} on the {target.name}: {tau}."


def _within(study: Study, within: pd.DataFrame) -> Iterator[str]:
    for group, words in trained_alike(study).items():
        if not (rows := _with_fixed(within, group, measure_names(study.quantities))):
            continue
        clear = _strongest_first(_clear(rows))
        more = f": {'the three strongest are ' if len(clear) > 3 else ''}{_listed(clear[:3])}" if clear else ""
        told = _how_many(clear, f"{len(rows)} measures", "the gap")
        yield f"Within {words} ({rows[0]['groups']} groups, pooled), {told}{more}."


def _reversals(study: Study, relations: pd.DataFrame, within: pd.DataFrame, with_gap: pd.DataFrame) -> Iterator[str]:
    """Yield which measures have another sign, both clearly, where settings are held fixed, or between kinds."""
    names = measure_names(study.quantities)
    overall = {_other_than_gap(row): row for row in _clear(_with_gap(names, relations))}
    for group, words in trained_alike(study).items():
        inside = {row["x"]: row for row in _clear(_with_fixed(within, group, names))}
        turned = [
            f"{name}, {row['pearson']:.2f} overall but {interval_of(inside[name], 'pearson')}"
            for name, row in overall.items()
            if name in inside and row["pearson"] * inside[name]["pearson"] < 0
        ]
        if turned:
            yield f"Within {words}, the sign of r changes for {_first_four(turned)}."
    between = []
    for name, two in _turned_by_kind(with_gap).items():
        said = [f"{interval_of(row, 'pearson')} in {row['kind']}" for _, row in two.iterrows()]
        between.append(f"{name}, {' but '.join(said)}")
    if between:
        yield f"Between kinds of networks the sign of r changes for {_first_four(between)}."


def _twins(measures: Sequence[str], networks: pd.DataFrame) -> Iterator[str]:
    present = [name for name in measures if name in networks and networks[name].nunique() > 1]
    for a, b in combinations(present, 2):
        if np.allclose(networks[a], networks[b], 1e-9, 0, equal_nan=True):
            yield f"On these networks {b} is the same number as {a}, for this loss and activation."


def _intervals(study: Study, kept: pd.DataFrame) -> str:
    column = unit_column(study.varied)
    units, unit = kept[column].nunique(), "network" if column == "key" else "seed"
    if not units:
        return "There are no intervals: no network reached the end of its training."
    independent = count_of(units, f"independent {unit}")
    if units < FEWEST_DESCRIBED:
        few = f"{independent} {is_or_are(units)} too few"
        return f"There are no intervals: {few}. A correlation here is no proof of anything."
    said = f"The intervals are 95% intervals over {independent}"
    if unit == "seed":
        said += ": networks of one seed share their initial weights and the order of their batches"
    rough = f" With {count_of(units, unit)} they are rough at best." if units < FEW else ""
    return f"{said}. A correlation in this population is no proof of a cause.{rough}"


# ---- relations, and their words


def _relation_of(relations: pd.DataFrame, a: str, b: str) -> pd.Series | None:
    either = ((relations["x"] == a) & (relations["y"] == b)) | ((relations["x"] == b) & (relations["y"] == a))
    return relations[either].iloc[0] if either.any() else None


def _with_gap(names: Sequence[str], relations: pd.DataFrame) -> list[pd.Series]:
    """Return the relations of these measures with the gap, without those that are undefined."""
    rows = [row for name in names if (row := _relation_of(relations, GAP.name, name)) is not None]
    return [row for row in rows if row["pearson"] == row["pearson"]]


def _with_fixed(within: pd.DataFrame, group: str, names: Sequence[str]) -> list[pd.Series]:
    """Return the relations of these measures with the gap where this group of settings is fixed; no undefined ones."""
    rows = [row for _, row in within[within["group"] == group].iterrows() if row["x"] in names]
    return [row for row in rows if row["pearson"] == row["pearson"]]


def _turned_by_kind(with_gap: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the measures that clearly go with the gap in one kind of networks and against it in another.

    Each has two rows: Pearson's r in one kind, and in the other.
    """
    rows = with_gap[(with_gap["kind"] != "") & (with_gap["coefficient"] == OVERALL["pearson"])]
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
        more = ", where only the seed differs" if ("seed",) in ways and len(names) > 1 else ""
        if names == ("seed",) and same_start:
            more = ", where all networks start from the same weights"
        told[", ".join(names)] = f"a fixed {' and '.join(map(in_words, names))}{more}"
    return told


def _have_one_model(study: Study) -> bool:
    settings = {name for axis in study.varied for name in but_seeds(axis)}
    if "model" in settings or isinstance(study.base.training, TrainedElsewhere):
        return False
    return not any(path.startswith("model.") for name in settings for path in paths(study.base, name))


def _other_than_gap(row: pd.Series) -> str:
    return str(row["y"] if row["x"] == GAP.name else row["x"])


def _is_clear(row: pd.Series, coefficient: str = "pearson") -> bool:
    """Return whether a coefficient's interval leaves out zero."""
    return bool(row[f"{coefficient}_low"] > 0 or row[f"{coefficient}_high"] < 0)


def _clear(rows: Sequence[pd.Series]) -> list[pd.Series]:
    return [row for row in rows if _is_clear(row)]


def _strongest_first(rows: Sequence[pd.Series]) -> list[pd.Series]:
    return sorted(rows, key=lambda row: -abs(row["pearson"]))


def _how_many(clear: Sequence[pd.Series], of: str, it: str) -> str:
    """Return how many of all measures, `of`, clearly go with the gap, called `it`, and how many against it."""
    up = sum(bool(row["pearson"] > 0) for row in clear)
    down = len(clear) - up
    if down and not up:
        return f"{down} of {of} clearly {'goes' if down == 1 else 'go'} against {it}"
    against = f", and {down} against it" if down else ""
    return f"{up or 'none'} of {of} clearly {'goes' if up == 1 else 'go'} with {it}{against}"


def _listed(rows: Sequence[pd.Series]) -> str:
    return "; ".join(f"{_other_than_gap(row)}, r = {interval_of(row, 'pearson')}" for row in rows)


def _first_four(turned: Sequence[str]) -> str:
    more = f"; and for {len(turned) - 4} more" if len(turned) > 4 else ""
    return "; ".join(turned[:4]) + more


def interval_of(row: pd.Series, coefficient: str) -> str:
    """Return a coefficient with its interval, if it has one."""
    low, high = row[f"{coefficient}_low"], row[f"{coefficient}_high"]
    return f"{row[coefficient]:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low == low else "")


def is_or_are(number: int) -> str:
    """Return the verb of so many."""
    return "is" if number == 1 else "are"


def _range(values: pd.Series, form: str = ".3g") -> str:
    low, high = f"{values.min():{form}}", f"{values.max():{form}}"
    return low if low == high else f"{low} to {high}"
