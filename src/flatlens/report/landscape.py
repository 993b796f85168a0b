"""Paths and planes, as a terminal screen and as a page: the answer, the table, pictures, and what these do not show."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.landscape import LossPath, LossPlane
from flatlens.landscape.path import NOT_SHOWN
from flatlens.landscape.plane import NOT_SEEN
from flatlens.report.cards import number
from flatlens.report.screen import Fitted, head_of_screen, remark


def landscape_screen(found: LossPath | LossPlane) -> RenderableType:
    """Return the screen of `flatlens path` or `plane`: the answer, the table, and what it cannot show."""
    title, limits = ("Paths", NOT_SHOWN) if isinstance(found, LossPath) else ("How far the quadratic holds", NOT_SEEN)
    first, *headings = map(str, found.table())
    table = Fitted(title, names=[first])
    for heading in headings:
        table.column(heading, "extra" if heading in ("looks", "length of d", "g^T d") else "value")
    for row in found.table().itertuples(index=False):
        table.row(*map(_shown, row))
    notes = [remark("Note: ", f"{line}.") for line in found.about["notes"]]
    head = head_of_screen({"": found.about}, found.answer)
    return Group(*head, table, Text(""), *notes, remark("Not shown: ", limits))


def _shown(cell: object) -> str:
    return str(cell) if not isinstance(cell, float) else "none" if cell == float("inf") else number(cell)


def write_landscape_page(found: LossPath | LossPlane, path: Path) -> Path:
    """Write one HTML file that needs no network: the answer, the pictures, the table."""
    from flatlens.report.figures.landscape import path_figure, plane_figure, slices_figure
    from flatlens.report.page import write_page  # not above: the screen draws nothing

    if isinstance(found, LossPath):
        title, limits, figures = "The loss between two networks", NOT_SHOWN, [path_figure(found)]
    else:
        figures = [slices_figure(found), plane_figure(found)]
        title, limits = "The loss around a network", NOT_SEEN
    return write_page(
        "landscape",
        path,
        {"": found.about},
        answer=found.answer,
        figures=figures,
        title=title,
        headings=list(found.table().columns),
        rows=[list(map(_shown, row)) for row in found.table().itertuples(index=False)],
        notes=found.about["notes"],
        limits=limits,
    )
