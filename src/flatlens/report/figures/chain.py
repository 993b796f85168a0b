"""The chain from MLS to sharpness, and how tight every inequality is on one network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt
import pandas as pd

from flatlens.bounds import Verdict
from flatlens.column import Column
from flatlens.report.figures.figure import Figure, log_ticks

LINKS = {
    "A": "MLS, mean of ‖∂f/∂x‖₂",
    "B": "‖W‖₂ mean of ‖∂f/∂W‖ / ‖x‖",
    "C": "B's means taken apart (Cauchy-Schwarz)",
    "D": "C with all parameters: sharpness S",
}
STATUS = ("holds", "undecided", "not applicable", "violated")
_SHAPES = ("circle", "diamond", "cross", "triangle-up")
_COLOURS = ("#1d7a4f", "#7e03a8", "#9aa3ae", "#c0392b")
FLOOR, CEILING = 1e-6, 1e3
"""The tightness at which a smaller and a larger one is drawn."""


_ARROWS = [{"test": f"datum.beyond == '{side}'", "value": f"triangle-{side}"} for side in ("left", "right")]
"""The marks of claims that lie outside the axis."""


def chain_frame(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Return A, B, C, D: each value, and its share of the next."""
    rows = {column.part: v for v in verdicts if (column := Column.parse(v.bound)).measure == "mls_chain"}
    if not rows:
        return pd.DataFrame(columns=["letter", "meaning", "value", "share_of_next", "status"])
    values = {"A": rows["A_B"].lhs, "B": rows["A_B"].rhs, "C": rows["B_C"].rhs, "D": rows["C_D"].rhs}
    after = {"A": rows["A_B"], "B": rows["B_C"], "C": rows["C_D"]}
    return pd.DataFrame([
        {
            "letter": letter,
            "meaning": LINKS[letter],
            "value": value,
            "share_of_next": after[letter].tightness if letter in after else math.nan,
            "status": after[letter].status if letter in after else "",
        }
        for letter, value in values.items()
    ])  # fmt: skip


def chain_figure(verdicts: Sequence[Verdict]) -> Figure:
    """Return four bars, each no longer than the next."""
    data = chain_frame(verdicts)
    data["label"] = data["letter"] + "  " + data["meaning"]
    bars = alt.Chart(data, width=640, height=150).mark_bar(height=18, color="#7e03a8").encode(
        y=alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=360)),
        x=alt.X("value:Q", title="output / input"),
        tooltip=["letter:N", "meaning:N", "value:Q", "share_of_next:Q", "status:N"],
    )  # fmt: skip
    numbers = alt.Chart(data).mark_text(align="left", dx=5).encode(
        y=alt.Y("label:N", sort=None), x="value:Q", text=alt.Text("value:Q", format=".4~g")
    )  # fmt: skip
    whole = bars + numbers
    caption = (
        "From the sensitivity to the input to the sharpness, a step at a time: each bar is at most as long as the "
        "next, where the step's assumptions hold. A step that adds much length is where the bound is lost."
    )
    return Figure("chain", "The chain A ≤ B ≤ C ≤ D", caption, data, whole, (whole,), "wide", colours=False)


def _told_of_arrows(beyond: set[str]) -> str:
    """Return the sentence on the claims that lie outside the axis, if there are any."""
    ends = {"left": f"below {FLOOR:g}", "right": f"above {CEILING:g}"}
    found = {side: end for side, end in ends.items() if side in beyond}
    return "".join(f" A triangle that points to the {side}: {end}, and drawn there." for side, end in found.items())


def tightness_figure(verdicts: Sequence[Verdict]) -> Figure:
    """Return the left side over the right side of every claim, on a logarithmic axis; beyond 1 a claim is violated."""
    data = pd.DataFrame([
        {
            "bound": v.bound,
            "layer": v.layer or "network",
            "tightness": v.tightness,
            "drawn": min(max(v.tightness, FLOOR), CEILING) if v.tightness == v.tightness else math.nan,
            "beyond": "left" if v.tightness < FLOOR else "right" if v.tightness > CEILING else "",
            "status": v.status,
            "assumption": v.assumption,
        }
        for v in verdicts
    ])  # fmt: skip
    seen = data["drawn"].dropna()
    low, high = (float(seen.min()) / 1.5, max(2.0, float(seen.max()) * 1.5)) if len(seen) else (0.1, 2.0)
    marks = alt.Chart(data, width=760, height=alt.Step(17)).mark_point(size=60, filled=True, opacity=0.85).encode(
        y=alt.Y("bound:N", sort=None, title=None),
        x=alt.X("drawn:Q", title="left side / right side",
                scale=alt.Scale(type="log", domain=[low, high]), axis=alt.Axis(values=log_ticks(low, high) or [1.0])),
        shape=alt.Shape("status:N", scale=alt.Scale(domain=list(STATUS), range=list(_SHAPES)),
                        legend=alt.Legend(orient="top", title=None), condition=_ARROWS),
        color=alt.Color("status:N", scale=alt.Scale(domain=list(STATUS), range=list(_COLOURS))),
        tooltip=["bound:N", "layer:N", "tightness:Q", "status:N", "assumption:N"],
    )  # fmt: skip
    line = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 3]).encode(x="one:Q")
    whole = line + marks
    caption = (
        "Each mark is a claim about the network or one of its layers, at the sample where it is tightest. At 1 the "
        "sides are equal; far to the left a claim holds and says little. A grey cross: the theorem does not apply to "
        "this network, so that a mark beyond 1 is no contradiction."
    )
    caption += _told_of_arrows(set(data["beyond"]))
    return Figure("tightness", "How tight every bound is", caption, data, whole, (whole,), "wide", colours=False)
