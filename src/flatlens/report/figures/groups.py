"""Groups of networks beside the first one: each measure's ratio with its interval."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from flatlens.comparing import GroupComparison
from flatlens.comparing.comparison import BESIDE
from flatlens.report.cards import number
from flatlens.report.figures.figure import Drawing, Figure, empty, known, log_axis, short_labels
from flatlens.report.figures.study import HUES
from flatlens.statistics.group_differences import SIGNIFICANCE

FLAT, COMPRESSED, FIT = "Flatness, by invariant measures", "Sensitivity and compression", "Loss and accuracy"
OTHERS = "Not invariant, or without a direction"
ROW = 18  #: height of a group's row, in pixels


def groups_frame(found: GroupComparison) -> pd.DataFrame:
    """Return the ratios of `GroupComparison.frame`, with section, significant and told.

    What is compared as a difference, such as an accuracy, has a unit of its own and is left out.
    """
    data: pd.DataFrame = found.frame()
    data = data.loc[(data["scale"] == "ratio") & np.isfinite(data["value"])].reset_index(drop=True)
    sections = {"flat": FLAT, "compressed": COMPRESSED}
    data["section"] = [
        FIT if row["measure"] in BESIDE else sections.get(row["small_means"], OTHERS) if row["decides"] else OTHERS
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
    whole, narrow = (_sections(data, reference, several, *sizes) for sizes in ((560, 34), (170, 20)))
    bars = ", its bar the 95% interval" if known(data["low"]) else ""
    caption = (
        f"A dot is the ratio to {reference} of geometric means{bars}; left of the line, at 1, the measure is smaller "
        "than there. A filled dot: they differ at 5%, after Holm's correction (the training loss, which is not tested, "
        "without it)."
    )
    title = f"Compared with {reference}"
    return Figure("groups-ratios", title, caption, data, whole, (whole,), "wide", colours=False, narrow=narrow)


def _sections(data: pd.DataFrame, reference: str, several: bool, width: int, letters: int) -> Drawing:
    there = [(name, data[data["section"] == name]) for name in (FLAT, COMPRESSED, FIT, OTHERS)]
    drawn = [(name, rows) for name, rows in there if len(rows)]
    if not drawn:
        return empty("no measure has a ratio")
    ends = pd.concat([data[name] for name in ("low", "value", "high")] + [pd.Series([1.0])])
    ends = ends[np.isfinite(ends) & (ends > 0)]
    domain = [float(ends.min()) / 1.05, float(ends.max()) * 1.05]
    panels = [
        _panel(rows, name, several, domain, (width, letters), f"ratio to {reference}" if i == len(drawn) - 1 else None)
        for i, (name, rows) in enumerate(drawn)
    ]
    stacked: Drawing = alt.concat(*panels, columns=1, spacing=14)
    return stacked


def _panel(
    data: pd.DataFrame, name: str, several: bool, domain: list[float], sizes: tuple[int, int], across: str | None
) -> Drawing:
    width, letters = sizes
    names, groups = (list(dict.fromkeys(data[field])) for field in ("measure", "group"))
    scale = alt.Scale(type="log", domain=domain, nice=False)
    axis = log_axis(pd.Series(domain), across)
    hues = alt.Color(
        "group:N",
        scale=alt.Scale(domain=groups, range=list(HUES[: len(groups)])),
        legend=alt.Legend(title=None, orient="top") if several else None,
    )
    beside = alt.Axis(labelExpr=short_labels(letters), labelLimit=0, minExtent=6 * letters, domain=False, ticks=False)
    base = alt.Chart(data).encode(
        y=alt.Y("measure:N", sort=names, title=None, axis=beside),
        color=hues,
        tooltip=[alt.Tooltip("told:N", title="ratio")],
    )
    if several:
        base = base.encode(yOffset=alt.YOffset("group:N", sort=groups, scale=alt.Scale(paddingOuter=0.3)))
    line = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 3]).encode(x=alt.X("one:Q", scale=scale))
    bars = base.mark_rule(strokeWidth=1.8, aria=False).encode(x=alt.X("low:Q", scale=scale, axis=axis), x2="high:Q")
    dots = base.mark_point(size=55, opacity=1, strokeWidth=1.8).encode(
        x=alt.X("value:Q", scale=scale, axis=axis),
        fill=alt.condition("datum.significant", hues, alt.value("white")),
        description="told:N",
    )
    drawn: Drawing = alt.layer(line, bars, dots).properties(
        width=width, height=ROW * len(names) * len(groups), title=name
    )
    return drawn
