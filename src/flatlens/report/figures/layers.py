"""The map of a network: its layers or blocks, in the order of execution, by measures."""

from __future__ import annotations

import math

import altair as alt
import pandas as pd

from flatlens.estimate import Estimate, Report
from flatlens.report.blocks import CALL, grouped
from flatlens.report.cards import number, spelling, with_error
from flatlens.report.figures.figure import Drawing, Figure, short_labels

_WHOLE = 40  #: with more layers, a row is a block
_FEW = 8  #: with more measures, parts such as `neuron_flatness.max` are not shown
WITH_VALUES = 60  #: largest number of rows with values in their cells
PALE, DARK, NONE = "#faf6ee", "#e39044", "#eef0f3"
_INK = "#1b222d"  #: of the values on tints, which are light on a dark page, too
_COLUMNS = ["row", "layer", "measure", "value", "place", "text", "told"]


def layers_frame(report: Report) -> pd.DataFrame:
    """Return one row for each measure and layer, or block: row, layer, measure, value, place, text, told.

    Of a network with more than `_WHOLE` layers in blocks, `row` is a block and `layer` the one with its largest value.
    `place` is from 0, the column's smallest value, to 1: by logarithm where all are positive, and then 1 only if they
    differ by a factor of two or more. It is NaN where the value is undefined or infinite.
    """
    linear = {str(name) for name in report.about.get("layers", [])}
    values = {(at, name): e for (name, at), e in report.items() if at and (CALL.sub("", at) in linear or not linear)}
    met, names = (list(dict.fromkeys(key[part] for key in values)) for part in (0, 1))
    if len(names) > _FEW:
        names = [name for name in names if name == spelling(name)]
    order = [str(name) for name in report.about.get("layers", [])]
    layers = sorted(met, key=lambda at: order.index(CALL.sub("", at)) if linear else 0)
    rows = {at: [at] for at in layers}
    if len(layers) > _WHOLE:
        rows = {block or members[0]: members for block, members in grouped(layers)}

    found = []
    for name in names:
        column = {row: _largest(values, members, name) for row, members in rows.items()}
        places = _places({row: e.value for row, (_, e) in column.items() if e is not None and math.isfinite(e.value)})
        for row, (at, e) in column.items():
            if e is None:
                continue
            known = e.value == e.value
            text = with_error(e, number(e.value)) if known else "–"
            said = f"{name} of {at}: {text} ({e.kind})" if known else f"{name} of {at}: undefined: {e.note}"
            found.append((row, at, name, e.value, places.get(row, math.nan), text.partition(" ±")[0], said))
    data = pd.DataFrame(found, columns=_COLUMNS)
    return data[data.groupby("measure")["place"].transform("count") > 0].reset_index(drop=True)


def _largest(values: dict[tuple[str, str], Estimate], members: list[str], name: str) -> tuple[str, Estimate | None]:
    """Return the layer with the largest defined value, and its estimate."""
    there = [(at, values[at, name]) for at in members if (at, name) in values]
    known = [(at, e) for at, e in there if e.value == e.value]
    return max(known, key=lambda one: one[1].value) if known else there[0] if there else ("", None)


def _places(values: dict[str, float]) -> dict[str, float]:
    """Return each value's place in its column.

    >>> _places({"a": 1.0, "b": 10.0, "c": 100.0}), _places({"a": -1.0, "b": 3.0}), _places({"a": 2.0, "b": 2.002})
    ({'a': 0.0, 'b': 0.5, 'c': 1.0}, {'a': 0.0, 'b': 1.0}, {'a': 0.0, 'b': 0.0014})
    """
    positive = all(value > 0 for value in values.values())
    on_axis = {row: math.log(value) if positive else value for row, value in values.items()}
    low, high = min(on_axis.values(), default=0.0), max(on_axis.values(), default=0.0)
    length = max(high - low, math.log(2)) if positive else (high - low) or 1.0
    return {row: round((value - low) / length, 4) for row, value in on_axis.items()}


def layers_figure(report: Report) -> Figure:
    """Return a row for each layer, or block of a deep network, and a column for each measure."""
    data = layers_frame(report)
    rows, names = (list(dict.fromkeys(data[field])) for field in ("row", "measure"))
    drawn, narrow = _map(data, rows, names, 62, 26), _map(data, rows, names, 50, 14)
    each = set(rows) == set(data["layer"])
    caption = (
        f"{'Layers' if each else 'Blocks, each with its largest value,'} from input to output. In each column, the "
        "darker the cell, the larger the value, on a log scale where all are positive; where they differ by less than "
        "a factor of two, all cells are pale."
    )
    caption += " Grey (–): undefined." if data["place"].isna().any() else ""
    return Figure(
        "layers-map", "Layers by measures", caption, data, drawn, (drawn,), "wide", colours=False, narrow=narrow
    )


def _map(data: pd.DataFrame, rows: list[str], names: list[str], column: int, letters: int) -> Drawing:
    few = len(rows) <= WITH_VALUES
    above = alt.Axis(
        orient="top", labelAngle=-40, labelLimit=0, labelExpr=short_labels(28), domain=False, ticks=False, grid=False
    )
    beside = alt.Axis(
        labelExpr=short_labels(letters), labelLimit=0, labelOverlap=True, domain=False, ticks=False, grid=False
    )
    base = alt.Chart(data, width=alt.Step(column), height=alt.Step(24 if few else 12)).encode(
        x=alt.X("measure:N", sort=names, title=None, axis=above),
        y=alt.Y("row:N", sort=rows, title=None, axis=beside),
        tooltip=[alt.Tooltip("told:N", title="value")],
        description="told:N",
    )
    tint = alt.Color("place:Q", scale=alt.Scale(domain=[0, 1], range=[PALE, DARK], interpolate="rgb"), legend=None)
    under = base.mark_rect(stroke="white", color=NONE, aria=False)  # Vega leaves out a tinted cell without a number
    cells = base.mark_rect(stroke="white", strokeWidth=1).encode(color=tint)
    words = [base.mark_text(fontSize=11, color=_INK, aria=False).encode(text="text:N")] if few else []
    drawn: Drawing = alt.layer(under, cells, *words)
    return drawn
