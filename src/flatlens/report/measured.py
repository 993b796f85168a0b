"""The page of one measured network: every number, profiles over the depth, and the layers by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flatlens.estimate import Estimate, Report
from flatlens.files import write_whole
from flatlens.measures import Card
from flatlens.report.blocks import grouped, heights, role
from flatlens.report.cards import FAMILIES, MOVES, card_of, spelling, survives, with_error
from flatlens.report.figures.figure import in_page_colours
from flatlens.report.figures.measured import deep_measures, depth_figure
from flatlens.report.measure import RISK, execution_order, layers_and_others
from flatlens.report.page import environment, svg_of
from flatlens.report.prose import cited
from flatlens.report.screen import head_of_page

TINTS = 6
"""Number of tints from the smallest value of a column to the largest."""


@dataclass(frozen=True)
class MeasuredCell:
    """A value in the table of layers."""

    text: str  #: the value with its sign and error; "–" if undefined
    exact: str  #: tooltip: all digits, the kind and the note; the reason if undefined
    tint: int  #: colour class, 0 to TINTS - 1; -1 if there is no value


@dataclass(frozen=True)
class _Row:
    """A row of the table: a layer and its cells."""

    name: str
    label: str
    cells: list[MeasuredCell]


@dataclass(frozen=True)
class Group:
    """A block, or a layer outside any."""

    block: str
    rows: list[_Row]
    largest: list[MeasuredCell]  #: the block's largest value in each column


Values: TypeAlias = Mapping[tuple[str, str], Estimate]


def write_measure_page(report: Report, cards: Sequence[Card], path: Path) -> Path:
    """Write one HTML file that needs no network."""
    values = {(name, layer): estimate for (name, layer), estimate in report.items() if layer is not None}
    layers = execution_order(report, list(dict.fromkeys(layer for _, layer in values)))
    columns = list(dict.fromkeys(name for name, _ in values))
    drawn = depth_figure(report) if len(layers) > 1 else None
    met = list({card.name: card for name in report.measures() if (card := card_of(name, cards))}.values())
    html = environment().get_template("measure.html.j2").render(
        about=report.about,
        **head_of_page({"": report.about}),
        families=_families(report, cards),
        moves=[(short, in_words) for _, short, in_words in MOVES],
        figures=[(drawn, in_page_colours(svg_of(drawn)))] if drawn is not None and deep_measures(drawn.data) else [],
        columns=columns,
        groups=_groups(values, layers, columns),
        total=layers_and_others(report, layers),
        measures=met,
        papers=cited(card.source for card in met),
    )  # fmt: skip
    return write_whole(path, html)


def _families(report: Report, cards: Sequence[Card]) -> dict[str, list[tuple[str, Estimate, tuple[bool, ...] | None]]]:
    """Return the network's answers by family, the risk first: name, estimate, the moves it survives."""
    found: dict[str, list[tuple[str, Estimate, tuple[bool, ...] | None]]] = {"risk": []}
    for (name, layer), estimate in report.items():
        if layer is None:
            card = card_of(name, cards)
            risk = spelling(name) in RISK
            family = "risk" if risk else card.family if card else "other"
            found.setdefault(family, []).append((name, estimate, survives(name, card) if card and not risk else None))
    order = ["risk", *FAMILIES]
    return {family: found[family] for family in sorted(found, key=lambda f: order.index(f) if f in order else 99)}


def _groups(values: Values, layers: list[str], columns: list[str]) -> list[Group]:
    """Return blocks with their layers; "" stands for a layer outside blocks."""
    groups = grouped(layers)
    known = {key: e for key, e in values.items() if e.value == e.value}
    places = {name: _places([layer for layer in layers if (name, layer) in known], name, known) for name in columns}
    best: dict[str, dict[str, str]] = {name: {} for name in columns}  # by block: the layer with the largest value
    for name in columns:
        for block, members in groups:
            there = [layer for layer in members if (name, layer) in known]
            if block and there:
                best[name][block] = max(there, key=lambda layer: known[name, layer].value)
    peaks = {name: heights({block: known[name, at].value for block, at in best[name].items()}) for name in columns}
    found = []
    for block, members in groups:
        rows = [
            _Row(layer, role(layer, block), [_cell(values.get((n, layer)), places[n].get(layer)) for n in columns])
            for layer in members
        ]
        largest = [
            _cell(known[n, best[n][block]], peaks[n].get(block, 1.0), f"the largest of the block, {best[n][block]}: ")
            if block in best[n]
            else MeasuredCell("", "", -1)
            for n in columns
        ]
        found.append(Group(block, rows, largest))
    return found


def _places(layers: list[str], name: str, known: Values) -> dict[str, float]:
    """Return each layer's rank, between 0 and 1: on a scale of values, extreme biases would hide all other layers."""
    order = sorted(layers, key=lambda layer: known[name, layer].value)
    return {layer: at / max(1, len(order) - 1) for at, layer in enumerate(order)}


def _cell(estimate: Estimate | None, place: float | None, before: str = "") -> MeasuredCell:
    if estimate is None:
        return MeasuredCell("", "", -1)
    if place is None:
        return MeasuredCell("–", estimate.note, -1)
    told = "; ".join(part for part in (estimate.kind, estimate.note) if part)
    exact = f"{before}{with_error(estimate, repr(estimate.value))} ({told})"
    return MeasuredCell(with_error(estimate, f"{estimate.value:.3g}"), exact, round(place * (TINTS - 1)))
