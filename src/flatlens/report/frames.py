"""The data of every figure, prepared before anything is drawn: tidy frames that can be saved and tested.

The column `included` says whether a network counts in the correlations; other networks are drawn as hollow marks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flatlens.experiments.overrides import IDENTITY, last_field
from flatlens.experiments.quantities import GAP, in_words
from flatlens.training.settings import RESULTS

if TYPE_CHECKING:
    from flatlens.experiments import Quantity, StudyResult

#: Columns with a network's settings or results, which do not measure flatness or compression.
NOT_MEASURES = frozenset({"lr", "batch_size", "seed", "steps", *RESULTS})
POINTS_PER_CURVE = 120  # a curve as wide as a phone shows no more
BINS = 9
_EQUAL = 1e-10  #: values that differ by less than this share of their size are drawn as equal
_SMALLEST, _LARGEST = 1e-290, 1e300  #: ends of the numbers that an axis shows: a browser's own arithmetic ends there
MOST_LEVELS = 12  # more colours or shapes cannot be distinguished
NOT_KNOWN = "not known"  #: the level of networks whose setting is missing


def shown_settings(result: StudyResult) -> dict[str, str]:
    """Return the columns that colours and shapes show: learning rate and batch size if they vary, or other settings."""
    networks = result.networks
    others = [
        name for name in result.varied
        if name in networks and name not in IDENTITY and last_field(name) != "seed"
        and networks[name].nunique() <= MOST_LEVELS
    ]  # fmt: skip
    shown = {}
    for sign, usual in (("colour", "lr"), ("shape", "batch_size")):
        shown[sign] = others.pop(0) if networks[usual].nunique() < 2 and others else usual
    return shown


def network_columns(result: StudyResult) -> dict[str, str]:
    """Return the columns that identify a network in a frame, and those of the table that they are made of."""
    return {name: name for name in IDENTITY} | {plain_field(name): name for name in shown_settings(result).values()}


def plain_field(column: str) -> str:
    """Return the field of a frame that holds a setting: a dot or bracket in its name would be read as a path.

    >>> plain_field("lr"), plain_field("data.seed")
    ('lr', 'setting_data_seed')
    """
    return column if column in IDENTITY else f"setting_{re.sub(r'[^0-9A-Za-z]', '_', column)}"


def with_not_known(setting: pd.Series[Any]) -> pd.Series[Any]:
    """Return the values of a setting with NOT_KNOWN in place of missing ones, which made floats of whole numbers.

    >>> with_not_known(pd.Series([3, None, 0.5])).tolist(), with_not_known(pd.Series([1.0, 2.0])).tolist()
    ([3, 'not known', 0.5], [1.0, 2.0])
    """
    if not setting.isna().any():
        return setting
    told = setting.astype(object).where(setting.notna(), NOT_KNOWN)
    return told.map(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)


def _with_settings(frame: pd.DataFrame, result: StudyResult) -> pd.DataFrame:
    """Return a frame of networks with the shown settings that it lacks."""
    more = {field: name for field, name in network_columns(result).items() if field not in frame}
    if not more:
        return frame
    beside = result.networks[["key", *more.values()]].set_axis(["key", *more], axis=1)
    return frame.merge(beside, on="key", how="left")


def measures_of(result: StudyResult) -> list[Quantity]:
    """Return the studied quantities that measure flatness or compression."""
    return [q for q in result.quantities if q.role == "measure" and q.column not in NOT_MEASURES]


def gap_of(result: StudyResult) -> Quantity | None:
    """Return the quantity that all others are compared with, if the study has it."""
    return next((q for q in result.quantities if q.column == GAP.column), None)


def axis_title(quantity: Quantity) -> str:
    """Return the displayed name, with the transform.

    >>> from flatlens.experiments import Quantity
    >>> axis_title(Quantity("network volume", "network_volume", "log"))
    'log network volume'
    """
    if quantity.transform == "identity" or quantity.transform in quantity.name:
        return quantity.name
    return f"{quantity.transform} {quantity.name}"


def value_frame(result: StudyResult) -> pd.DataFrame:
    """Return one row for each network: its identity, `included`, its outcome, then each quantity."""
    frame = _with_settings(result.values.merge(result.networks[["key", "outcome"]], on="key", how="left"), result)
    names = [q.name for q in result.quantities]
    values = frame.reindex(columns=names).apply(_finite)
    who = frame[[*network_columns(result), "outcome"]].assign(included=frame["included"].astype(bool))
    return pd.concat([who, values], axis=1).reset_index(drop=True)


def relation_frame(result: StudyResult) -> pd.DataFrame:
    """Return the relations with every pair in both orders, so that (x, y) and (y, x) can be looked up."""
    there = result.relations
    back = there.rename(columns={"x": "y", "y": "x"})
    both = pd.concat([there, back], ignore_index=True)
    return both[both["x"] != both["y"]].drop_duplicates(["x", "y"]).reset_index(drop=True)


def gap_relations(result: StudyResult) -> pd.DataFrame:
    """Return each quantity's correlation with the gap, strongest first; `alike` names the settings that are held equal.

    A network's own losses are left out: at interpolation the test loss is the gap.
    """
    columns = ["quantity", "coefficient", "value", "low", "high", "n", "alike"]
    gap = gap_of(result)
    if gap is None:
        return pd.DataFrame(columns=columns)
    shown = [q.name for q in result.quantities if q.role == "setting" or q.column not in NOT_MEASURES]
    pairs = relation_frame(result)
    pairs = pairs[(pairs["y"] == gap.name) & pairs["x"].isin(shown)]
    pairs = pairs.sort_values(["pearson", "x"], ascending=[False, True])
    parts = [_coefficient(pairs, "Pearson r", "pearson"), _coefficient(pairs, "Kendall τ", "kendall")]
    if len(result.within):
        within = result.within[(result.within["x"] == gap.name) | (result.within["y"] == gap.name)]
        within = within.assign(x=within["x"].where(within["x"] != gap.name, within["y"]))
        within = within[within["x"].isin(shown)]
        for group, rows in within.groupby("group", sort=True):
            parts.append(_coefficient(rows, "Pearson r", "pearson", alike=spoken(str(group))))
    frame = pd.concat(parts, ignore_index=True)
    order = {name: i for i, name in enumerate(pairs["x"])}
    frame = frame.dropna(subset=["value"]).sort_values("quantity", key=lambda q: q.map(order), kind="stable")
    titles = {q.name: axis_title(q) for q in result.quantities}
    return frame.assign(quantity=frame["quantity"].map(titles)).reset_index(drop=True)[columns]


def spoken(setting: str) -> str:
    """Return the column names of settings in words.

    >>> spoken("lr, batch_size")
    'learning rate and batch size'
    """
    return " and ".join(in_words(last_field(part)) for part in setting.split(", "))


def _coefficient(pairs: pd.DataFrame, label: str, name: str, alike: str = "") -> pd.DataFrame:
    part = pairs[["x", name, f"{name}_low", f"{name}_high", "n"]].set_axis(
        ["quantity", "value", "low", "high", "n"], axis=1
    )
    return part.assign(coefficient=label, alike=alike)


def regression_line(x: pd.Series[float], y: pd.Series[float]) -> pd.DataFrame:
    """Return the two ends of the least-squares line of y on x; empty if it is undefined.

    >>> regression_line(pd.Series([0.0, 1.0, 2.0]), pd.Series([1.0, 3.0, 5.0])).round(9)
         x    y
    0  0.0  1.0
    1  2.0  5.0
    """
    kept = pd.DataFrame({"x": x, "y": y}).dropna()
    if len(kept) < 3 or np.ptp(kept["x"].to_numpy()) == 0:
        return pd.DataFrame({"x": [], "y": []}, dtype=float)
    ends = np.array([kept["x"].min(), kept["x"].max()])
    centred = kept["x"] - kept["x"].mean()  # centred first: a large offset would cost digits
    share = centred / centred.abs().max()  # whose squares neither overflow nor underflow
    slope = float((share * kept["y"]).sum() / (share**2).sum() / centred.abs().max())
    return pd.DataFrame({"x": ends, "y": kept["y"].mean() + slope * (ends - kept["x"].mean())})


def histogram(values: pd.Series[float]) -> pd.DataFrame:
    """Return counts in even bins over the padded range: low, high, count; empty for no values."""
    present = values.dropna().to_numpy(dtype=float)
    if not len(present):
        return pd.DataFrame({"low": [], "high": [], "count": []}, dtype=float)
    (low, high), share = padded_range(values), np.linspace(0, 1, BINS + 1)
    edges = (1 - share) * low + share * high  # np.histogram refuses bins as narrow as rounding
    counts = np.bincount(np.searchsorted(edges[1:-1], present, side="right"), minlength=BINS)
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:], "count": counts})


def padded_range(values: pd.Series[float]) -> tuple[float, float]:
    """Return an axis range with a margin; of length 1 or more if there are no values, or they differ by rounding.

    >>> padded_range(pd.Series([0.0, 10.0]))
    (-0.6, 10.6)
    >>> padded_range(pd.Series([2.0, 2.0 - 1e-15]))
    (1.499999999999999, 2.5)
    """
    present = values.dropna()
    if present.empty:
        return (0.0, 1.0)
    low, high = present.clip(-_LARGEST, _LARGEST).agg(["min", "max"]).tolist()
    margin, size = 0.06 * (high - low), max(abs(low), abs(high))
    if margin <= _EQUAL * size or size < _SMALLEST:
        margin = max(0.1 * size, 0.5)
    return (low - margin, high + margin)


def profile_frame(result: StudyResult) -> pd.DataFrame:
    """Return each measure by layer: network, measure, layer, position, value, included; without undefined values."""
    columns = [*network_columns(result), "measure", "layer", "position", "value", "included"]
    if result.layers.empty:
        return pd.DataFrame(columns=columns)
    frame = _with_settings(result.layers.merge(result.values[["key", "included"]], on="key", how="left"), result)
    frame = frame.assign(value=_finite(frame["value"])).dropna(subset=["value"])
    order = {name: i for i, name in enumerate(dict.fromkeys(result.layers["measure"]))}  # as the study lists them
    frame = frame.assign(_order=frame["measure"].map(order))
    return frame.sort_values(["_order", "lr", "batch_size", "seed", "position"]).reset_index(drop=True)[columns]


def middle_profiles(profiles: pd.DataFrame, colour: str = "lr") -> pd.DataFrame:
    """Return the median over the included networks of each colour: measure, layer, position, the colour, value."""
    included = profiles[profiles["included"].astype(bool)]
    return included.groupby(["measure", "layer", "position", colour], sort=True)["value"].median().reset_index()


def curve_frame(result: StudyResult) -> pd.DataFrame:
    """Return the training loss by step, evenly in log steps: network, step, loss, included. It starts at step 1."""
    columns = [*network_columns(result), "step", "loss", "included"]
    if result.curves.empty:
        return pd.DataFrame(columns=columns)
    curves = result.curves.assign(loss=_finite(result.curves["loss"]))
    curves = curves[(curves["step"] > 0) & (curves["loss"] > 0)]
    thinned = []
    for _, one in curves.groupby("key", sort=True):
        curve, last = one.sort_values("step"), len(one) - 1
        if last >= POINTS_PER_CURVE:
            steps = curve["step"].to_numpy(dtype=float)
            wanted = np.searchsorted(steps, np.geomspace(steps[0], steps[-1], POINTS_PER_CURVE))
            curve = curve.iloc[np.unique(np.append(wanted.clip(0, last), [0, last]))]
        thinned.append(curve)
    if not thinned:
        return pd.DataFrame(columns=columns)
    frame = _with_settings(pd.concat(thinned).merge(result.values[["key", "included"]], on="key", how="left"), result)
    return frame.sort_values(["batch_size", "lr", "seed", "step"]).reset_index(drop=True)[columns]


def _finite(values: pd.Series[float]) -> pd.Series[float]:
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    return numbers.where(np.isfinite(numbers))
