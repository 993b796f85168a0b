"""Numbers of each network from its trajectory: the measures followed during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.experiments.result import StudyResult
from flatlens.papers.evidence import Table, alike_in, histories, mark_left_out, reached
from flatlens.papers.experiment import Results, deferred
from flatlens.statistics.correlations import COEFFICIENTS, CoefficientName

Trajectories: TypeAlias = Callable[[StudyResult], Mapping[str, pd.DataFrame]]
"""Returns a table per network, by key: one row per measured step, one column per followed measure, and `edge`."""
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


def rise_to_peak(column: str) -> Number:
    """Return how far a column rises to its peak: its largest value minus its first. It is never below 0."""
    return lambda trajectory: peak(column)(trajectory) - first(column)(trajectory)


@deferred
def correlated_changes(trajectory: pd.DataFrame, x: str, y: str, coefficient: CoefficientName = "pearson") -> float:
    """Return the correlation of the changes of two columns between measured steps; NaN for fewer than three changes.

    A rank correlation of the values would count a drift of 2% on a plateau as much as a rise by a factor of ten.
    Pearson's of the changes may hang on one of them, the first step of training: a verdict needs that of ranks, too.
    """
    if not {x, y} <= set(trajectory.columns):
        return np.nan
    changes = np.diff(trajectory[[x, y]].dropna().to_numpy(dtype=float), axis=0)
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
    trajectories = {
        key: trajectory[(trajectory["loss"] < loss).cummax()] for key, trajectory in histories(result).items()
    }
    return {key: trajectory for key, trajectory in trajectories.items() if len(trajectory) > 1}


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
