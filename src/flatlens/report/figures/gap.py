"""Each measure against the generalisation gap: a panel a measure, and all the correlations in one forest plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import pandas as pd

from flatlens.report import frames
from flatlens.report.figures.figure import (
    SHAPES,
    Drawing,
    Figure,
    Grid,
    Width,
    empty,
    hollow,
    interval,
    known,
    solid_if_included,
)

if TYPE_CHECKING:
    from flatlens.experiments import Quantity, StudyResult
    from flatlens.statistics import Relations

GAP_PANELS = "against_gap"
_PANELS_A_ROW = 3
HUES = (
    "#2f7fc1",
    "#e08214",
    "#3f9b78",
    "#9b6bb3",
    "#8a94a3",
    "#b5524c",
)  #: colours of the coefficients, which also differ by shape
_BARS = ", its bar the 95% interval over seeds: a bar that crosses zero says that these networks do not settle the sign"
_ALIKE = (
    " Among networks trained alike the means of the groups of equal settings are taken out, so that a setting that "
    "moves both sides is no evidence."
)
_KINDS = alt.Legend(title=None, orient="top", columns=1, labelLimit=330)


def gap_panels(result: StudyResult) -> Figure:
    """Return the gap over each measure, with the least-squares line of the included networks."""
    gap, measures = frames.gap_of(result), frames.measures_of(result)
    data = frames.value_frame(result)
    grid, relations = Grid.of(result), frames.relation_frame(result)
    if gap is None or not measures or data.empty:
        panels: list[Drawing] = [empty("no measure and gap to compare")]
        whole: Drawing = panels[0]
    else:
        panels = [_panel(data, relations, q, gap, grid, "container") for q in measures]
        whole = alt.concat(
            *(_panel(data, relations, q, gap, grid, 300) for q in measures), columns=_PANELS_A_ROW
        ).resolve_scale(fill="shared", shape="shared")
    return Figure(
        name=GAP_PANELS,
        title="Each measure against the generalisation gap",
        caption="One mark a network; the line is the least-squares fit. Over each panel: Pearson's r and Kendall's "
        f"tau{' with 95% intervals over independent seeds' if known(relations['pearson_low']) else ''}."
        f"{hollow(data['included'])}",
        data=data,
        whole=whole,
        panels=tuple(panels),
        layout="grid",
        signs=True,
    )


def _panel(data: pd.DataFrame, relations: pd.DataFrame, x: Quantity, y: Quantity, grid: Grid, width: Width) -> Drawing:
    """Return one measure's panel. Columns get plain names: a dot or bracket in a field would be read as a path."""
    who = dict.fromkeys([*frames.NETWORK, *map(frames.plain_field, (grid.colour, grid.shape))])
    drawn = data.rename(columns={x.name: "x", y.name: "y"})[[*who, "outcome", "included", "x", "y"]]
    drawn = grid.told(drawn.dropna(subset=["x", "y"]))
    legend = width != "container"
    scale, ticks = alt.Scale(zero=False), alt.Axis(tickCount=5)
    marks = (
        alt.Chart(drawn)
        .mark_point(size=55, opacity=1, strokeWidth=1.5)
        .encode(
            x=alt.X("x:Q", title=frames.axis_title(x), scale=scale, axis=ticks),
            y=alt.Y("y:Q", title=frames.axis_title(y), scale=scale, axis=ticks),
            fill=grid.colour_of(alt.Fill, legend),
            stroke=grid.colour_of(alt.Stroke, legend),
            shape=grid.shape_of(legend),
            fillOpacity=solid_if_included(),
            tooltip=grid.tooltip(
                alt.Tooltip("outcome:N"),
                alt.Tooltip("x:Q", title=frames.axis_title(x), format=".4g"),
                alt.Tooltip("y:Q", title=frames.axis_title(y), format=".4g"),
            ),
        )
    )
    counted = drawn[drawn["included"]]
    fit = (
        alt.Chart(frames.regression_line(counted["x"], counted["y"]))
        .mark_line(strokeWidth=1.5, strokeDash=[5, 3], color="#8a94a3")
        .encode(x="x:Q", y="y:Q")
    )
    found = relations[(relations["x"] == x.name) & (relations["y"] == y.name)]
    row = found.iloc[0].to_dict() if len(found) else None
    words = f"{interval(row, 'pearson', 'r')},  {interval(row, 'kendall', 'τ')}"
    return alt.layer(fit, marks).properties(
        width=width, height=210, title=alt.TitleParams(text=frames.axis_title(x), subtitle=words)
    )


def gap_forest(result: StudyResult) -> Figure:
    """Return every measure's and setting's correlation with the gap, as dots with intervals, strongest first."""
    data = frames.gap_relations(result)

    def draw(width: Width) -> list[Drawing]:
        alike = data["alike"] != ""
        parts = (("Across all networks", ~alike), ("Among networks trained alike: Pearson r", alike))
        order = list(dict.fromkeys(data["quantity"]))
        return [_forest(data[rows], title, order, width) for title, rows in parts if rows.any()]

    panels = draw("container") or [empty("no correlation is defined for these networks")]
    return Figure(
        name="correlations_with_gap",
        title="How strongly each quantity goes with the gap",
        caption=f"A dot is a correlation with the generalisation gap{_BARS if known(data['low']) else ''}."
        f"{_ALIKE if (data['alike'] != '').any() else ''}",
        data=data,
        whole=alt.hconcat(*draw(420)).resolve_scale(color="independent", shape="independent", yOffset="independent")
        if len(data)
        else panels[0],
        panels=tuple(panels),
        layout="grid",
        colours=False,
    )


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
    return Figure("relations", f"Correlations with {name}", caption, data, drawing, (drawing,), "wide", colours=False)


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
