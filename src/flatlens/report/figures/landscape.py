"""The figures of paths and planes: the loss between two networks, around one, and its quadratic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from flatlens.landscape import LossPath, LossPlane
from flatlens.landscape.path import CURVE, LINE, MATCHED, NOT_SHOWN
from flatlens.landscape.plane import NOT_SEEN
from flatlens.report.figures.figure import Drawing, Figure, one_picture

_HUES = {LINE: "#7e03a8", MATCHED: "#2f7fc1", CURVE: "#e08214"}
_SHORT = alt.Axis(labelExpr="abs(datum.value) < 1e6 ? datum.label : format(datum.value, '.3~e')")
_SHADES = ["#f6f0fa", "#d9b3e6", "#b061c9", "#7e03a8", "#43015a"]  #: of the loss, from low to high


def path_figure(found: LossPath) -> Figure:
    """Return the loss along each path, with the chord between the ends as a dashed line."""
    data = found.frame()
    names = list(found.ways)
    hues = alt.Color("path:N", scale=alt.Scale(domain=names, range=[_HUES[name] for name in names]),
                     legend=alt.Legend(title=None, orient="top"))  # fmt: skip
    told = [alt.Tooltip(f"{name}:Q", format=".4g") for name in ("t", "loss", "chord")]

    def drawn(width: int) -> Drawing:
        base = alt.Chart(data).encode(x=alt.X("t:Q", title="t: first network at 0, second at 1"), color=hues)
        y = alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False), axis=_SHORT)
        line, dots = base.mark_line().encode(y=y), base.mark_point(filled=True, size=22).encode(y=y, tooltip=told)
        chord = base.mark_line(strokeDash=[4, 3], strokeWidth=1).encode(y="chord:Q")
        layered: Drawing = alt.layer(line, dots, chord).properties(width=width, height=260)
        return layered

    caption = f"Each dot is the loss computed there; dashed: the chord between the ends. {NOT_SHOWN}"
    whole, narrow = drawn(560), drawn(250)
    return one_picture("path", "Loss along the path", caption, data, whole, narrow)


def plane_figure(found: LossPlane) -> Figure:
    """Return the loss on the plane as a map, with the network in the middle and checkpoints as dots."""
    data = found.frame()
    steps = [float(values[1] - values[0]) for values in (found.x, found.y)]
    for name, step in zip(("x", "y"), steps, strict=True):
        data[f"{name}_from"], data[f"{name}_to"] = data[name] - step / 2, data[name] + step / 2
    # the logarithm where the loss spans more than a factor of 20, else the loss
    positive = data["loss"][np.isfinite(data["loss"]) & (data["loss"] > 0)]
    wide = len(positive) > 0 and float(data["loss"].min()) > 0 and float(positive.max()) > 20 * float(positive.min())
    scale = alt.Scale(type="log" if wide else "linear", range=_SHADES)
    names = [f"{one.name} (steps of length {one.length:.3g})" for one in found.slices]

    def drawn(width: int) -> Drawing:
        cells = alt.Chart(data).mark_rect().encode(
            x=alt.X("x_from:Q", title=names[0], scale=alt.Scale(nice=False, zero=False)), x2="x_to:Q",
            y=alt.Y("y_from:Q", title=names[1], scale=alt.Scale(nice=False, zero=False)), y2="y_to:Q",
            color=alt.Color("loss:Q", scale=scale, legend=alt.Legend(title="loss", orient="right", format=".4~g")),
            tooltip=[alt.Tooltip(f"{name}:Q", format=".4g") for name in ("x", "y", "loss")],
        )  # fmt: skip
        marks = pd.DataFrame({"x": [0.0], "y": [0.0]})
        layers = [cells, alt.Chart(marks).mark_point(shape="cross", size=90, color="black").encode(x="x:Q", y="y:Q")]
        if found.trajectory is not None:
            dots = pd.DataFrame(found.trajectory.numpy(), columns=["x", "y", "distance from the plane"])
            tooltip = [alt.Tooltip(f"{name}:Q", format=".4g") for name in dots]
            layers.append(alt.Chart(dots).mark_line(point=True, color="#e08214", strokeWidth=1).encode(
                x="x:Q", y="y:Q", order="index:Q", tooltip=tooltip).transform_window(index="row_number()"))  # fmt: skip
        layered: Drawing = alt.layer(*layers).properties(width=width, height=int(0.8 * width))
        return layered

    also = " Orange: the checkpoints, projected; they lie off the plane." if found.trajectory is not None else ""
    caption = f"Each cell is the loss computed at its centre; the cross is the network.{also} {NOT_SEEN}"
    whole, narrow = drawn(420), drawn(200)
    return one_picture("plane", "Loss on the plane", caption, data, whole, narrow)


def slices_figure(found: LossPlane) -> Figure:
    """Return the loss along each direction with the Hessian's quadratic over it."""
    data = found.slice_frame().melt(["direction", "x", "distance"], ["loss", "quadratic"], "curve", "value")

    def drawn(width: int) -> Drawing:
        panels = []
        for one in found.slices:
            rows = data[data["direction"] == one.name]
            losses = rows[(rows["curve"] == "loss") & np.isfinite(rows["value"])]["value"]
            low, high = float(losses.min()), float(losses.max())
            room = 0.1 * (high - low) or 1.0
            scale = alt.Scale(domain=[low - room, high + room], nice=False)
            y = alt.Y("value:Q", title="loss", scale=scale, axis=_SHORT)
            base = alt.Chart(rows).mark_line(clip=True).encode(
                x=alt.X("distance:Q", title="distance"), y=y,
                color=alt.Color("curve:N", scale=alt.Scale(domain=["loss", "quadratic"], range=["#7e03a8", "#e08214"]),
                                legend=alt.Legend(title=None, orient="top")),
                strokeDash=alt.StrokeDash("curve:N", legend=None),
                tooltip=[alt.Tooltip("distance:Q", format=".4g"), alt.Tooltip("value:Q", format=".4g")],
            )  # fmt: skip
            ends = [sign * good * one.length for sign, (good, _) in zip((-1, 1), one.holds, strict=True)]
            inside = [end for end in ends if abs(end) <= float(one.x[-1]) * one.length]
            marks = alt.Chart(pd.DataFrame({"end": inside})).mark_rule(strokeDash=[2, 3]).encode(x="end:Q")
            panels.append(alt.layer(base, marks).properties(width=width, height=200, title=one.name))
        joined: Drawing = alt.concat(*panels, columns=2 if width > 220 else 1)
        return joined

    caption = (
        f"Dashed: the Hessian's quadratic. Dotted lines: the distance to which it holds within "
        f"{found.about['rtol']:.0%} of its second order. A slice shows one direction of all."
    )
    whole, narrow = drawn(300), drawn(220)
    return one_picture("slices", "Slices and their quadratic", caption, data, whole, narrow)


def one_below_other(figures: Sequence[Figure]) -> Drawing:
    """Return several figures as one picture, one below the other."""
    parts: list[Any] = [figure.whole for figure in figures]
    joined: Drawing = alt.concat(*parts, columns=1).resolve_scale(color="independent", strokeDash="independent")
    return joined
