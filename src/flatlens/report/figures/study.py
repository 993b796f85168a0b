"""The figures of a study: measures against the gap, against each other, layer by layer, and the training curves."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import altair as alt
import pandas as pd

from flatlens.experiments.overrides import IDENTITY
from flatlens.report import frames
from flatlens.report.figures.figure import (
    FALLS,
    RISES,
    SHAPES,
    Drawing,
    Figure,
    Grid,
    Width,
    dashed,
    empty,
    hollow,
    in_panels,
    interval,
    known,
    log_axis,
    one_picture,
    solid_if_included,
    value_axis,
)

if TYPE_CHECKING:
    from flatlens.experiments import Quantity, StudyResult
    from flatlens.statistics import Relations


GAP_PANELS = "against_gap"
HUES = ("#2f7fc1", "#e08214", "#3f9b78", "#9b6bb3", "#8a94a3", "#b5524c")
"""Colours of the coefficients, which also differ by shape."""
_BARS = ", its bar the 95% interval over seeds: an interval that contains 0 leaves the sign open"
_ALIKE = (
    " Among networks trained alike the means of the groups of equal settings are taken out, so that a setting that "
    "moves both sides is not evidence."
)
_KINDS = alt.Legend(title=None, orient="top", columns=1, labelLimit=330)


def gap_panels(result: StudyResult) -> Figure:
    """Return the gap over each measure, with the least-squares line of the included networks."""
    gap, measures = frames.gap_of(result), frames.measures_of(result)
    data = frames.value_frame(result)
    grid, relations = Grid.of(result), frames.relation_frame(result)
    who = dict.fromkeys([*IDENTITY, *map(frames.plain_field, (grid.colour, grid.shape))])
    scale, ticks = alt.Scale(zero=False), alt.Axis(tickCount=5)

    def panel(x: Quantity, width: Width) -> Drawing:
        assert gap is not None
        # plain names of columns: a dot or bracket in a field would be read as a path
        drawn = data.rename(columns={x.name: "x", gap.name: "y"})[[*who, "outcome", "included", "x", "y"]]
        drawn = grid.told(drawn.dropna(subset=["x", "y"]))
        legend, names = width != "container", {"x": frames.axis_title(x), "y": frames.axis_title(gap)}
        values = [alt.Tooltip(f"{axis}:Q", title=name, format=".4g") for axis, name in names.items()]
        marks = alt.Chart(drawn).mark_point(size=55, opacity=1, strokeWidth=1.5).encode(
            x=alt.X("x:Q", title=names["x"], scale=scale, axis=ticks),
            y=alt.Y("y:Q", title=names["y"], scale=scale, axis=ticks),
            fill=grid.colour_of(alt.Fill, legend),
            stroke=grid.colour_of(alt.Stroke, legend),
            shape=grid.shape_of(legend),
            fillOpacity=solid_if_included(),
            tooltip=grid.tooltip(alt.Tooltip("outcome:N"), *values),
        )  # fmt: skip
        counted = drawn[drawn["included"]]
        fit = alt.Chart(frames.regression_line(counted["x"], counted["y"]))
        fit = fit.mark_line(strokeWidth=1.5, strokeDash=[5, 3], color="#8a94a3").encode(x="x:Q", y="y:Q")
        found = relations[(relations["x"] == x.name) & (relations["y"] == gap.name)]
        row = found.iloc[0].to_dict() if len(found) else None
        words = f"{interval(row, 'pearson', 'r')},  {interval(row, 'kendall', 'τ')}"
        title = alt.TitleParams(text=names["x"], subtitle=words)
        return alt.layer(fit, marks).properties(width=width, height=210, title=title)

    # one legend for all panels
    there = gap is not None and len(data) > 0
    nothing = "no measure and gap to compare"
    whole, panels = in_panels(panel, measures if there else [], nothing, fill="shared", shape="shared")
    bars = " with 95% intervals over independent seeds" if known(relations["pearson_low"]) else ""
    title = "Each measure against the generalisation gap"
    caption = (
        "One mark a network; the line is the least-squares fit. Over each panel: Pearson's r and Kendall's "
        f"tau{bars}.{hollow(data['included'])}"
    )
    return Figure(GAP_PANELS, title, caption, data, whole, panels, "grid", signs=True)


def gap_forest(result: StudyResult) -> Figure:
    """Return every measure's and setting's correlation with the gap, as dots with intervals, strongest first."""
    data = frames.gap_relations(result)
    alike, order = data["alike"] != "", list(dict.fromkeys(data["quantity"]))
    parts = (("Across all networks", ~alike), ("Among networks trained alike: Pearson r", alike))
    whole, panels = in_panels(
        lambda part, width: _forest(data[part[1]], part[0], order, width),
        [part for part in parts if part[1].any()],
        "no correlation is defined for these networks",
        columns=0,
        width=420,
        color="independent",
        shape="independent",
        yOffset="independent",
    )
    title, bars = "Correlation of each quantity with the gap", _BARS if known(data["low"]) else ""
    caption = f"A dot is a correlation with the generalisation gap{bars}.{_ALIKE if alike.any() else ''}"
    return Figure("correlations_with_gap", title, caption, data, whole, panels, "grid", colours=False)


def relations_figure(relations: Relations, target: str | None = None) -> Figure:
    """Return the correlations of a table's columns with one of them, as dots with intervals, strongest first."""
    pairs = relations.of(target)
    name = str(pairs["y"].iloc[0])
    rows = [
        {
            "quantity": row["x"],
            "coefficient": spoken,
            "value": row[coefficient],
            "low": row[f"{coefficient}_low"],
            "high": row[f"{coefficient}_high"],
            "n": row["n"],
            "alike": "",
        }
        for row in pairs.sort_values("pearson", key=lambda r: -r.abs()).to_dict("records")
        for coefficient, spoken in (("pearson", "Pearson r"), ("kendall", "Kendall tau"))
    ]
    data = pd.DataFrame(rows).dropna(subset=["value"])
    drawing: Drawing = empty("no correlation is defined for these columns")
    if len(data):
        drawing = _forest(data, f"With {name}", list(dict.fromkeys(data["quantity"])), 420, f"correlation with {name}")
    bars = ", its bar the 95% interval over independent units" if known(data["low"]) else ""
    caption = f"A dot is a correlation{bars}."
    return one_picture("relations", f"Correlations with {name}", caption, data, drawing)


def _forest(
    data: pd.DataFrame, title: str, order: list[str], width: Width, across: str = "correlation with the gap"
) -> Drawing:
    alike = data["alike"] != ""
    data = data.assign(kind=data["coefficient"].where(~alike, "equal " + data["alike"]))
    kinds = list(dict.fromkeys(data["kind"]))
    first = 2 if alike.any() else 0  # after those of the other panel: one colour, one meaning
    hues = [HUES[(first + i) % len(HUES)] for i in range(len(kinds))]
    shapes = [SHAPES[(first + i) % len(SHAPES)] for i in range(len(kinds))]
    # Two lines for a name with a comma: on a phone one line would take half the width.
    labels = alt.Axis(labelExpr="split(datum.label, ', ')", labelLimit=190, grid=True, tickBand="extent")
    base = alt.Chart(data).encode(
        y=alt.Y("quantity:N", sort=order, scale=alt.Scale(domain=order), title=None, axis=labels),
        yOffset=alt.YOffset("kind:N", sort=kinds, scale=alt.Scale(domain=kinds, paddingOuter=0.3)),
        color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=hues), legend=_KINDS),
    )
    scale = alt.Scale(domain=[-1, 1])
    bars = base.mark_rule(strokeWidth=1.6).encode(
        x=alt.X("low:Q", scale=scale, title=across, axis=alt.Axis(tickCount=5)), x2="high:Q"
    )
    numbers = [alt.Tooltip(f"{column}:Q", format=".3f") for column in ("value", "low", "high")]
    dots = base.mark_point(filled=True, size=45, opacity=1).encode(
        x=alt.X("value:Q", scale=scale),
        shape=alt.Shape("kind:N", scale=alt.Scale(domain=kinds, range=shapes), legend=_KINDS),
        tooltip=["quantity:N", "coefficient:N", "kind:N", *numbers, "n:Q"],
    )
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[3, 3]).encode(x=alt.X("zero:Q", scale=scale))
    return alt.layer(zero, bars, dots).properties(width=width, height=38 * len(order), title=title)


CELL = 78
BRUSH = "brush"


def scatter_matrix(result: StudyResult) -> Figure:
    """Return every measure and the gap against each other; a brush in one panel marks the same networks in all."""
    gap = frames.gap_of(result)
    quantities = [*([gap] if gap else []), *frames.measures_of(result)]
    data = frames.value_frame(result)
    drawing: Drawing = empty("no network to show")
    if quantities and len(data):
        # cells row by row; quantities become q0, q1...: a dot or bracket in a field would be read as a path
        fields = {q.name: f"q{i}" for i, q in enumerate(quantities)}
        grid, last = Grid.of(result), len(quantities) - 1
        drawn = grid.told(data[[*frames.network_columns(result), "included", *fields]].rename(columns=fields))
        pairs = {(row["x"], row["y"]): row for row in frames.relation_frame(result).to_dict("records")}
        views: list[str] = []
        cells: list[Drawing] = []
        for i, row in enumerate(quantities):
            for j, column in enumerate(quantities):
                if i == j:
                    cells.append(_diagonal(data[row.name], frames.axis_title(row), last=i == last))
                elif i > j:
                    cell = _scatter(drawn, (column, f"q{j}"), (row, f"q{i}"), (j == 0, i == last), grid)
                    views.append(f"cell_{i}_{j}")
                    cells.append(cell.properties(name=views[-1]))
                else:
                    cells.append(_coefficients(pairs.get((column.name, row.name))))
        # the brush is declared once for all panels by their names: handed to each, Altair would warn of every double
        brushed = alt.TopLevelSelectionParameter(
            name=BRUSH, select=alt.IntervalSelectionConfig(type="interval", resolve="global"), views=views
        )
        drawing = alt.concat(
            *cells, columns=len(quantities), spacing=5, bounds="flush", params=[brushed] if views else alt.Undefined
        ).resolve_scale(fill="shared")
    caption = (
        "Below the diagonal one mark a network; with a mouse, drag a rectangle in any panel to follow its "
        "networks through all of them, double-click to let go. On the diagonal each quantity's histogram. Above it "
        f"Pearson's r and Kendall's τ{' with 95% intervals' if known(result.relations['pearson_low']) else ''}, orange "
        "where both rise together, blue where one falls; the stronger the tint the larger "
        f"|r|.{hollow(data['included'])}"
    )
    return one_picture("scatter_matrix", "All pairs of quantities", caption, data, drawing)  # own legend


def _wrap(title: str) -> list[str]:
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
    drawn: pd.DataFrame, x: tuple[Quantity, str], y: tuple[Quantity, str], edge: tuple[bool, bool], grid: Grid
) -> alt.Chart:
    (left, bottom), (xq, xf), (yq, yf) = edge, x, y
    values = [alt.Tooltip(f"{field}:Q", title=frames.axis_title(q), format=".4g") for q, field in (x, y)]
    marks = alt.Chart(drawn).mark_point(size=16, strokeWidth=1).properties(width=CELL, height=CELL)
    encoded: alt.Chart = marks.encode(
        x=alt.X(f"{xf}:Q", scale=_domain(drawn[xf]), axis=_edge_axis(bottom, frames.axis_title(xq), drawn[xf])),
        y=alt.Y(f"{yf}:Q", scale=_domain(drawn[yf]), axis=_edge_axis(left, frames.axis_title(yq), drawn[yf])),
        fill=grid.colour_of(alt.Fill, True),
        stroke=grid.colour_of(alt.Stroke, True),
        fillOpacity=solid_if_included(),
        opacity=alt.OpacityValue(0.1, condition={"param": BRUSH, "value": 1.0}),
        tooltip=grid.tooltip(*values),
    )
    return encoded


def _domain(values: pd.Series[float]) -> alt.Scale:
    return alt.Scale(domain=list(frames.padded_range(values)), nice=False, zero=False)


def _diagonal(values: pd.Series[float], title: str, last: bool) -> Drawing:
    """Return the histogram under the quantity's name; the corners carry the names that the outer axes lack."""
    lines = _wrap(title)
    bars = frames.histogram(values)
    free = 1 - (12 * len(lines) + 10) / CELL  # the upper part is the name's
    top = float(bars["count"].max()) / free if len(bars) else 1.0
    histogram = alt.Chart(bars).mark_bar(color="#9aa5b4", opacity=0.65, binSpacing=0.5)
    histogram = histogram.encode(
        x=alt.X("low:Q", scale=_domain(values), axis=_edge_axis(last, title, values)),
        x2="high:Q",
        y=alt.Y("count:Q", scale=alt.Scale(domain=[0, top]), axis=None, stack=None),
        y2=alt.Y2Datum(0),
    )
    style: dict[str, Any] = {"align": "center", "baseline": "top", "fontSize": 9, "lineHeight": 12}
    name = alt.Chart(pd.DataFrame({"name": ["\n".join(lines)]}))
    name = name.mark_text(x=CELL / 2, y=5, lineBreak="\n", fontWeight="bold", **style).encode(text="name:N")
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
    style: dict[str, Any] = {"lineBreak": "\n", "fontSize": 10, "lineHeight": 14, "baseline": "middle"}
    text = alt.Chart(pd.DataFrame({"text": ["\n".join(lines)]}), width=CELL, height=CELL, view=tinted)
    words: alt.Chart = text.mark_text(x=CELL / 2, y=CELL / 2, dy=-6.5 * (len(lines) - 1), **style).encode(text="text:N")
    return words


def layer_profiles(result: StudyResult) -> Figure:
    """Return a panel for each measure: a thin line for each network, a thick one for the median of a learning rate."""
    data = frames.profile_frame(result)
    grid = Grid.of(result)
    whose = f"its {frames.spoken(grid.colour)}" if grid.known_colours else "all of them"

    def panel(measure: str, width: Width) -> Drawing:
        rows = grid.told(data[data["measure"] == measure])
        layers = list(rows.sort_values("position")["layer"].drop_duplicates())
        logarithmic = bool((rows["value"] > 0).all())
        y = value_axis("value:Q", rows["value"], logarithmic, 5)
        x = alt.X("layer:O", sort=layers, title=None, axis=alt.Axis(labelAngle=0, labelOverlap=True))
        colour, field = grid.colour_of(alt.Color, width != "container"), frames.plain_field(grid.colour)
        thin = alt.Chart(rows).mark_line(strokeWidth=1, strokeOpacity=0.5)  # opacity: a PNG takes 20 times as long
        thin = thin.encode(x=x, y=y, color=colour, detail="key:N", strokeDash=_dashed_if_excluded())
        tooltip = [
            alt.Tooltip("layer:N"),
            alt.Tooltip(f"{field}:N", title=frames.spoken(grid.colour)),
            alt.Tooltip("value:Q", title=f"median {measure}", format=".4g"),
        ]
        thick = alt.Chart(frames.middle_profiles(rows, field))
        thick = thick.mark_line(strokeWidth=2.6, point=alt.OverlayMarkDef(size=38, filled=True))
        thick = thick.encode(x=x, y=y, color=colour, tooltip=tooltip)
        title = alt.TitleParams(text=measure, subtitle="log scale" if logarithmic else "linear scale")
        return alt.layer(thin, thick).properties(width=width, height=190, title=title)

    names = list(dict.fromkeys(data["measure"]))
    whole, panels = in_panels(panel, names, "no value by layer", color="shared")
    caption = (
        f"Layers from input to output. A thin line is one network{dashed(data['included'])}, a thick one the "
        f"median of {whose}. The axis is logarithmic where every value is positive."
    )
    return Figure("layer_profiles", "Layer by layer", caption, data, whole, panels, "grid")


def training_curves(result: StudyResult) -> Figure:
    """Return a panel for each batch size: the training loss over steps, on log axes, and the loss trained to."""
    data = frames.curve_frame(result)
    grid = Grid.of(result)
    bound = result.settings.get("base", {}).get("training", {}).get("until", {}).get("loss_below")
    extent = (float(data["step"].min()), float(data["step"].max())) if len(data) else (1.0, 1.0)
    steps = alt.Scale(type="log", domain=list(extent), nice=False)

    def panel(part: tuple[Any, pd.DataFrame], width: Width) -> Drawing:
        size, rows = part
        lines = alt.Chart(grid.told(rows)).mark_line(strokeWidth=1.2, strokeOpacity=0.85, clip=True).encode(
            x=alt.X("step:Q", scale=steps, axis=log_axis(rows["step"], "step")),
            y=alt.Y("loss:Q", scale=alt.Scale(type="log"), axis=log_axis(rows["loss"], "training loss")),
            color=grid.colour_of(alt.Color, width != "container"),
            detail="key:N",
            strokeDash=_dashed_if_excluded(),
            tooltip=grid.tooltip(alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".3g")),
        )  # fmt: skip
        layers = [lines]
        if bound:
            layers.append(alt.Chart(pd.DataFrame({"loss": [bound]})).mark_rule(strokeDash=[4, 3]).encode(y="loss:Q"))
        return alt.layer(*layers).properties(width=width, height=210, title=f"batch size {size}")

    sizes = list(data.groupby("batch_size", sort=True))
    whole, panels = in_panels(panel, sizes, "no training curve", color="shared")
    stop = f" The dashed level is the loss every network was trained to ({bound:g})." if bound else ""
    caption = (
        "Loss over the whole training set against the number of updates, one line a "
        f"network{dashed(data['included'])}.{stop}"
    )
    return Figure("training_curves", "Training", caption, data, whole, panels, "grid")


def _dashed_if_excluded() -> alt.StrokeDash:
    scale = alt.Scale(domain=[True, False], range=[[1, 0], [4, 3]])
    return alt.StrokeDash("included:N", scale=scale, legend=None)
