"""Paths and planes, as a terminal screen and as a page: the answer, the table, pictures, and what these do not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.landscape import LossPath, LossPlane
from flatlens.landscape.path import NOT_SHOWN
from flatlens.landscape.plane import NOT_SEEN
from flatlens.report.cards import number
from flatlens.report.screen import Fitted, head_of_screen, remark

if TYPE_CHECKING:
    from flatlens.report.figures import Figure


def path_screen(found: LossPath) -> RenderableType:
    """Return the screen of `flatlens path`: the answer, one row for each path, and what it cannot show."""
    return _screen("Paths", found.table(), ("path",), found.answer, found.about, NOT_SHOWN)


def plane_screen(found: LossPlane) -> RenderableType:
    """Return the screen of `flatlens plane`: the answer, one row for each side of a direction."""
    return _screen("How far the quadratic holds", found.table(), ("direction", "side"), found.answer, found.about,
                   NOT_SEEN)  # fmt: skip


def write_path_page(found: LossPath, path: Path) -> Path:
    """Write one HTML file that needs no network: the answer, the loss along each path, the table."""
    from flatlens.report.figures.landscape import path_figure  # not above: the screen draws nothing

    title = "The loss between two networks"
    return _write(title, path, found.answer, found.about, [path_figure(found)], found.table(), NOT_SHOWN)


def write_plane_page(found: LossPlane, path: Path) -> Path:
    """Write one HTML file that needs no network: the answer, the slices with their quadratic, the plane, the table."""
    from flatlens.report.figures.landscape import plane_figure, slices_figure  # not above: the screen draws nothing

    drawn = [slices_figure(found), plane_figure(found)]
    title = "The loss around a network"
    return _write(title, path, found.answer, found.about, drawn, found.table(), NOT_SEEN)


def _screen(
    title: str, rows: pd.DataFrame, names: Sequence[str], answer: Sequence[str], about: Mapping[str, Any], limits: str
) -> RenderableType:
    table = Fitted(title, names=names[:1])
    for heading in rows.columns[1:]:
        table.column(str(heading), "extra" if heading in ("looks", "length of d", "g^T d") else "value")
    for row in rows.itertuples(index=False):
        table.row(*map(_shown, row))
    notes = [remark("Note: ", f"{line}.") for line in about["notes"]]
    return Group(*head_of_screen({"": about}, answer), table, Text(""), *notes, remark("Not shown: ", limits))


def _shown(cell: object) -> str:
    if isinstance(cell, float):
        return "none" if cell == float("inf") else number(cell)
    return str(cell)


def _write(
    title: str, path: Path, answer: Sequence[str], about: Mapping[str, Any], figures: Sequence[Figure],
    rows: pd.DataFrame, limits: str,
) -> Path:  # fmt: skip
    from flatlens.report.page import write_page  # not above: the screen draws nothing

    return write_page(
        "landscape",
        path,
        {"": about},
        answer=answer,
        figures=figures,
        title=title,
        headings=list(rows.columns),
        rows=[list(map(_shown, row)) for row in rows.itertuples(index=False)],
        notes=about["notes"],
        limits=limits,
    )
