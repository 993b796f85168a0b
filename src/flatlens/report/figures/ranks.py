"""Networks ranked by each measure, as a table of tints, and how far any two measures agree."""

from __future__ import annotations

import altair as alt
import pandas as pd

from flatlens.comparing import Comparison
from flatlens.report.cards import SIGNS
from flatlens.report.figures.figure import Figure
from flatlens.report.palette import FALLS, RISES

SMALL, MIDDLE, LARGE, NEUTRAL = "#8fcfae", "#f7f5ef", "#eeb07e", "#eef0f3"
INK = "#1b222d"  #: of the words on tints, which are light on a dark page, too: not the ink of the page
DRAWN_MARKS = {
    "~": "tied, or its 95% interval overlaps another's.",
    "*": "the measure changes when the weights are rescaled without changing the function, so its ranks also depend on "
    "the scales of the weights.",
    "≥, ≤": "a bound, ranked by its value.",
}
"""The marks in cells and beside rows; a caption explains those that are drawn."""
WITH_VALUES, WITH_RANKS = 8, 30
"""Largest numbers of networks with room in a cell for the value, and for the rank."""


def ranks_frame(comparison: Comparison) -> pd.DataFrame:
    """Return `Comparison.frame` with `place` from 0 (smallest) to 1, and the texts of cells and rows."""
    data = comparison.frame()
    last = data.groupby("measure")["rank"].transform("count") - 1
    data["place"] = (data["rank"] - 1) / last.where(last > 0)
    data["pointing"] = data["small_means"] != ""
    signs = [SIGNS.get(kind, "") for kind in data["kind"]]
    values = [f"{sign}{value:.3g}" if value == value else "–" for sign, value in zip(signs, data["value"], strict=True)]
    data["value_text"] = [
        f"{text}{'~' if open_ else ''}" for text, open_ in zip(values, data["undecided_with"], strict=True)
    ]
    data["rank_text"] = [
        "" if rank != rank else f"{rank:g}{'~' if open_ else ''}"
        for rank, open_ in zip(data["rank"], data["undecided_with"], strict=True)
    ]
    data["survives"] = [comparison.survives(name) for name in data["measure"]]
    data["row"] = data["measure"].where(data["survives"], data["measure"] + " *")
    return data


def ranks_figure(comparison: Comparison) -> Figure:
    """Return a row for each measure and a column for each network: green if its value is among the smallest."""
    data = ranks_frame(comparison)
    count = len(comparison.models)
    step = 86 if count <= WITH_VALUES else 36 if count <= WITH_RANKS else 16
    first = data.drop_duplicates("measure").sort_values(["pointing", "survives"], ascending=False, kind="stable")
    rows = first["row"].to_list()
    angle = -40 if count > 3 else 0
    x = alt.X(
        "model:N",
        sort=None,
        title=None,
        axis=alt.Axis(orient="top", labelAngle=angle, labelLimit=0, domain=False, ticks=False),
    )
    y = alt.Y("row:N", sort=rows, title=None, axis=alt.Axis(labelLimit=300, domain=False, ticks=False))
    base = alt.Chart(data, width=alt.Step(step), height=alt.Step(24)).encode(x=x, y=y)
    cells = base.mark_rect(stroke="white", strokeWidth=2).encode(
        color=alt.condition(
            "datum.pointing && isValid(datum.place)",
            alt.Color(
                "place:Q",
                scale=alt.Scale(domain=[0, 0.5, 1], range=[SMALL, MIDDLE, LARGE], interpolate="rgb"),
                legend=None,
            ),
            alt.value(NEUTRAL),
        ),
        tooltip=["measure:N", "model:N", "value:Q", "stderr:Q", "rank:Q", "undecided_with:N", "note:N"],
    )
    text = "value_text" if count <= WITH_VALUES else "rank_text"
    words = [base.mark_text(fontSize=11, color=INK).encode(text=f"{text}:N")] if count <= WITH_RANKS else []
    drawn = alt.layer(cells, *words)
    written = " ".join([*rows, *(data[text] if words else [])])
    caption = (
        f"{'Values; the colour is the rank' if count <= WITH_VALUES else 'Ranks'}: green is the smallest, that is the "
        "flattest or the most compressed, orange the largest. Grey rows are measures without a known direction."
    )
    if comparison.not_ranked:
        caption += f" White: not ranked ({', '.join(comparison.not_ranked)}), because the training losses differ."
    caption += "".join(
        f" {mark}: {meaning}" for mark, meaning in DRAWN_MARKS.items() if set(mark) & set(written) - set(", ")
    )
    return Figure("ranks", "Ranks by every measure", caption, data, drawn, (drawn,), "wide", colours=False)


def taus_figure(comparison: Comparison) -> Figure:
    """Return how far any two measures agree in their order of the networks."""
    taus = comparison.agreement().taus
    data = taus.rename_axis(index="a").reset_index().melt("a", var_name="b", value_name="tau")
    names = [str(name) for name in taus]
    base = alt.Chart(data, width=alt.Step(30), height=alt.Step(22)).encode(
        x=alt.X("b:N", sort=names, title=None, axis=alt.Axis(orient="top", labelAngle=-60, labelLimit=260)),
        y=alt.Y("a:N", sort=names, title=None, axis=alt.Axis(labelLimit=300)),
    )
    under = base.mark_rect(stroke="white", color=NEUTRAL)  # Vega leaves out a tinted cell without a number
    cells = base.mark_rect(stroke="white").encode(
        color=alt.Color(
            "tau:Q",
            scale=alt.Scale(domain=[-1, 0, 1], range=[FALLS, "#ffffff", RISES], interpolate="rgb"),
            legend=None,
        ),
        tooltip=["a:N", "b:N", "tau:Q"],
    )
    number = alt.condition("isValid(datum.tau)", alt.Text("tau:Q", format=".1f"), alt.value(""))
    drawn = under + cells + base.mark_text(fontSize=10, color=INK).encode(text=number)
    caption = (
        "Kendall's tau-b: 1 (orange) where two measures order the networks alike, -1 (blue) where they reverse each "
        "other; ties and overlapping intervals count for neither. Empty where a measure ties all networks."
    )
    return Figure("taus", "How far each two measures agree", caption, data, drawn, (drawn,), "wide", colours=False)
