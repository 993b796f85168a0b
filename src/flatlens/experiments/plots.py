"""The data of figures, from the tables of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pandas as pd

from flatlens.experiments.evidence import histories
from flatlens.experiments.experiment import Plot
from flatlens.experiments.quantities import Quantity, in_words
from flatlens.experiments.result import StudyResult
from flatlens.statistics import average


def pairwise(name: str, result: StudyResult) -> Plot:
    """Every quantity of a study against every other, over the networks that reached the end of their training."""
    names = [q.name for q in result.quantities if q.name in result.values]
    data = result.values.loc[result.values["included"], names].reset_index(drop=True)
    return Plot(
        name=f"pairs_{name}",
        title=f"Everything against everything: {name}",
        caption=f"One mark a network, {len(data)} of them. Above the diagonal Pearson's r.",
        kind="matrix",
        data=data,
        study=name,
    )


def followed_curves(result: StudyResult, setting: str, shown: Sequence[Quantity], held: str) -> Plot:
    """What was followed in training, a line a value of the setting."""
    words, seeds = in_words(setting), result.networks["seed"].nunique()
    caption = f"Lines are means over {seeds} seeds at one {words}, bands from the least to the largest; {held}."
    name, title = f"through_training_{setting}", f"Through training, by {words}"
    return course_curves(result.networks, histories(result), setting, shown, name, title, caption)


def course_curves(
    networks: pd.DataFrame,
    courses: Mapping[str, pd.DataFrame],
    setting: str,
    shown: Sequence[Quantity],
    name: str,
    title: str,
    caption: str,
    dashed: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> Plot:
    """Courses of these networks, a line a value of the setting: the mean over the others, with its extremes.

    `dashed`: in the panel of a quantity a line more, its name and its column of the courses.
    """
    parts = []
    for one in shown:
        for key, value in zip(networks["key"], networks[setting], strict=True):
            if (course := courses.get(key)) is None:
                continue
            lines = {value: one.of(course)}
            if one.name in dashed:
                line, column = dashed[one.name]
                lines[line] = course[column]
            parts += [
                pd.DataFrame({"panel": one.name, "x": y.index, "line": line, "y": y}) for line, y in lines.items()
            ]
    rows = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["panel", "x", "line", "y"])
    drawn = banded(rows, name, title, caption, "step", in_words(setting))
    return replace(drawn, dashed=tuple(line for line, _ in dashed.values()))


def banded(
    rows: pd.DataFrame, name: str, title: str, caption: str, x: str, line: str = "", *, log_x: bool = False
) -> Plot:
    """A line a panel and `line`: the mean of `y` at each `x`, with its least and largest, by decades where they are
    several."""
    grouped = rows.groupby(["panel", "x", "line"], sort=False)["y"]
    data = grouped.agg(y="mean", low="min", high="max").reset_index()
    columns = ["panel", "x", "line", "y", "low", "high"]
    return Plot(name, title, caption, "curves", data[columns], x, line, log_y=True, log_x=log_x)


def bars(data: pd.DataFrame, name: str, title: str, caption: str, x: str, y: str) -> Plot:
    """A bar a panel, x and group, with the 95% interval of its mean; `data` has panel, x, group and value."""
    rows = []
    for key, values in data.groupby(["panel", "x", "group"], sort=False)["value"]:
        found = average(values.to_numpy())
        mean = found.value if found.value == found.value else float(np.nanmean(values))
        rows.append((*key, mean, found.low, found.high))
    return Plot(
        name, title, caption, "bars", pd.DataFrame(rows, columns=["panel", "x", "group", "y", "low", "high"]), x, y
    )


def scatter(
    networks: pd.DataFrame,
    name: str,
    title: str,
    caption: str,
    panels: Mapping[str, str],
    against: str,
    group: str,
    *,
    x: str,
    y: str,
) -> Plot:
    """A panel a column, whose values stand against another column's; marks by a setting, with their networks' keys."""
    parts = [
        pd.DataFrame(
            {
                "panel": panel,
                "x": networks[column],
                "y": networks[against],
                "group": networks[group].astype(str),
                "key": networks["key"],
            }
        )
        for panel, column in panels.items()
        if {column, against, group} <= set(networks.columns)
    ]
    data = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["panel", "x", "y", "group", "key"])
    data = data.dropna(subset=["x", "y"]).reset_index(drop=True)
    return Plot(name, title, caption, "scatter", data, x, y, group=in_words(group))
