"""Bounds checked on one network: a terminal screen, and a page with the chain and every claim's tightness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.bounds import BOUNDS, BoundsReport, Verdict
from flatlens.bounds.check import cause
from flatlens.column import Column
from flatlens.progress import by_key
from flatlens.report.blocks import summed_up
from flatlens.report.screen import Fitted, head_of_screen, remark

REASONS = 24  #: number of reasons that a screen shows
LAYERS = 12  #: with more layers, a screen shows one row for each bound
STYLES = {"holds": "green", "violated": "bold red", "undecided": "magenta", "not applicable": "dim"}
URGENT = ("not applicable", "holds", "undecided", "violated")  #: verdicts from the least to the most important one


def _by_bound(verdicts: Sequence[Verdict]) -> list[tuple[str, list[Verdict], str, Verdict]]:
    """Return each bound's claims: how many have each verdict, and the most important one, of these the tightest."""
    rows = []
    for bound, claims in by_key((verdict.bound, verdict) for verdict in verdicts).items():
        count = Counter[str](v.status for v in claims)
        told = ", ".join(f"{count[s]} {s}" for s in dict.fromkeys(("violated", *STYLES)) if count[s])
        top = max(claims, key=lambda v: (URGENT.index(v.status), v.tightness if v.tightness == v.tightness else -1.0))
        rows.append((bound, claims, told, top))
    return rows


def bounds_screen(verdicts: BoundsReport) -> RenderableType:
    """Return the screen of `flatlens bounds`: what was measured, one row for each claim, then how to read it."""
    deep = len({v.layer for v in verdicts}) > LAYERS
    table = Fitted("Bounds", names=["bound", "layer"])
    for heading in ("left", "right"):
        table.column(heading, "extra")
    table.column("tight")
    table.column("status", left=True)

    # of a deep network each bound has one row, else each claim has one, and the name of its bound stands above
    rows = [(v, "") for v in verdicts]
    if deep:
        table.column("claims")
        rows = [
            (top, f"{sum(v.status == top.status for v in claims)} of {len(claims)}" if len(claims) > 1 else "")
            for _, claims, _, top in _by_bound(verdicts)
        ]
    above = None
    for verdict, told in rows:
        bound = Text("" if verdict.bound == above else verdict.bound)
        status = Text(verdict.status, style=STYLES[verdict.status])
        sides = _shown(verdict.lhs, 3), _shown(verdict.rhs, 3), _shown(verdict.tightness, 2)
        table.row(bound, verdict.layer or "", *sides, status, *([Text(told, style="dim")] if deep else []))
        above = verdict.bound
    more = "One row per bound: its tightest claim, and how many have its verdict; all claims: --page or --json."
    every = [Text(more, style="dim")] if deep else []
    head = head_of_screen({"": verdicts.about}, verdicts.answer)
    key = remark(
        "\ntight: ",
        "left side over right side, where they are closest; 1 is equality. not applicable: an assumption of the "
        "theorem fails here, or is neither checked nor declared; the sides are shown anyway.",
    )
    # why a bound does not apply, is violated or undecided: by reason
    said = by_key((why, (verdict.bound, verdict.layer or "")) for verdict in verdicts if (why := _why(verdict)))
    text = Text("\nWhy" if said else "", style="bold")
    for why, places in list(said.items())[:REASONS]:
        bounds = by_key(places)
        of = [f"{name} at {summed_up(layers, most=4)}" if any(layers) else name for name, layers in bounds.items()]
        text.append(f"\n{', '.join(of)}: ", style="not bold italic").append(why, style="not bold not italic dim")
    if len(said) > REASONS:
        text.append(f"\nand {len(said) - REASONS} more reasons: --page or --json", style="not bold")
    return Group(*head, table, *every, text, key)


def _why(verdict: Verdict) -> str:
    share = f"{verdict.violated_share:.0%} of samples violate it" if verdict.violated_share else ""
    return "; ".join(part for part in (verdict.assumption, share, verdict.note) if part)


def _shown(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if value == value else "-"


def write_bounds_page(verdicts: BoundsReport, path: Path) -> Path:
    """Write one HTML file that needs no network: the chain, every claim's tightness, the table, all the bounds."""
    from flatlens.report.figures.measured import chain_figure, tightness_figure  # not above: the screen draws nothing
    from flatlens.report.page import write_page

    drawn = (chain_figure(verdicts), tightness_figure(verdicts))
    names = dict.fromkeys(Column.parse(verdict.bound).measure for verdict in verdicts)
    return write_page(
        "bounds",
        path,
        {"": verdicts.about},
        answer=verdicts.answer,
        figures=[figure for figure in drawn if figure.data[figure.data.columns[2]].notna().any()],
        cards={name: BOUNDS[name] for name in names if name in BOUNDS},
        groups=_by_bound(verdicts),
        why=_why,
        shown=_shown,
        cause=cause([v for v in verdicts if v.status == "violated"]),
        counts={status: sum(v.status == status for v in verdicts) for status in STYLES},
    )
