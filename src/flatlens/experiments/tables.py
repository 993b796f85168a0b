"""Tables of a study: of its networks, from their folders or an earlier result, and what is derived from these tables.

`tables_of` has the numbers of each network, `Loaded` all of them together; `values_table`, `groupings` and
`gap_correlations` say what is correlated with the generalisation gap, and over which groups.

Levels of an axis of words, such as SAM and none, are compared over pairs of networks with the same seed and the same
other settings. Where no level shares a seed with another, they are groups of independent networks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import nan
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from flatlens.column import Column, split_at_commas
from flatlens.comparing.comparison import direction
from flatlens.comparing.rankings import proportional
from flatlens.experiments.overrides import (
    IDENTITY,
    NONE,
    TOGETHER,
    but_seeds,
    is_seed,
    last_field,
    seedless,
    setting_columns,
    setting_text,
    split_values,
    value_of,
)
from flatlens.experiments.quantities import GAP, Quantity, measure_names
from flatlens.experiments.result import TABLE_COLUMNS, StudyResult
from flatlens.experiments.settings import NetworkSettings, facts
from flatlens.experiments.store import Record
from flatlens.measures import MEASURES, named
from flatlens.measures.definition import RESCALINGS
from flatlens.progress import count_of
from flatlens.statistics import (
    GroupDifference,
    Statistic,
    correlate,
    granulated_kendall,
    group_differences,
    partial_correlation,
)
from flatlens.statistics.correlations import TITLES
from flatlens.statistics.group_differences import as_frame
from flatlens.statistics.resampling import FEWEST_POINTS
from flatlens.training import REACHED, TrainedElsewhere, Training
from flatlens.training.settings import RESULTS, SHARES
from flatlens.user_code import short


def kinds_of(networks: pd.DataFrame) -> pd.Series[str]:
    """Return each network's kind in the words that differ, "" where all are of one kind; as the column `kind`.

    BatchNorm is named only of architectures that can have it, and if it differs among them.

    >>> models = ["VGG11(classes=10, batchnorm=False)", "ResNet18(classes=10, batchnorm=True)", "LeNet5(classes=10)"]
    >>> kinds_of(pd.DataFrame({"model": models})).tolist()
    ['VGG11 without BatchNorm', 'ResNet18 with BatchNorm', 'LeNet5']
    >>> kinds_of(pd.DataFrame({"model.batchnorm": [True, False]})).tolist()
    ['with BatchNorm', 'without BatchNorm']
    """
    model = networks["model"].map(str) if "model" in networks else pd.Series("", index=networks.index)
    setting = next((name for name in networks if last_field(str(name)) == "batchnorm"), None)
    told = (
        model.astype(str).str.extract(r"\bbatchnorm=(True|False)")[0] if setting is None else networks[setting].map(str)
    )
    said = told.map({"True": "with BatchNorm", "False": "without BatchNorm"})
    words = [part.fillna("") for part in (model.map(lambda m: m.partition("(")[0]), said) if part.nunique() > 1]
    named = pd.concat(words, axis=1).agg(" ".join, axis=1) if words else pd.Series("", index=networks.index)
    return named.str.strip().rename("kind")


def tables_of(records: Sequence[Record], varied: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return the tables whose rows are of one network each, by name, with the networks in the order given."""
    networks, layers = [], []
    parts: dict[str, list[pd.DataFrame]] = {"curves": [], "histories": [], "functions": []}
    for record in records:
        identity, training, curves = _identity(record), record.settings.training, record.curves
        # the network: identity, other varied settings, outcome, steps, all numbers
        own = {name: setting_of(record.settings, name) for name in setting_columns(varied)}
        row = {**identity, **own, "outcome": record.result["outcome"]}
        if "steps" not in own:
            row["steps"] = record.result["steps"]
        row |= {str(Column.of(*key)): e.value for key, e in record.report.items()}
        networks.append(row | training.results if isinstance(training, TrainedElsewhere) else row)
        # each layer's values, with its position in execution order
        position = {layer: number for number, layer in enumerate(record.result["layers"])}
        layers += [
            {**identity, "measure": name, "layer": layer, "position": position.get(layer, len(position))}
            | {"value": e.value, "kind": e.kind}
            for (name, layer), e in record.report.items()
            if layer is not None
        ]
        # curves, which a training elsewhere has not; measures followed in training; the graph of one from R to R
        if "step" in curves:
            of_steps = {name: curves[name].numpy() for name in ("step", "loss", "accuracy", "test_loss")}
            parts["curves"].append(pd.DataFrame({**identity, **of_steps}))
        if record.history is not None:
            parts["histories"].append(record.history.rename(columns={"lr": "rate"}).assign(**identity))
        if "input" in curves:
            graph = {"x": curves["input"].numpy(), "y": curves["output"].numpy()}
            parts["functions"].append(pd.DataFrame({**identity, **graph}))
    in_order = list(dict.fromkeys(name for row in networks for name in row))  # one that diverged has no measured ones
    tables = {
        "networks": pd.DataFrame(networks, columns=in_order),
        "layers": pd.DataFrame(layers, columns=TABLE_COLUMNS["layers"]),
    }
    for name, several in parts.items():
        columns = TABLE_COLUMNS[name]
        whole = [table[columns] for table in several] or [pd.DataFrame(columns=columns)]
        tables[name] = pd.concat(whole, ignore_index=True)
    return tables


def values_table(networks: pd.DataFrame, quantities: Sequence[Quantity]) -> pd.DataFrame:
    """Return the studied quantities, transformed; `included` is true if training reached its end."""
    identity = networks[IDENTITY].assign(included=networks["outcome"].isin(REACHED))
    return pd.concat([identity, pd.DataFrame({q.name: q.of(networks) for q in quantities})], axis=1)


def held_fixed(varied: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the useful ways of holding settings fixed: the first setting, all but the seed, the seed.

    >>> held_fixed(["lr", "batch_size", "seed"])
    [('lr',), ('lr', 'batch_size'), ('seed',)]
    >>> held_fixed(["batchnorm+seed"]), held_fixed(["lr", "model.seed"])
    ([('batchnorm',), ('seed',)], [('lr',)])
    """
    others = tuple(name for axis in varied if (name := TOGETHER.join(but_seeds(axis))))
    seed: list[tuple[str, ...]] = [("seed",)] if unit_column(varied) == "seed" else []
    return list(dict.fromkeys([others[:1], others, *seed])) if others else seed


def unit_column(varied: Sequence[str]) -> str:
    """Return the column that says which networks are one independent unit: the seed if it varies, else the key.

    Networks of one seed share their initial weights and the order of their batches. The column `seed` is that of the
    batches; where an axis of other seeds alone varies, it is that axis.

    >>> unit_column(["data.seed+model.seed+training.seed"]), unit_column(["lr"]), unit_column(["lr", "model.seed"])
    ('seed', 'key', 'model.seed')
    """
    if {"seed", "training.seed"} & {name for axis in varied for name in axis.split(TOGETHER)}:
        return "seed"
    return next(filter(is_seed, varied), "key")


def groupings(networks: pd.DataFrame, varied: Sequence[str]) -> dict[str, pd.Series]:
    """Return the group number of each row, for every way of holding settings fixed."""
    settings = without_seeds(networks, varied).assign(seed=networks["seed"])
    return {", ".join(names): settings.groupby(list(names), dropna=False).ngroup() for names in held_fixed(varied)}


def without_seeds(networks: pd.DataFrame, varied: Sequence[str]) -> pd.DataFrame:
    """Return the settings that vary, but seeds, as text: a column for each axis, also where it sets several together.

    >>> networks = pd.DataFrame({"lr": [0.1, None], "batchnorm+seed": ["(True, 3)", "(False, 3)"], "seed": [3, 3]})
    >>> without_seeds(networks, ["lr", "batchnorm+seed", "seed"]).to_dict("list")
    {'lr': ['0.1', 'nan'], 'batchnorm': ['True', 'False']}
    """
    columns = {}
    for axis in varied:
        if kept := but_seeds(axis):
            parts = []
            for name in kept:
                if name in networks:
                    parts.append(networks[name].astype(object).map(str).map(seedless))  # of no networks as well
                else:  # an older table has settings that vary together in one column alone
                    at = axis.split(TOGETHER).index(name)
                    of_axis = networks[axis].map(lambda values, at=at: seedless(split_values(values)[at]))
                    parts.append(of_axis.replace("None", NONE))
            columns[TOGETHER.join(kept)] = reduce(lambda one, other: one + ", " + other, parts)
    return pd.DataFrame(columns, index=networks.index)


def setting_of(settings: NetworkSettings, name: str) -> Any:
    """Return a network's setting as a cell of a table; None where a training elsewhere does not tell it."""
    if not isinstance(settings.training, TrainedElsewhere):
        value = value_of(settings, name)
    elif name in (known := facts(settings)):
        value = known[name]
    else:
        return None
    # nested settings as text, without the seed that has a column of its own
    return value if isinstance(value, int | float | str) else seedless(setting_text(value), settings.training.seed)


def _identity(record: Record) -> dict[str, Any]:
    training, key = record.settings.training, record.settings.key
    if isinstance(training, TrainedElsewhere):
        lr, batch_size = (training.known.get(name, nan) for name in ("lr", "batch_size"))
        seed = nan if training.seed is None else training.seed
        return {"key": key, "lr": lr, "batch_size": batch_size, "seed": seed, "weights": short(training.weights)}
    batch_size = training.batch_size or record.result.get("samples", 0)
    return {"key": key, "lr": training.optimiser.lr, "batch_size": batch_size, "seed": training.seed}


OF_NETWORKS = ("networks", "layers", "curves", "histories", "functions")
"""Tables of a study whose rows are of one network each."""
_AND = " | "


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Loaded:
    """The tables of some networks, and what is known of their runs; each as in `StudyResult`."""

    networks: pd.DataFrame
    layers: pd.DataFrame
    curves: pd.DataFrame
    histories: pd.DataFrame
    functions: pd.DataFrame
    versions: dict[str, str]
    excluded: list[tuple[str, str]]
    alone: list[tuple[str, int]]
    seconds: float

    @classmethod
    def of_records(cls, records: Sequence[Record], varied: Sequence[str]) -> Loaded:
        """Return what is in the folders of these networks."""
        return cls(
            **tables_of(records, varied),
            versions=_merged([record.result["versions"] for record in records]),
            excluded=[(r.settings.key, _why_excluded(r)) for r in records if r.result["outcome"] not in REACHED],
            alone=sorted(Counter(why for r in records if (why := r.result.get("trained_alone"))).items()),
            seconds=_summed([r.result["seconds_training"] + r.result["seconds_measuring"] for r in records]),
        )

    @classmethod
    def of_result(cls, result: StudyResult, networks: Sequence[NetworkSettings], varied: Sequence[str]) -> Loaded:
        """Return what a result, whose study may have varied other settings, holds of these networks."""
        of = {settings.key: settings for settings in networks}
        tables = {name: getattr(result, name) for name in OF_NETWORKS}
        rows = {name: table[table["key"].isin(set(of))].reset_index(drop=True) for name, table in tables.items()}
        # the columns of other settings give way to those of `varied`
        table, columns = rows["networks"], setting_columns(varied)
        results = [name for name in table if name not in {*IDENTITY, *setting_columns(result.varied), *columns}]
        own = {name: [setting_of(of[key], name) for key in table["key"]] for name in columns}
        rows["networks"] = pd.concat([table[IDENTITY], pd.DataFrame(own, index=table.index), table[results]], axis=1)
        share = len(rows["networks"]) / max(len(result.networks), 1)
        return cls(
            **rows,
            versions=result.versions,
            excluded=[(key, why) for key, why in result.excluded if key in of],
            alone=[(why, round(number * share)) for why, number in result.alone],
            seconds=result.seconds * share,
        )

    def with_others(self, others: Loaded, keys: Sequence[str]) -> Loaded:
        """Return both together, with the rows of each table in the order of `keys`."""
        order = {key: number for number, key in enumerate(keys)}
        alone = Counter(dict(self.alone)) + Counter(dict(others.alone))
        tables = {}
        for name in OF_NETWORKS:
            both = [getattr(self, name), getattr(others, name)]
            whole = pd.concat([one for one in both if len(one)] or both[:1], ignore_index=True)  # empty ones: no types
            tables[name] = whole.sort_values("key", key=lambda keys: keys.map(order), kind="stable", ignore_index=True)
        return Loaded(
            **tables,
            versions=_merged([one.versions for one in (self, others) if len(one.networks)]),
            excluded=sorted((*self.excluded, *others.excluded), key=lambda one: order[one[0]]),
            alone=sorted(alone.items()),
            seconds=self.seconds + others.seconds,
        )


def _summed(seconds: Sequence[float]) -> float:
    """Return the sum, no network with more than ten medians: the clock runs on where a process or machine is halted.

    >>> _summed([1.0, 2.0, 2.0, 3000.0])
    25.0
    """
    return sum(min(one, 10 * median(seconds)) for one in seconds)


def _why_excluded(record: Record) -> str:
    training, result = record.settings.training, record.result
    assert isinstance(training, Training)  # a training elsewhere is at its end
    batch = "full batch" if training.batch_size is None else f"batch size {training.batch_size}"
    where = f"learning rate {training.optimiser.lr:g}, {batch}, seed {training.seed}"
    if result["outcome"] == "diverged":
        return f"diverged after {count_of(result['steps'], 'step')} ({where})"
    right = "" if math.isnan(result["accuracy"]) else f", accuracy {result['accuracy']:.3g}"  # NaN: a regression
    return f"loss {result['loss']:.3g}{right} after {count_of(result['steps'], 'step')} ({where})"


def _merged(all_versions: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the versions of each package, joined by " | " where networks were computed with several."""
    names = dict.fromkeys(name for recorded in all_versions for name in recorded)
    each = {name: {one for v in all_versions for one in str(v.get(name, "unknown")).split(_AND)} for name in names}
    return {name: _AND.join(sorted(versions)) for name, versions in each.items()}


COLUMNS = tuple(TABLE_COLUMNS["gap_correlations"])
GRANULATED = "granulated Kendall"
GIVEN_LOSS = {"pearson": "Pearson r given the training loss", "spearman": "Spearman rho given the training loss"}
LOSSES_DIFFER = 1.1
"""Ratio of the largest to the smallest training loss from which on they differ."""


def gap_correlations(
    values: pd.DataFrame,
    settings: pd.DataFrame,
    quantities: Sequence[Quantity],
    units: pd.Series,
    kinds: pd.Series | None = None,
    losses: pd.Series | None = None,
) -> pd.DataFrame:
    """Return one row per measure and coefficient, over all networks and then over each kind; the columns are COLUMNS.

    `kind` is "" for all networks; kinds of fewer than four have no rows. The coefficients are Pearson, Spearman and
    Kendall; Pearson's and Spearman's given the training loss, where losses differ; the granulated Kendall over groups
    that differ in one setting alone, and its part along each setting ("granulated Kendall along lr"), if anything but
    the seed was varied; and partial correlations given the numerical settings (`given` names the settings held fixed).
    `low` and `high` bound the 95% interval over independent units, by the jackknife of `clustered`, and `p` is its
    two-sided one, that of random orders where each network is a unit of its own; fewer than 6 units give neither. `n`
    is the number of networks, `units` that of units. `why` says which networks were left out, `note` why a value is
    NaN, or has no interval.

    `values` has the included networks, one column per quantity, transformed; `settings` (`without_seeds`), `units`,
    `kinds` (`kinds_of`) and `losses` (`training_losses`) are of the same networks. Over several kinds a measure may
    correlate with the gap only because both differ between kinds.
    """
    if GAP.name not in values:
        return pd.DataFrame(columns=list(COLUMNS))
    losses = pd.Series(nan, index=values.index) if losses is None else losses
    rows = _rows("", values, settings, quantities, units, losses)
    if kinds is not None and kinds.nunique() > 1:
        for kind in kinds.unique():
            mine = kinds == kind
            if mine.sum() >= FEWEST_POINTS:
                rows += _rows(str(kind), values[mine], settings[mine], quantities, units[mine], losses[mine])
    return pd.DataFrame(rows, columns=list(COLUMNS))


def training_losses(networks: pd.DataFrame, curves: pd.DataFrame) -> pd.Series:
    """Return each network's training loss as measured, else the last one of its training; NaN if neither is known.

    >>> networks = pd.DataFrame({"key": ["a", "b"]})
    >>> curves = pd.DataFrame({"key": ["a", "a"], "step": [0, 9], "loss": [2.0, 0.5]})
    >>> training_losses(networks, curves).tolist()
    [0.5, nan]
    """
    if "loss" in networks:
        return networks["loss"].astype(float)
    last = curves.sort_values("step", kind="stable").groupby("key")["loss"].last()
    return networks["key"].map(last).astype(float)


def _rows(
    kind: str,
    values: pd.DataFrame,
    settings: pd.DataFrame,
    quantities: Sequence[Quantity],
    units: pd.Series,
    losses: pd.Series,
) -> list[tuple[object, ...]]:
    gap = values[GAP.name]
    # the training losses, as logarithms if all are positive; None where they do not differ, or one is not known
    loss = None
    if len(losses) and np.isfinite(losses).all():
        positive = losses.min() > 0
        differ = losses.max() > LOSSES_DIFFER * losses.min() if positive else np.ptp(losses) > 0
        loss = (np.log(losses) if positive else losses) if differ else None
    varied = settings.loc[:, settings.nunique() > 1]  # all networks of a kind have one model
    controls = values[[q.name for q in quantities if q.role == "setting" and values[q.name].nunique() > 1]]
    rows: list[tuple[object, ...]] = []
    for name in measure_names(quantities):

        def add(coefficient: str, s: Statistic, given: str = "", name: str = name) -> tuple[object, ...]:
            return kind, name, coefficient, s.value, s.low, s.high, s.p, s.n, s.units, given, s.why, s.note

        same: dict[str, Any] = {"names": (name, GAP.name), "units": units}
        rows += [add(title, correlate(values[name], gap, key, **same)) for key, title in TITLES.items()]  # type: ignore[arg-type]
        if loss is not None:
            for key, title in GIVEN_LOSS.items():
                left = partial_correlation(values[name], gap, loss.rename("training loss"), key, **same)  # type: ignore[arg-type]
                rows.append(add(title, left, "training loss"))
        if len(varied.columns):
            psi = granulated_kendall(values[name], gap, varied, **same)
            rows.append(add(GRANULATED, psi, "all settings but one"))
            rows += [add(f"{GRANULATED} along {axis}", part, f"all but {axis}") for axis, part in psi.parts.items()]
        if len(controls.columns):
            for key, title in {"pearson": "partial Pearson", "spearman": "partial Spearman"}.items():
                found = partial_correlation(values[name], gap, controls, key, **same)  # type: ignore[arg-type]
                rows.append(add(title, found, ", ".join(controls.columns)))
    return rows


_ROUNDING = 1e-9
"""Largest difference of two columns that are multiples of each other, relative to their values."""
_HELD_OUT = "test_loss"
"""It is tested together with the measures that decide."""


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
    """Return the differences between the levels of each setting that is not a number, over the included networks."""
    settings = without_seeds(networks, varied)
    # measures of the whole network, those that decide first, then risks, as far as they are numbers in the table
    measured = [q.column for q in quantities if q.role == "measure" and q.column in networks]
    measured.sort(key=lambda name: _meaning(name) is None)
    names = dict.fromkeys([*measured, *(name for name in RESULTS if name in networks)])
    columns = {name: networks[name].to_numpy(float) for name in names if pd.api.types.is_numeric_dtype(networks[name])}
    cards = {name: one.card for name in columns if (one := MEASURES.get(Column.parse(name).name))}
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
        # pairs of networks that share all but the level, if two levels share any; not of trainings elsewhere
        pairs = units = None
        if not rows["seed"].isna().any():
            seeds = [name for name in ["seed", *filter(is_seed, varied)] if name in rows]
            labels = pd.concat([others, rows[seeds].astype(str)], axis=1).agg(" | ".join, axis=1)
            pairs = labels if (levels[known].groupby(labels.to_numpy()).nunique() > 1).any() else None
            units = None if (unit := unit_column(varied)) == "key" else rows[unit]
        differences = group_differences(
            {name: values[known] for name, values in columns.items()},
            levels[known],
            pairs,
            units,
            first=[*meanings, _HELD_OUT],
            untested=[name for name in RESULTS if name in columns and name != _HELD_OUT],
            linear=[name for name in columns if name in SHARES or (name in cards and cards[name].unit == "log")],
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


def _meaning(name: str) -> tuple[str, str] | None:
    """Return the meaning and the family of an invariant number of the whole network that has a direction."""
    column = Column.parse(name)
    if column.name not in MEASURES or column.transform or column.layer is not None or column.part:
        return None
    one = named([column.measure])[0]
    meaning = direction(one.card)
    return (meaning, one.card.family) if meaning and one.invariant_under >= RESCALINGS else None
