"""Bounds checked on one network: a screen of a terminal, and a page with the chain and every claim's tightness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flatlens.bounds import BOUNDS, Verdict
from flatlens.files import write_whole
from flatlens.report.figures.chain import chain_figure, tightness_figure
from flatlens.report.page import environment
from flatlens.report.render import svg_of

STYLES = {"holds": "green", "violated": "bold red", "undecided": "magenta", "not applicable": "dim"}


def bounds_screen(verdicts: Sequence[Verdict]) -> RenderableType:
    """What `flatlens bounds` ends with: one row a claim, then what to make of it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title="\nBounds", title_justify="left",
                  title_style="bold")  # fmt: skip
    for heading in ("bound", "layer", "left", "right", "tight", "status"):
        table.add_column(heading, justify="right" if heading in ("left", "right", "tight") else "left", no_wrap=True)
    table.add_column("why", overflow="fold")
    name = None
    for verdict in verdicts:
        table.add_row(
            Text("" if verdict.bound == name else verdict.bound),
            verdict.layer or "",
            *(shown(value, digits) for value, digits in ((verdict.lhs, 3), (verdict.rhs, 3), (verdict.tightness, 2))),
            Text(verdict.status, style=STYLES[verdict.status]),
            Text(_why(verdict), style="dim"),
        )
        name = verdict.bound
    return Group(table, _key(verdicts))


def shown(value: float, digits: int) -> str:
    """A number, or a dash where there is none."""
    return f"{value:.{digits}g}" if value == value else "-"


def _why(verdict: Verdict) -> str:
    share = f"{verdict.violated_share:.0%} of samples beyond" if verdict.violated_share else ""
    return "; ".join(part for part in (verdict.assumption, share, verdict.note) if part)


def _key(verdicts: Sequence[Verdict]) -> Text:
    """What the words mean, and what was found."""
    violated = [v for v in verdicts if v.status == "violated"]
    text = Text("\ntight: ", style="bold").append(
        "left side over right side, where they come nearest; 1 is equality. not applicable: the theorem supposes what "
        "is not so here, or what nobody vouched for; the sides are shown all the same.",
        style="not bold",
    )
    counts = ", ".join(f"{sum(v.status == s for v in verdicts)} {s}" for s in STYLES)
    text.append("\nClaims: ", style="bold").append(counts, style="not bold")
    if violated:
        names = ", ".join(dict.fromkeys(v.bound for v in violated))
        text.append(f"\nVIOLATED: {names}: {_cause(violated)}.", style="bold red")
    return text


def _cause(violated: Sequence[Verdict]) -> str:
    """What a violated bound means: the user's word comes first."""
    declared = list(dict.fromkeys(v.assumption for v in violated if v.assumption))
    ours = "an error in flatlens or in a theorem: please report it"
    return f"either what was taken on your word is not so ({'; '.join(declared)}), or {ours}" if declared else ours


def write_bounds_page(verdicts: Sequence[Verdict], about: Mapping[str, Any], path: Path) -> Path:
    """One HTML file that needs no network: the chain, the tightness of every claim, the table, what each bound says."""
    drawn = (chain_figure(verdicts), tightness_figure(verdicts))
    figures = [figure for figure in drawn if figure.data[figure.data.columns[2]].notna().any()]
    names = dict.fromkeys(verdict.bound.partition(".")[0] for verdict in verdicts)
    html = environment().get_template("bounds.html.j2").render(
        about=about,
        figures=[(figure, svg_of(figure)) for figure in figures],
        verdicts=verdicts,
        why=_why,
        shown=shown,
        bounds=[BOUNDS[name] for name in names if name in BOUNDS],
        cause=_cause([v for v in verdicts if v.status == "violated"]),
        counts={status: sum(v.status == status for v in verdicts) for status in STYLES},
    )  # fmt: skip
    return write_whole(path, html.encode())
