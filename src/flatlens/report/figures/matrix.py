"""The pairwise scatter matrix: marks below the diagonal, coefficients above it, histograms on it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import altair as alt
import pandas as pd

from flatlens.report import frames
from flatlens.report.figures.figure import (
    Drawing,
    Figure,
    Grid,
    empty,
    hollow,
    interval,
    known,
    solid_if_included,
)
from flatlens.report.palette import FALLS, RISES

if TYPE_CHECKING:
    from flatlens.experiments import Quantity, StudyResult

CELL = 78
BRUSH = "brush"


def scatter_matrix(result: StudyResult) -> Figure:
    """Return every measure and the gap against each other; a brush in one panel marks the same networks in all."""
    gap = frames.gap_of(result)
    quantities = [*([gap] if gap else []), *frames.measures_of(result)]
    data = frames.value_frame(result)
    drawing = _matrix(result, quantities, data) if quantities and len(data) else empty("no network to show")
    return Figure(
        name="scatter_matrix",
        title="Everything against everything",
        caption="Below the diagonal one mark a network; with a mouse, drag a rectangle in any panel to follow its "
        "networks through all of them, double-click to let go. On the diagonal each quantity's histogram. Above it "
        f"Pearson's r and Kendall's τ{' with 95% intervals' if known(result.relations['pearson_low']) else ''}, orange "
        "where both rise together, blue where one falls; the stronger the tint the larger "
        f"|r|.{hollow(data['included'])}",
        data=data,
        whole=drawing,
        panels=(drawing,),
        layout="wide",
        colours=False,  # its legend is its own
    )


def _matrix(result: StudyResult, quantities: list[Quantity], data: pd.DataFrame) -> Drawing:
    """Return cells row by row. Quantities become q0, q1...: a dot or bracket in a field would be read as a path."""
    fields = {q.name: f"q{i}" for i, q in enumerate(quantities)}
    grid = Grid.of(result)
    drawn = grid.told(data[[*frames.network_columns(result), "included", *fields]].rename(columns=fields))
    pairs = {(row["x"], row["y"]): row for row in frames.relation_frame(result).to_dict("records")}
    views: list[str] = []
    cells: list[Drawing] = []
    for i, row in enumerate(quantities):
        for j, column in enumerate(quantities):
            if i == j:
                cells.append(_diagonal(data[row.name], frames.axis_title(row), last=i == len(quantities) - 1))
            elif i > j:
                edge = (j == 0, i == len(quantities) - 1)
                views.append(f"cell_{i}_{j}")
                cells.append(_scatter(drawn, (column, f"q{j}"), (row, f"q{i}"), edge, grid).properties(name=views[-1]))
            else:
                cells.append(_coefficients(pairs.get((column.name, row.name))))
    # Declared once for all panels by their names: handed to each, Altair would warn of every double.
    brushed = alt.TopLevelSelectionParameter(
        name=BRUSH, select=alt.IntervalSelectionConfig(type="interval", resolve="global"), views=views
    )
    matrix: alt.ConcatChart = alt.concat(
        *cells, columns=len(quantities), spacing=5, bounds="flush", params=[brushed] if views else alt.Undefined
    ).resolve_scale(fill="shared")
    return matrix


def _wrap(title: str) -> list[str]:
    """Return the lines of a title, as long as a cell is wide."""
    return textwrap.wrap(title, 13, break_long_words=False)


def two_ticks(low: float, high: float) -> list[float]:
    """Return two round numbers far apart and away from both ends: more would run together.

    >>> two_ticks(-0.6, 10.6), two_ticks(0.2705, 0.3155), two_ticks(-2.12, -1.73)
    ([2.0, 8.0], [0.28, 0.3], [-2.0, -1.8])
    """
    margin = 0.1 * (high - low)
    power = math.floor(math.log10(high - low))
    for step in (digit * 10.0**at for at in (power, power - 1) for digit in (5, 2, 1)):
        first, last = math.ceil((low + margin) / step), math.floor((high - margin) / step)
        if last > first:
            return [float(f"{at * step:.15g}") for at in (first, last)]
    return []


def _edge_axis(shown: bool, title: str, values: pd.Series[float]) -> alt.Axis:
    """Return an axis with names on the outer edge only, and lines in every cell."""
    ticks = two_ticks(*frames.padded_range(values))
    if not shown:
        return alt.Axis(labels=False, ticks=False, title=None, values=ticks)
    return alt.Axis(title=_wrap(title), values=ticks, format=",.6~g", labelFontSize=9, titleFontSize=10)


def _scatter(
    drawn: pd.DataFrame,
    x: tuple[Quantity, str],
    y: tuple[Quantity, str],
    edge: tuple[bool, bool],
    grid: Grid,
) -> alt.Chart:
    (left, bottom), (xq, xf), (yq, yf) = edge, x, y
    marks: alt.Chart = (
        alt.Chart(drawn)
        .mark_point(size=16, strokeWidth=1)
        .encode(
            x=alt.X(f"{xf}:Q", scale=_domain(drawn[xf]), axis=_edge_axis(bottom, frames.axis_title(xq), drawn[xf])),
            y=alt.Y(f"{yf}:Q", scale=_domain(drawn[yf]), axis=_edge_axis(left, frames.axis_title(yq), drawn[yf])),
            fill=grid.colour_of(alt.Fill, True),
            stroke=grid.colour_of(alt.Stroke, True),
            fillOpacity=solid_if_included(),
            opacity=alt.OpacityValue(0.1, condition={"param": BRUSH, "value": 1.0}),
            tooltip=grid.tooltip(
                alt.Tooltip(f"{xf}:Q", title=frames.axis_title(xq), format=".4g"),
                alt.Tooltip(f"{yf}:Q", title=frames.axis_title(yq), format=".4g"),
            ),
        )
        .properties(width=CELL, height=CELL)
    )
    return marks


def _domain(values: pd.Series[float]) -> alt.Scale:
    return alt.Scale(domain=list(frames.padded_range(values)), nice=False, zero=False)


def _diagonal(values: pd.Series[float], title: str, last: bool) -> Drawing:
    """Return the histogram under the quantity's name; the corners carry the names that the outer axes lack."""
    lines = _wrap(title)
    bars = frames.histogram(values)
    free = 1 - (12 * len(lines) + 10) / CELL  # the upper part is the name's
    top = float(bars["count"].max()) / free if len(bars) else 1.0
    histogram = (
        alt.Chart(bars)
        .mark_bar(color="#9aa5b4", opacity=0.65, binSpacing=0.5)
        .encode(
            x=alt.X("low:Q", scale=_domain(values), axis=_edge_axis(last, title, values)),
            x2="high:Q",
            y=alt.Y("count:Q", scale=alt.Scale(domain=[0, top]), axis=None, stack=None),
            y2=alt.Y2Datum(0),
        )
    )
    name = (
        alt.Chart(pd.DataFrame({"name": ["\n".join(lines)]}))
        .mark_text(
            x=CELL / 2,
            y=5,
            align="center",
            baseline="top",
            lineBreak="\n",
            fontSize=9,
            fontWeight="bold",
            lineHeight=12,
        )
        .encode(text="name:N")
    )
    return alt.layer(histogram, name).properties(width=CELL, height=CELL)


def _coefficients(row: Mapping[Hashable, Any] | None) -> alt.Chart:
    """Return both coefficients in words on a tint: transparent, so that it suits a light and a dark page."""
    if row is None or row["pearson"] != row["pearson"]:
        lines, tint, strength = ["undefined"], RISES, 0.0
    else:
        pearson, kendall = interval(row, "pearson", "r"), interval(row, "kendall", "τ")
        lines = [line for words in (pearson, kendall) for line in words.replace(" [", "\n[").split("\n")]
        tint, strength = (RISES if row["pearson"] >= 0 else FALLS), abs(row["pearson"])
    tinted = alt.ViewBackground(fill=tint, fillOpacity=round(0.6 * strength**1.5, 3))
    text: alt.Chart = (
        alt.Chart(pd.DataFrame({"text": ["\n".join(lines)]}))
        .mark_text(
            x=CELL / 2,
            y=CELL / 2,
            lineBreak="\n",
            fontSize=10,
            lineHeight=14,
            baseline="middle",
            dy=-6.5 * (len(lines) - 1),
        )
        .encode(text="text:N")
        .properties(width=CELL, height=CELL, view=tinted)
    )
    return text
