"""fl.relate: the correlations of a table's columns, such as measures and gaps of networks, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import pandas as pd
from torch import Tensor

from flatlens.errors import BadInput, UnknownName
from flatlens.result import Result, of_report
from flatlens.statistics.relations import relate_all

USUAL_TARGET = "generalisation_gap"


class Relations(Result):
    """Correlations of every pair of columns; `frame()` is the table, `plot()` a picture of those with one of them."""

    _KIND = "table of relations"

    def __init__(self, pairs: pd.DataFrame, about: Mapping[str, Any]) -> None:
        self._pairs = pairs
        self.about = dict(about)  #: the number of rows, the columns, and the column of independent units

    def frame(self) -> pd.DataFrame:
        """Return one row for each pair, with the columns of `relate_all`."""
        return self._pairs.copy()

    def of(self, target: str | None = None) -> pd.DataFrame:
        """Return the pairs with one column, which is called y; by default the gap, or else the table's last column.

        Raises:
            UnknownName: there is no such column.
        """
        columns = self.about["columns"]
        target = target or (USUAL_TARGET if USUAL_TARGET in columns else columns[-1])
        if target not in columns:
            raise UnknownName.among("column in these relations", target, columns)
        pairs = self._pairs[(self._pairs["x"] == target) | (self._pairs["y"] == target)]
        other = pairs["x"].where(pairs["y"] == target, pairs["y"])
        return pairs.assign(x=other, y=target).reset_index(drop=True)

    def plot(self, target: str | None = None) -> Any:
        """Return an Altair chart of the correlations with one column, the `target`; a notebook shows it by itself."""
        return of_report("pictures.picture")(self, target)

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"pairs": self._pairs.to_dict("list")}, {}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls(pd.DataFrame(content["pairs"]), content["about"])


def relate(table: pd.DataFrame, *, units: str | None = None) -> Relations:
    """Return the correlations of all columns of numbers, over the rows that are finite in both.

    Args:
        table: One row for each network, such as measured values and settings; columns of other types are left out.
        units: The column that names the independent unit of each row, such as "seed"; without it, each row is one. The
            intervals are over units.

    >>> table = pd.DataFrame({"mls": [1.0, 2.0, 3.0, 4.0], "gap": [0.1, 0.2, 0.3, 0.4], "name": list("abcd")})
    >>> relate(table).of("gap")[["x", "pearson", "kendall", "n"]].to_dict("records")
    [{'x': 'mls', 'pearson': 1.0, 'kendall': 1.0, 'n': 4}]

    Raises:
        BadInput: it is no table with at least two columns of numbers.
        UnknownName: it has no column of the units' name.
    """
    if not isinstance(table, pd.DataFrame):
        raise BadInput(f"relate(...): a pandas DataFrame is needed, got {type(table).__name__}")
    if units is not None and units not in table:
        raise UnknownName.among("column in this table", units, map(str, table.columns))
    numbers = table.drop(columns=[] if units is None else [units]).select_dtypes("number")
    numbers.columns = numbers.columns.map(str)
    if numbers.shape[1] < 2 or not numbers.columns.is_unique:
        names = ", ".join(numbers.columns) or "none"
        raise BadInput(f"relate(...): at least two columns of numbers with names of their own are needed, got {names}")
    pairs = relate_all(numbers, None if units is None else table[units])
    return Relations(pairs, {"rows": len(table), "columns": list(numbers.columns), "units": units})
