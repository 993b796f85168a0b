"""The page of all results: one HTML file that needs no network connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import altair as alt
import pandas as pd
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from benchmarks import machine
from benchmarks.rows import TASKS, Row, promises, rows
from flatlens.report.figures.figure import theme

PAGE = machine.RESULTS / "page.html"
NAMES = ["one_pass", "definitions", "curvature", "growth", "memory"]  #: results that the page shows
EACH = "panel:N"
OURS = "#1f5fa8"
COLOURS = {"flatlens": OURS, "BackPACK": "#d1495b", "curvlinops": "#e0a030", "PyHessian": "#3a9d7c",
           "hessian-eigenthings": "#7b5ea7"}  # fmt: skip
TOP = alt.Legend(orient="top")


def write() -> Path:
    """Write the page from the saved results."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=select_autoescape(["html", "j2"]), undefined=StrictUndefined)
    environment.filters["short"] = short
    every = list(rows())
    PAGE.write_text(
        environment.get_template("page.html.j2").render(
            promises=list(promises()),
            tables=[(task, list(mine)) for task, mine in groupby(every, key=lambda row: row.task)],
            growth=[(kind, found) for kind, found in machine.earlier("growth").get("kinds", {}).items()],
            values=machine.earlier("definitions").get("values", {}),
            growth_picture=growth_picture(),
            error_picture=error_picture(every),
            machines=list(machines()),
            versions=machine.earlier("curvature").get("versions", {}),
            gpu=machine.earlier("gpu"),
        )
        + "\n"
    )
    return PAGE


def machines() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (title, machine) of each part that was measured separately."""
    for name in NAMES:
        found = machine.earlier(name)
        parts = found.get("networks") or found.get("kinds") or found.get("tasks") or {}
        each = {f"{name}: {part}": one["machine"] for part, one in parts.items()}
        yield from (each or ({name: found["machine"]} if found else {})).items()


def short(number: float | None, digits: int = 3) -> str:
    """Return a number with this many digits, or an empty string."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.{digits}g}"


def growth_picture() -> str:
    """Return seconds against sizes, of the pass and its floor, as SVG; empty without results."""
    points = [
        {"panel": found["what"].rstrip(":="), "who": who, "size": size, "seconds": spread["median"]}
        for found in machine.earlier("growth").get("kinds", {}).values()
        for who in ("pass", "floor")
        for size, spread in zip(found["sizes"], found[who]["seconds"], strict=True)
    ]
    if not points:
        return ""
    lines = alt.Chart(pd.DataFrame(points)).mark_line(point=True)
    return _svg(lines.encode(
        _log("size", None), _log("seconds", "seconds", "y"),
        alt.Color("who:N", title=None, legend=TOP).scale(domain=["pass", "floor"], range=[OURS, "#8a93a0"]),
    ))  # fmt: skip


def error_picture(every: list[Row]) -> str:
    """Return each library's error against its seconds, as SVG; empty without results."""
    points = [
        {
            "panel": f"{row.task.lower()}: {row.network.partition(', n')[0]}",
            "library": row.who.split()[0],
            "error": row.error,
            "seconds": row.seconds["median"],
        }
        for row in every
        if row.task in list(TASKS.values())[:2] and row.error and row.seconds
    ]
    if not points:
        return ""
    marks = alt.Chart(pd.DataFrame(points)).mark_point(filled=True, size=90, opacity=0.9)
    return _svg(marks.encode(
        _log("seconds", "seconds"), _log("error", "relative error", "y", format=".0e"),
        alt.Color("library:N", title=None, legend=TOP).scale(domain=list(COLOURS), range=list(COLOURS.values())),
        alt.Shape("library:N", title=None, legend=TOP).scale(domain=list(COLOURS)),
    ))  # fmt: skip


def _log(field: str, title: str | None, which: Literal["x", "y"] = "x", format: str = "~g") -> alt.X | alt.Y:
    """Return a logarithmic axis with few ticks."""
    channel = alt.X if which == "x" else alt.Y
    axis = alt.Axis(tickCount=4, format=format, labelOverlap=True)
    found: alt.X | alt.Y = channel(f"{field}:Q", title=title, axis=axis).scale(type="log", nice=False, padding=12)
    return found


def _svg(chart: alt.Chart) -> str:
    panels = (
        chart.properties(width=250, height=170)
        .facet(facet=alt.Facet(EACH, title=None, sort=None), columns=3)
        .resolve_scale(x="independent", y="independent")
    )
    spec: dict[str, Any] = panels.to_dict()
    spec.pop("config", None)
    config = theme("light", 1)
    config["range"] = {}
    svg: str = vl_convert.vegalite_to_svg(json.dumps(spec), config=config, allowed_base_urls=[])
    return svg
