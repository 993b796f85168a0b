"""Figures written to files and to JSON, without a browser or a network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from flatlens.errors import needs
from flatlens.files import write_whole
from flatlens.report.figures import Figure
from flatlens.report.frames import csv_bytes
from flatlens.report.palette import theme

with needs("study", "a picture"):
    import vl_convert

PIXELS_PER_POINT = 2  # sharp on a phone and in print
LARGEST_SIDE = 6000  # pixels; a picture of hundreds of panels must not take gigabytes


def svg_of(figure: Figure, colours: int = 1) -> str:
    """Return the picture as the text of an SVG file, in light colours; `colours` as for `palette.theme`."""
    spec = json.dumps({"$schema": "https://vega.github.io/schema/vega-lite/v6.json", **figure.spec})
    svg: str = vl_convert.vegalite_to_svg(spec, config=theme("light", colours), allowed_base_urls=[])
    return svg


def write_figure(figure: Figure, folder: Path, colours: int) -> list[Path]:
    """Write `folder/<name>.svg`, `.pdf`, `.png` and `.csv`: the picture three times, and its data."""
    svg = svg_of(figure, colours)
    png: bytes = vl_convert.svg_to_png(svg, scale=_scale(svg))
    pdf: bytes = vl_convert.svg_to_pdf(svg)
    return [
        write_whole(folder / f"{figure.name}.svg", svg.encode()),
        write_whole(folder / f"{figure.name}.pdf", pdf),
        write_whole(folder / f"{figure.name}.png", png),
        write_whole(folder / f"{figure.name}.csv", csv_bytes(figure.data)),
    ]


def _scale(svg: str) -> float:
    """Return the pixels per point: two, less for a huge picture."""
    head = svg[: svg.index(">")]
    sides = [float(head.split(f' {side}="', 1)[1].split('"', 1)[0]) for side in ("width", "height")]
    return min(PIXELS_PER_POINT, LARGEST_SIDE / max(*sides, 1.0))


def script_json(value: Any) -> str:
    r"""Return JSON that may stand inside a script element: no character in it can end the element or open a comment.

    >>> script_json({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(_without_nan(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
