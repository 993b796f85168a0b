"""The two pictures of architecture.md: `python docs/architecture.py` writes them.

The picture of the layers follows the import contract in pyproject.toml, and the words for each folder there.
"""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images"
WIDTH = 920
ROW = 34
FLOW = {  # name: (column, row, what it is)
    "model, loss, data": (0, 0, "yours; files, hub names"),
    "Problem": (0, 1, "checked before anything is measured"),
    "Lens": (0, 2, "at these weights; keeps what was computed"),
    "plan": (1, 2, "what each parameter does, off autograd's graph"),
    "pass": (1, 3, "one forward, N backward passes, in chunks"),
    "Gram matrices": (1, 4, "per sample and layer: G, K, J W, ..."),
    "curvature": (0, 3, "products with H and Gauss-Newton"),
    "measures": (0, 5, "each a function and its card"),
    "Report": (0, 6, "value, error, kind, cost"),
    "bounds": (1, 5, "both sides and assumptions"),
    "transforms": (1, 6, "which numbers are invariant"),
    "training, tracking": (2, 1, "measures at chosen steps"),
    "experiments": (2, 3, "populations; store; findings"),
    "papers": (2, 5, "claims, statistics, outcomes"),
    "report": (2, 6, "pages, figures, tables"),
}
ARROWS = [
    ("model, loss, data", "Problem"), ("Problem", "Lens"), ("Lens", "plan"), ("plan", "pass"),
    ("pass", "Gram matrices"), ("Lens", "curvature"), ("curvature", "measures"),
    ("Gram matrices", "measures"), ("Gram matrices", "bounds"),
    ("measures", "Report"), ("Report", "transforms"), ("training, tracking", "experiments"), ("experiments", "papers"),
    ("papers", "report"),
]  # fmt: skip


def layers() -> list[list[str]]:
    """Return the folders and modules of each layer, the highest first, as the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (first,) = (one["layers"] for one in contracts if one["name"] == "a layer imports only the layers below it")
    return [[name.strip().removeprefix("flatlens.") for name in layer.split("|")] for layer in first]


def meanings() -> dict[str, str]:
    """Return what each folder and module is, in the words of the tree in architecture.md."""
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("## What is where")[2]
    return {name.removesuffix(".py").rstrip("/"): words for name, words in re.findall(r"^ {6}(\S+) +(.*)$", tree, re.M)}


def layers_svg() -> str:
    """Return the picture of the layers: a folder imports only from those below it."""
    said, rows = meanings(), []
    for number, names in enumerate(layers()):
        y = 10 + number * ROW
        words = "; ".join(said[name] for name in names) if len(names) == 1 else ""
        rows.append(_box(10, y, 250 if words else WIDTH - 20, ROW - 6, "  |  ".join(names)))
        rows.append(_text(275, y + 19, words, "said"))
    return _svg("\n".join(rows), 14 + len(layers()) * ROW)


def flow_svg() -> str:
    """Return the picture of the flow, from a model, a loss and data to pages."""
    parts = [_arrow(*_centre(one), *_centre(other)) for one, other in ARROWS]
    for name, (column, row, words) in FLOW.items():
        x, y = 10 + column * 305, 10 + row * 66
        parts += [_box(x, y, 285, 46, ""), _text(x + 12, y + 19, name, "name"), _text(x + 12, y + 37, words, "said")]
    return _svg("\n".join(parts), 10 + 7 * 66)


def _centre(name: str) -> tuple[int, int]:
    column, row, _ = FLOW[name]
    return 10 + column * 305 + 142, 10 + row * 66 + 23


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """Return a line between two boxes with its point where it enters the second."""
    if x == to_x:
        to_y -= 25
    else:
        side = 1 if to_x > x else -1
        x, to_x = x + 142 * side, to_x - 145 * side
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" marker-end="url(#point)"/>'


def _box(x: int, y: int, width: int, height: int, name: str) -> str:
    drawn = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
    return drawn + (_text(x + 12, y + 19, name, "name") if name else "")


def _text(x: int, y: int, words: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>' if words else ""


def _svg(content: str, height: int) -> str:
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">
<style>rect {{ fill: #eef3f8; stroke: #4c78a8 }} line {{ stroke: #777; stroke-width: 1.3 }} .name {{ font-size: 14px;
font-weight: bold; fill: #1d3550 }} .said {{ font-size: 12px; fill: #444 }} .page {{ fill: #fff; stroke: none }}</style>
<defs><marker id="point" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">
<path d="M0,0 L9,4 L0,8 z" fill="#777"/></marker></defs>
<rect class="page" width="{WIDTH}" height="{height}"/>
{content}
</svg>
"""


def main(into: Path = PICTURES) -> None:
    """Write both pictures."""
    (into / "layers.svg").write_text(layers_svg())
    (into / "flow.svg").write_text(flow_svg())


if __name__ == "__main__":
    main()
