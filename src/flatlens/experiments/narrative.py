"""A study in sentences, made from computed numbers and their intervals: its findings, and its answer in three lines."""

from __future__ import annotations

from collections.abc import Sequence
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
    return [
        *_population(study, networks, unfinished, failed),
        *_against_gap(study.quantities, relations),
        *_settings(study.quantities, relations),
        *_within(study, within),
        *_reversals(study, relations, within),
        *_turned_by_kind(with_gap),
        *_twins(study.base.measures, networks),
        _intervals(study, networks),
    ]


def _intervals(study: Study, networks: pd.DataFrame) -> str:
    """Return what the intervals are over, and what they do not say."""
    kept = networks[networks["outcome"].isin(REACHED)]
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


def _population(study: Study, networks: pd.DataFrame, unfinished: int, failed: int) -> list[str]:
    kept = networks[networks["outcome"].isin(REACHED)]
    total = len(study.networks())
    elsewhere = isinstance(study.base.training, TrainedElsewhere)
    steps = "" if elsewhere or not len(kept) else f", after {_range(kept['steps'], ',')} steps"
    sentences = [f"{len(kept)} of {total} networks {_goal(study)}{steps}."]
    if {"test_accuracy", GAP.column} <= set(kept) and len(kept):
        sentences[0] += (
            f" Their test accuracy is {_range(kept['test_accuracy'])}, their generalisation gap (test loss minus "
            f"training loss) {_range(kept[GAP.column])}."
        )
    elif elsewhere and GAP.column in kept:
        sentences[0] += f" Their generalisation gap, as the table of checkpoints has it, is {_range(kept[GAP.column])}."
    elif elsewhere:
        sentences.append("No measure is compared with the generalisation gap: the data has no test samples, and the "
                         "table of checkpoints no column gap.")  # fmt: skip
    for outcome in ("out of steps", "diverged"):
        if number := int((networks["outcome"] == outcome).sum()):
            how = "ran out of steps" if outcome == "out of steps" else outcome
            sentences.append(
                f"{count_of(number, 'network')} {how} and {is_or_are(number)} left out of every relation below."
            )
    if failed:
        sentences.append(f"{count_of(failed, 'network')} ended in an error and {is_or_are(failed)} missing.")
    if unfinished:
        sentences.append(
            f"{count_of(unfinished, 'network')} {is_or_are(unfinished)} not finished: this is a partial result."
        )
    return sentences


def _goal(study: Study) -> str:
    """Return the goal of training in words."""
    train = study.base.data.train
    if isinstance(study.base.training, TrainedElsewhere):
        return "that were trained elsewhere are measured"
    until = study.base.training.until
    samples = f"{train} training samples" if train else "training samples"
    low = "" if until.loss_below is None else f"loss below {until.loss_below:g}"
    if until.accuracy == 1 and low:
        return f"interpolate their {samples} (accuracy 1, {low})"
    conditions = [
        low,
        "" if until.accuracy is None else f"accuracy at least {until.accuracy:g}",
        "" if until.gradient_norm is None else f"gradient norm at most {until.gradient_norm:g}",
    ]
    told = " and ".join(condition for condition in conditions if condition)
    return f"reach {told} on their {samples}" if told else f"are trained on their {samples} to the end of their steps"


def trained_alike(study: Study) -> dict[str, str]:
    """Return each way of holding settings fixed, in words."""
    ways, told = held_fixed(study.varied), {}
    fixed = {"seed", "model.seed"} & {name for axis in study.varied for name in axis.split(TOGETHER)}
    same_start = bool(fixed) and _have_one_model(study)
    for names in ways:
        words = " and ".join(map(in_words, names))
        only_seed = ("seed",) in ways and len(names) > 1
        more = ", where only the seed differs" if only_seed else ""
        more = ", where all networks start from the same weights" if names == ("seed",) and same_start else more
        told[", ".join(names)] = f"a fixed {words}{more}"
    return told


def _have_one_model(study: Study) -> bool:
    """Return whether the networks are known to differ in nothing of their architecture but its seed."""
    settings = {name for axis in study.varied for name in but_seeds(axis)}
    if "model" in settings or isinstance(study.base.training, TrainedElsewhere):
        return False
    return not any(path.startswith("model.") for name in settings for path in paths(study.base, name))


def _against_gap(quantities: Sequence[Quantity], relations: pd.DataFrame) -> list[str]:
    """Return each measure's relation with the gap: intervals without zero first, strongest first, then the others."""
    names = measure_names(quantities)
    rows = [row for name in names if (row := relation_of(relations, GAP.name, name)) is not None]
    clear = sorted((r for r in rows if is_clear(r, "pearson")), key=lambda r: -abs(r["pearson"]))
    unclear = [r for r in rows if not is_clear(r, "pearson") and r["pearson"] == r["pearson"]]
    sentences = []
    if clear:
        best = clear[0]
        verb = "rises" if best["pearson"] > 0 else "falls"
        sentences.append(
            f"Across {best['n']} networks the generalisation gap {verb} with {other_than_gap(best)} most closely: "
            f"Pearson r = {interval_of(best, 'pearson')}, Kendall tau = {interval_of(best, 'kendall')}."
        )
    for verb, sign in (("rises", 1), ("falls", -1)):
        if group := [r for r in clear[1:] if r["pearson"] * sign > 0]:
            listed = "; ".join(f"{other_than_gap(r)}, r = {interval_of(r, 'pearson')}" for r in group)
            sentences.append(f"The gap {verb} also with {listed}.")
    if unclear:
        listed = "; ".join(f"{other_than_gap(r)}, r = {interval_of(r, 'pearson')}" for r in unclear)
        known = any(r["pearson_low"] == r["pearson_low"] for r in unclear)
        why = "the interval contains zero" if known else "there are no intervals"
        sentences.append(f"No clear relation with the gap ({why}): {listed}.")
    return sentences


def _settings(quantities: Sequence[Quantity], relations: pd.DataFrame) -> list[str]:
    """Return the relations of each setting with sharpness and with the gap."""
    sentences = []
    for setting in (q for q in quantities if q.role == "setting"):
        name = setting.name.removesuffix(" (log)")
        for target, low, high in ((SHARPNESS, "flatter", "sharper"), (GAP, "smaller gaps", "larger gaps")):
            row = relation_of(relations, setting.name, target.name)
            if row is None or row["kendall"] != row["kendall"]:
                continue
            tau = f"Kendall tau of {name} and {target.name} = {interval_of(row, 'kendall')} (n = {row['n']})"
            if not is_clear(row, "kendall"):
                sentences.append(f"No clear effect of the {name} on the {target.name}: {tau}.")
            elif target is SHARPNESS:
                sentences.append(f"A larger {name} goes with {low if row['kendall'] < 0 else high} minima: {tau}.")
            else:
                sentences.append(f"A larger {name} goes with {low if row['kendall'] < 0 else high}: {tau}.")
    return sentences


def _within(study: Study, within: pd.DataFrame) -> list[str]:
    """Return the relations with the gap that remain when settings are held fixed."""
    sentences = []
    for group, words in trained_alike(study).items():
        rows = with_fixed(within, group, measure_names(study.quantities))
        if not rows:
            continue
        clear = sorted((r for r in rows if is_clear(r, "pearson")), key=lambda r: -abs(r["pearson"]))
        listed = "; ".join(f"{r['x']}, r = {interval_of(r, 'pearson')}" for r in clear[:3])
        more = f": {'the three strongest are ' if len(clear) > 3 else ''}{listed}" if clear else ""
        told = clearly(clear, f"{len(rows)} measures", "the gap")
        sentences.append(f"Within {words} ({rows[0]['groups']} groups, pooled), {told}{more}.")
    return sentences


def _reversals(study: Study, relations: pd.DataFrame, within: pd.DataFrame) -> list[str]:
    """Return the measures whose clear relation with the gap changes its sign clearly when settings are held fixed."""
    sentences = []
    for group, words in trained_alike(study).items():
        turned = []
        for name in measure_names(study.quantities):
            overall = relation_of(relations, GAP.name, name)
            inside = within[(within["x"] == name) & (within["group"] == group)]
            if overall is None or inside.empty or overall["pearson"] * inside["pearson"].iloc[0] >= 0:
                continue
            if is_clear(overall, "pearson") and is_clear(inside.iloc[0], "pearson"):
                turned.append(f"{name}, {overall['pearson']:.2f} overall but {interval_of(inside.iloc[0], 'pearson')}")
        if turned:
            sentences.append(f"Within {words}, the sign of r changes for {_first_four(turned)}.")
    return sentences


def turned_by_kind(with_gap: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the measures that clearly go with the gap in one kind of networks and against it in another.

    `with_gap` is the table of `gap_correlations`. Each measure has two rows: Pearson's r in one kind, and in the other.
    """
    rows = with_gap[(with_gap["kind"] != "") & (with_gap["coefficient"] == OVERALL["pearson"])]
    rows = rows.rename(columns={"value": "pearson", "low": "pearson_low", "high": "pearson_high"})
    ends = {
        str(name): same.loc[[same["pearson_low"].idxmax(), same["pearson_high"].idxmin()]]
        for name, same in rows.dropna(subset=["pearson_low", "pearson_high"]).groupby("quantity", sort=False)
    }
    return {name: two for name, two in ends.items() if two["pearson_low"].iloc[0] > 0 > two["pearson_high"].iloc[1]}


def _turned_by_kind(with_gap: pd.DataFrame) -> list[str]:
    """Return the sentence about measures whose sign is another in another kind of networks."""
    turned = []
    for name, two in turned_by_kind(with_gap).items():
        said = [f"{interval_of(row, 'pearson')} in {row['kind']}" for _, row in two.iterrows()]
        turned.append(f"{name}, {' but '.join(said)}")
    return [f"Between kinds of networks the sign of r changes for {_first_four(turned)}."] if turned else []


def _first_four(turned: Sequence[str]) -> str:
    more = f"; and for {len(turned) - 4} more" if len(turned) > 4 else ""
    return "; ".join(turned[:4]) + more


def _twins(measures: Sequence[str], networks: pd.DataFrame) -> list[str]:
    """Return the pairs of measures that are equal on all of these networks."""
    present = [name for name in measures if name in networks and networks[name].nunique() > 1]
    pairs = [
        (a, b) for a, b in combinations(present, 2) if np.allclose(networks[a], networks[b], 1e-9, 0, equal_nan=True)
    ]
    return [f"On these networks {b} is the same number as {a}, for this loss and activation." for a, b in pairs]


def relation_of(relations: pd.DataFrame, a: str, b: str) -> pd.Series | None:
    """Return the row of a pair, in either order; None if there is none."""
    either = ((relations["x"] == a) & (relations["y"] == b)) | ((relations["x"] == b) & (relations["y"] == a))
    return relations[either].iloc[0] if either.any() else None


def with_fixed(within: pd.DataFrame, group: str, names: Sequence[str]) -> list[pd.Series]:
    """Return the relations of these measures with the gap where this group of settings is fixed; no undefined ones."""
    rows = [row for _, row in within[within["group"] == group].iterrows() if row["x"] in names]
    return [row for row in rows if row["pearson"] == row["pearson"]]


def other_than_gap(row: pd.Series) -> str:
    """Return the quantity of a relation that is not the gap."""
    return str(row["y"] if row["x"] == GAP.name else row["x"])


def is_clear(row: pd.Series, coefficient: str) -> bool:
    """Return whether a coefficient's interval leaves out zero."""
    return bool(row[f"{coefficient}_low"] > 0 or row[f"{coefficient}_high"] < 0)


def clearly(clear: Sequence[pd.Series], of: str, it: str) -> str:
    """Return in words how many of all measures, `of`, clearly go with the gap, called `it`, and how many against it.

    `clear` are the relations whose interval leaves out zero.
    """
    up = sum(bool(row["pearson"] > 0) for row in clear)
    down = len(clear) - up
    if down and not up:
        return f"{down} of {of} clearly {_go(down)} against {it}"
    against = f", and {down} against it" if down else ""
    return f"{up or 'none'} of {of} clearly {_go(up)} with {it}{against}"


def _go(count: int) -> str:
    return "goes" if count == 1 else "go"


def interval_of(row: pd.Series, coefficient: str) -> str:
    """Return a coefficient with its interval, if it has one."""
    low, high = row[f"{coefficient}_low"], row[f"{coefficient}_high"]
    return f"{row[coefficient]:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low == low else "")


def _range(values: pd.Series, form: str = ".3g") -> str:
    low, high = f"{values.min():{form}}", f"{values.max():{form}}"
    return low if low == high else f"{low} to {high}"


def is_or_are(number: int) -> str:
    """Return the verb of so many."""
    return "is" if number == 1 else "are"


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
