"""What correlates with the generalisation gap: the lines, the picture and the table of docs/papers/index.md.

A population is the networks of one kind in one study. `papers.py` asks for all of it, from the stored tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeAlias

import altair as alt
import atlas
import numpy as np
import pandas as pd
import vl_convert
from compact import compact
from scipy.stats import beta

from flatlens.column import Column
from flatlens.experiments.overrides import but_seeds
from flatlens.experiments.quantities import GAP
from flatlens.experiments.result import StudyResult
from flatlens.experiments.tables import LOSSES_DIFFER, kinds_of, training_losses, without_seeds
from flatlens.papers.evidence import ACCURACY_GAP, UNIT, accuracy_gaps, correlated, independent, studied, these
from flatlens.papers.reparam2019 import layer_five
from flatlens.papers.reproduction import Reproduction
from flatlens.statistics import Statistic, partial_correlation
from flatlens.statistics.groupwise import relate_within

LOSS = "training loss"
SEEDS = "the seed alone"
REGULARISED = "a regulariser's strength"
DIFFERENCES: Mapping[str, str] = {
    "label_smoothing": REGULARISED, "mixup.beta": REGULARISED, "augmentation.p": REGULARISED,
    "ascent.rho": REGULARISED, "coefficient": REGULARISED, "weight_decay": REGULARISED,
    "train": "number of samples", "separation": "class separation",
    "scale": "scale of inputs or weights", "start": "scale of inputs or weights", "init": "scale of inputs or weights",
    "model.widths": "width", "max_steps": "length of training",
    "lr": "learning rate, batch size, optimiser", "batch_size": "learning rate, batch size, optimiser",
}  # fmt: skip
"""What differs between networks, by the setting that varies; where several vary, the first of these counts."""
NO_MEASURES = {
    "true error": "it is the test error",
    "loss less label entropy": "a training loss",
    LOSS: "the others are weighed given it",
}
"""Quantities that are no candidates, with the reason."""
FALLS_BY_CONSTRUCTION = "bound"
"""Bounds have the number of samples in their denominator: where that differs they say nothing of a network."""
FEWEST = 3  #: populations in which a measure was seen, to be one to use
DRAWN_FROM = 2  #: populations in which a measure was seen, to be in the picture
SHOWN = tuple(dict.fromkeys([SEEDS, "learning rate, batch size, optimiser", *DIFFERENCES.values()]))[:6]
PANELS = ("with the gap of the loss", "with the gap of the accuracy", "with that of the loss, given the training loss")
COLUMNS = ("gap", "accuracy gap", "gap given loss")
EQUAL = ("equal settings", "equal settings, accuracy gap", "equal settings, given loss")
PICTURE, TABLE = Path("..") / "images" / "gap.svg", Path("gap.csv")
ONE_NAME = {
    "Jacobian norm of softmax": "Jacobian norm of the softmax",
    "Jacobian norm, softmaxed": "Jacobian norm of the softmax",
    "bound of NMLS": "bound on NMLS",
    "D": "bound on MLS",
}
"""What one quantity is called in some studies, and here."""


Three: TypeAlias = tuple[Statistic | None, Statistic | None, Statistic | None]


@dataclass(frozen=True)
class Relation:
    """How a measure correlates with the gap in one population."""

    measure: str
    difference: str  #: what differs between the networks: a value of DIFFERENCES
    experiment: str
    where: str  #: the study, and the kind of its networks
    gap: Statistic  #: rank correlation with the gap of the loss
    accuracy: Statistic | None  #: with the gap of the accuracy; None where it is not known
    given: Statistic | None  #: with the gap of the loss, given the training loss; None where losses do not differ
    #: Pearson's r with the gap, with that of the accuracy, and with the gap given the training loss, among networks of
    #: equal settings; None where it is not known
    equal: Three
    column: str = ""  #: the column of the measure in the study's table
    classes: bool = True  #: whether outputs are classes: only then there is an accuracy


def relations(found: Iterable[Reproduction]) -> list[Relation]:
    """Return every measure with the gap in every population, by measure."""
    every = [
        each for one in found for name, result in one.results.items() for kind, part in _kinds(result)
        for each in _relations(replace(one, results={name: part}), name, kind)
    ]  # fmt: skip
    return sorted(every, key=lambda each: (each.measure, each.experiment, each.where))


def _kinds(result: StudyResult) -> Iterator[tuple[str, StudyResult]]:
    kinds = kinds_of(result.networks)
    for kind in dict.fromkeys(kinds):
        keys = set(result.networks.loc[kinds == kind, "key"])
        networks, values = (
            table[table["key"].isin(keys)].reset_index(drop=True) for table in (result.networks, result.values)
        )
        yield kind, replace(result, networks=networks, values=values)


def _relations(one: Reproduction, name: str, kind: str) -> Iterator[Relation]:
    result = one.results[name]
    table = _table(one, name)
    if GAP.name not in table or not table[GAP.name].notna().any():
        return
    varied = {setting for axis in result.varied for setting in but_seeds(axis)}
    difference = next((said for setting, said in DIFFERENCES.items() if setting in varied), SEEDS)
    within = _within(result, table)
    classes = bool(result.curves["accuracy"].notna().any())
    for quantity in result.quantities:
        measure = quantity.name
        if quantity.role != "measure" or measure not in table:
            continue
        yield Relation(
            ONE_NAME.get(measure, measure), difference, one.experiment.id, f"{name.replace('_', ' ')} {kind}".strip(),
            _ranks(table, measure, GAP.name), _ranks(table, measure, ACCURACY_GAP) if ACCURACY_GAP in table else None,
            _given_loss(table, measure), within.get(measure, (None, None, None)), quantity.column,
            classes,
        )  # fmt: skip


def _table(one: Reproduction, name: str) -> pd.DataFrame:
    """Return the networks of a study with their gaps, training losses and units; those of X14 are four schemes."""
    result, units = one.results[name], studied(name)
    if one.experiment.id == "X14":
        init = layer_five(one.results, name).set_index("key")["init"]
        units = independent(lambda results: studied(name)(results).assign(scheme=lambda t: t["key"].map(init)),
                            "scheme")  # fmt: skip
    networks = result.networks.set_index("key")
    losses = training_losses(result.networks, result.curves).set_axis(networks.index)
    columns = {LOSS: losses, **accuracy_gaps(networks)}
    table = units(one.results)
    return table.assign(**{name: table["key"].map(column) for name, column in columns.items() if name not in table})


def _ranks(table: pd.DataFrame, measure: str, target: str) -> Statistic:
    return correlated(these(table), measure, target, "spearman")({})


def _given_loss(table: pd.DataFrame, measure: str) -> Statistic | None:
    losses = table[LOSS]
    if measure == LOSS or not _differ(losses):
        return None
    return partial_correlation(table[measure], table[GAP.name], losses, "spearman", units=table[UNIT])


def _differ(losses: pd.Series) -> bool:
    return bool(losses.notna().all() and losses.max() > LOSSES_DIFFER * losses.min())


def _within(result: StudyResult, table: pd.DataFrame) -> Mapping[str, Three]:
    """Return `Relation.equal` by measure: the means of each group of equal settings are taken off."""
    settings = without_seeds(result.networks, result.varied)
    used = result.values["included"].astype(bool)
    if settings.empty or GAP.name not in result.values:
        return {}
    group, seeds = settings.agg(" ".join, axis=1)[used], result.networks["seed"][used]
    measures = [quantity.name for quantity in result.quantities if quantity.name in result.values]
    columns = result.values[measures][used]
    known = table.set_index("key").reindex(result.values["key"][used]).set_axis(columns.index)

    def with_target(columns: pd.DataFrame, target: str) -> dict[str, Statistic]:
        found = relate_within(columns, target, {"settings": group}, seeds)
        return {
            row["x"]: Statistic("r", row["pearson"], int(row["n"]), row["pearson_low"], row["pearson_high"],
                                units=int(row["units"]))
            for _, row in found.iterrows() if row["pearson"] == row["pearson"]
        }  # fmt: skip

    gaps = with_target(columns, GAP.name)
    accuracies, given = {}, {}
    if ACCURACY_GAP in known:
        accuracies = with_target(columns.assign(**{ACCURACY_GAP: known[ACCURACY_GAP]}), ACCURACY_GAP)
    if _differ(known[LOSS]):
        held = pd.get_dummies(group, drop_first=True, dtype=float).assign(**{LOSS: known[LOSS]})
        given = {
            name: partial_correlation(columns[name], columns[GAP.name], held, units=seeds)
            for name in gaps
            if name != LOSS
        }
    return {name: (one, accuracies.get(name), given.get(name)) for name, one in gaps.items()}


@dataclass(frozen=True)
class Seen:
    """How a measure correlates with the gap over all populations in which one thing differs."""

    measure: str
    column: str  #: the shortest of its columns
    experiments: list[str]
    networks: int
    gap: list[Statistic]
    accuracy: list[Statistic]  #: of the populations where it is known
    given: list[Statistic]  #: of those whose training losses differ
    classes: bool  #: whether outputs are classes in one of the populations


def seen_where(every: Sequence[Relation], difference: str) -> list[Seen]:
    """Return each measure over the populations of one difference; for SEEDS, among networks of equal settings."""
    if difference == SEEDS:
        fields = ("gap", "accuracy", "given")
        mine = [replace(one, **dict(zip(fields, one.equal, strict=True))) for one in every if one.equal[0] is not None]
    else:
        mine = [one for one in every if one.difference == difference]
    by_measure: dict[str, list[Relation]] = {}
    for one in mine:
        by_construction = FALLS_BY_CONSTRUCTION in one.measure and difference == DIFFERENCES["train"]
        if one.measure not in NO_MEASURES and not by_construction and one.gap.value == one.gap.value:
            by_measure.setdefault(one.measure, []).append(one)
    return [
        Seen(
            measure,
            min((one.column for one in those), key=len),
            list(dict.fromkeys(one.experiment for one in those)),
            sum(one.gap.n for one in those),
            [one.gap for one in those],
            [one.accuracy for one in those if one.accuracy is not None],
            [one.given for one in those if one.given is not None],
            any(one.classes for one in those),
        )
        for measure, those in by_measure.items()
    ]


def sign(one: Statistic) -> int:
    """Return the sign of a correlation whose 95% interval excludes 0, else 0."""
    return (one.low > 0) - (one.high < 0)


def share(found: Sequence[Statistic], side: int) -> float:
    """Return the lower end of the exact 95% interval of the share of populations with this sign."""
    held = sum(sign(one) == side for one in found)
    return float(beta.ppf(0.025, held, len(found) - held + 1)) if held else 0.0


def useful(seen: Sequence[Seen]) -> Seen | None:
    """Return the measure to use: positively correlated in over half of FEWEST populations or more, also given the loss.

    Given the training loss it is so more often than negatively; of several measures it is the one of the
    largest `share` there, or of the gap where losses do not differ.
    """
    with_it = [
        one for one in seen
        if len(one.gap) >= FEWEST and 2 * sum(sign(s) == 1 for s in one.gap) > len(one.gap)
        and (not one.given or sum(map(sign, one.given)) > 0)
    ]  # fmt: skip
    return max(with_it, key=lambda one: (share(one.given or one.gap, 1), middle(one.given or one.gap)), default=None)


def misleading(seen: Sequence[Seen]) -> Seen | None:
    """Return the measure that correlates negatively in the largest `share` of its populations, two or more."""
    against = [one for one in seen if sum(sign(s) == -1 for s in one.gap) > 1]
    return max(against, key=lambda one: (share(one.gap, -1), -middle(one.gap)), default=None)


def middle(found: Sequence[Statistic]) -> float:
    """Return the median of the values."""
    return median(one.value for one in found)


def advice(every: Sequence[Relation]) -> Iterator[str]:
    """Yield a table: for each thing that differs, which measure to use, and which to avoid."""
    yield from atlas.head("what differs", "", "measure", "with the gap", "accuracy gap", "given the training loss",
                          "networks", "from", numbers=("networks",))  # fmt: skip
    for difference in SHOWN:
        seen = seen_where(every, difference)
        best, worst = useful(seen), misleading(seen)
        yield _line(f"**{difference}**", "use", best)
        if worst is not None:
            yield _line("", "avoid" if sum(map(sign, worst.accuracy)) <= 0 else "the gaps disagree", worst)
    yield ""


def _line(difference: str, word: str, one: Seen | None) -> str:
    if one is None:
        return atlas.line(difference, word, "no measure qualifies", "", "", "", "", "")
    gap, accuracy, given = (_counted(found) for found in (one.gap, one.accuracy, one.given))
    cells = gap, accuracy if one.classes else "regression", given
    return atlas.line(difference, word, _with_name(one), *cells, f"{one.networks:,}", ", ".join(one.experiments))


def _with_name(one: Seen) -> str:
    """Return the measure with the name to type: "Gauss-Newton norm (`ggn_norm`)"; of a bound's side the bound's."""
    column = Column.parse(one.column) if one.column else None
    return one.measure if column is None or column.measure == one.measure else f"{one.measure} (`{column.measure}`)"


def _counted(found: Sequence[Statistic]) -> str:
    """Return the median, and in how many populations the interval is on either side: "0.78 (19 +, 0 − of 20)"."""
    if not found:
        return "not known"
    signs = [sign(one) for one in found]
    return f"{middle(found):.2f} ({signs.count(1)} +, {signs.count(-1)} − of {len(found)})"


def picture(every: Sequence[Relation]) -> str:
    """Return the heat map of measures by what differs, for both gaps and given the training loss, as an SVG."""
    seen = {difference: [one for one in seen_where(every, difference) if len(one.gap) >= DRAWN_FROM]
            for difference in SHOWN}  # fmt: skip
    several = {one.measure for difference in SHOWN if difference != SEEDS for one in seen[difference]}
    cells = [
        {"measure": one.measure, "difference": difference, "r": middle(found), "which": which}
        for difference in SHOWN for one in seen[difference] if one.measure in several
        for which, found in zip(PANELS, (one.gap, one.accuracy, one.given), strict=True) if found
    ]  # fmt: skip
    base = alt.Chart(pd.DataFrame(cells)).encode(
        x=alt.X("difference:N", sort=list(SHOWN), title=None, axis=alt.Axis(labelAngle=-40, labelLimit=200)),
        y=alt.Y("measure:N", title=None, axis=alt.Axis(labelLimit=200)),
    )
    colour = alt.Color("r:Q", scale=alt.Scale(scheme="blueorange", domain=[-1, 1]), title="r")
    text = base.mark_text(fontSize=9).encode(text=alt.Text("r:Q", format=".2f"))
    chart = alt.layer(base.mark_rect().encode(color=colour), text).properties(width=alt.Step(36), height=alt.Step(18))
    drawn = chart.facet(column=alt.Column("which:N", title=None, sort=list(PANELS)))
    # a browser's font may be wider than the one that these labels are measured by
    drawn = drawn.properties(padding={"left": 60, "right": 20, "top": 5, "bottom": 50})
    return compact(vl_convert.vegalite_to_svg(drawn.to_json(), allowed_base_urls=[]))


def long_table(every: Sequence[Relation]) -> pd.DataFrame:
    """Return every measure in every population: correlations with the gaps, with 95% intervals."""
    rows = []
    for one in every:
        row: dict[str, object] = {
            "measure": one.measure, "what differs": one.difference, "experiment": one.experiment,
            "population": one.where, "networks": one.gap.n, "units": one.gap.units, "unit": one.gap.unit,
        }  # fmt: skip
        for name, s in zip((*COLUMNS, *EQUAL), (one.gap, one.accuracy, one.given, *one.equal), strict=True):
            row |= {name: np.nan, f"{name} low": np.nan, f"{name} high": np.nan} if s is None else {
                name: s.value, f"{name} low": s.low, f"{name} high": s.high
            }  # fmt: skip
        rows.append(row)
    return pd.DataFrame(rows)


def page(found: Iterable[Reproduction], folder: Path) -> Iterator[str]:
    """Yield the lines of the page; write the picture and the table beside it."""
    every = relations(found)
    yield from advice(every)
    (folder / PICTURE).write_text(picture(every))
    long_table(every).to_csv(folder / TABLE, index=False, float_format="%.3g")
    yield f"![Measures by what differs between networks]({PICTURE})"
    yield ""
