"""Statistics that claims rest on: relations over networks, trends along settings, what happens in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.experiments.predictions import Results
from flatlens.experiments.result import StudyResult
from flatlens.statistics import Statistic, average, correlate, kendall
from flatlens.statistics.coefficients import Array
from flatlens.statistics.correlations import CoefficientName
from flatlens.training import REACHED

Evidence: TypeAlias = Callable[[Results], Statistic]

Table: TypeAlias = Callable[[Results], pd.DataFrame]
"""One row a network, one column a number of it."""


def reached(study: str) -> Table:
    """The networks of a study whose training reached its end, with all that was measured."""

    def found(results: Results) -> pd.DataFrame:
        networks = results[study].networks
        return networks[networks["outcome"].isin(REACHED)].reset_index(drop=True)

    return found


def where(table: Table, chosen: Callable[[pd.DataFrame], pd.Series]) -> Table:
    """Those of its networks for which `chosen` is true."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        kept: pd.DataFrame = networks[chosen(networks)]
        return kept

    return found


def correlated(table: Table, x: str, y: str, coefficient: CoefficientName = "pearson") -> Evidence:
    """The correlation of two columns."""

    def found(results: Results) -> Statistic:
        networks = numbers_of(table(results), [x, y])
        return correlate(networks[x], networks[y], coefficient, names=(x, y))

    return found


def related(study: str, x: str, y: str, coefficient: CoefficientName = "pearson") -> Evidence:
    """The correlation of two quantities of a study, over the networks whose training reached its end."""

    def found(results: Results) -> Statistic:
        values = results[study].values
        kept = values[values["included"]]
        return correlate(kept[x], kept[y], coefficient, names=(x, y))

    return found


def trend(study: str, setting: str, column: str) -> Evidence:
    """Kendall's tau-b of a setting and a column of the table of networks, over the networks that reached the end."""
    return correlated(reached(study), setting, column, "kendall")


def along(table: Table, setting: str, column: str, same: Sequence[str]) -> Evidence:
    """The mean of Kendall's tau-b of a setting and a column over the lines of a figure: groups of networks that have
    all else the `same`."""

    name = f"Kendall tau-b of {setting} and {column}, alike in {', '.join(same)}"
    return over_groups(table, setting, column, same, _ordered, name)


def _ordered(line: pd.Series) -> float:
    return tau(line.index.to_numpy(dtype=float), line.to_numpy())


def tau(x: Array, y: Array) -> float:
    """Kendall's tau-b of two columns; NaN of fewer than two rows, or where one of them is constant."""
    return float(kendall(x, y, np.ones((1, len(x))))[0]) if len(x) > 1 else np.nan


def over_groups(
    table: Table, setting: str, column: str, same: Sequence[str], of: Callable[[pd.Series], float], name: str
) -> Evidence:
    """The mean over such groups of `of` the column's values, by the setting's."""

    def found(results: Results) -> Statistic:
        networks = table(results)
        groups = (numbers_of(group, [setting, column]).dropna() for group in alike_in(networks, same))
        return average([of(group.set_index(setting)[column]) for group in groups if len(group)], name=name)

    return found


def alike_in(networks: pd.DataFrame, same: Sequence[str]) -> list[pd.DataFrame]:
    """The networks in groups of equal settings; what was not varied is no column."""
    varied = [name for name in same if name in networks]
    if not varied or networks.empty:
        return [networks] if len(networks) else []
    return [group for _, group in networks.groupby(varied, dropna=False, sort=False)]


def together(study: str, x: str, y: str, *, below: float = np.inf) -> Evidence:
    """The mean over networks of Kendall's tau of two measures in the course of training, once the loss is below."""

    def found(results: Results) -> Statistic:
        taus = [
            _kendall(history[x], history[y])
            for history in each_history(results[study], below)
            if {x, y} <= set(history.columns)
        ]
        return average(taus, name=f"Kendall tau-b of {x} and {y} over the steps of a network")

    return found


def changes(study: str, column: str, *, below: float = np.inf) -> Evidence:
    """The mean over networks of log(last / first) of a measure in the course of training, once the loss is below."""

    def found(results: Results) -> Statistic:
        ratios = []
        for history in each_history(results[study], below):
            values = history[column].dropna() if column in history else pd.Series(dtype=float)
            ends = values.iloc[[0, -1]].to_numpy() if len(values) > 1 else np.array([np.nan, np.nan])
            ratios.append(float(np.log(ends[1] / ends[0])) if (ends > 0).all() else np.nan)
        return average(ratios, name=f"log(last / first) of {column}")

    return found


def each_history(result: StudyResult, below: float = np.inf) -> list[pd.DataFrame]:
    """As `histories`, from the step on where the loss first was below."""
    return [after_loss(table, below) if "loss" in table else table for table in histories(result).values()]


def after_loss(course: pd.DataFrame, below: float) -> pd.DataFrame:
    """From the moment on where the loss first was below."""
    kept: pd.DataFrame = course[(course["loss"] < below).cummax()]
    return kept


def histories(result: StudyResult) -> dict[str, pd.DataFrame]:
    """A table a network that reached the end: one row a step, one column a measure of the network ("mls") or of a layer
    ("mls[fc1]"), and `edge` where it was known."""
    reached = set(result.networks.loc[result.networks["outcome"].isin(REACHED), "key"])
    tables = {}
    for key, history in result.histories.groupby("key", sort=False):
        if key not in reached:
            continue
        table = history.assign(name=in_full(history)).pivot(index="step", columns="name", values="value")
        tables[str(key)] = table.assign(edge=history.groupby("step")["edge"].first()) if "edge" in history else table
    return tables


def in_full(history: pd.DataFrame) -> pd.Series:
    """The names of what was followed: "mls" of the network, "mls[fc1]" of a layer."""
    rows = zip(history["measure"], history["layer"], strict=True)
    return pd.Series([str(Column.of(measure, layer or None)) for measure, layer in rows], index=history.index)


def numbers_of(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The columns as numbers; missing ones, where no network has been measured, are NaN."""
    return table.reindex(columns=list(dict.fromkeys(columns))).astype(float)


def _kendall(x: pd.Series, y: pd.Series) -> float:
    return correlate(x, y, "kendall", resampled=0, permuted=0).value
