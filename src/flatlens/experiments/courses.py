"""What happened in the course of training, as numbers of each network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.experiments.evidence import Table, after_loss, alike_in, histories, reached, tau
from flatlens.experiments.predictions import Results
from flatlens.experiments.result import StudyResult

Courses: TypeAlias = Callable[[StudyResult], Mapping[str, pd.DataFrame]]
"""By network: one row a moment, one column a measure that was followed, and `edge`."""
Number: TypeAlias = Callable[[pd.DataFrame], float]
"""From a course to a number of the network."""


def in_course(study: str, numbers: Mapping[str, Number], courses: Courses = histories) -> Table:
    """The networks whose training reached its end, and these numbers of their courses, a column each."""

    def found(results: Results) -> pd.DataFrame:
        networks, known = reached(study)(results), courses(results[study])
        kept = networks[networks["key"].isin(set(known))].reset_index(drop=True)
        columns = {name: [number(known[key]) for key in kept["key"]] for name, number in numbers.items()}
        return kept.assign(**columns)

    return found


def until_partner(setting: str, measure: str, level: float, alike: Sequence[str]) -> Courses:
    """Courses up to the step where the network with the least value of the setting, `alike` in the others, first had
    `measure` at `level` or above; without those whose partner never had."""

    def found(result: StudyResult) -> Mapping[str, pd.DataFrame]:
        courses = histories(result)
        networks = result.networks[result.networks["key"].isin(set(courses))]
        kept: dict[str, pd.DataFrame] = {}
        for group in alike_in(networks, alike):
            keys = [str(key) for key in group["key"]]
            partner = courses[keys[int(group[setting].astype(float).argmin())]]
            there = partner[partner[measure] >= level].index.min()
            if there == there:
                kept |= {key: courses[key].loc[:there] for key in keys}
        return kept

    return found


def first(column: str) -> Number:
    """Its value at the first moment."""
    return lambda course: float(course[column].iloc[0])


def last(column: str) -> Number:
    """Its value at the last moment."""
    return lambda course: float(course[column].iloc[-1])


def largest(column: str, over: str | None = None) -> Number:
    """Its largest value, in units of another column."""
    return lambda course: float((course[column] / (1.0 if over is None else course[over])).max())


def climb(column: str) -> Number:
    """Its largest value less its first."""
    return lambda course: largest(column)(course) - first(column)(course)


def late(column: str, over: str | None = None) -> Number:
    """Its mean over the later half of the moments, in units of another column."""

    def found(course: pd.DataFrame) -> float:
        values = course[column] / (1.0 if over is None else course[over])
        return float(values.iloc[len(values) // 2 :].mean())

    return found


def rise(column: str) -> Number:
    """Its mean over the later half of the moments less its first value."""
    return lambda course: late(column)(course) - first(column)(course)


def fall(column: str) -> Number:
    """log(last / largest): 0 where it ends at its height, far below where it has collapsed."""
    return lambda course: float(np.log(last(column)(course) / largest(column)(course)))


def agreement(x: str, y: str) -> Number:
    """Kendall's tau-b of two columns over the moments."""
    return lambda course: tau(*course[[x, y]].dropna().to_numpy().T)


def growth_beyond(column: str, over: str, edge: str) -> Number:
    """log of its last value over that at the first moment where `over` had reached `edge`; NaN where it never has."""

    def found(course: pd.DataFrame) -> float:
        beyond = course.loc[(course[over] >= course[edge]).cummax(), column]
        return float(np.log(beyond.iloc[-1] / beyond.iloc[0])) if len(beyond) else np.nan

    return found


def gain(column: str) -> Number:
    """Its last value less its first."""
    return lambda course: last(column)(course) - first(column)(course)


def log_gain(column: str) -> Number:
    """log(last / first)."""
    return lambda course: float(np.log(last(column)(course) / first(column)(course)))


def slowing(column: str) -> Number:
    """Its mean gain from moment to moment over the later half of them less that over the earlier: above 0 where a fall
    slows down. NaN of fewer than three moments."""

    def found(course: pd.DataFrame) -> float:
        gains = np.diff(course[column])
        half = len(gains) // 2
        return float(gains[-half:].mean() - gains[:half].mean()) if half else np.nan

    return found


def once_below(loss: float) -> Courses:
    """Courses from the moment on where the loss first was below; without those of fewer than two moments there."""

    def found(result: StudyResult) -> Mapping[str, pd.DataFrame]:
        courses = {key: after_loss(course, loss) for key, course in histories(result).items()}
        return {key: course for key, course in courses.items() if len(course) > 1}

    return found


def between(start: float, end: float) -> Courses:
    """Courses between two shares of their steps, each the first moment there or later; without those of fewer than two
    moments."""

    def found(result: StudyResult) -> Mapping[str, pd.DataFrame]:
        kept = {}
        for key, course in histories(result).items():
            low, high = (course.index[course.index >= share * course.index[-1]][0] for share in (start, end))
            kept[key] = course.loc[low:high]
        return {key: course for key, course in kept.items() if len(course) > 1}

    return found
