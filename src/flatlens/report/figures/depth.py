"""A deep network's layers: each measure over the depth, a line for each kind of layer."""

from __future__ import annotations

import math
from collections import Counter

import altair as alt
import pandas as pd

from flatlens.estimate import Report
from flatlens.report.blocks import CALL, blocks, grouped, role
from flatlens.report.figures.figure import Drawing, Figure, log_axis

_KINDS = 8  #: number of kinds of layers with their own colour
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
OTHERS, OUTSIDE = "other layers", "outside the blocks"
_PANELS_A_ROW = 3
_OF_BLOCKS = (
    " Across: blocks, and the layers before and behind them, in the order in which they run; a line for each kind of "
    "layer."
)


def depth_frame(report: Report) -> pd.DataFrame:
    """Return one row for each measure and linear layer: measure, layer, block, kind, depth, value, low, high.

    `depth` counts blocks, or layers outside them; `low` and `high` bound the 95% interval. Undefined and infinite
    values are left out.
    """
    linear = {str(name) for name in report.about.get("layers", [])}
    values = [(name, layer, e) for (name, layer), e in report.items() if layer is not None and math.isfinite(e.value)]
    names = [n for n in dict.fromkeys(layer for _, layer, _ in values) if CALL.sub("", n) in linear or not linear]
    order = [str(name) for name in report.about.get("layers", []) if name in names]
    names = [*order, *(name for name in names if name not in order)]
    depth = {name: at for at, (_, members) in enumerate(grouped(names)) for name in members}
    block = blocks(names)
    common = Counter(role(name, block[name]) for name in names if block[name])
    known = {kind for kind, count in common.most_common(_KINDS) if count > 1}

    def kind(name: str) -> str:
        if not block[name]:
            return OUTSIDE
        return role(name, block[name]) if role(name, block[name]) in known else OTHERS

    rows = [(m, at, block[at], kind(at), depth[at], e.value, 1.96 * e.stderr) for m, at, e in values if at in depth]
    data = pd.DataFrame(rows, columns=["measure", "layer", "block", "kind", "depth", "value", "reach"])
    reach = data.pop("reach")
    return data.assign(low=data["value"] - reach, high=data["value"] + reach)


def deep_measures(data: pd.DataFrame) -> list[str]:
    """Return the measures in `depth_frame`'s table with values at two depths or more: those that have a panel."""
    depths = data.groupby("measure", sort=False)["depth"].nunique()
    return [str(name) for name, count in depths.items() if count > 1]


def depth_figure(report: Report) -> Figure:
    """Return a panel for each measure with a value at two depths or more."""
    data = depth_frame(report)
    names = deep_measures(data)
    in_blocks = bool((data["block"] != "").any())
    x, colour = _across(data, in_blocks), _colour(data, in_blocks)
    panels = [_panel(data[data["measure"] == name], name, x, colour, in_blocks) for name in names]
    whole = alt.concat(*panels, columns=_PANELS_A_ROW, spacing=26).resolve_scale(color="shared")
    bars = " A bar is the 95% interval of an estimate." if (data["high"] > data["low"]).any() else ""
    caption = (
        f"From input to output.{_OF_BLOCKS if in_blocks else ''}{bars} The axis is logarithmic where every value, with "
        "its interval, is positive."
    )
    return Figure("depth", "Over the depth", caption, data, whole, (whole,), "wide", colours=False)


def _across(data: pd.DataFrame, in_blocks: bool) -> alt.X:
    """Return the axis over the depth: numbers of blocks, or the names of layers where there are none."""
    if not in_blocks:
        names = list(data.sort_values("depth", kind="stable")["layer"].drop_duplicates())
        axis = alt.Axis(labelAngle=-40, labelOverlap=True, labelLimit=90)
        return alt.X("layer:O", title=None, scale=alt.Scale(domain=names), axis=axis)
    scale, axis = alt.Scale(nice=False, padding=6), alt.Axis(tickMinStep=1, tickCount=6, format="d")
    return alt.X("depth:Q", title="block, or layer outside the blocks", scale=scale, axis=axis)


def _colour(data: pd.DataFrame, in_blocks: bool) -> alt.Color:
    """Return the channel of the kinds of layers; without blocks there is one, and no legend."""
    kinds = list(dict.fromkeys(data["kind"].where(~data["kind"].isin([OUTSIDE, OTHERS])).dropna()))
    domain = [*kinds, *(k for k in (OTHERS, OUTSIDE) if (data["kind"] == k).any())]
    colours = [*_COLOURS[: len(kinds)], *(["#9aa3ae", "#1c2430"][-(len(domain) - len(kinds)) :] if domain else [])]
    legend = alt.Legend(title=None, orient="top", columns=5, symbolType="circle", columnPadding=24)
    scale = alt.Scale(domain=domain, range=colours)
    return alt.Color("kind:N", sort=domain, scale=scale, legend=legend if in_blocks else None)


def _panel(data: pd.DataFrame, name: str, x: alt.X, colour: alt.Color, in_blocks: bool) -> Drawing:
    logarithmic = bool((data["low"] > 0).all())
    scale = alt.Scale(type="log", nice=False, padding=6) if logarithmic else alt.Scale(zero=False, padding=6)
    axis = log_axis(data["value"], None) if logarithmic else alt.Axis(title=None, tickCount=4)
    y, low = (alt.Y(f"{field}:Q", scale=scale, axis=axis) for field in ("value", "low"))
    marks = alt.Chart(data).mark_point(size=16, filled=True, opacity=1).encode(x=x, y=y, color=colour)
    joined = data[~data["kind"].isin([OUTSIDE, OTHERS])] if in_blocks else data
    lines = alt.Chart(joined).mark_line(strokeWidth=1.4).encode(x=x, y=y, color=colour)
    unsure = data[data["high"] > data["low"]]
    bars = alt.Chart(unsure).mark_rule(strokeWidth=1).encode(x=x, y=low, y2="high:Q", color=colour)
    panel: Drawing = alt.layer(lines, *([bars] if len(unsure) else []), marks)
    return panel.properties(width=290, height=130, title=name)
