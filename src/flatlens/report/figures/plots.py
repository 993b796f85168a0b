"""The figures of experiments: the data that an experiment names, drawn by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import altair as alt
import pandas as pd

from flatlens.report.figures.figure import SHAPES, Drawing, Figure, FigureLayout, Width, in_panels, log_axis
from flatlens.report.figures.study import scatter_matrix

if TYPE_CHECKING:
    from flatlens.experiments import StudyResult
    from flatlens.papers.experiment import Plot

DRAWN_COLOURS = 4  #: number of colours for lines and marks without an order; a grey follows them
TABLE_COLUMN, TABLE_ROW = 150, 30  #: width and height of a table's cells in the files, in pixels
LEGEND_WIDTH, SYMBOL, LETTER = 250, 22, 5.5
"""Widths of a legend above a panel, of its symbols and of a letter, in pixels."""


def plot_figure(plot: Plot, results: Mapping[str, StudyResult]) -> Figure:
    """Return the figure of a plot; a matrix is that of its study."""
    if plot.kind == "matrix":
        drawn = scatter_matrix(results[plot.study])
        return replace(drawn, name=plot.name, title=plot.title)
    names = list(dict.fromkeys(plot.data["panel"]))
    whole, panels = in_panels(
        lambda name, width: _PANELS[plot.kind](plot.data[plot.data["panel"] == name], plot, name, width),
        names,
        "no network has reached the end of its training",
    )
    of_text = plot.kind == "table" and bool(names)  # the page has a table of its own
    panels = () if of_text else panels
    layout: FigureLayout = "table" if of_text else "grid"
    return Figure(plot.name, plot.title, plot.caption, plot.data, whole, panels, layout=layout, colours=False)


def crossed(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return each panel of a plot of kind "table": its title, and its texts by row and column, in the plot's order."""
    found = []
    for title, panel in data.groupby("panel", sort=False):
        rows, columns = (list(dict.fromkeys(panel[name])) for name in ("row", "column"))
        texts = panel.pivot(index="row", columns="column", values="text").reindex(index=rows, columns=columns)
        found.append((str(title), texts.fillna("")))
    return found


def _curves(data: pd.DataFrame, plot: Plot, title: str, width: Width) -> Drawing:
    # lines with a colour: numbers by size, names in the plot's order
    lines = [line for line in dict.fromkeys(plot.data["line"]) if line not in plot.dashed]
    lines = sorted(lines) if all(map(pd.api.types.is_number, lines)) else lines
    # a legend above the panel, with as many names side by side as its width holds
    longest = max((len(str(name)) for name in lines), default=0)
    columns, title_of_lines = max(1, int(LEGEND_WIDTH / (SYMBOL + LETTER * longest))), plot.group or plot.y or None
    legend = alt.Legend(title=title_of_lines, orient="top", columns=columns, labelLimit=LEGEND_WIDTH)
    colour = alt.Color("line:O", scale=alt.Scale(domain=lines), legend=legend)
    x = _across(data, plot) if plot.log_x else alt.X("x:Q", title=plot.x, axis=alt.Axis(tickCount=5))
    y = _vertical(data, plot, "y:Q")
    data, beside = (data[data["line"].isin(plot.dashed) == dashed] for dashed in (False, True))
    low = _vertical(data, plot, "low:Q")
    band = alt.Chart(data).mark_area(opacity=0.18).encode(x=x, y=low, y2="high:Q", color=colour)
    line = alt.Chart(data).mark_line(strokeWidth=1.7).encode(x=x, y=y, color=colour, tooltip=_tooltip(data))
    if len(lines) > DRAWN_COLOURS + 1:  # the colours and the grey begin again
        strokes = [[4, 2] if number // (DRAWN_COLOURS + 1) % 2 else [1, 0] for number in range(len(lines))]
        line = line.encode(
            strokeDash=alt.StrokeDash("line:O", scale=alt.Scale(domain=lines, range=strokes), legend=legend)
        )
    layers = [band, line]
    if len(beside):
        dashed = alt.Chart(beside).mark_line(strokeWidth=1.4, strokeDash=[5, 4], color="gray")
        layers.append(dashed.encode(x=x, y=y, detail="line:N", tooltip=_tooltip(beside)))
    return alt.layer(*layers).properties(width=width, height=210, title=title)


def _scatter(data: pd.DataFrame, plot: Plot, title: str, width: Width) -> Drawing:
    groups = list(dict.fromkeys(plot.data["group"]))
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(groups))]
    legend = alt.Legend(orient="top", title=plot.group or None) if len(groups) > 1 else None
    marks = alt.Chart(data).mark_point(filled=True, size=45, opacity=0.8)
    drawn = marks.encode(
        x=_across(data, plot),
        y=_vertical(data, plot, "y:Q"),
        color=alt.Color("group:N", scale=alt.Scale(domain=groups), legend=legend),
        shape=alt.Shape("group:N", scale=alt.Scale(domain=groups, range=shapes), legend=legend),
        tooltip=_tooltip(data),
    )
    sized: alt.Chart = drawn.properties(width=width, height=210, title=title)
    return sized


def _bars(data: pd.DataFrame, plot: Plot, title: str, width: Width) -> Drawing:
    groups = list(dict.fromkeys(plot.data["group"]))
    base = alt.Chart(data).encode(
        x=alt.X("x:N", title=plot.x, sort=list(dict.fromkeys(data["x"])), axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("group:N", sort=groups),
        tooltip=_tooltip(data),
    )
    colour = alt.Color("group:N", scale=alt.Scale(domain=groups), legend=alt.Legend(orient="top", title=None))
    bar = base.mark_bar().encode(y=_vertical(data, plot, "y:Q"), color=colour)
    reach = base.mark_rule(strokeWidth=1.4).encode(y=_vertical(data, plot, "low:Q"), y2="high:Q")
    return alt.layer(bar, reach).properties(width=width, height=210, title=title)


def _table(data: pd.DataFrame, plot: Plot, title: str, _: Width) -> Drawing:
    columns, rows = (list(dict.fromkeys(data[name])) for name in ("column", "row"))
    above = alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False)
    beside = alt.Axis(domain=False, ticks=False, labelLimit=300)
    drawn = alt.Chart(data).mark_text(fontSize=13).encode(
        x=alt.X("column:N", title=None, sort=columns, axis=above),
        y=alt.Y("row:N", title=None, sort=rows, axis=beside),
        text="text:N",
        tooltip=_tooltip(data),
    )  # fmt: skip
    sized: alt.Chart = drawn.properties(width=TABLE_COLUMN * len(columns), height=TABLE_ROW * len(rows), title=title)
    return sized


def _across(data: pd.DataFrame, plot: Plot) -> alt.X:
    if plot.log_x and _decades(data["x"]):
        return alt.X("x:Q", scale=alt.Scale(type="log", nice=False), axis=log_axis(data["x"], plot.x))
    return alt.X("x:Q", title=plot.x, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))


def _vertical(data: pd.DataFrame, plot: Plot, field: str) -> alt.Y:
    lines_alone = plot.kind == "curves" and not plot.group  # then `y` is what the lines are, and the panel the quantity
    title = None if lines_alone else plot.y
    drawn = pd.concat([data[name] for name in ("y", "low", "high") if name in data])
    if isinstance(plot.log_y, bool):
        logarithmic = plot.log_y and _decades(drawn)
    else:
        logarithmic = bool(data["panel"].isin(plot.log_y).any() and drawn.min() > 0)
    if logarithmic:
        return alt.Y(field, scale=alt.Scale(type="log", nice=False), axis=log_axis(data["y"], title))
    zero = plot.kind == "bars"
    return alt.Y(field, title=title, scale=alt.Scale(zero=zero), axis=alt.Axis(tickCount=5))


def _decades(values: pd.Series[float]) -> bool:
    """Return whether a logarithmic axis is possible and shows more than a linear one."""
    return bool(values.min() > 0 and values.max() > 10 * values.min())


def _tooltip(data: pd.DataFrame) -> list[alt.Tooltip]:
    shown = [name for name in data.columns if name != "panel"]
    return [
        alt.Tooltip(f"{name}:Q", format=".4g") if data[name].dtype.kind == "f" else alt.Tooltip(f"{name}:N")
        for name in shown
    ]


_PANELS: Mapping[str, Callable[[pd.DataFrame, Plot, str, Width], Drawing]] = {
    "curves": _curves,
    "scatter": _scatter,
    "bars": _bars,
    "table": _table,
}
