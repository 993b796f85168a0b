"""The figures of measured networks: the map of layers, bounds, ranks, measures through training, compression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import altair as alt
import pandas as pd

from flatlens.bounds import Verdict
from flatlens.column import Column
from flatlens.comparing import Comparison, Compression
from flatlens.comparing.compressing import EXPECTED_WITHIN
from flatlens.curvature.optimiser_geometry import has_edge
from flatlens.estimate import Estimate, Report
from flatlens.report.blocks import CALL, grouped
from flatlens.report.cards import SIGNS, number, spelling, with_error
from flatlens.report.figures.figure import (
    FALLS,
    RISES,
    Drawing,
    Figure,
    Width,
    in_panels,
    known,
    log_ticks,
    one_picture,
    short_labels,
    value_axis,
)

LINKS = {
    "A": "MLS, mean of ‖∂f/∂x‖₂",
    "B": "‖W‖₂ mean of ‖∂f/∂W‖ / ‖x‖",
    "C": "B's means taken apart (Cauchy-Schwarz)",
    "D": "C with all parameters: sharpness S",
}
STATUS = ("holds", "undecided", "not applicable", "violated")
_SHAPES = ("circle", "diamond", "cross", "triangle-up")
_COLOURS = ("#1d7a4f", "#7e03a8", "#9aa3ae", "#c0392b")
FLOOR, CEILING = 1e-6, 1e3  #: the tightness at which a smaller and a larger one is drawn


_ARROWS = [{"test": f"datum.beyond == '{side}'", "value": f"triangle-{side}"} for side in ("left", "right")]
"""The marks of claims that lie outside the axis."""


def chain_frame(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Return A, B, C, D: each value, and its share of the next."""
    rows = {column.part: v for v in verdicts if (column := Column.parse(v.bound)).measure == "mls_chain"}
    if not rows:
        return pd.DataFrame(columns=["letter", "meaning", "value", "share_of_next", "status"])
    values = {"A": rows["A_B"].lhs, "B": rows["A_B"].rhs, "C": rows["B_C"].rhs, "D": rows["C_D"].rhs}
    after = {"A": rows["A_B"], "B": rows["B_C"], "C": rows["C_D"]}
    return pd.DataFrame([
        {
            "letter": letter,
            "meaning": LINKS[letter],
            "value": value,
            "share_of_next": after[letter].tightness if letter in after else math.nan,
            "status": after[letter].status if letter in after else "",
        }
        for letter, value in values.items()
    ])  # fmt: skip


def chain_figure(verdicts: Sequence[Verdict]) -> Figure:
    """Return four bars, each no longer than the next."""
    data = chain_frame(verdicts)
    data["label"] = data["letter"] + "  " + data["meaning"]
    whole, narrow = _chain(data, 640, 60), _chain(data, 120, 24)
    caption = (
        "From the sensitivity to the input to the sharpness, a step at a time: each bar is at most as long as the "
        "next, where the step's assumptions hold. A large increase marks the loosest step."
    )
    return one_picture("chain", "The chain A ≤ B ≤ C ≤ D", caption, data, whole, narrow)


def _chain(data: pd.DataFrame, width: int, letters: int) -> Drawing:
    beside = alt.Axis(labelLimit=0, labelExpr=short_labels(letters))
    bars = alt.Chart(data, width=width, height=150).mark_bar(height=18, color="#7e03a8").encode(
        y=alt.Y("label:N", sort=None, title=None, axis=beside),
        x=alt.X("value:Q", title="output / input", axis=alt.Axis(tickCount=width // 60)),
        tooltip=["letter:N", "meaning:N", "value:Q", "share_of_next:Q", "status:N"],
    )  # fmt: skip
    numbers = alt.Chart(data).mark_text(align="left", dx=5).encode(
        y=alt.Y("label:N", sort=None), x="value:Q", text=alt.Text("value:Q", format=".4~g")
    )  # fmt: skip
    drawn: Drawing = bars + numbers
    return drawn


def tightness_figure(verdicts: Sequence[Verdict]) -> Figure:
    """Return the left side over the right side of every claim, on a logarithmic axis; beyond 1 a claim is violated."""
    data = pd.DataFrame([
        {
            "bound": v.bound,
            "layer": v.layer or "network",
            "tightness": v.tightness,
            "drawn": min(max(v.tightness, FLOOR), CEILING) if v.tightness == v.tightness else math.nan,
            "beyond": "left" if v.tightness < FLOOR else "right" if v.tightness > CEILING else "",
            "status": v.status,
            "assumption": v.assumption,
        }
        for v in verdicts
    ])  # fmt: skip
    whole, narrow = _tightness(data, 760, 60, 4), _tightness(data, 180, 22, 2)
    caption = (
        "Each mark is a claim about the network or one of its layers, at the sample where it is tightest. At 1 the "
        "sides are equal; far to the left a claim holds and says little. A grey cross: the theorem does not apply to "
        "this network, so that a mark beyond 1 does not contradict it."
    )
    for side, end in {"left": f"below {FLOOR:g}", "right": f"above {CEILING:g}"}.items():
        if side in set(data["beyond"]):
            caption += f" A triangle that points to the {side}: {end}, and drawn there."
    return one_picture("tightness", "How tight every bound is", caption, data, whole, narrow)


def _tightness(data: pd.DataFrame, width: int, letters: int, columns: int) -> Drawing:
    data = data[data["drawn"].notna()]  # a bound without a mark would leave its row empty
    seen = data["drawn"]
    low, high = (float(seen.min()) / 1.5, max(2.0, float(seen.max()) * 1.5)) if len(seen) else (0.1, 2.0)
    met = [at for at, status in enumerate(STATUS) if status in set(data["status"])]
    statuses, shapes, colours = ([of[at] for at in met] for of in (STATUS, _SHAPES, _COLOURS))
    axis = alt.Axis(values=log_ticks(low, high) or [1.0], labelOverlap=True, labelSeparation=12, format="~g")
    marks = alt.Chart(data, width=width, height=alt.Step(17)).mark_point(size=60, filled=True, opacity=0.85).encode(
        y=alt.Y("bound:N", sort=None, title=None, axis=alt.Axis(labelLimit=0, labelExpr=short_labels(letters))),
        x=alt.X("drawn:Q", title="left side / right side", axis=axis,
                scale=alt.Scale(type="log", domain=[low, high], nice=False)),
        shape=alt.Shape("status:N", scale=alt.Scale(domain=statuses, range=shapes),
                        legend=alt.Legend(orient="top", title=None, columns=columns), condition=_ARROWS),
        color=alt.Color("status:N", scale=alt.Scale(domain=statuses, range=colours)),
        tooltip=["bound:N", "layer:N", "tightness:Q", "status:N", "assumption:N"],
    )  # fmt: skip
    line = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 3]).encode(x="one:Q")
    drawn: Drawing = line + marks
    return drawn


SMALL, MIDDLE, LARGE, NEUTRAL = "#8fcfae", "#f7f5ef", "#eeb07e", "#eef0f3"
INK = "#1b222d"  #: of the words on tints, which are light on a dark page, too: not the ink of the page
DRAWN_MARKS = {
    "~": "tied, or its 95% interval overlaps another's.",
    "*": "the measure changes when the weights are rescaled without changing the function, so its ranks also depend on "
    "the scales of the weights.",
    "≥, ≤": "a bound, ranked by its value.",
}
"""The marks in cells and beside rows; a caption explains those that are drawn."""
WITH_VALUES, WITH_RANKS = 8, 30  #: largest numbers of networks with room in a cell for the value, and for the rank


def ranks_frame(comparison: Comparison) -> pd.DataFrame:
    """Return `Comparison.frame` with `place` from 0 (smallest) to 1, and the texts of cells and rows."""
    data = comparison.frame()
    last = data.groupby("measure")["rank"].transform("count") - 1
    data["place"] = (data["rank"] - 1) / last.where(last > 0)
    data["pointing"] = data["small_means"] != ""
    signs = [SIGNS.get(kind, "") for kind in data["kind"]]
    values = [f"{sign}{value:.3g}" if value == value else "–" for sign, value in zip(signs, data["value"], strict=True)]
    shared = ["~" if others else "" for others in data["undecided_with"]]
    ranks = ["" if rank != rank else f"{rank:g}" for rank in data["rank"]]
    data["value_text"] = [f"{text}{mark}" for text, mark in zip(values, shared, strict=True)]
    data["rank_text"] = [f"{text}{mark}" if text else "" for text, mark in zip(ranks, shared, strict=True)]
    data["stable"] = [comparison.is_invariant(name) for name in data["measure"]]
    data["row"] = data["measure"].where(data["stable"], data["measure"] + " *")
    return data


def ranks_figure(comparison: Comparison) -> Figure:
    """Return a row for each measure and a column for each network: green if its value is among the smallest."""
    data = ranks_frame(comparison)
    count = len(comparison.models)
    step = 86 if count <= WITH_VALUES else 36 if count <= WITH_RANKS else 16
    first = data.drop_duplicates("measure").sort_values(["pointing", "stable"], ascending=False, kind="stable")
    rows = first["row"].to_list()
    above = alt.Axis(orient="top", labelAngle=-40 if count > 3 else 0, labelLimit=0, domain=False, ticks=False)
    x = alt.X("model:N", sort=None, title=None, axis=above)
    y = alt.Y("row:N", sort=rows, title=None, axis=alt.Axis(labelLimit=300, domain=False, ticks=False))
    base = alt.Chart(data, width=alt.Step(step), height=alt.Step(24)).encode(x=x, y=y)
    tints = alt.Scale(domain=[0, 0.5, 1], range=[SMALL, MIDDLE, LARGE], interpolate="rgb")
    tint = alt.Color("place:Q", scale=tints, legend=None)
    cells = base.mark_rect(stroke="white", strokeWidth=2).encode(
        color=alt.condition("datum.pointing && isValid(datum.place)", tint, alt.value(NEUTRAL)),
        tooltip=["measure:N", "model:N", "value:Q", "stderr:Q", "rank:Q", "undecided_with:N", "note:N"],
    )
    text = "value_text" if count <= WITH_VALUES else "rank_text"
    words = [base.mark_text(fontSize=11, color=INK).encode(text=f"{text}:N")] if count <= WITH_RANKS else []
    drawn = alt.layer(cells, *words)
    written = " ".join([*rows, *(data[text] if words else [])])
    caption = (
        f"{'Values; the colour is the rank' if count <= WITH_VALUES else 'Ranks'}: green is the smallest, that is the "
        "flattest or the most compressed, orange the largest. Grey rows are measures without a known direction."
    )
    if comparison.not_ranked:
        caption += f" White: not ranked ({', '.join(comparison.not_ranked)})."
    caption += "".join(
        f" {mark}: {meaning}" for mark, meaning in DRAWN_MARKS.items() if set(mark) & set(written) - set(", ")
    )
    return one_picture("ranks", "Ranks by every measure", caption, data, drawn)


def taus_figure(comparison: Comparison) -> Figure:
    """Return how far any two measures agree in their order of the networks."""
    taus = comparison.agreement().taus
    data = taus.rename_axis(index="a").reset_index().melt("a", var_name="b", value_name="tau")
    names = [str(name) for name in taus]
    base = alt.Chart(data, width=alt.Step(30), height=alt.Step(22)).encode(
        x=alt.X("b:N", sort=names, title=None, axis=alt.Axis(orient="top", labelAngle=-60, labelLimit=260)),
        y=alt.Y("a:N", sort=names, title=None, axis=alt.Axis(labelLimit=300)),
    )
    under = base.mark_rect(stroke="white", color=NEUTRAL)  # Vega leaves out a tinted cell without a number
    tints = alt.Scale(domain=[-1, 0, 1], range=[FALLS, "#ffffff", RISES], interpolate="rgb")
    tint = alt.Color("tau:Q", scale=tints, legend=None)
    cells = base.mark_rect(stroke="white").encode(color=tint, tooltip=["a:N", "b:N", "tau:Q"])
    number = alt.condition("isValid(datum.tau)", alt.Text("tau:Q", format=".1f"), alt.value(""))
    drawn = under + cells + base.mark_text(fontSize=10, color=INK).encode(text=number)
    caption = (
        "Kendall's tau-b: 1 (orange) where two measures order the networks alike, -1 (blue) where they reverse each "
        "other; ties and overlapping intervals count for neither. Empty where a measure ties all networks."
    )
    return one_picture("taus", "Pairwise agreement", caption, data, drawn)


Z = 1.96
_EDGE = (
    "A dashed line is the edge of stability: with a larger sharpness, the steps at this learning rate grow on a "
    "quadratic."
)
_COLUMNS = ["run", "step", "measure", "value", "low", "high", "edge"]


def tracked_frame(histories: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return network-level numbers of each run's history (`Tracker.history`), with their 95% intervals.

    Only rows that `has_edge` have a value of `edge`. A step where a measure is undefined has NaN, and breaks its line.
    """
    parts = [pd.DataFrame(columns=_COLUMNS)]
    for run, history in histories.items():
        rows = history[history["layer"] == ""]
        rows = rows[rows["value"].notna().groupby(rows["measure"]).transform("any")]
        reach = Z * rows["stderr"].fillna(0)  # a bound has none
        edge = rows["edge"].where(rows["measure"].map(has_edge))
        parts.append(rows.assign(run=run, low=rows["value"] - reach, high=rows["value"] + reach, edge=edge)[_COLUMNS])
    return pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)


def tracked_figure(histories: Mapping[str, pd.DataFrame]) -> Figure:
    """Return every tracked measure against the step; a dashed line is the edge at which that run's steps grow.

    Parts of a number, such as `gradient_noise_scale.covariance`, have no panel beside its own.
    """
    data = tracked_frame(histories)
    names = list(dict.fromkeys(data["measure"]))
    names = [name for name in names if spelling(name) == name or spelling(name) not in names]
    runs = list(histories)

    def panel(measure: str, width: Width) -> Drawing:
        rows = data[data["measure"] == measure]
        with_edge = known(rows["edge"])
        drawn = pd.concat([rows["value"], rows["edge"]]).dropna()
        peak, edge = rows["value"].abs().max(), rows["edge"].median()
        near = bool(max(peak, edge) <= _FAR * min(peak, edge)) if with_edge else False
        # near its edge a sharpness is compared with it by eye; far from it, a linear axis would flatten one of the two
        beside_edge = has_edge(measure) and (near or not with_edge)
        logarithmic = bool((drawn > 0).all() and (rows["low"].dropna() > 0).all()) and not beside_edge
        y = value_axis("value:Q", drawn, logarithmic, 6, zero=True, **({"padding": 8} if logarithmic else {}))
        if not logarithmic and with_edge and not near:  # a negative sharpness far from the edge
            y = alt.Y("value:Q", scale=alt.Scale(type="symlog", constant=peak or 1.0), axis=alt.Axis(title=None))
        legend = alt.Legend(title=None, orient="top") if len(runs) > 1 else None
        colour = alt.Color("run:O", sort=runs, scale=alt.Scale(domain=runs), legend=legend)
        x = alt.X("step:Q", title="step", axis=alt.Axis(tickCount=4))
        tooltip = ["run:N", "step:Q", alt.Tooltip("value:Q", format=".4g"), alt.Tooltip("edge:Q", format=".4g")]
        points = alt.OverlayMarkDef(size=18) if len(rows) <= _WITH_POINTS * len(runs) else False
        line = alt.Chart(rows).mark_line(strokeWidth=1.6, invalid="break-paths-show-domains", point=points)
        layers = [line.encode(x=x, y=y, color=colour, tooltip=tooltip)]
        if _banded(rows):
            layers.insert(0, alt.Chart(rows).mark_area(opacity=0.2).encode(x=x, y="low:Q", y2="high:Q", color=colour))
        if with_edge:
            dashes = alt.Chart(rows).mark_line(strokeDash=[5, 4], strokeWidth=1.2).encode(x=x)
            if len(rows) == 1:  # a line needs two points
                dashes = alt.Chart(rows).mark_rule(strokeDash=[5, 4], strokeWidth=1.2)
            layers.append(dashes.encode(y="edge:Q", color=colour))
        told = ["dashed: edge of stability"] * with_edge + ["log scale"] * logarithmic
        # options below the name: a panel has no room for both in a line
        column = Column.parse(measure)
        name, options = str(replace(column, measure=column.name)), column.measure.removeprefix(column.name)[1:-1]
        below = list(filter(None, [options, ", ".join(told)]))
        title = alt.TitleParams(text=name, subtitle=below[0] if len(below) == 1 else below) if below else name
        return alt.layer(*layers).properties(width=width, height=145, title=title)

    whole, panels = in_panels(panel, names, "nothing was measured", columns=2, width=360, color="shared")
    said = ["One line a run."] if len(histories) > 1 else []
    said += ["Bands are 95% intervals."] if _banded(data) else []
    caption = " ".join([*said, _EDGE] if known(data["edge"]) else said)
    return Figure("tracked", "Through training", caption, data, whole, panels, "grid", colours=False)


def _banded(data: pd.DataFrame) -> bool:
    return bool((data["high"] > data["low"]).any())


_WITH_POINTS = 50  #: measurements of a run up to which each is a point
_FAR = 5  #: a sharpness and its edge that differ by a larger factor share a logarithmic axis


_WHOLE = 40  #: with more layers, a row is a block
_FEW = 8  #: with more measures, parts such as `neuron_flatness.max` are not shown
MAP_VALUES = 60  #: largest number of rows with values in their cells
PALE, DARK, NONE = "#faf6ee", "#e39044", "#eef0f3"
_MAP_COLUMNS = ["row", "layer", "measure", "value", "place", "text", "told"]


def layers_frame(report: Report) -> pd.DataFrame:
    """Return one row for each measure and layer; of many layers, for each block, with its layer of the largest value.

    `place` is from 0, the column's smallest value, to 1, as in `_places`; NaN where the value is not finite.
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
        # the layer with the largest defined value of each row
        column: dict[str, tuple[str, Estimate]] = {}
        for row, members in rows.items():
            if there := [(at, values[at, name]) for at in members if (at, name) in values]:
                defined = [(at, e) for at, e in there if e.value == e.value]
                column[row] = max(defined, key=lambda one: one[1].value, default=there[0])
        places = _places({row: e.value for row, (_, e) in column.items() if math.isfinite(e.value)})
        for row, (at, e) in column.items():
            known = e.value == e.value
            text = with_error(e, number(e.value)) if known else "–"
            said = f"{name} of {at}: {text} ({e.kind})" if known else f"{name} of {at}: undefined: {e.note}"
            found.append((row, at, name, e.value, places.get(row, math.nan), text.partition(" ±")[0], said))
    data = pd.DataFrame(found, columns=_MAP_COLUMNS)
    return data[data.groupby("measure")["place"].transform("count") > 0].reset_index(drop=True)


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
    return one_picture("layers-map", "Layers by measures", caption, data, drawn, narrow)


def _map(data: pd.DataFrame, rows: list[str], names: list[str], column: int, letters: int) -> Drawing:
    few = len(rows) <= MAP_VALUES
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
    words = [base.mark_text(fontSize=11, color=INK, aria=False).encode(text="text:N")] if few else []
    drawn: Drawing = alt.layer(under, cells, *words)
    return drawn


RISE_COLOURS = ("#1d7a4f", "#c0392b")


def rises_figures(found: Compression) -> list[Figure]:
    """Return a mark for each layer and scheme whose forecast and rise are positive, on logarithmic axes, if any has."""
    data = found.frame()[["layer", "scheme", "forecast", "rise", "valid"]]
    data["forecast holds"] = data["valid"].map({True: "expected", False: "flagged"})
    drawn = data[(data["layer"] != "") & (data["forecast"] > 0) & (data["rise"] > 0)]
    if drawn.empty:
        return []
    whole, narrow = _rises(drawn, 520, 300, 3), _rises(drawn, 230, 230, 1)
    left = int((data["layer"] != "").sum()) - len(drawn)
    caption = (
        f"Each mark is a layer under a scheme. On the line forecast and measured rise are equal; between the dashed "
        f"lines they differ by less than {EXPECTED_WITHIN:g} times. A red mark is flagged: higher orders exceed a "
        "quarter of the forecast."
    )
    caption += f" Without a mark: {left} with a forecast or a rise of 0 or below." if left else ""
    return [one_picture("rises", "Forecast and measured rise of the loss", caption, data, whole, narrow)]


def _rises(data: pd.DataFrame, width: int, height: int, columns: int) -> Drawing:
    numbers = pd.concat([data["forecast"], data["rise"]])
    low, high = float(numbers.min()) / 1.5, float(numbers.max()) * 1.5
    scale, ticks = alt.Scale(type="log", domain=[low, high], nice=False), log_ticks(low, high)
    axis = alt.Axis(values=ticks, format="~g") if ticks else alt.Axis(tickCount=4)
    places = alt.X("forecast:Q", scale=scale, axis=axis), alt.Y("rise:Q", title="measured rise", scale=scale, axis=axis)
    marks = alt.Chart(data, width=width, height=height).mark_point(size=60, filled=True, opacity=0.8).encode(
        x=places[0], y=places[1],
        shape=alt.Shape("scheme:N", legend=alt.Legend(orient="top", title=None, columns=columns, columnPadding=20)),
        color=alt.Color("forecast holds:N", scale=alt.Scale(domain=["expected", "flagged"], range=RISE_COLOURS),
                        legend=alt.Legend(orient="top", columnPadding=20)),
        tooltip=["layer:N", "scheme:N", "forecast:Q", "rise:Q", "forecast holds:N"],
    )  # fmt: skip
    ends = [(factor, end) for factor in (1 / EXPECTED_WITHIN, 1.0, EXPECTED_WITHIN) for end in (low, high)]
    lines = pd.DataFrame([{"factor": factor, "forecast": end, "rise": end * factor} for factor, end in ends])
    base = alt.Chart(lines).mark_line(color="#8a93a0", strokeWidth=1, clip=True)
    line = base.encode(
        x=places[0], y=places[1], detail="factor:N",
        strokeDash=alt.StrokeDashValue([4, 3], condition={"test": "datum.factor == 1", "value": [1, 0]}),
    )  # fmt: skip
    drawn: Drawing = line + marks
    return drawn
