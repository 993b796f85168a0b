"""The report of one network: as a terminal screen, as a page, and as a notebook shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from flatlens.comparing import direction
from flatlens.errors import UnknownName
from flatlens.estimate import Estimate, Report
from flatlens.measures import Card, catalogue
from flatlens.progress import by_key, count_of, listed
from flatlens.report.blocks import CALL, grouped, heights, role
from flatlens.report.cards import FAMILIES, MOVES, card_of, in_short, invariances_of, spelling, with_error
from flatlens.report.screen import Fitted, Profile, as_text, head_of_screen, remark
from flatlens.result import MOST_ROWS
from flatlens.training.settings import RESULTS

LAYERS_ACROSS = 5  #: largest number of layers with a column each
BLOCKS = 4  #: smallest number of blocks with a profile
ANSWERS_DOWN = 32  #: with more rows, parts such as `relative_flatness.max` are not shown
EXPLAINED = 16  #: number of the network's numbers up to which each has a line with its meaning
NOTEBOOK = [
    "measure", "layer", "value", "stderr", "kind", "small means", "invariant under", "meaning", "unit", "note",
    "source", "seconds", "products",
]  # fmt: skip
"""The columns of a notebook's table; those without an entry are left out."""
LINES = 60  #: number of lines that `print(report)` shows at most
TINTS = 6  #: number of tints from the smallest value of a column to the largest
Values: TypeAlias = Mapping[tuple[str, str], Estimate]  #: the values of measures at layers


class AnswerRow(NamedTuple):
    """A network-level value as a row of a table."""

    name: str
    estimate: Estimate
    kept: tuple[bool, ...]  #: whether it is invariant under each of MOVES; empty where that is not known


def rows_by_family(report: Report, cards: Sequence[Card]) -> dict[str, list[AnswerRow]]:
    """Return the network's numbers by family, the risk first; families come in the order asked for."""
    found: dict[str, list[AnswerRow]] = {"risk": []}
    for (name, layer), estimate in report.items():
        if layer is not None:
            continue
        card = card_of(name, cards)
        risk = spelling(name) in RESULTS
        kept = invariances_of(name, card) if card and not risk else ()
        found.setdefault("risk" if risk else card.family if card else "other", []).append(
            AnswerRow(name, estimate, kept)
        )
    return {family: rows for family, rows in found.items() if rows}


def by_layer(report: Report) -> tuple[Values, list[str], list[str]]:
    """Return the values at layers, the layers in the order of execution, and the measures.

    Parameters outside any layer come last; an old report does not know the order.
    """
    values = {(name, layer): estimate for (name, layer), estimate in report.items() if layer is not None}
    known, met = [str(layer) for layer in report.about.get("layers", [])], dict.fromkeys(layer for _, layer in values)
    layers = sorted(met, key=lambda layer: known.index(layer) if layer in known else len(known))
    return values, layers, list(dict.fromkeys(name for name, _ in values))


def layers_and_others(report: Report, met: list[str]) -> str:
    """Return in words how many of the names in a table are layers, and how many are parameters beside them.

    >>> layers_and_others(Report({}, {"layers": ["fc1", "fc2"]}), ["fc1", "fc2", "norm.weight"])
    '2 layers and 1 other parameter'
    """
    known = {str(layer) for layer in report.about.get("layers", [])}
    others = sum(CALL.sub("", name) not in known for name in met) if known else 0
    told = count_of(len(met) - others, "layer")
    return f"{told} and {count_of(others, 'other parameter')}" if others else told


def measure_screen(report: Report, cards: Sequence[Card], layers: str = "") -> RenderableType:
    """Return the screen of `flatlens measure`, with every value of the layers whose names hold `layers`."""
    return Lines(*(part for parts in _parts(report, cards, layers).values() for part in parts))


def printed(report: Report) -> str:
    """Return the screen as text of `LINES` lines at most, without what `frame()` shows better."""
    parts = _parts(report, catalogue())
    left_out: list[str] = []
    for name in ("", "layers", "notes", "key"):
        left_out += [name] if parts.pop(name, []) else []
        more = f"\nNot shown: {listed(left_out)} (report.frame() has every number)"
        shown = [part for several in parts.values() for part in several]
        lines = as_text(*shown, *([Text(more)] if left_out else [])).split("\n")
        if len(lines) <= LINES:
            return "\n".join(lines)
    return "\n".join([*lines[: LINES - 1], "and more: report.frame() has every number"])


def _parts(report: Report, cards: Sequence[Card], layers: str = "") -> dict[str, list[RenderableType]]:
    """Return what a screen shows, by name, from top to bottom; measures without a card have no invariances."""
    whole = report
    if sum(layer is None for _, layer in whole) > ANSWERS_DOWN:  # a screen would not hold the parts
        report = Report({key: e for key, e in whole.items() if key[0] == spelling(key[0])}, whole.about)
    # the network's numbers by family, each with its meaning where they are few
    table = Fitted("The network", names=["measure"])
    table.column("value")
    table.column("95% ±")
    table.column("kind", left=True)
    for _, short, _ in MOVES:
        table.column(short, "extra", left=True)
    families = rows_by_family(report, cards)
    explained = sum(map(len, families.values())) <= EXPLAINED
    for family, rows in families.items():
        table.section(family)
        for name, e, kept in rows:
            badges = [Text("yes", style="green") if yes else Text("no", style="yellow") for yes in kept]
            error, kind = f"{e.margin:.2g}" if e.margin else "", e.kind if e.kind != "undefined" else ""
            table.row(f"  {name}", _value(e), error, kind, *badges)
            if explained and (meaning := in_short(name)):
                table.section(f"    {meaning}")
    # notes, which the answer of few numbers has, and what the columns mean
    notes = by_key((estimate.note, name) for (name, layer), estimate in report.items() if layer is None)
    told = " ".join(whole.answer)
    lines = [f"{', '.join(names)}: {note}" for note, names in notes.items() if note and note not in told]
    key = remark(
        f"\n{', '.join(short for _, short, _ in MOVES)}: ",
        f"is the network-level value invariant under {', '.join(in_words for _, _, in_words in MOVES)}? None of these "
        "changes the function.",
    )
    dotted = "Parts such as .sum and .max: in --json and --save, and shown for measures requested by name."
    return {
        "head": head_of_screen({"": report.about}, whole.answer),
        "network": [table],
        "layers": _layer_tables(report, layers),
        "notes": [remark("\nNotes\n", "\n".join(lines))] if lines else [],
        "key": [key, *([Text(dotted)] if len(report) < len(whole) else [])],
    }


def _value(estimate: Estimate) -> Text:
    if estimate.kind == "undefined" or estimate.value != estimate.value:
        return Text("undefined", style="dim")
    return Text(f"{estimate.value:.4g}")


def _cell(estimate: Estimate | None) -> Text:
    """Return a layer's value with its sign and error, which have no columns of their own there."""
    if estimate is None:
        return Text("")
    value = _value(estimate)
    return value if estimate.value != estimate.value else Text(with_error(estimate, value.plain))


def _layer_tables(report: Report, wanted: str) -> list[RenderableType]:
    """Return the layers' values: all if they fit or are wanted, else ranges and profiles over the blocks."""
    values, layers, names = by_layer(report)
    if wanted:
        matching = [layer for layer in layers if wanted in layer]
        if not matching:
            raise UnknownName.among("layer", wanted, layers)
        names = [name for name in names if any((name, layer) in values for layer in matching)]
        table = Fitted(f"Layers with {wanted!r} in their name", names=["layer"], values=names)
        for block, members in grouped(matching):
            if block:
                table.section(block)
            for layer in members:
                cells = [_cell(values.get((name, layer))) for name in names]
                table.row(f"{'  ' if block else ''}{role(layer, block)}", *cells)
        return [table]
    if not values:
        return []
    if len(layers) <= LAYERS_ACROSS:
        table = Fitted("Layer by layer", names=["measure"], values=layers)
        for name in names:
            table.row(f"  {name}", *(_cell(values.get((name, layer))) for layer in layers))
        return [table]

    # of many layers the range of each measure
    groups = [(block, members) for block, members in grouped(layers) if block]
    size = layers_and_others(report, layers) + (f" in {len(groups)} blocks" if len(groups) >= BLOCKS else "")
    ranges = Fitted(f"Over {size} (every value: --layers NAME, --page, --json or --save)", names=["measure"])
    for heading in ("smallest", "in layer", "largest", "in layer"):
        ranges.column(heading, "name" if heading == "in layer" else "value")
    for name in names:
        found = {layer: values[name, layer] for layer in layers if (name, layer) in values}
        defined = [layer for layer, estimate in found.items() if estimate.value == estimate.value]
        if not defined:
            ranges.row(f"  {name}", Text("undefined", style="dim"))
            continue
        low, high = (pick(defined, key=lambda layer: found[layer].value) for pick in (min, max))
        ranges.row(f"  {name}", _cell(found[low]), low, _cell(found[high]), high)
    if len(groups) < BLOCKS:
        return [ranges]

    # and of many blocks its profile over them
    blocks = f"From {groups[0][0]} to {groups[-1][0]}"
    profiles = Fitted(f"{blocks}: the largest in each block (by logarithm where positive)", names=["measure"])
    profiles.column("", "picture")
    for name in names:
        each = [[values[name, layer].value for layer in members if (name, layer) in values] for _, members in groups]
        largest = [max((v for v in block if v == v), default=float("nan")) for block in each]
        if any(value == value for value in largest):
            profiles.row(f"  {name}", Profile(largest))
    return [ranges, profiles]


def folded(report: Report) -> str:
    """Return the HTML of a report: the answer, the network's numbers and their meaning, each block's below its name."""
    cards, described = catalogue(), []
    for row in report.frame().to_dict("records"):
        card = None if row["layer"] else card_of(row["measure"], cards)
        kept = invariances_of(row["measure"], card) if card else ()
        under = ", ".join(short for (_, short, _), stays in zip(MOVES, kept, strict=False) if stays)
        words = (direction(card), under, card.meaning) if card else ("", "", "")
        described.append(row | dict(zip(("small means", "invariant under", "meaning"), words, strict=True)))
    table = pd.DataFrame(described, columns=NOTEBOOK)

    def html(rows: pd.DataFrame) -> str:
        shown = [name for name in rows if not rows[name].isin(["", 0]).all()]
        return rows[shown].to_html(float_format="{:.6g}".format, border=0, na_rep="")

    answer = [f"<p>{escape(sentence)}</p>" for sentence in report.answer]
    if len(table) <= MOST_ROWS:
        return "\n".join([*answer, html(table)])
    parts = [*answer, html(table[table["layer"] == ""])]
    for block, members in grouped(list(dict.fromkeys(layer for layer in table["layer"] if layer))):
        rows = table[table["layer"].isin(members)]
        layers = f"{len(members)} layers, " if len(members) > 1 else ""
        told = f"{escape(block or members[0])} ({layers}{count_of(len(rows), 'number')})"
        parts.append(f"<details><summary>{told}</summary>{html(rows)}</details>")
    return "\n".join(parts)


def write_measure_page(report: Report, cards: Sequence[Card], path: Path) -> Path:
    """Write one HTML file that needs no network."""
    from flatlens.report.figures.measured import layers_figure  # not above: the screen draws nothing
    from flatlens.report.page import write_page

    values, layers, columns = by_layer(report)
    drawn = layers_figure(report)
    families = rows_by_family(report, cards)
    order = ["risk", *FAMILIES]
    met = {card.name: card for name in report.measures() if (card := card_of(name, cards))}
    return write_page(
        "measure",
        path,
        {"": report.about},
        answer=report.answer,
        figures=[drawn] if drawn.data["row"].nunique() > 1 else [],
        cards=met,
        families={f: families[f] for f in sorted(families, key=lambda f: order.index(f) if f in order else 99)},
        moves=[(short, in_words) for _, short, in_words in MOVES],
        columns=columns,
        groups=page_groups(values, layers, columns),
        total=layers_and_others(report, layers),
    )


def page_groups(values: Values, layers: list[str], columns: list[str]) -> list[dict[str, Any]]:
    """Return the blocks of a page's table with their layers, whose cells are tinted from small to large values.

    A layer outside any block is one with the name "". `largest` has the block's largest value in each column.
    """
    groups = grouped(layers)
    known = {key: e for key, e in values.items() if e.value == e.value}
    rank: dict[str, dict[str, float]] = {}  # of layers, 0 to 1: by values, extreme biases would hide all other layers
    best: dict[str, dict[str, str]] = {}  # by block: the layer with the largest value
    peaks: dict[str, dict[str, float]] = {}
    for name in columns:
        of = {layer: known[name, layer].value for layer in layers if (name, layer) in known}
        rank[name] = {layer: at / max(1, len(of) - 1) for at, layer in enumerate(sorted(of, key=of.__getitem__))}
        there = {block: [layer for layer in members if layer in of] for block, members in groups if block}
        best[name] = {block: max(members, key=of.__getitem__) for block, members in there.items() if members}
        peaks[name] = heights({block: of[layer] for block, layer in best[name].items()})

    found = []
    for block, members in groups:
        rows = [
            {
                "name": layer,
                "label": role(layer, block),
                "cells": [_tinted(values.get((n, layer)), rank[n].get(layer)) for n in columns],
            }
            for layer in members
        ]
        largest = [
            _tinted(known[n, best[n][block]], peaks[n].get(block, 1.0), f"the largest of the block, {best[n][block]}: ")
            if block in best[n]
            else _tinted(None, None)
            for n in columns
        ]
        found.append({"block": block, "rows": rows, "largest": largest})
    return found


def _tinted(estimate: Estimate | None, place: float | None, before: str = "") -> dict[str, Any]:
    """Return a cell: the value, all that is known of it in a tooltip, and its class of colour, -1 without a value."""
    if estimate is None or place is None:
        return {"text": "" if estimate is None else "–", "exact": "" if estimate is None else estimate.note, "tint": -1}
    told = "; ".join(part for part in (estimate.kind, estimate.note) if part)
    exact = f"{before}{with_error(estimate, repr(estimate.value))} ({told})"
    return {"text": with_error(estimate, f"{estimate.value:.3g}"), "exact": exact, "tint": round(place * (TINTS - 1))}
