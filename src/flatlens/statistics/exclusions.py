"""Selection of networks with a finite number in every column, and reasons why others are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flatlens.errors import BadInput, UnknownName
from flatlens.statistics.coefficients import Array


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Retained:
    """The networks that are kept, with their columns, and the reasons why others are left out."""

    table: pd.DataFrame  #: one row per network that is kept
    excluded: tuple[tuple[str, int], ...]  #: (reason, number of networks)


def keep(
    table: pd.DataFrame, columns: Sequence[Any], log: Collection[Any] = (), present: Sequence[Any] = ()
) -> Retained:
    """Return the rows with a finite number in each of `columns` and a value in each of `present`.

    Columns in `log` are replaced by their logarithms.

    >>> keep(pd.DataFrame({"a": [1.0, 0.0, np.nan], "b": [1.0, 2.0, 3.0]}), ["a", "b"], log=["a"]).excluded
    (('a is not positive, and has no logarithm', 1), ('a is missing', 1))
    """
    for name in log:
        if name not in columns:
            raise UnknownName.among("column to take the logarithm of", str(name), map(str, columns))
    reasons = np.full(len(table), "", dtype=object)
    numbers = {name: _numbers(table, name) for name in columns}
    for name, values in numbers.items():
        _exclude(reasons, np.isnan(values), f"{name} is missing")
        _exclude(reasons, np.isinf(values), f"{name} is infinite")
        if name in log:
            _exclude(reasons, values <= 0, f"{name} is not positive, and has no logarithm")
    for name in present:
        _exclude(reasons, table[name].isna().to_numpy(), f"{name} is missing")
    kept = reasons == ""
    found = {name: np.log(values[kept]) if name in log else values[kept] for name, values in numbers.items()}
    others = {name: table[name].to_numpy()[kept] for name in present}
    counts = Counter(map(str, reasons[~kept]))  # in the order of first appearance
    return Retained(pd.DataFrame({**found, **others}), tuple(counts.items()))


def _numbers(table: pd.DataFrame, name: Any) -> Array:
    try:
        return np.asarray(table[name].to_numpy(dtype=np.float64, na_value=np.nan))
    except (TypeError, ValueError) as error:
        raise BadInput(f"column {name!r}: numbers are needed ({error})") from error


def _exclude(reasons: NDArray[np.object_], these: NDArray[np.bool_], why: str) -> None:
    reasons[these & (reasons == "")] = why


def as_columns(**columns: Any) -> pd.DataFrame:
    """Return a table of columns of equal length; pandas indices are ignored."""
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    shapes = {name: values.shape for name, values in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        each = ", ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
        raise BadInput(f"columns must have equal lengths, one number per network: {each}")
    return pd.DataFrame(arrays)
