"""Networks beside each other: each measure's values with their intervals."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from flatlens.comparing import Comparison
from flatlens.report.cards import SIGNS, number
from flatlens.report.figures.figure import NOT_KNOWN_GREY, PANELS_A_ROW, Drawing, Figure, empty, log_axis, short_labels

_ROW = 20  #: height of a network's row, in pixels
_WIDTH = 185  #: of a panel without its names: with them it fits a phone
RANKED = "#2f7fc1"
_TOWARDS = {
    "flat": "smaller is flatter",
    "compressed": "smaller is more compressed",
    "": "smaller is not necessarily better",
}
_BOUNDS = [
    {"test": f"datum.kind == '{kind}'", "value": f"triangle-{side}"}
    for kind, side in (("lower bound", "right"), ("upper bound", "left"))
]
"""The marks of bounds: they point to where the value is."""


def values_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row for each measure and network: `Comparison.frame` with low, high, ranked and told.

    `low` and `high` bound the 95% interval. Undefined and infinite values are left out; measures that no rescaling of
    the weights changes come first.
    """
    data = comparison.frame()
    data = data[np.isfinite(data["value"])]
    reach = 1.96 * data["stderr"].fillna(0)  # a bound has none
    data = data.assign(
        low=data["value"] - reach, high=data["value"] + reach, ranked=data["model"].isin(comparison.ranked)
    )
    data["told"] = [
        f"{row['measure']} of {row['model']}: {SIGNS.get(row['kind'], '')}{number(row['value'])}"
        + (f" ± {number(row['high'] - row['value'], 2)}" if row["high"] > row["value"] else "")
        + ("" if row["ranked"] else ", not ranked")
        for row in data.to_dict("records")
    ]
    data["stable"] = [comparison.survives(name) for name in data["measure"]]
    data["points"] = data["small_means"] != ""
    found: pd.DataFrame = data.sort_values(["points", "stable"], ascending=False, kind="stable", ignore_index=True)
    return found


def values_figure(comparison: Comparison) -> Figure:
    """Return a panel for each measure: a row for each network, with a dot at its value."""
    data = values_frame(comparison)
    names = list(dict.fromkeys(data["measure"]))
    panels = tuple(_panel(data[data["measure"] == name], comparison.models) for name in names)
    panels = panels or (empty("no value is defined"),)
    kinds = set(data["kind"])
    caption = "A dot is a network's value."
    caption += " Its bar is the 95% interval." if (data["high"] > data["low"]).any() else ""
    caption += " A hollow grey dot: not ranked." if not data["ranked"].all() else ""
    for kind, side in (("lower bound", "right"), ("upper bound", "left")):
        caption += f" A triangle that points to the {side} is a {kind}." if kind in kinds else ""
    if not data["stable"].all():
        caption += " *: the measure changes when the weights are rescaled without changing the function."
    whole = alt.concat(*panels, columns=PANELS_A_ROW, spacing=22)
    return Figure("compared", "Which network is flatter", caption, data, whole, panels, "grid", colours=False)


def _panel(data: pd.DataFrame, models: list[str]) -> Drawing:
    name, towards = data["measure"].iloc[0], _TOWARDS[data["small_means"].iloc[0]]
    low, high = float(data["low"].min()), float(data["high"].max())
    logarithmic = low > 0 and high > 4 * low  # over a narrower range a linear axis shows the same, with rounder ticks
    axis = alt.Axis(title=None, tickCount=4, labelOverlap=True, format=".4~g" if high < 1e5 else ".3~e")
    scale = alt.Scale(zero=False, padding=8)
    if logarithmic:
        axis = log_axis(pd.Series([low, high]), None)
        scale = alt.Scale(type="log", nice=False, padding=8)
    beside = alt.Axis(labelExpr=short_labels(18), labelLimit=0, domain=False, ticks=False, grid=True, tickBand="extent")
    colour = alt.condition("datum.ranked", alt.value(RANKED), alt.value(NOT_KNOWN_GREY))
    base = alt.Chart(data).encode(
        y=alt.Y("model:N", sort=models, scale=alt.Scale(domain=models), title=None, axis=beside),
        tooltip=[alt.Tooltip("told:N", title="value")],
        color=colour,
    )
    bars = base.mark_rule(strokeWidth=1.8, aria=False).encode(x=alt.X("low:Q", scale=scale, axis=axis), x2="high:Q")
    dots = base.mark_point(size=55, opacity=1, strokeWidth=1.8).encode(
        x=alt.X("value:Q", scale=scale, axis=axis),
        fill=alt.condition("datum.ranked", alt.value(RANKED), alt.value("transparent")),
        shape=alt.ShapeValue("circle", condition=_BOUNDS),
        description="told:N",
    )
    star = "" if data["stable"].iloc[0] else " *"
    title = alt.TitleParams(text=f"{name}{star}", subtitle=f"{towards}{', log scale' if logarithmic else ''}")
    drawn: Drawing = alt.layer(bars, dots).properties(width=_WIDTH, height=_ROW * len(models), title=title)
    return drawn
