"""Measures through training: a panel a measure, a line a run, and the edge of stability beside the sharpness."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import pandas as pd

from flatlens.column import Column
from flatlens.report.figures.figure import Drawing, Figure, Width, empty, known, log_axis
from flatlens.tracking.stability import WITH_EDGE

Z = 1.96
_PANELS_A_ROW = 2
_EDGE = (
    " A dashed line is the edge of stability: with a larger sharpness, the steps at this learning rate grow on a "
    "quadratic."
)
_COLUMNS = ["run", "step", "measure", "value", "low", "high", "edge"]


def tracked_frame(histories: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return network-level numbers of each run's history (`Tracker.history`), with their 95% intervals.

    Only rows of `WITH_EDGE` have a value of `edge`.
    """
    parts = [pd.DataFrame(columns=_COLUMNS)]
    for run, history in histories.items():
        rows = history[(history["layer"] == "") & (history["kind"] != "undefined")]
        reach = Z * rows["stderr"]
        edge = rows["edge"].where(rows["measure"].map(lambda name: Column.parse(name).name in WITH_EDGE))
        parts.append(rows.assign(run=run, low=rows["value"] - reach, high=rows["value"] + reach, edge=edge)[_COLUMNS])
    return pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)


def tracked_figure(histories: Mapping[str, pd.DataFrame]) -> Figure:
    """Return every tracked measure against the step; a dashed line is the edge at which that run's steps grow."""
    data = tracked_frame(histories)
    runs = list(histories)
    names = list(dict.fromkeys(data["measure"]))

    def draw(width: Width) -> list[Drawing]:
        return [_panel(data[data["measure"] == name], name, runs, width) for name in names]

    panels = draw("container") or [empty("nothing was measured")]
    whole = alt.concat(*draw(360), columns=_PANELS_A_ROW).resolve_scale(color="shared") if names else panels[0]
    return Figure(
        name="tracked",
        title="Through training",
        caption=f"One line a run.{' Bands are 95% intervals.' if _banded(data) else ''}"
        f"{_EDGE if known(data['edge']) else ''}",
        data=data,
        whole=whole,
        panels=tuple(panels),
        layout="grid",
        colours=False,
    )


def _banded(data: pd.DataFrame) -> bool:
    """Return whether any value has an interval."""
    return bool((data["high"] > data["low"]).any())


def _panel(data: pd.DataFrame, measure: str, runs: list[str], width: Width) -> Drawing:
    logarithmic = bool((data["value"] > 0).all()) and Column.parse(measure).name not in WITH_EDGE
    y = alt.Y(
        "value:Q",
        scale=alt.Scale(type="log", nice=False) if logarithmic else alt.Scale(zero=True),
        axis=log_axis(data["value"], None) if logarithmic else alt.Axis(title=None, tickCount=6),
    )
    colour = alt.Color("run:O", sort=runs, scale=alt.Scale(domain=runs), legend=alt.Legend(title=None, orient="top"))
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickCount=6))
    tooltip = ["run:N", "step:Q", alt.Tooltip("value:Q", format=".4g"), alt.Tooltip("edge:Q", format=".4g")]
    layers: list[alt.Chart] = [
        alt.Chart(data).mark_line(strokeWidth=1.6).encode(x=x, y=y, color=colour, tooltip=tooltip)
    ]
    if _banded(data):
        layers.insert(0, alt.Chart(data).mark_area(opacity=0.2).encode(x=x, y="low:Q", y2="high:Q", color=colour))
    if known(data["edge"]):
        edge = alt.Chart(data).mark_line(strokeDash=[5, 4], strokeWidth=1.2)
        layers.append(edge.encode(x=x, y="edge:Q", color=colour))
    return alt.layer(*layers).properties(width=width, height=230, title=measure)
