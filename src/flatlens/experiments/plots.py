"""The data of figures, from the tables of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd

from flatlens.experiments.evidence import in_full
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
    """What was followed in training, a line a value of the setting: the mean over seeds, with its extremes."""
    table = result.histories
    if setting not in table:
        table = table.merge(result.networks[["key", setting]], on="key")
    names = in_full(table)
    parts = [
        rows.assign(panel=one.name, y=one.of(rows.rename(columns={"value": one.column})))
        for one in shown
        for rows in [table[names == one.column]]
    ]
    rows = pd.concat(parts, ignore_index=True).rename(columns={"step": "x", setting: "line"})
    words = in_words(setting)
    seeds = result.networks["seed"].nunique()
    caption = f"Lines are means over {seeds} seeds at one {words}, bands from the least to the largest; {held}."
    return banded(rows, f"through_training_{setting}", f"Through training, by {words}", caption, "step", words)


def course_curves(
    networks: pd.DataFrame,
    courses: Mapping[str, pd.DataFrame],
    setting: str,
    shown: Sequence[Quantity],
    name: str,
    title: str,
    caption: str,
    references: Mapping[str, str] = MappingProxyType({}),
) -> Plot:
    """Courses of these networks, a line a value of the setting: the mean over the others, with its extremes; a dashed
    line at another column of theirs in the panel of a quantity."""
    nothing = pd.DataFrame(columns=["panel", "x", "line", "y", "reference"])
    parts = [
        pd.DataFrame({"panel": one.name, "x": course.index, "line": line, "y": one.of(course)}).assign(
            reference=course.get(references.get(one.name, ""), np.nan)
        )
        for one in shown
        for key, line in zip(networks["key"], networks[setting], strict=True)
        if (course := courses.get(key)) is not None
    ]
    rows = pd.concat(parts, ignore_index=True) if parts else nothing
    return banded(rows, name, title, caption, "step", in_words(setting))


def banded(
    rows: pd.DataFrame, name: str, title: str, caption: str, x: str, line: str = "", *, log_x: bool = False
) -> Plot:
    """A line a panel and `line`: the mean of `y` at each `x`, with its least and largest, by decades where they are
    several; a `reference` is kept."""
    grouped = rows.groupby(["panel", "x", "line"], sort=False)
    data = grouped["y"].agg(y="mean", low="min", high="max")
    if "reference" in rows and rows["reference"].notna().any():
        data["reference"] = grouped["reference"].first()
    columns = ["panel", "x", "line", "y", "low", "high", *(["reference"] if "reference" in data else [])]
    return Plot(name, title, caption, "curves", data.reset_index()[columns], x, line, log_y=True, log_x=log_x)


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
