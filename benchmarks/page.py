"""The page of all results: one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from benchmarks import machine
from benchmarks.rows import TASKS, Row, promises, rows
from flatlens.report.palette import theme

PAGE = machine.RESULTS / "page.html"
NAMES = ["one_pass", "definitions", "curvature", "growth", "memory"]  #: the results that it shows
EACH = "panel:N"


def write() -> Path:
    """Make the page anew from the results that lie there."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=select_autoescape(), undefined=StrictUndefined)
    environment.filters["short"] = short
    every = list(rows())
    PAGE.write_text(
        environment.get_template("page.html.j2").render(
            promises=list(promises()),
            tables=[(task, list(mine)) for task, mine in groupby(every, key=lambda row: row.task)],
            growth=[(kind, found) for kind, found in machine.earlier("growth").get("kinds", {}).items()],
            values=machine.earlier("definitions").get("values", {}),
            pictures=list(pictures(every)),
            machines=list(machines()),
            versions=machine.earlier("curvature").get("versions", {}),
            gpu=machine.earlier("gpu"),
        )
        + "\n"
    )
    return PAGE


def machines() -> Iterator[tuple[str, dict[str, Any]]]:
    """(what was measured, where) of each part that was measured by itself."""
    for name in NAMES:
        found = machine.earlier(name)
        parts = found.get("networks") or found.get("kinds") or found.get("tasks") or {}
        each = {f"{name}: {part}": one["machine"] for part, one in parts.items()}
        yield from (each or ({name: found["machine"]} if found else {})).items()


def short(number: float | None, digits: int = 3) -> str:
    """A number with so many digits, or nothing."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.{digits}g}"


def pictures(every: list[Row]) -> Iterator[tuple[str, str, str]]:
    """(title, caption, SVG) of each."""
    if machine.earlier("growth"):
        yield (
            "How the pass's time grows",
            "Median seconds of the pass and of its floor, on logarithmic axes: the slope is the exponent.",
            _svg(_grown()),
        )
    peers = [row for row in every if row.task in list(TASKS.values())[:2] and row.error and row.seconds]
    if peers:
        yield (
            "Error against time",
            "Each library's relative error (root mean square over its runs) and median seconds, on logarithmic axes: "
            "what lies lower on the left is better.",
            _svg(_apart(peers)),
        )


def _grown() -> alt.FacetChart:
    points = [
        {"panel": found["what"], "who": who, "size": size, "seconds": spread["median"]}
        for found in machine.earlier("growth")["kinds"].values()
        for who in ("pass", "floor")
        for size, spread in zip(found["sizes"], found[who]["seconds"], strict=True)
    ]
    lines = alt.Chart(pd.DataFrame(points)).mark_line(point=True)
    return _panels(lines.encode(
        alt.X("size:Q", title=None).scale(type="log"), alt.Y("seconds:Q", title="seconds").scale(type="log"),
        alt.Color("who:N", title=None).scale(domain=["pass", "floor"], range=["#1f5fa8", "#8a93a0"]),
    ))  # fmt: skip


def _apart(peers: list[Row]) -> alt.FacetChart:
    points = [
        {
            "panel": f"{row.task.lower()}: {row.network.partition(', n')[0]}",
            "library": row.who.split()[0],
            "error": row.error,
            "seconds": row.seconds["median"],
        }
        for row in peers
    ]
    marks = alt.Chart(pd.DataFrame(points)).mark_point(filled=True, size=90)
    return _panels(marks.encode(
        alt.X("seconds:Q").scale(type="log"),
        alt.Y("error:Q", title="relative error", axis=alt.Axis(format=".0e")).scale(type="log"),
        alt.Color("library:N", title=None), alt.Shape("library:N", title=None),
    ))  # fmt: skip


def _panels(chart: alt.Chart) -> alt.FacetChart:
    faceted: alt.FacetChart = (
        chart.properties(width=250, height=180)
        .facet(facet=alt.Facet(EACH, title=None, sort=None), columns=3)
        .resolve_scale(x="independent", y="independent")
    )
    return faceted


def _svg(chart: alt.FacetChart) -> str:
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("config", None)
    config = theme("light", 1)
    config["range"] = {}
    svg: str = vl_convert.vegalite_to_svg(json.dumps(spec), config=config, allowed_base_urls=[])
    return svg
