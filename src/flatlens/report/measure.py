"""A report as one terminal screen: the numbers, how far to trust them, which survive a rescaling of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.errors import UnknownName
from flatlens.estimate import Estimate, Report
from flatlens.measures import Card
from flatlens.progress import count_of
from flatlens.report.blocks import CALL, grouped, role
from flatlens.report.cards import MOVES, card_of, spelling, survives, with_error
from flatlens.report.screen import Fitted, Profile, head_of_screen

LAYERS_ACROSS = 5  #: largest number of layers with a column each
BLOCKS = 4  #: smallest number of blocks with a profile
ANSWERS_DOWN = 32  #: with more rows, parts such as `relative_flatness.max` are not shown
RISK = frozenset({"loss", "accuracy", "test_loss", "test_accuracy", "generalisation_gap"})


def measure_screen(report: Report, cards: Sequence[Card], layers: str = "") -> RenderableType:
    """Return the screen of `flatlens measure`.

    Args:
        report: The measured numbers.
        cards: The catalogue's cards; a measure without one is shown without its invariances.
        layers: Show every value of the layers whose names hold this.

    Returns:
        Something for a rich console: what was measured, the network's answers, the layers' values, a key.
    """
    whole, report = report, _without_parts(report)
    parts: list[RenderableType] = [*head_of_screen({"": report.about})]
    parts.append(_network_table(report, cards))
    parts += _layer_tables(report, layers)
    notes = _notes(report)
    if notes:
        parts.append(notes)
    parts.append(_key(report, cards))
    if len(report) < len(whole):
        parts.append(
            Text("Parts such as .sum and .max are in --json and --save, and shown of measures asked for by name.")
        )
    return Group(*parts)


def _without_parts(report: Report) -> Report:
    """Return the measures' main numbers alone, if a screen would not hold the others."""
    if sum(layer is None for _, layer in report) <= ANSWERS_DOWN:
        return report
    return Report({key: estimate for key, estimate in report.items() if key[0] == spelling(key[0])}, report.about)


def _network_table(report: Report, cards: Sequence[Card]) -> Fitted:
    """Return one row for each measure: the risk first, then families, and their measures in the order asked for."""
    table = Fitted("The network")
    table.column("measure", "name")
    table.column("value")
    table.column("95% ±")
    table.column("kind", left=True)
    for _, short, _ in MOVES:
        table.column(short, "extra", left=True)
    answers = [(name, estimate) for (name, layer), estimate in report.items() if layer is None]
    group = None
    rows = [(_group(name, cards), name, estimate) for name, estimate in answers]
    families = list(dict.fromkeys(["risk", *(heading for heading, _, _ in rows)]))
    for heading, name, estimate in sorted(rows, key=lambda row: families.index(row[0])):
        if heading != group:
            table.section(heading)
            group = heading
        table.row(f"  {name}", _value(estimate), _error(estimate), _kind(estimate), *_badges(name, cards))
    return table


def _group(name: str, cards: Sequence[Card]) -> str:
    if spelling(name) in RISK:
        return "risk"
    card = card_of(name, cards)
    return card.family if card else "other"


def _badges(name: str, cards: Sequence[Card]) -> list[Text]:
    card = card_of(name, cards)
    if card is None or spelling(name) in RISK:
        return [Text("") for _ in MOVES]
    return [Text("yes", style="green") if yes else Text("no", style="yellow") for yes in survives(name, card)]


def _layer_tables(report: Report, wanted: str) -> list[RenderableType]:
    """Return the layers' values: all if they fit or are wanted, else ranges and profiles over the blocks."""
    values = {(name, layer): estimate for (name, layer), estimate in report.items() if layer is not None}
    layers = execution_order(report, list(dict.fromkeys(layer for _, layer in values)))
    names = list(dict.fromkeys(name for name, _ in values))
    if wanted:
        matching = [layer for layer in layers if wanted in layer]
        if not matching:
            raise UnknownName.among("part of a layer's name", wanted, layers)
        return [_wanted_table(values, matching, names, wanted)]
    if not values:
        return []
    if len(layers) <= LAYERS_ACROSS:
        return [_across(values, layers, names)]
    groups = [(block, members) for block, members in grouped(layers) if block]
    ranges = _range_table(report, values, layers, names, len(groups))
    return [ranges, _profile_table(values, groups, names)] if len(groups) >= BLOCKS else [ranges]


def _across(values: Mapping[tuple[str, str], Estimate], layers: list[str], names: list[str]) -> Fitted:
    table = Fitted("Layer by layer")
    table.column("measure", "name")
    for layer in layers:
        table.column(layer)
    for name in names:
        table.row(f"  {name}", *(_cell(values.get((name, layer))) for layer in layers))
    return table


def _wanted_table(
    values: Mapping[tuple[str, str], Estimate], layers: list[str], names: list[str], wanted: str
) -> Fitted:
    """Return a table with a row for each layer, under its block, and a column for each measure."""
    names = [name for name in names if any((name, layer) in values for layer in layers)]
    table = Fitted(f"Layers with {wanted!r} in their name")
    table.column("layer", "name")
    for name in names:
        table.column(name)
    for block, members in grouped(layers):
        if block:
            table.section(block)
        for layer in members:
            table.row(f"{'  ' if block else ''}{role(layer, block)}", *(_cell(values.get((n, layer))) for n in names))
    return table


def _profile_table(
    values: Mapping[tuple[str, str], Estimate], groups: list[tuple[str, list[str]]], names: list[str]
) -> Fitted:
    """Return each measure over the blocks as a row of bars."""
    blocks = f"From {groups[0][0]} to {groups[-1][0]}"
    table = Fitted(f"{blocks}: the largest in each block (by logarithm where positive)")
    table.column("measure", "name")
    table.column("", "picture")
    for name in names:
        found = [[values[name, layer].value for layer in members if (name, layer) in values] for _, members in groups]
        largest = [max((v for v in block if v == v), default=float("nan")) for block in found]
        if any(value == value for value in largest):
            table.row(f"  {name}", Profile(largest))
    return table


def _range_table(
    report: Report, values: Mapping[tuple[str, str], Estimate], layers: list[str], names: list[str], blocks: int
) -> Fitted:
    """Return a deep network's extremes of each measure, and their layers."""
    size = f"{layers_and_others(report, layers)}{f' in {blocks} blocks' if blocks >= BLOCKS else ''}"
    table = Fitted(f"Over {size} (every value: --layers NAME, --page, --json or --save)")
    table.column("measure", "name")
    for heading in ("smallest", "in layer", "largest", "in layer"):
        table.column(heading, "name" if heading == "in layer" else "value")
    for name in names:
        found = {layer: values[name, layer] for layer in layers if (name, layer) in values}
        defined = [layer for layer, estimate in found.items() if estimate.value == estimate.value]
        if not defined:
            table.row(f"  {name}", Text("undefined", style="dim"))
            continue
        low, high = (pick(defined, key=lambda layer: found[layer].value) for pick in (min, max))
        table.row(f"  {name}", _cell(found[low]), low, _cell(found[high]), high)
    return table


def layers_and_others(report: Report, met: list[str]) -> str:
    """Return in words how many of the names in a table are layers, and how many are parameters beside them.

    >>> layers_and_others(Report({}, {"layers": ["fc1", "fc2"]}), ["fc1", "fc2", "norm.weight"])
    '2 layers and 1 other parameter'
    """
    known = {str(layer) for layer in report.about.get("layers", [])}
    others = sum(CALL.sub("", name) not in known for name in met) if known else 0
    told = count_of(len(met) - others, "layer")
    return f"{told} and {count_of(others, 'other parameter')}" if others else told


def execution_order(report: Report, met: list[str]) -> list[str]:
    """Return the layers in the order of execution, if the report knows it; parameters outside any layer come last."""
    known = [str(layer) for layer in report.about.get("layers", [])]
    return sorted(met, key=lambda layer: known.index(layer) if layer in known else len(known))


def _cell(estimate: Estimate | None) -> Text:
    """Return a layer's value with its sign and error, which have no columns of their own there."""
    if estimate is None:
        return Text("")
    value = _value(estimate)
    return value if estimate.value != estimate.value else Text(with_error(estimate, value.plain))


def _value(estimate: Estimate) -> Text:
    if estimate.kind == "undefined" or estimate.value != estimate.value:
        return Text("undefined", style="dim")
    return Text(f"{estimate.value:.4g}")


def _error(estimate: Estimate) -> str:
    return f"{1.96 * estimate.stderr:.2g}" if estimate.stderr else ""


def _kind(estimate: Estimate) -> str:
    return estimate.kind if estimate.kind != "undefined" else ""


def _notes(report: Report) -> Text | None:
    """Return the network's notes; equal ones once."""
    said: dict[str, list[str]] = {}
    for (name, layer), estimate in report.items():
        if layer is None and estimate.note:
            said.setdefault(estimate.note, []).append(name)
    if not said:
        return None
    lines = [f"{', '.join(names)}: {note}" for note, names in said.items()]
    return Text("\nNotes\n", style="bold").append("\n".join(lines), style="not bold")


def _key(report: Report, cards: Sequence[Card]) -> Text:
    """Return the meaning of the last columns, and the measures that any two networks can be compared by."""
    names = dict.fromkeys(name for name, layer in report if layer is None and spelling(name) not in RISK)
    met = {spelling(name): card for name in names if (card := card_of(name, cards))}
    survive = [name for name, card in met.items() if all(survives(name, card)[:2])]  # both rescalings
    key = Text(f"\n{', '.join(short for _, short, _ in MOVES)}: ", style="bold")
    key.append(
        f"does the network's value survive {', '.join(in_words for _, _, in_words in MOVES)}? All of these leave the "
        "network's function as it is.",
        style="not bold",
    )
    if met:
        key.append("\nSurvive any rescaling of the weights: ", style="bold")
        key.append(", ".join(survive) if survive else "none of these", style="not bold")
    return key
