"""What the tables of a study hold, by which tables from elsewhere are checked before anything is computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from torch import Tensor

from flatlens.errors import BadInput
from flatlens.experiments.settings import Study
from flatlens.experiments.vary import IDENTITY, setting_columns
from flatlens.plain import fits
from flatlens.training import Training
from flatlens.training.run import Ending

_RESULT: dict[str, Any] = {
    "outcome": Ending, "steps": int, "layers": list[str], "versions": dict[str, str], "loss": float | None,
    "accuracy": float | None, "samples": int, "trained_alone": str, "seconds_training": float,
    "seconds_measuring": float,
}  # fmt: skip
"""What the result.json of a network holds; the first four always."""
_CURVES = (("step", "loss", "accuracy", "test_loss"), ("input", "output"))
"""The curves of a network: those of one group have one length."""
_KINDS = {"text": "text", "number": "numbers", "flag": "True or False", "any": "any values"}
_NETWORK = {"key": "text", **dict.fromkeys(IDENTITY[1:], "number")}


def _columns(names: str, texts: str = "") -> dict[str, str]:
    return {name: "text" if name in texts.split() else "number" for name in names.split()}


_COLUMNS = {
    "layers": _NETWORK | _columns("measure layer position value kind", "measure layer kind"),
    "curves": _NETWORK | _columns("step loss accuracy test_loss"),
    "histories": _NETWORK
    | _columns("step rate edge measure layer value stderr kind products note", "measure layer kind note"),
    "functions": _NETWORK | _columns("x y"),
    "relations": _columns("x y n units pearson pearson_low pearson_high kendall kendall_low kendall_high", "x y"),
    "within": _columns("x y group groups n units pearson pearson_low pearson_high", "x y group"),
    "gap_correlations": _columns(
        "kind quantity coefficient value low high p n units given why note", "kind quantity coefficient given why note"
    ),
}
"""The columns of each table that has the same ones in every study, and what each holds."""

_ONCE = {
    "networks": ["key"],
    "layers": ["key", "measure", "layer"],
    "curves": ["key", "step"],
    "histories": ["key", "step", "measure", "layer"],
    "values": ["key"],
    "relations": ["x", "y"],
    "within": ["x", "y", "group"],
    "gap_correlations": ["kind", "quantity", "coefficient", "given"],
}
"""The columns whose values together occur in one row alone."""


def require_result(result: Mapping[str, Any]) -> None:
    """Raise BadInput for a result.json that lacks a value, or has one of another type."""
    for at, (name, hint) in enumerate(_RESULT.items()):
        if (at < 4 or name in result) and not fits(result.get(name), hint):
            raise BadInput(f"{name} is {result.get(name)!r:.40} in result.json")


def require_curves(curves: Mapping[str, Tensor]) -> None:
    """Raise BadInput for curves that are not numbers in rows of one length."""
    for group in _CURVES:
        shapes = (
            {tuple(curves[name].shape) if name in curves else () for name in group} if group[0] in curves else set()
        )
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            raise BadInput(f"the curves {', '.join(group)} must have one length")


def require_tables(tables: Mapping[str, pd.DataFrame], study: Study, varied: list[str]) -> None:
    """Refuse tables that are not those of the study: columns, types, doubled or foreign networks.

    Raises:
        BadInput: the first difference.
    """
    for name, table in tables.items():
        _require_columns(name, table, _expected(name, table, study, varied), study)
        if name in _ONCE and (twice := table.duplicated(_ONCE[name])).any():
            row = ", ".join(map(str, table[twice].iloc[0][_ONCE[name]]))
            raise BadInput(f"the table {name} has two rows for {row}")
    networks, keys = tables["networks"], list(tables["networks"]["key"])
    if (twice := networks.drop(columns="key").duplicated()).any():
        raise BadInput(f"the table networks has the network {networks['key'][twice].iloc[0]} a second time")
    if len(networks) > (most := math.prod(len(axis.values) for axis in study.axes)):
        raise BadInput(f"the table networks has {len(networks)} networks, more than the {most} of the study")
    if list(tables["values"]["key"]) != keys:
        raise BadInput("the tables networks and values have other networks, or another order")
    for name, table in tables.items():
        if "key" in table and (left := set(table["key"]) - set(keys)):
            raise BadInput(f"the table {name} has the network {min(left)}, which the table networks does not have")


def _expected(name: str, table: pd.DataFrame, study: Study, varied: list[str]) -> dict[str, str]:
    """Return the columns that a table must have, and what each holds."""
    if name == "values":
        return _NETWORK | {"included": "flag"} | {quantity.name: "number" for quantity in study.quantities}
    if name != "networks":
        return _COLUMNS[name]
    axes = dict.fromkeys((axis for axis in varied if axis not in IDENTITY), "any")
    parts = dict.fromkeys(set(setting_columns(varied)) & set(table), "any")  # older tables have none of joint axes
    own = {"outcome": "text", "steps": "number"} | _NETWORK | axes | parts
    results = {str(column): "text" if column == "weights" else "number" for column in table if column not in own}
    return own | results


def _require_columns(name: str, table: pd.DataFrame, expected: Mapping[str, str], study: Study) -> None:
    there = list(table.columns)
    if twice := list(table.columns[table.columns.duplicated()]):
        raise BadInput(f"the table {name} has the column {twice[0]!r} twice")
    if missing := [column for column in expected if column not in there]:
        raise BadInput(f"the table {name} has no column {missing[0]!r}")
    if extra := [column for column in there if column not in expected]:
        raise BadInput(f"the table {name} has the column {extra[0]!r}, which no such table has")
    facts = () if isinstance(study.base.training, Training) else ("lr", "batch_size")  # of a table of the user's
    for column, kind in expected.items():
        if column not in facts and not _holds(table[column], kind):
            raise BadInput(f"the column {column!r} of the table {name} must hold {_KINDS[kind]}")


def _holds(column: pd.Series[Any], kind: str) -> bool:
    if kind == "any" or column.empty:
        return True
    if kind == "text":
        return all(isinstance(one, str) for one in column)
    flags, numbers = pd.api.types.is_bool_dtype(column.dtype), pd.api.types.is_numeric_dtype(column.dtype)
    if kind == "flag":
        return flags
    return (numbers and not flags and column.dtype.kind != "c") or bool(column.isna().all())
