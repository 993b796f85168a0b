"""Bounds checked on one network: a terminal screen, and a page with the chain and every claim's tightness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.bounds import BOUNDS, BoundsReport, Verdict
from flatlens.column import Column
from flatlens.files import write_whole
from flatlens.report.blocks import summed_up
from flatlens.report.screen import Fitted, head_of_page, head_of_screen

REASONS = 24  #: number of reasons that a screen shows
LAYERS = 12  #: with more layers, a screen shows one row for each bound
STYLES = {"holds": "green", "violated": "bold red", "undecided": "magenta", "not applicable": "dim"}


def bounds_screen(verdicts: BoundsReport) -> RenderableType:
    """Return the screen of `flatlens bounds`: what was measured, one row for each claim, then how to read it."""
    table = Fitted("Bounds")
    deep = len({v.layer for v in verdicts}) > LAYERS
    for heading in ("bound", "layer"):
        table.column(heading, "name")
    for heading in ("left", "right"):
        table.column(heading, "extra")
    table.column("tight")
    table.column("status", left=True)
    if deep:
        table.column("claims")
    rows = [(v, "") for v in verdicts]
    if deep:
        rows = [
            (top, f"{sum(v.status == top.status for v in claims)} of {len(claims)}" if len(claims) > 1 else "")
            for _, claims, _, top in _by_bound(verdicts)
        ]
    name = None
    for verdict, told in rows:
        table.row(
            Text("" if verdict.bound == name else verdict.bound),
            verdict.layer or "",
            *(_shown(value, digits) for value, digits in ((verdict.lhs, 3), (verdict.rhs, 3), (verdict.tightness, 2))),
            Text(verdict.status, style=STYLES[verdict.status]),
            *([Text(told, style="dim")] if deep else []),
        )
        name = verdict.bound
    every = (
        [
            Text(
                "One row per bound: its tightest claim, and how many have its verdict; all claims: --page or --json.",
                style="dim",
            )
        ]
        if deep
        else []
    )
    return Group(*head_of_screen({"": verdicts.about}), table, *every, _reasons(verdicts), _key(verdicts))


def _reasons(verdicts: Sequence[Verdict]) -> Text:
    """Return why claims do not apply or are violated, and other notes; each reason once."""
    said: dict[str, dict[str, list[str]]] = {}
    for verdict in verdicts:
        if why := _why(verdict):
            said.setdefault(why, {}).setdefault(verdict.bound, []).append(verdict.layer or "")
    text = Text("\nWhy" if said else "", style="bold")
    for why, bounds in list(said.items())[:REASONS]:
        of = [f"{name} at {summed_up(layers, most=4)}" if any(layers) else name for name, layers in bounds.items()]
        text.append(f"\n{', '.join(of)}: ", style="not bold italic").append(why, style="not bold not italic dim")
    more = len(said) - REASONS
    return text.append(f"\nand {more} reasons more: --page or --json", style="not bold") if more > 0 else text


def _shown(value: float, digits: int) -> str:
    """Return a number in words, or a dash if it is NaN."""
    return f"{value:.{digits}g}" if value == value else "-"


def _by_bound(verdicts: Sequence[Verdict]) -> list[tuple[str, list[Verdict], str, Verdict]]:
    """Return the claims of each bound: its name, the claims, the counts of their verdicts, the most important claim.

    The most important claim is a violated one, else an undecided one, else one that holds; among these the tightest.
    """
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.bound, []).append(verdict)
    rows = []
    for bound, claims in found.items():
        ended = [(status, sum(v.status == status for v in claims)) for status in ("violated", *STYLES)]
        told = ", ".join(f"{count} {status}" for status, count in dict(ended).items() if count)
        order = ("not applicable", "holds", "undecided", "violated")
        top = max(claims, key=lambda v: (order.index(v.status), v.tightness if v.tightness == v.tightness else -1.0))
        rows.append((bound, claims, told, top))
    return rows


def _why(verdict: Verdict) -> str:
    share = f"{verdict.violated_share:.0%} of samples violate it" if verdict.violated_share else ""
    return "; ".join(part for part in (verdict.assumption, share, verdict.note) if part)


def _key(verdicts: Sequence[Verdict]) -> Text:
    """Return the meaning of the words, and the counts."""
    violated = [v for v in verdicts if v.status == "violated"]
    text = Text("\ntight: ", style="bold").append(
        "left side over right side, where they are closest; 1 is equality. not applicable: an assumption of the "
        "theorem fails here, or is neither checked nor declared; the sides are shown anyway.",
        style="not bold",
    )
    counts = ", ".join(f"{sum(v.status == s for v in verdicts)} {s}" for s in STYLES)
    text.append("\nClaims: ", style="bold").append(counts, style="not bold")
    if violated:
        names = ", ".join(dict.fromkeys(v.bound for v in violated))
        text.append(f"\nVIOLATED: {names}: {_cause(violated)}.", style="bold red")
    return text


def _cause(violated: Sequence[Verdict]) -> str:
    """Return the meaning of a violated bound; the user's own declarations come first."""
    declared = list(dict.fromkeys(v.assumption for v in violated if v.assumption))
    ours = "an error in flatlens or in a theorem: please report it"
    return f"either an assumption that you declared is false ({'; '.join(declared)}), or {ours}" if declared else ours


def write_bounds_page(verdicts: BoundsReport, path: Path) -> Path:
    """Write one HTML file that needs no network: the chain, every claim's tightness, the table, all the bounds."""
    from flatlens.report.figures.figure import in_page_colours
    from flatlens.report.figures.measured import chain_figure, tightness_figure  # not above: the screen draws nothing
    from flatlens.report.page import environment, svg_of
    from flatlens.report.prose import cited

    drawn = (chain_figure(verdicts), tightness_figure(verdicts))
    figures = [figure for figure in drawn if figure.data[figure.data.columns[2]].notna().any()]
    names = dict.fromkeys(Column.parse(verdict.bound).measure for verdict in verdicts)
    bounds = [BOUNDS[name] for name in names if name in BOUNDS]
    html = environment().get_template("bounds.html.j2").render(
        about=verdicts.about,
        **head_of_page({"": verdicts.about}),
        figures=[(figure, in_page_colours(svg_of(figure))) for figure in figures],
        groups=_by_bound(verdicts),
        why=_why,
        shown=_shown,
        bounds=bounds,
        papers=cited(one.source for one in bounds),
        cause=_cause([v for v in verdicts if v.status == "violated"]),
        counts={status: sum(v.status == status for v in verdicts) for status in STYLES},
    )  # fmt: skip
    return write_whole(path, html)
