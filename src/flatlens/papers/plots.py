"""The data of figures, from the tables of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pandas as pd

from flatlens.experiments.quantities import Quantity, in_words
from flatlens.experiments.result import StudyResult
from flatlens.papers.evidence import histories
from flatlens.papers.experiment import Plot

BANDS = "Lines are means over seeds, bands one standard deviation to either side"
"""Beginning of the captions of `banded`."""


def pairwise(name: str, result: StudyResult) -> Plot:
    """Return the matrix of all pairs of quantities, over the networks that reached the end of training."""
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


def followed_curves(
    result: StudyResult,
    networks: pd.DataFrame,
    setting: str,
    shown: Sequence[Quantity],
    name: str,
    title: str,
    held: str,
) -> Plot:
    """Return curves of the quantities followed in training, one line per value of the setting.

    `networks`: those of the result that are drawn; `held`: what they have in common, in words.
    """
    caption = f"{BANDS}; {networks['seed'].nunique()} seeds, {held}."
    return course_curves(networks, histories(result), setting, shown, name, title, caption)


def course_curves(
    networks: pd.DataFrame,
    courses: Mapping[str, pd.DataFrame],
    setting: str,
    shown: Sequence[Quantity],
    name: str,
    title: str,
    caption: str,
    dashed: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    *,
    log_y: bool | tuple[str, ...] = True,
) -> Plot:
    """Return curves of courses, one line per value of the setting: the mean over its networks, with a band.

    `dashed` adds a line to the panel of a quantity: its name, and its column of the courses.
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
    drawn = banded(rows, name, title, caption, "step", in_words(setting), log_y=log_y)
    return replace(drawn, dashed=tuple(line for line, _ in dashed.values()))


def banded(
    rows: pd.DataFrame,
    name: str,
    title: str,
    caption: str,
    x: str,
    line: str = "",
    *,
    log_x: bool = False,
    log_y: bool | tuple[str, ...] = True,
) -> Plot:
    """Return one curve per panel and `line`: the mean `y` at each `x`, with a band of one standard deviation.

    Of positive values the band stays positive: where it would reach 0 or below, it ends at the smallest.
    """
    grouped = rows.groupby(["panel", "x", "line"], sort=False)["y"]
    data = grouped.agg(y="mean", least="min", spread="std").reset_index()
    spread = data["spread"].fillna(0.0)  # of one value
    data["low"], data["high"] = data["y"] - spread, data["y"] + spread
    data["low"] = data["low"].where((data["low"] > 0) | (data["least"] <= 0), data["least"])
    columns = ["panel", "x", "line", "y", "low", "high"]
    return Plot(name, title, caption, "curves", data[columns], x, line, log_y=log_y, log_x=log_x)


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
    """Return one panel per column, over the column `against`; marks differ by `group`, and have their network's key."""
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
