"""Networks, or groups of networks, beside each other: each measure's values or ratios, with their intervals."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from flatlens.comparing import Comparison, GroupComparison
from flatlens.report.cards import SIGNS, number
from flatlens.report.figures.figure import (
    NOT_KNOWN_GREY,
    PANELS_A_ROW,
    Drawing,
    Figure,
    empty,
    known,
    log_axis,
    one_picture,
    short_labels,
)
from flatlens.report.figures.study import HUES
from flatlens.statistics.group_differences import SIGNIFICANCE
from flatlens.training.settings import RESULTS

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
FLAT, COMPRESSED, FIT = "Flatness, by invariant measures", "Sensitivity and compression", "Loss and accuracy"
OTHERS = "Not invariant, or without a direction"
_GROUP_ROW = 18  #: height of a group's row, in pixels


def values_figure(comparison: Comparison) -> Figure:
    """Return a panel for each measure: a row for each network, with a dot at its value."""
    # finite values with their 95% intervals, measures with a direction and invariant ones first
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
    data["stable"] = [comparison.is_invariant(name) for name in data["measure"]]
    data["points"] = data["small_means"] != ""
    data = data.sort_values(["points", "stable"], ascending=False, kind="stable", ignore_index=True)
    names = list(dict.fromkeys(data["measure"]))
    models = comparison.models

    # networks in the order of the comparison in every panel, so that a row is one network throughout
    def panel(name: str) -> Drawing:
        rows = data[data["measure"] == name]
        towards, low, high = _TOWARDS[rows["small_means"].iloc[0]], float(rows["low"].min()), float(rows["high"].max())
        logarithmic = low > 0 and high > 4 * low  # over a narrower range a linear axis shows it, with rounder ticks
        axis = alt.Axis(title=None, tickCount=4, labelOverlap=True, format=".4~g" if high < 1e5 else ".3~e")
        scale = alt.Scale(zero=False, padding=8)
        if logarithmic:
            axis, scale = log_axis(pd.Series([low, high]), None), alt.Scale(type="log", nice=False, padding=8)
        beside = alt.Axis(
            labelExpr=short_labels(18), labelLimit=0, domain=False, ticks=False, grid=True, tickBand="extent"
        )
        base = alt.Chart(rows).encode(
            y=alt.Y("model:N", sort=models, scale=alt.Scale(domain=models), title=None, axis=beside),
            tooltip=[alt.Tooltip("told:N", title="value")],
            color=alt.condition("datum.ranked", alt.value(RANKED), alt.value(NOT_KNOWN_GREY)),
        )
        fill = alt.condition("datum.ranked", alt.value(RANKED), alt.value("transparent"))
        bars, dots = _bars_and_dots(base, scale, axis, fill, shape=alt.ShapeValue("circle", condition=_BOUNDS))
        star = "" if rows["stable"].iloc[0] else " *"
        title = alt.TitleParams(text=f"{name}{star}", subtitle=f"{towards}{', log scale' if logarithmic else ''}")
        drawn: Drawing = alt.layer(bars, dots).properties(width=_WIDTH, height=_ROW * len(models), title=title)
        return drawn

    panels: tuple[Drawing, ...] = tuple(map(panel, names))
    panels = panels or (empty("no value is defined"),)
    # the caption explains those marks alone that are there
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


def groups_frame(found: GroupComparison) -> pd.DataFrame:
    """Return the ratios of `GroupComparison.frame` (differences are left out), with section, significant and told."""
    data: pd.DataFrame = found.frame()
    data = data.loc[(data["scale"] == "ratio") & np.isfinite(data["value"])].reset_index(drop=True)
    sections = {"flat": FLAT, "compressed": COMPRESSED}
    data["section"] = [
        FIT if row["measure"] in RESULTS else sections.get(row["small_means"], OTHERS) if row["decides"] else OTHERS
        for row in data.to_dict("records")
    ]
    beyond = (data["low"] > 1) | (data["high"] < 1)
    data["significant"] = (data["p_holm"] < SIGNIFICANCE) | (data["p_holm"].isna() & beyond)
    data["told"] = [
        f"{row['measure']}, {row['group']} / {row['reference']}: {number(row['value'])}"
        + (f" [{number(row['low'])}, {number(row['high'])}]" if row["low"] == row["low"] else "")
        + (f", p = {number(row['p_holm'], 2)}" if row["p_holm"] == row["p_holm"] else "")
        for row in data.to_dict("records")
    ]
    return data


def groups_figure(found: GroupComparison) -> Figure:
    """Return a row for each measure, with a dot at each group's ratio to the first group."""
    data = groups_frame(found)
    reference = next(iter(found.groups))
    several = len(found.groups) > 2
    sections = [(name, data[data["section"] == name]) for name in (FLAT, COMPRESSED, FIT, OTHERS)]
    sections = [(name, rows) for name, rows in sections if len(rows)]
    # one logarithmic axis for all sections, with 1, where a group equals the first one
    ends = pd.concat([data[name] for name in ("low", "value", "high")] + [pd.Series([1.0])])
    ends = ends[np.isfinite(ends) & (ends > 0)]
    domain = [float(ends.min()) / 1.05, float(ends.max()) * 1.05]
    scale = alt.Scale(type="log", domain=domain, nice=False)

    def panel(name: str, rows: pd.DataFrame, width: int, letters: int) -> Drawing:
        names, groups = (list(dict.fromkeys(rows[field])) for field in ("measure", "group"))
        axis = log_axis(pd.Series(domain), f"ratio to {reference}" if name == sections[-1][0] else None)
        hues = alt.Color(
            "group:N",
            scale=alt.Scale(domain=groups, range=list(HUES[: len(groups)])),
            legend=alt.Legend(title=None, orient="top") if several else None,
        )
        beside = alt.Axis(
            labelExpr=short_labels(letters), labelLimit=0, minExtent=6 * letters, domain=False, ticks=False
        )
        base = alt.Chart(rows).encode(
            y=alt.Y("measure:N", sort=names, title=None, axis=beside),
            color=hues,
            tooltip=[alt.Tooltip("told:N", title="ratio")],
        )
        if several:
            base = base.encode(yOffset=alt.YOffset("group:N", sort=groups, scale=alt.Scale(paddingOuter=0.3)))
        line = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 3])
        line = line.encode(x=alt.X("one:Q", scale=scale))
        bars, dots = _bars_and_dots(base, scale, axis, alt.condition("datum.significant", hues, alt.value("white")))
        height = _GROUP_ROW * len(names) * len(groups)
        drawn: Drawing = alt.layer(line, bars, dots).properties(width=width, height=height, title=name)
        return drawn

    # the lowest panel names the axis of all
    whole, narrow = (
        alt.concat(*(panel(name, rows, *sizes) for name, rows in sections), columns=1, spacing=14)
        if sections
        else empty("no measure has a ratio")
        for sizes in ((560, 34), (170, 20))
    )
    bars = ", its bar the 95% interval" if known(data["low"]) else ""
    caption = (
        f"A dot is the ratio to {reference} of geometric means{bars}; left of the line, at 1, the measure is smaller "
        "than there. A filled dot: they differ at 5%, after Holm's correction (the training loss, which is not tested, "
        "without it)."
    )
    return one_picture("groups-ratios", f"Compared with {reference}", caption, data, whole, narrow)


def _bars_and_dots(base: Any, scale: alt.Scale, axis: alt.Axis, fill: Any, **more: Any) -> tuple[Any, Any]:
    # The intervals, and the values on them, which tell what they are
    bars = base.mark_rule(strokeWidth=1.8, aria=False).encode(x=alt.X("low:Q", scale=scale, axis=axis), x2="high:Q")
    dots = base.mark_point(size=55, opacity=1, strokeWidth=1.8)
    return bars, dots.encode(x=alt.X("value:Q", scale=scale, axis=axis), fill=fill, description="told:N", **more)
