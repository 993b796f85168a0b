"""Pictures small enough for a repository: an SVG without what no eye sees, or a PNG of few colours."""

from __future__ import annotations

import io
import re
from collections import Counter

import vl_convert
from PIL import Image

_UNSEEN = re.compile(r' (?:aria-\w+|role|class|pointer-events|xml:space)="[^"]*"| (?:fill-|stroke-)?opacity="1"')
"""Attributes that are for programs, or say what holds without them."""
_NOTHING = re.compile(r'<path(?=[^>]*(?: d=""| d="M0,0h0v0h0Z"| display="none"))[^>]*/>')
_MARK = re.compile(r'<path transform="translate\(([^,)]+),([^,)]+)\)"( [^>]*?)/>')
_GROUP = re.compile(r"<g(?: transform=\"translate\(0,0\)\")?>((?:(?!</?g\b).)*)</g>", re.DOTALL)
_EMPTY = re.compile(r"<g\b[^>]*(?:/>|(?<!/)></g>)")
_FONT = re.compile(r' font-family="[^"]*"')
_TAG = re.compile(r"<[^>]+>")
_LONG = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")
FEWEST_MARKS = 3
"""Marks that look alike are drawn from one pattern where there are so many of them."""
PNG_COLOURS = 64
"""Colours of a PNG."""


def compact(svg: str) -> str:
    """Return a picture of Vega's that looks the same, without labels for programs, with marks drawn from patterns.

    Coordinates are rounded to a hundredth of a pixel.
    """
    svg = _NOTHING.sub("", _UNSEEN.sub("", svg))
    svg = _TAG.sub(lambda tag: _LONG.sub(_rounded, tag[0]), svg)
    if len(fonts := set(_FONT.findall(svg))) == 1:
        svg = _FONT.sub("", svg).replace("<svg", f"<svg{fonts.pop()}", 1)
    before = ""
    while before != svg:
        before, svg = svg, _GROUP.sub(r"\1", _EMPTY.sub("", svg))
    return _with_patterns(svg)


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _with_patterns(svg: str) -> str:
    """Return the picture with marks that differ in their place alone drawn from one pattern each."""
    counts = Counter(look for _, _, look in _MARK.findall(svg))
    names = {look: f"m{i}" for i, (look, count) in enumerate(counts.items()) if count >= FEWEST_MARKS}

    def placed(mark: re.Match[str]) -> str:
        x, y, look = mark.groups()
        return f'<use xlink:href="#{names[look]}" x="{x}" y="{y}"/>' if look in names else mark[0]

    patterns = "".join(f'<path id="{name}"{look}/>' for look, name in names.items())
    head, end, rest = _MARK.sub(placed, svg).partition(">")
    return f"{head}{end}<defs>{patterns}</defs>{rest}" if names else svg


def small_png(svg: str, most: int, scales: tuple[float, ...] = (1.5, 1.25, 1.0, 0.8, 0.65, 0.5)) -> bytes:
    """Return a PNG of few colours at the largest of these scales that takes at most `most` bytes, else at the last."""
    found = b""
    for scale in scales:
        picture = Image.open(io.BytesIO(vl_convert.svg_to_png(svg, scale=scale))).convert("RGB")
        written = io.BytesIO()
        picture.quantize(PNG_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            written, "PNG", optimize=True
        )
        found = written.getvalue()
        if len(found) <= most:
            break
    return found
