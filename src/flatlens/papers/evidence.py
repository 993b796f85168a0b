"""Statistics for predictions: relations over networks, trends along settings, changes during training.

They are over independent units: a label such as "seed 3" in the column UNIT of a table of networks. Networks with the
same seed share their initial weights, the order of their batches, and often their data, so they are one unit and count
once, also across the cases of a study: different architectures of one seed share the data and the order of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.errors import BadInput
from flatlens.experiments.overrides import but_seeds
from flatlens.experiments.result import StudyResult
from flatlens.experiments.tables import unit_column
from flatlens.papers.experiment import Results, deferred
from flatlens.statistics import Statistic, average, clustered, kendall, spearman
from flatlens.statistics.correlations import COEFFICIENTS, TITLES, CoefficientName
from flatlens.statistics.resampling import Coefficient
from flatlens.statistics.statistic import Retained, keep
from flatlens.training import REACHED

UNIT = "unit"
"""Name of the column with the unit of each network."""
CASE = "case"
"""Name of the column with the kind of each network, where kinds are never pooled."""
WHY_LEFT_OUT = "left out"
"""Name of the column that says why a network is left out of every statistic, though it reached the end; "" if not."""
ACCURACY_GAP = "accuracy gap"
"""Name of the column of training less test accuracy, where both are known."""
LEARNT = 0.1
"""Share of the way from chance to accuracy 1 that a network has to come, or it never trained."""


def column_of_units(result: StudyResult) -> str:
    """Return the column of the networks that says which are one unit: "seed" if the study varies it, else "key"."""
    return unit_column([axis["name"] for axis in result.settings["axes"] if len(axis["values"]) > 1])


def with_units(result: StudyResult, networks: pd.DataFrame) -> pd.DataFrame:
    """Return the networks with their units: the seed, or the network itself if the study does not vary the seed."""
    column = column_of_units(result)
    return labelled(networks, [column], "network" if column == "key" else "seed")


def labelled(table: pd.DataFrame, columns: Sequence[str], word: str = "") -> pd.DataFrame:
    """Return the table with units: rows that agree in these columns are one unit. `word` is what a unit is.

    >>> labelled(pd.DataFrame({"seed": [0, 1, 0]}), ["seed"])["unit"].tolist()
    ['seed 0', 'seed 1', 'seed 0']
    """
    word = word or " and ".join(columns)
    if " " in word or not columns or not set(columns) <= set(table):
        raise BadInput(
            f"independent({list(columns)}, unit={word!r}): expected columns of the table, and one word for a "
            f"unit; the table has {', '.join(map(str, table))}"
        )
    values = table[list(columns)].astype(str).agg(", ".join, axis=1) if len(table) else pd.Series(dtype=str)
    return table.assign(**{UNIT: f"{word} " + values})


def units_in(table: pd.DataFrame) -> pd.Series:
    """Return the unit of each row; refuse a table without units."""
    if UNIT not in table:
        raise BadInput(
            f"the table has no column {UNIT!r}: keep that of reached(...), or name the columns whose values make a "
            "unit with independent(table, ...)"
        )
    units: pd.Series = table[UNIT]
    return units


def word_of(units: Iterable[str]) -> str:
    """Return what a unit is, from their labels: "seed".

    >>> word_of(pd.Series(["seed 0", "seed 1"]))
    'seed'
    """
    words = dict.fromkeys(str(unit).partition(" ")[0] for unit in units)
    return next(iter(words)) if len(words) == 1 else "unit"


def units_of_groups(groups: Sequence[set[str]]) -> list[str]:
    """Return the unit of each group of networks, from the units of its networks: groups that share one are one unit.

    >>> units_of_groups([{"seed 0"}, {"seed 1"}, {"seed 0"}])
    ['seed 0', 'seed 1', 'seed 0']
    >>> units_of_groups([{"seed 0", "seed 1"}, {"seed 1", "seed 2"}, {"seed 3"}])
    ['group seed 0', 'group seed 0', 'group seed 3']
    """
    joined: list[set[str]] = []
    for group in groups:
        apart = [one for one in joined if not one & group]
        joined = [*apart, set(group).union(*(one for one in joined if one & group))]
    word = "" if all(len(one) == 1 for one in joined) else "group "
    return [f"{word}{min(next(one for one in joined if one & group))}" for group in groups]


def trained_ones(table: pd.DataFrame) -> tuple[pd.DataFrame, tuple[tuple[str, int], ...]]:
    """Return the networks without those marked as left out, and (reason, number) of these."""
    if WHY_LEFT_OUT not in table:
        return table, ()
    marked = table[WHY_LEFT_OUT] != ""
    counts = table.loc[marked, WHY_LEFT_OUT].value_counts(sort=False)
    return table[~marked], tuple((str(why), int(number)) for why, number in counts.items())


def marked_untrained(networks: pd.DataFrame, chance: float, settings: Sequence[str] = ()) -> pd.DataFrame:
    """Return the networks, with those that never trained marked as left out.

    The rule: the training accuracy is less than a tenth of the way from chance (one over the number of classes) to 1.
    A network without an accuracy is not marked. `settings`: columns whose values name a network, seeds apart.

    >>> marked_untrained(pd.DataFrame({"accuracy": [0.09, 1.0]}), 0.1)["left out"].tolist()
    ['it never trained: accuracy below 0.19', '']
    >>> marked_untrained(pd.DataFrame({"accuracy": [0.09], "rho": [0.2]}), 0.1, ["rho"])["left out"].tolist()
    ['it never trained: accuracy below 0.19 (rho 0.2)']
    """
    least = chance + LEARNT * (1 - chance)
    untrained = networks["accuracy"].astype(float) < least
    named = [column for column in settings if column in networks]
    why = pd.Series(f"it never trained: accuracy below {least:.3g}", index=networks.index)
    if named:
        which = networks[named].apply(lambda row: ", ".join(f"{name} {value}" for name, value in row.items()), axis=1)
        why += " (" + which + ")"
    return mark_left_out(networks, untrained, why)


def mark_left_out(networks: pd.DataFrame, those: pd.Series, why: str | pd.Series) -> pd.DataFrame:
    """Return the networks, with `those` marked as left out for this reason, in place of an earlier one."""
    before = networks[WHY_LEFT_OUT] if WHY_LEFT_OUT in networks else pd.Series("", index=networks.index)
    return networks.assign(**{WHY_LEFT_OUT: before.mask(those, why)})


def accuracy_gaps(networks: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the networks' accuracy gaps by the name of their column; nothing where accuracies are not known.

    >>> accuracy_gaps(pd.DataFrame({"accuracy": [1.0], "test_accuracy": [0.75]}))["accuracy gap"].tolist()
    [0.25]
    """
    if {"accuracy", "test_accuracy"} <= set(networks):
        return {ACCURACY_GAP: networks["accuracy"].astype(float) - networks["test_accuracy"].astype(float)}
    stored = networks.get("generalisation_gap(convention='accuracy')")
    return {} if stored is None else {ACCURACY_GAP: stored}


Evidence: TypeAlias = Callable[[Results], Statistic]
Table: TypeAlias = Callable[[Results], pd.DataFrame]
"""Returns one row per network, one column per number."""


@deferred
def reached(results: Results, study: str) -> pd.DataFrame:
    """Return the networks of a study that reached the end of training: all measured columns, accuracy gaps, units."""
    networks = results[study].networks
    kept = networks[networks["outcome"].isin(REACHED)].reset_index(drop=True)
    return with_units(results[study], kept.assign(**accuracy_gaps(kept)))


@deferred
def trained_in(results: Results, study: str) -> pd.DataFrame:
    """Return the networks of `reached`; those that never trained are marked, and left out of every statistic."""
    model = results[study].settings["base"]["model"]
    classes = model["classes"] if "classes" in model else model["outputs"]
    varied = [one for name in results[study].varied for one in but_seeds(name)]
    return marked_untrained(reached(study)(results), 1 / classes, varied)


@deferred
def studied(results: Results, study: str) -> pd.DataFrame:
    """Return the networks of a study's correlations: quantities as columns, transformed, under the names shown."""
    values = results[study].values
    return with_units(results[study], values[values["included"]].reset_index(drop=True))


def independent(table: Table, unit: str, columns: Sequence[str] | None = None) -> Table:
    """Return the table with other units: networks equal in `columns` (default: the one named `unit`) are one unit.

    `unit` is one word for what a unit is: independent(table, "architecture", ["model"]).
    """
    return lambda results: labelled(table(results), columns or [unit], unit)


def these(networks: pd.DataFrame) -> Table:
    """Return the table of these networks, whatever the results."""
    return lambda results: networks


Chosen: TypeAlias = str | Callable[[pd.DataFrame], pd.Series]
"""Says which networks of a table are chosen: a condition on its columns, such as "lr < lr.max()", or a function."""


@deferred
def where(results: Results, table: Table, chosen: Chosen) -> pd.DataFrame:
    """Return the networks of a table that are chosen."""
    networks = table(results)
    kept: pd.DataFrame = networks[is_chosen(networks, chosen)]
    return kept


def is_chosen(networks: pd.DataFrame, chosen: Chosen) -> pd.Series:
    """Return whether each network is chosen."""
    return pd.Series(networks.eval(chosen, engine="python")) if isinstance(chosen, str) else chosen(networks)


@deferred
def correlated(results: Results, table: Table, x: str, y: str, coefficient: CoefficientName = "pearson") -> Statistic:
    """Return the correlation of two columns; beside Pearson's r that of ranks, which has to agree."""
    kept = complete(table(results), [x, y])
    a, b = (kept.table[name].to_numpy() for name in (x, y))
    one = weighed(
        f"{TITLES[coefficient]} of {x} and {y}",
        partial(COEFFICIENTS[coefficient], a, b),
        kept,
        fisher=True,
        ranks=partial(spearman, a, b) if coefficient == "pearson" else None,
        ordered=(a, b),
    )
    return replace(one, correlation=coefficient != "kendall")


@deferred
def along(results: Results, table: Table, setting: str, column: str, same: Sequence[str]) -> Statistic:
    """Return the mean of Kendall's tau-b of a setting and a column, over groups of networks equal in `same`."""
    name = f"Kendall tau-b of {setting} and {column}, alike in {', '.join(same)}"

    def tau(line: pd.Series) -> float:
        once = np.ones((1, len(line)))
        return float(kendall(line.index.to_numpy(float), line.to_numpy(), once)[0]) if len(line) > 1 else np.nan

    one = over_groups(table, setting, column, same, tau, name, correlations=True)(results)
    return replace(one, low=np.clip(one.low, -1, 1), high=np.clip(one.high, -1, 1))  # where a tau lies


@deferred
def over_groups(
    results: Results,
    table: Table,
    setting: str,
    column: str,
    same: Sequence[str],
    of: Callable[[pd.Series], float],
    name: str,
    *,
    correlations: bool = False,
) -> Statistic:
    """Return the mean over groups equal in `same` of `of`, a function of the column's values indexed by the setting.

    Where networks are of several cases, it is the mean over cases of the mean within each. n counts networks.
    `correlations`: `of` returns one, between -1 and 1.
    """
    networks, untrained = trained_ones(table(results).reset_index(drop=True))
    numbers, units_of = numbers_of(networks, [setting, column]).dropna(), units_in(networks)
    groups = [numbers.loc[group.index.intersection(numbers.index)] for group in alike_in(networks, same)]
    groups = [group for group in groups if len(group)]
    values = np.array([of(group.set_index(setting)[column]) for group in groups])
    units = units_of_groups([set(units_of.loc[group.index]) for group in groups])
    cases = [networks.loc[group.index[0], CASE] for group in groups] if CASE in networks else None
    one = average(values, units, name=name, unit=word_of(units), correlations=correlations, cases=cases)
    sizes = np.array([len(group) for group in groups], dtype=int)
    lost = {
        f"{column} is missing": len(networks) - len(numbers),
        f"undefined among those alike in {', '.join(same)}": int(sizes[~np.isfinite(values)].sum()),
    }
    excluded = (*untrained, *((why, number) for why, number in lost.items() if number))
    return replace(one, n=int(sizes[np.isfinite(values)].sum()), excluded=excluded)


def alike_in(networks: pd.DataFrame, same: Sequence[str]) -> list[pd.DataFrame]:
    """Return the networks in groups of equal settings; settings without a column were not varied."""
    varied = [name for name in same if name in networks]
    if not varied or networks.empty:
        return [networks] if len(networks) else []
    return [group for _, group in networks.groupby(varied, dropna=False, sort=False)]


def histories(result: StudyResult) -> dict[str, pd.DataFrame]:
    """Return a table per network that reached the end of training: one row per step, one column per followed measure.

    Columns are "mls" of the network, "mls[fc1]" of a layer, and `edge` where it is known.
    """
    reached = set(result.networks.loc[result.networks["outcome"].isin(REACHED), "key"])
    tables = {}
    for key, history in result.histories.groupby("key", sort=False):
        if key not in reached:
            continue
        rows = zip(history["measure"], history["layer"], strict=True)
        named = history.assign(name=[str(Column.of(measure, layer or None)) for measure, layer in rows])
        table = named.pivot(index="step", columns="name", values="value")
        tables[str(key)] = table.assign(edge=history.groupby("step")["edge"].first()) if "edge" in history else table
    return tables


def numbers_of(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the columns as numbers; missing columns are NaN."""
    return table.reindex(columns=list(dict.fromkeys(columns))).astype(float)


def complete(table: pd.DataFrame, columns: Sequence[str]) -> Retained:
    """Return the networks that trained and have a finite number in all columns, with UNIT; and who is left out."""
    kept, untrained = trained_ones(table)
    numbers = numbers_of(kept, columns)
    found = keep(numbers.assign(**{UNIT: units_in(kept)}), list(numbers), present=[UNIT])
    return Retained(found.table, (*untrained, *found.excluded))


def weighed(name: str, coefficient: Coefficient, kept: Retained, **options: Any) -> Statistic:
    """Return a statistic of the networks that are kept, weighed over their units; options as of `clustered`."""
    units = kept.table[UNIT]
    return clustered(name, coefficient, units, unit=word_of(units), excluded=kept.excluded, **options)


Trajectories: TypeAlias = Callable[[StudyResult], Mapping[str, pd.DataFrame]]
"""Returns a table per network, by key: one row per measured step, one column per followed measure, and `edge`."""


@deferred
def by_line(results: Results, table: Table, setting: str) -> pd.DataFrame:
    """Return the table with a line of a figure, a value of the setting, as its case."""
    networks = table(results)
    return networks.assign(**{CASE: setting + " " + networks[setting].astype(str)})


Number: TypeAlias = Callable[[pd.DataFrame], float]
"""Returns a number of the network from its trajectory."""


@deferred
def in_trajectory(
    results: Results,
    study: str,
    numbers: Mapping[str, Number],
    trajectories: Trajectories = histories,
    networks: Callable[[str], Table] = reached,
    without: str = "",
) -> pd.DataFrame:
    """Return the networks of a study (`reached` or `trained_in`), with these numbers of their trajectories as columns.

    Those without a trajectory are dropped; if `without` gives a reason, they are marked as left out for it.
    """
    table, known = networks(study)(results), trajectories(results[study])
    there = table["key"].isin(set(known))
    kept = mark_left_out(table, ~there, without) if without else table[there].reset_index(drop=True)
    columns = {
        name: [number(known[key]) if key in known else np.nan for key in kept["key"]]
        for name, number in numbers.items()
    }
    return kept.assign(**columns)


@deferred
def until_partner(
    result: StudyResult, setting: str, measure: str, level: float, alike: Sequence[str]
) -> Mapping[str, pd.DataFrame]:
    """Return trajectories up to the step where the partner's `measure` first reached `level`.

    The partner has the smallest value of the setting among networks `alike` in the others. Networks whose partner never
    reached the level are left out.
    """
    trajectories = histories(result)
    networks = result.networks[result.networks["key"].isin(set(trajectories))]
    kept: dict[str, pd.DataFrame] = {}
    for group in alike_in(networks, alike):
        keys = [str(key) for key in group["key"]]
        partner = trajectories[keys[int(group[setting].astype(float).argmin())]]
        there = partner[partner[measure] >= level].index.min()
        if there == there:
            kept |= {key: trajectories[key].loc[:there] for key in keys}
    return kept


def first(column: str) -> Number:
    """Return a column's first value."""
    return lambda trajectory: float(trajectory[column].iloc[0])


def last(column: str) -> Number:
    """Return a column's last value."""
    return lambda trajectory: float(trajectory[column].iloc[-1])


def peak(column: str, over: str | None = None) -> Number:
    """Return a column's largest value, divided by another column if given."""
    return lambda trajectory: float((trajectory[column] / (1.0 if over is None else trajectory[over])).max())


@deferred
def late(trajectory: pd.DataFrame, column: str, over: str | None = None) -> float:
    """Return a column's mean over the later half of the trajectory, divided by another column if given."""
    values = trajectory[column] / (1.0 if over is None else trajectory[over])
    return float(values.iloc[len(values) // 2 :].mean())


def rise(column: str) -> Number:
    """Return how far a column rises and stays: its mean over the later half of the trajectory minus its first value."""
    return lambda trajectory: late(column)(trajectory) - first(column)(trajectory)


def log_rise(column: str) -> Number:
    """Return log(mean over the later half of the trajectory / the first value)."""
    return lambda trajectory: float(np.log(late(column)(trajectory) / first(column)(trajectory)))


def rise_to_peak(column: str) -> Number:
    """Return how far a column rises to its peak: its largest value minus its first. It is never below 0."""
    return lambda trajectory: peak(column)(trajectory) - first(column)(trajectory)


@deferred
def correlated_changes(
    trajectory: pd.DataFrame, x: str, y: str, coefficient: CoefficientName = "pearson", apart: int = 1
) -> float:
    """Return the correlation of the changes of two columns between measured steps; NaN for fewer than three changes.

    A change is that from a measured step to the one `apart` places later: with 2 or more, changes overlap.

    A rank correlation of the values would count a drift of 2% on a plateau as much as a rise by a factor of ten.
    Pearson's of the changes may hang on one of them, the first step of training: a verdict needs that of ranks, too.
    """
    if not {x, y} <= set(trajectory.columns):
        return np.nan
    values = trajectory[[x, y]].dropna().to_numpy(dtype=float)
    changes = values[apart:] - values[:-apart]
    once = np.ones((1, len(changes)))
    return float(COEFFICIENTS[coefficient](changes[:, 0], changes[:, 1], once)[0]) if len(changes) > 2 else np.nan


@deferred
def growth_beyond(trajectory: pd.DataFrame, column: str, over: str, edge: str) -> float:
    """Return log(last / the value where `over` first reached `edge`); NaN if it never did."""
    beyond = trajectory.loc[(trajectory[over] >= trajectory[edge]).cummax(), column]
    return float(np.log(beyond.iloc[-1] / beyond.iloc[0])) if len(beyond) else np.nan


@deferred
def up_to_edge(trajectory: pd.DataFrame, number: Number, column: str, edge: str) -> float:
    """Return a number of the trajectory up to where `column` first reached `edge`, or the whole one."""
    below = ~(trajectory[column] >= trajectory[edge]).cummax()
    return number(trajectory.iloc[: int(below.sum()) + 1])


def gain(column: str) -> Number:
    """Return a column's last value minus its first."""
    return lambda trajectory: last(column)(trajectory) - first(column)(trajectory)


def log_gain(column: str) -> Number:
    """Return log(last / first)."""
    return lambda trajectory: float(np.log(last(column)(trajectory) / first(column)(trajectory)))


@deferred
def slowing(trajectory: pd.DataFrame, column: str) -> float:
    """Return the mean gain per row over the later half of the trajectory minus that over the earlier half."""
    gains = np.diff(trajectory[column])
    half = len(gains) // 2
    return float(gains[-half:].mean() - gains[:half].mean()) if half else np.nan


@deferred
def once_below(result: StudyResult, loss: float) -> Mapping[str, pd.DataFrame]:
    """Return trajectories from the first step with a smaller loss on; those with fewer than two rows are left out."""
    later = {key: trajectory[(trajectory["loss"] < loss).cummax()] for key, trajectory in histories(result).items()}
    return {key: trajectory for key, trajectory in later.items() if len(trajectory) > 1}


@deferred
def up_to_below(result: StudyResult, loss: float) -> Mapping[str, pd.DataFrame]:
    """Return trajectories up to the first step with a smaller loss; those without one are left out."""
    below = {key: (trajectory, trajectory["loss"] < loss) for key, trajectory in histories(result).items()}
    return {key: trajectory.loc[: small.idxmax()] for key, (trajectory, small) in below.items() if small.any()}


@deferred
def between(result: StudyResult, start: float, end: float) -> Mapping[str, pd.DataFrame]:
    """Return trajectories between two shares of their steps; those with fewer than two rows are left out.

    Each end is the first measured step at this share or later.
    """
    kept = {}
    for key, trajectory in histories(result).items():
        low, high = (trajectory.index[trajectory.index >= share * trajectory.index[-1]][0] for share in (start, end))
        kept[key] = trajectory.loc[low:high]
    return {key: trajectory for key, trajectory in kept.items() if len(trajectory) > 1}
