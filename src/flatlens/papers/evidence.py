"""Statistics for predictions: relations over networks, trends along settings, changes during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.experiments.result import StudyResult
from flatlens.papers.predictions import Results
from flatlens.papers.units import labelled, with_units
from flatlens.statistics import Statistic, average, correlate, kendall
from flatlens.statistics.coefficients import Array
from flatlens.statistics.correlations import CoefficientName
from flatlens.training import REACHED

Evidence: TypeAlias = Callable[[Results], Statistic]

Table: TypeAlias = Callable[[Results], pd.DataFrame]
"""Returns one row per network, one column per number."""


def reached(study: str) -> Table:
    """Return the networks of a study that reached the end of training, with all measured columns and their units.

    The unit is the seed, if the study varies it, else the network.
    """

    def found(results: Results) -> pd.DataFrame:
        networks = results[study].networks
        kept = networks[networks["outcome"].isin(REACHED)].reset_index(drop=True)
        return with_units(results[study], kept)

    return found


def studied(study: str) -> Table:
    """Return the networks of a study's correlations: quantities as columns, transformed, under the names shown."""

    def found(results: Results) -> pd.DataFrame:
        values = results[study].values
        return with_units(results[study], values[values["included"]].reset_index(drop=True))

    return found


def independent(table: Table, unit: str = "seed", columns: Sequence[str] | None = None) -> Table:
    """Return the table with other units: networks equal in `columns` (default: the one named `unit`) are one unit.

    `unit` is one word for what a unit is: independent(table, "architecture", ["model"]).
    """
    return lambda results: labelled(table(results), columns or [unit], unit)


def where(table: Table, chosen: Callable[[pd.DataFrame], pd.Series]) -> Table:
    """Return the networks of a table for which `chosen` is true."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        kept: pd.DataFrame = networks[chosen(networks)]
        return kept

    return found


def correlated(table: Table, x: str, y: str, coefficient: CoefficientName = "pearson") -> Evidence:
    """Return the correlation of two columns."""

    def found(results: Results) -> Statistic:
        networks = numbers_of(table(results), [x, y])
        return correlate(networks[x], networks[y], coefficient, names=(x, y))

    return found


def related(study: str, x: str, y: str, coefficient: CoefficientName = "pearson") -> Evidence:
    """Return the correlation of two quantities of a study, over the networks that reached the end of training."""
    return correlated(studied(study), x, y, coefficient)


def trend(study: str, setting: str, column: str) -> Evidence:
    """Return Kendall's tau-b of a setting and a column, over the networks that reached the end of training."""
    return correlated(reached(study), setting, column, "kendall")


def along(table: Table, setting: str, column: str, same: Sequence[str]) -> Evidence:
    """Return the mean of Kendall's tau-b of a setting and a column, over groups of networks equal in `same`."""
    name = f"Kendall tau-b of {setting} and {column}, alike in {', '.join(same)}"
    return over_groups(table, setting, column, same, _ordered, name)


def _ordered(line: pd.Series) -> float:
    return tau(line.index.to_numpy(dtype=float), line.to_numpy())


def tau(x: Array, y: Array) -> float:
    """Return Kendall's tau-b of two columns; NaN for fewer than two rows, or if a column is constant."""
    return float(kendall(x, y, np.ones((1, len(x))))[0]) if len(x) > 1 else np.nan


def over_groups(
    table: Table, setting: str, column: str, same: Sequence[str], of: Callable[[pd.Series], float], name: str
) -> Evidence:
    """Return the mean over groups equal in `same` of `of`, a function of the column's values indexed by the setting."""

    def found(results: Results) -> Statistic:
        networks = table(results)
        groups = (numbers_of(group, [setting, column]).dropna() for group in alike_in(networks, same))
        return average([of(group.set_index(setting)[column]) for group in groups if len(group)], name=name)

    return found


def alike_in(networks: pd.DataFrame, same: Sequence[str]) -> list[pd.DataFrame]:
    """Return the networks in groups of equal settings; settings without a column were not varied."""
    varied = [name for name in same if name in networks]
    if not varied or networks.empty:
        return [networks] if len(networks) else []
    return [group for _, group in networks.groupby(varied, dropna=False, sort=False)]


def together(study: str, x: str, y: str, *, below: float = np.inf) -> Evidence:
    """Return the mean over networks of Kendall's tau of two measures during training, once the loss is `below`."""

    def found(results: Results) -> Statistic:
        taus = [
            _kendall(history[x], history[y])
            for history in each_history(results[study], below)
            if {x, y} <= set(history.columns)
        ]
        return average(taus, name=f"Kendall tau-b of {x} and {y} over the steps of a network")

    return found


def changes(study: str, column: str, *, below: float = np.inf) -> Evidence:
    """Return the mean over networks of log(last / first) of a measure during training, once the loss is `below`."""

    def found(results: Results) -> Statistic:
        ratios = []
        for history in each_history(results[study], below):
            values = history[column].dropna() if column in history else pd.Series(dtype=float)
            ends = values.iloc[[0, -1]].to_numpy() if len(values) > 1 else np.array([np.nan, np.nan])
            ratios.append(float(np.log(ends[1] / ends[0])) if (ends > 0).all() else np.nan)
        return average(ratios, name=f"log(last / first) of {column}")

    return found


def each_history(result: StudyResult, below: float = np.inf) -> list[pd.DataFrame]:
    """Return `histories` from the first step on where the loss is `below`."""
    return [after_loss(table, below) if "loss" in table else table for table in histories(result).values()]


def after_loss(course: pd.DataFrame, below: float) -> pd.DataFrame:
    """Return the rows from the first one on where the loss is `below`."""
    kept: pd.DataFrame = course[(course["loss"] < below).cummax()]
    return kept


def histories(result: StudyResult) -> dict[str, pd.DataFrame]:
    """Return a table per network that reached the end of training: one row per step, one column per followed measure.

    Columns are "mls" of the network, "mls[fc1]" of a layer, and `edge` where it is known.
    """
    reached = set(result.networks.loc[result.networks["outcome"].isin(REACHED), "key"])
    tables = {}
    for key, history in result.histories.groupby("key", sort=False):
        if key not in reached:
            continue
        table = history.assign(name=in_full(history)).pivot(index="step", columns="name", values="value")
        tables[str(key)] = table.assign(edge=history.groupby("step")["edge"].first()) if "edge" in history else table
    return tables


def in_full(history: pd.DataFrame) -> pd.Series:
    """Return the name of each row's measure: "mls" of the network, "mls[fc1]" of a layer."""
    rows = zip(history["measure"], history["layer"], strict=True)
    return pd.Series([str(Column.of(measure, layer or None)) for measure, layer in rows], index=history.index)


def numbers_of(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the columns as numbers; missing columns are NaN."""
    return table.reindex(columns=list(dict.fromkeys(columns))).astype(float)


def _kendall(x: pd.Series, y: pd.Series) -> float:
    return correlate(x, y, "kendall", resampled=0, permuted=0).value
