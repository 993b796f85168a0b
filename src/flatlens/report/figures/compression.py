"""The figure of a compressed network: the forecast rise of the loss against the measured one."""

from __future__ import annotations

import altair as alt
import pandas as pd

from flatlens.comparing import Compression
from flatlens.comparing.compressing import EXPECTED_WITHIN
from flatlens.report.figures.figure import Drawing, Figure, log_ticks, one_picture

_COLOURS = ("#1d7a4f", "#c0392b")


def rises_figures(found: Compression) -> list[Figure]:
    """Return a mark for each layer and scheme whose forecast and rise are positive, on logarithmic axes, if any has."""
    data = found.frame()[["layer", "scheme", "forecast", "rise", "valid"]]
    data["forecast holds"] = data["valid"].map({True: "expected", False: "flagged"})
    drawn = data[(data["layer"] != "") & (data["forecast"] > 0) & (data["rise"] > 0)]
    if drawn.empty:
        return []
    whole, narrow = _rises(drawn, 520, 300, 3), _rises(drawn, 230, 230, 1)
    left = int((data["layer"] != "").sum()) - len(drawn)
    caption = (
        f"Each mark is a layer under a scheme. On the line forecast and measured rise are equal; between the dashed "
        f"lines they differ by less than {EXPECTED_WITHIN:g} times. A red mark is flagged: higher orders exceed a "
        "quarter of the forecast."
    )
    caption += f" Without a mark: {left} with a forecast or a rise of 0 or below." if left else ""
    return [one_picture("rises", "Forecast and measured rise of the loss", caption, data, whole, narrow)]


def _rises(data: pd.DataFrame, width: int, height: int, columns: int) -> Drawing:
    numbers = pd.concat([data["forecast"], data["rise"]])
    low, high = float(numbers.min()) / 1.5, float(numbers.max()) * 1.5
    scale, ticks = alt.Scale(type="log", domain=[low, high], nice=False), log_ticks(low, high)
    axis = alt.Axis(values=ticks, format="~g") if ticks else alt.Axis(tickCount=4)
    places = alt.X("forecast:Q", scale=scale, axis=axis), alt.Y("rise:Q", title="measured rise", scale=scale, axis=axis)
    marks = alt.Chart(data, width=width, height=height).mark_point(size=60, filled=True, opacity=0.8).encode(
        x=places[0], y=places[1],
        shape=alt.Shape("scheme:N", legend=alt.Legend(orient="top", title=None, columns=columns, columnPadding=20)),
        color=alt.Color("forecast holds:N", scale=alt.Scale(domain=["expected", "flagged"], range=_COLOURS),
                        legend=alt.Legend(orient="top", columnPadding=20)),
        tooltip=["layer:N", "scheme:N", "forecast:Q", "rise:Q", "forecast holds:N"],
    )  # fmt: skip
    ends = [(factor, end) for factor in (1 / EXPECTED_WITHIN, 1.0, EXPECTED_WITHIN) for end in (low, high)]
    lines = pd.DataFrame([{"factor": factor, "forecast": end, "rise": end * factor} for factor, end in ends])
    base = alt.Chart(lines).mark_line(color="#8a93a0", strokeWidth=1, clip=True)
    line = base.encode(
        x=places[0], y=places[1], detail="factor:N",
        strokeDash=alt.StrokeDashValue([4, 3], condition={"test": "datum.factor == 1", "value": [1, 0]}),
    )  # fmt: skip
    drawn: Drawing = line + marks
    return drawn
