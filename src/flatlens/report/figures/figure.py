"""The parts of a figure: its data, then the drawing, with a caption that says how to read it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import altair as alt
import pandas as pd

Drawing: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart | alt.ConcatChart | alt.HConcatChart
Width: TypeAlias = int | Literal["container"]
FigureLayout: TypeAlias = Literal["grid", "wide"]

EXCLUDED_HOLLOW = "A hollow mark is a network that is left out of the correlations."


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Figure:
    """One figure of the page and of the figures folder."""

    name: str  #: name of its files, without the ending
    title: str
    caption: str
    data: pd.DataFrame  #: tidy table of what is drawn
    whole: Drawing  #: the figure as one picture, for PNG and SVG
    panels: tuple[Drawing, ...]  #: for the page: a "grid" of panels flows with the width of the screen
    layout: FigureLayout
    batch_shapes: bool = False  #: whether the shape of a mark shows the batch size
    colours: bool = True  #: whether colours show the learning rate, so that the page explains them

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Return the whole picture as Vega-Lite JSON, without a theme."""
        return _plain(self.whole)

    @cached_property
    def panel_specs(self) -> list[dict[str, Any]]:
        """Return the page's panels as Vega-Lite JSON, without a theme: the page brings its own."""
        return [self.spec if panel is self.whole else _plain(panel) for panel in self.panels]


def _plain(drawing: Drawing) -> dict[str, Any]:
    """Return the JSON without the schema's address, so that the page holds none, and without Altair's theme."""
    spec: dict[str, Any] = drawing.to_dict(validate=False)  # checked in the tests: it takes longer than the drawing
    return {key: value for key, value in spec.items() if key not in ("$schema", "config")}


@dataclass(frozen=True)
class Grid:
    """The levels of the study's two settings: the same colours and shapes in every figure."""

    lrs: tuple[float, ...]
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, networks: pd.DataFrame) -> Grid:
        """Return the levels in a table of networks."""
        return cls(tuple(sorted(set(networks["lr"]))), tuple(sorted(set(networks["batch_size"]))))

    def lr_scale(self) -> alt.Scale:
        """Return a scale with the domain only: the theme brings the colours."""
        return alt.Scale(domain=list(self.lrs))

    def batch_scale(self) -> alt.Scale:
        """Return a scale with a shape for every batch size."""
        return alt.Scale(
            domain=list(self.batch_sizes), range=[SHAPES[i % len(SHAPES)] for i in range(len(self.batch_sizes))]
        )


SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")


def lr_legend(shown: bool) -> alt.Legend | None:
    """Return the legend of the files; the page has its own above a figure's panels."""
    return alt.Legend(title="learning rate", orient="top") if shown else None


def batch_legend(shown: bool) -> alt.Legend | None:
    """Return the legend of shapes, as `lr_legend` does for colours."""
    return alt.Legend(title="batch size", orient="top") if shown else None


def network_tooltip(*more: alt.Tooltip) -> list[alt.Tooltip]:
    """Return a tooltip with the network's identity, then `more`."""
    who = [alt.Tooltip("key:N", title="network"), alt.Tooltip("lr:Q", title="learning rate"),
           alt.Tooltip("batch_size:Q", title="batch size"), alt.Tooltip("seed:Q")]  # fmt: skip
    return [*who, *more]


def solid_if_included() -> alt.FillOpacityValue:
    """Return a fill that leaves excluded networks hollow.

    `alt.when` and `alt.value` would take Altair ten times as long.
    """
    return alt.FillOpacityValue(0.0, condition={"test": "datum.included", "value": 0.75})


def log_ticks(low: float, high: float) -> list[float] | None:
    """Return ticks of a log axis: powers of ten, or 1, 2, 5 over a narrower range; None for one narrower still.

    >>> log_ticks(0.05, 20.0), log_ticks(0.4, 6.0), log_ticks(0.6, 0.9)
    ([0.1, 1.0, 10.0], [0.5, 1.0, 2.0, 5.0], None)
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, math.ceil((last - first) / 6))
    for digits in ((1,), (1, 2, 5)):
        ticks = [float(f"{digit}e{power}") for power in range(first, last + 1, step) for digit in digits]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            return inside
    return None


def log_axis(values: pd.Series[float], title: str | None) -> alt.Axis:
    """Return an axis with few ticks: Vega's default is nine a decade."""
    if values.empty:
        return alt.Axis(title=title)
    low, high = float(values.min()), float(values.max())
    ticks = log_ticks(low, high)
    if ticks is None:
        return alt.Axis(title=title, tickCount=4)
    return alt.Axis(title=title, values=ticks, format="~e" if low < 1e-4 or high > 1e6 else ",~g")


def interval(row: Mapping[Hashable, Any] | None, name: str, symbol: str) -> str:
    """Return a coefficient with its 95% interval, in words for a title.

    >>> interval({"pearson": 0.5, "pearson_low": -0.25, "pearson_high": 0.75}, "pearson", "r")
    'r = 0.50 [−0.25, 0.75]'
    """
    if row is None or row[name] != row[name]:
        return f"{symbol} undefined"
    words = f"{symbol} = {row[name]:z.2f} [{row[f'{name}_low']:z.2f}, {row[f'{name}_high']:z.2f}]"
    return words.replace("-", "−")


def empty(message: str) -> alt.Chart:
    """Return a picture that says why there is nothing to draw."""
    text: alt.Chart = alt.Chart(pd.DataFrame({"text": [message]})).mark_text(fontSize=13).encode(text="text:N")
    return text
