"""The parts of a figure: its data, then the drawing, with a caption that says how to read it; colours and themes.

Learning rates are ordered, so their colours run from dark to bright along one perceptually even ramp, which also
reads in grey and with any form of colour blindness. The dark theme takes a brighter stretch of the same ramp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import altair as alt
import numpy as np
import pandas as pd

from flatlens.experiments.overrides import IDENTITY
from flatlens.report import frames

if TYPE_CHECKING:
    from flatlens.experiments import StudyResult


Mode: TypeAlias = Literal["light", "dark"]
MODES: tuple[Mode, Mode] = ("light", "dark")

#: Colours along the ramp, evenly spaced: indigo, purple, magenta, coral, orange, yellow.
_RAMP = ("#120789", "#4c02a1", "#7e03a8", "#a92395", "#cc4778", "#e56b5d", "#f89540", "#fdc527", "#f0f921")
_STRETCH: dict[Mode, tuple[float, float]] = {"light": (0.0, 0.7), "dark": (0.38, 0.95)}
_INK: dict[Mode, tuple[str, str, str]] = {  # text, quieter text, lines
    "light": ("#1c2430", "#5b6675", "#e3e7ec"),
    "dark": ("#e8ebf0", "#a3acb9", "#333b47"),
}

NOT_KNOWN_GREY = "#8a94a3"  #: the colour of a level that is not known, after the ordered ones
RISES, FALLS = "#e08214", "#2f7fc1"  #: orange for a positive correlation, blue for a negative one
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


_IN_PAGE = {
    **dict(zip(_INK["light"], ("--ink", "--soft", "--line"), strict=True)),
    **{"white": "--panel", "#1d7a4f": "--yes", "#c0392b": "--bad"},
}
"""The colours of a chart that the page's style has, too, by its names of them."""


_MARK = re.compile(r'<path aria-label="([^"]*)" role="graphics-symbol"[^>]*')


def in_page(svg: str) -> str:
    """Return a picture in light colours as a page holds it: its ink, lines and ground follow the page's.

    The pointer shows what a mark is described by.

    >>> in_page('<path aria-label="a: 1" role="graphics-symbol" fill="white" stroke="#e3e7ec"/>')
    '<path aria-label="a: 1" role="graphics-symbol" fill="var(--panel)" stroke="var(--line)"><title>a: 1</title></path>'
    """
    svg = _MARK.sub(lambda mark: f"{mark[0].rstrip('/')}><title>{mark[1]}</title></path", svg)
    for colour, name in _IN_PAGE.items():
        svg = svg.replace(f'"{colour}"', f'"var({name})"')
    return svg


def ramp(position: float) -> str:
    """Return the colour at `position` in [0, 1] along the ramp.

    >>> ramp(0.0), ramp(1.0)
    ('#120789', '#f0f921')
    """
    stations = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in _RAMP], dtype=float)
    at = np.linspace(0, 1, len(_RAMP))
    return "#" + "".join(f"{round(float(np.interp(position, at, stations[:, i]))):02x}" for i in range(3))


def ordered_colours(count: int, mode: Mode) -> list[str]:
    """Return `count` colours in order, all legible on the background of `mode`.

    >>> ordered_colours(2, "light")
    ['#120789', '#f0844c']
    """
    low, high = _STRETCH[mode]
    if count == 1:
        return [ramp((low + high) / 2)]
    return [ramp(float(p)) for p in np.linspace(low, high, count)]


def level_colours(count: int, mode: Mode) -> list[str]:
    """Return the colours of `count` levels, and then that of a level that is not known."""
    return [*ordered_colours(max(count, 1), mode), NOT_KNOWN_GREY]


def theme(mode: Mode, colours: int) -> dict[str, Any]:
    """Return the Vega-Lite config of every chart: quiet axes, system fonts, `colours` ordered colours."""
    ink, soft, faint = _INK[mode]
    return {
        "background": "white" if mode == "light" else "#171b21",
        "font": FONT,
        "view": {"stroke": faint},
        "axis": {"labelColor": soft, "titleColor": ink, "gridColor": faint, "domainColor": faint, "tickColor": faint,
                 "titleFontWeight": "normal", "titleFontSize": 12, "labelFontSize": 11, "labelLimit": 260,
                 "labelFlush": False},
        "legend": {"labelColor": ink, "titleColor": ink, "symbolStrokeWidth": 2, "symbolOpacity": 1},
        "title": {"color": ink, "subtitleColor": soft, "anchor": "start", "fontSize": 13, "subtitleFontSize": 12},
        "text": {"color": ink},
        "rule": {"color": soft},
        "range": {"ordinal": level_colours(colours, mode)},
        "mark": {"invalid": "filter"},
    }  # fmt: skip


Drawing: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart | alt.ConcatChart | alt.HConcatChart
Width: TypeAlias = int | Literal["container"]
FigureLayout: TypeAlias = Literal["grid", "wide", "table"]
PANELS_A_ROW = 3  #: in the picture of a figure
Channel = TypeVar("Channel", alt.Fill, alt.Stroke, alt.Color)


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Figure:
    """A figure of the page and of the figures folder."""

    name: str  #: name of its files, without the ending
    title: str
    caption: str
    data: pd.DataFrame  #: tidy table of what is drawn
    whole: Drawing  #: the figure as one picture, for PNG and SVG
    panels: tuple[Drawing, ...]  #: for the page: a "grid" flows with the width of the screen, a "table" has none
    layout: FigureLayout
    signs: bool = False  #: whether the shape of a mark shows a setting
    colours: bool = True  #: whether colours show a setting, so that the page explains them
    narrow: Drawing | None = None  #: the whole for a phone, where it would be too wide

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Return the whole picture as Vega-Lite JSON, without a theme."""
        return _plain(self.whole)

    @cached_property
    def panel_specs(self) -> list[dict[str, Any]]:
        """Return the page's panels as Vega-Lite JSON, without a theme: the page brings its own."""
        return [self.spec if panel is self.whole else _plain(panel) for panel in self.panels]

    @property
    def drawn_apart(self) -> list[dict[str, Any]]:
        """Return the panels that flow with the width of a page; or the whole picture, and that for a phone."""
        if self.layout == "grid":
            return self.panel_specs
        return [self.spec] if self.narrow is None else [self.spec, _plain(self.narrow)]


def one_picture(
    name: str, title: str, caption: str, data: pd.DataFrame, whole: Drawing, narrow: Drawing | None = None
) -> Figure:
    """Return a figure without panels; its caption says what its colours mean."""
    return Figure(name, title, caption, data, whole, (whole,), "wide", colours=False, narrow=narrow)


def _plain(drawing: Drawing) -> dict[str, Any]:
    """Return the JSON without the schema's address, so that the page holds none, and without Altair's theme."""
    spec: dict[str, Any] = drawing.to_dict(validate=False)  # checked in the tests: it takes longer than the drawing
    return {key: value for key, value in spec.items() if key not in ("$schema", "config")}


@dataclass(frozen=True)
class Grid:
    """The settings that colours and shapes show, and their levels: the same in every figure."""

    colour: str
    colours: tuple[Any, ...]
    shape: str
    shapes: tuple[Any, ...]

    @classmethod
    def of(cls, result: StudyResult) -> Grid:
        """Return the settings and their levels in a study."""
        shown, levels = frames.shown_settings(result), {}
        for sign, name in shown.items():
            # numbers by size, others as they come, then NOT_KNOWN if one is missing
            column = result.networks[name]
            values = column.sort_values() if pd.api.types.is_numeric_dtype(column) else column
            each = frames.with_not_known(values).drop_duplicates().tolist()
            levels[sign] = tuple(sorted(each, key=lambda level: bool(level == frames.NOT_KNOWN)))
        return cls(shown["colour"], levels["colour"], shown["shape"], levels["shape"])

    @property
    def known_colours(self) -> int:
        """Return the number of levels with a colour of the ramp; after them comes the grey of `NOT_KNOWN`."""
        return len(self.colours) - (frames.NOT_KNOWN in self.colours)

    @property
    def known_shapes(self) -> int:
        """Return the number of levels with a shape of their own, without `NOT_KNOWN`."""
        return len(self.shapes) - (frames.NOT_KNOWN in self.shapes)

    @property
    def signs(self) -> list[str]:
        """Return the shape of each level."""
        known = [SHAPES[i % len(SHAPES)] for i in range(max(self.known_shapes, 1))]
        return [*known, NOT_KNOWN_SHAPE][: len(self.shapes)] if self.known_shapes else known

    def told(self, marks: pd.DataFrame) -> pd.DataFrame:
        """Return the data of marks with `NOT_KNOWN` as a level: what has no level would not be drawn."""
        fields = dict.fromkeys([*IDENTITY[1:], *map(frames.plain_field, (self.colour, self.shape))])
        return marks.assign(**{field: frames.with_not_known(marks[field]) for field in fields})

    def colour_of(self, channel: type[Channel], shown: bool) -> Channel:
        """Return a channel of colour; the theme brings the colours, and the page a legend unless it is `shown`."""
        legend = alt.Legend(title=frames.spoken(self.colour), orient="top") if shown and self.known_colours else None
        field = f"{frames.plain_field(self.colour)}:O"
        return channel(field, scale=alt.Scale(domain=list(self.colours)), legend=legend)

    def shape_of(self, shown: bool) -> alt.Shape:
        """Return the channel of the marks' shapes, one for each level."""
        legend = alt.Legend(title=frames.spoken(self.shape), orient="top") if shown and self.known_shapes else None
        scale = alt.Scale(domain=list(self.shapes), range=self.signs)
        return alt.Shape(f"{frames.plain_field(self.shape)}:N", scale=scale, legend=legend)

    def tooltip(self, *more: alt.Tooltip) -> list[alt.Tooltip]:
        """Return a tooltip with the network's identity, then `more`."""
        who = {"key": "network", **{name: frames.spoken(name) for name in IDENTITY[1:]}}
        for name in (self.colour, self.shape):
            who.setdefault(frames.plain_field(name), frames.spoken(name))
        return [alt.Tooltip(f"{field}:N", title=title) for field, title in who.items()] + list(more)


SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
NOT_KNOWN_SHAPE = "triangle-right"


def solid_if_included() -> alt.FillOpacityValue:
    """Return a fill that leaves excluded networks hollow; `alt.when` would take Altair ten times as long."""
    return alt.FillOpacityValue(0.0, condition={"test": "datum.included", "value": 0.75})


def hollow(included: pd.Series[bool]) -> str:
    """Return a caption's sentence on hollow marks, if any network is left out of the correlations."""
    return "" if included.all() else " A hollow mark is a network that is left out of the correlations."


def dashed(included: pd.Series[bool]) -> str:
    """Return a caption's words on dashed lines, if any network is left out of the correlations."""
    return "" if included.all() else " (dashed if left out of the correlations)"


def log_ticks(low: float, high: float) -> list[float] | None:
    """Return ticks of a log axis: powers of ten, or 1, 2, 5 over a narrower range; None for one narrower still.

    >>> log_ticks(0.05, 20.0), log_ticks(0.4, 6.0), log_ticks(0.07, 0.46), log_ticks(0.6, 0.9)
    ([0.1, 1.0, 10.0], [0.5, 1.0, 2.0, 5.0], [0.1, 0.2], None)
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, math.ceil((last - first) / 6))
    for digits, least in (((1,), 3), ((1, 2, 5), 2)):
        ticks = [float(f"{digit}e{power}") for power in range(first, last + 1, step) for digit in digits]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= least:
            return inside
    return None


def log_axis(values: pd.Series[float], title: str | None) -> alt.Axis:
    """Return an axis with few ticks: Vega's default is nine a decade."""
    values = values[np.isfinite(values.astype(float))]
    if values.empty:
        return alt.Axis(title=title)
    low, high = float(values.min()), float(values.max())
    ticks = log_ticks(low, high)
    if ticks is None:
        return alt.Axis(title=title, tickCount=4)
    return alt.Axis(title=title, values=ticks, format="~e" if low < 1e-4 or high > 1e6 else ",~g")


def value_axis(field: str, values: pd.Series[float], logarithmic: bool, ticks: int, **scale: Any) -> alt.Y:
    """Return a vertical axis without a title, logarithmic or not; `scale` is for both, and `zero` for a linear one."""
    zero = scale.pop("zero", False)
    if logarithmic:
        return alt.Y(field, scale=alt.Scale(type="log", nice=False, **scale), axis=log_axis(values, None))
    return alt.Y(field, scale=alt.Scale(zero=zero, **scale), axis=alt.Axis(title=None, tickCount=ticks))


def in_panels(
    draw: Callable[[Any, Width], Drawing],
    of: Sequence[Any],
    nothing: str,
    *,
    columns: int = PANELS_A_ROW,
    width: int = 300,
    **shared: Any,
) -> tuple[Drawing, tuple[Drawing, ...]]:
    """Return the panels of a figure as one picture, and for the page; one that says `nothing` if there are none.

    They have `columns`, or with 0 lie side by side, and `shared` resolves their scales.
    """
    if not of:
        return (blank := empty(nothing)), (blank,)
    drawn = [draw(one, width) for one in of]
    whole = alt.concat(*drawn, columns=columns) if columns else alt.hconcat(*drawn)
    return whole.resolve_scale(**shared) if shared else whole, tuple(draw(one, "container") for one in of)


def known(numbers: pd.Series[float]) -> bool:
    """Return whether any number is defined, such as the lower end of an interval: too few units have none."""
    return bool(numbers.notna().any())


def interval(row: Mapping[Hashable, Any] | None, name: str, symbol: str) -> str:
    """Return a coefficient with its 95% interval, in words for a title.

    >>> interval({"pearson": 0.5, "pearson_low": -0.25, "pearson_high": 0.75}, "pearson", "r")
    'r = 0.50 [−0.25, 0.75]'
    """
    if row is None or row[name] != row[name]:
        return f"{symbol} undefined"
    words, low, high = f"{symbol} = {row[name]:z.2f}", row[f"{name}_low"], row[f"{name}_high"]
    words += f" [{low:z.2f}, {high:z.2f}]" if low == low else ""  # too few independent units have none
    return words.replace("-", "−")


def short_labels(most: int) -> str:
    """Return the expression of an axis that shortens long names in the middle.

    >>> short_labels(9)
    "length(datum.label) > 9 ? slice(datum.label, 0, 4) + '…' + slice(datum.label, -4) : datum.label"
    """
    left = (most - 1) // 2
    short = f"slice(datum.label, 0, {left}) + '…' + slice(datum.label, -{most - 1 - left})"
    return f"length(datum.label) > {most} ? {short} : datum.label"


def empty(message: str) -> alt.Chart:
    """Return a picture that says why there is nothing to draw."""
    text: alt.Chart = alt.Chart(pd.DataFrame({"text": [message]})).mark_text(fontSize=13).encode(text="text:N")
    return text
