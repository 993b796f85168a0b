"""Colours and chart themes: one place, so that every figure tells learning rates apart the same way.

Learning rates are ordered, so their colours run from dark to bright along one perceptually even ramp, which also
reads in grey and with any form of colour blindness. The dark theme takes a brighter stretch of the same ramp.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

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


def in_page_colours(svg: str) -> str:
    """Return a picture in light colours as a page holds it: its ink, lines and ground follow the page's.

    >>> in_page_colours('<rect fill="white" stroke="#e3e7ec"/>')
    '<rect fill="var(--panel)" stroke="var(--line)"/>'
    """
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
