"""Tables of correlations: fl.relate for every pair of a table's columns, and within groups of equal settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from flatlens.errors import BadInput, UnknownName
from flatlens.result import Result, of_report
from flatlens.statistics.correlations import undefined_because
from flatlens.statistics.inference import FEWEST_DESCRIBED, clustered
from flatlens.statistics.resampling import Coefficient, kendall, pearson
from flatlens.statistics.statistic import Array

FEWEST_WITHIN = 10  #: smallest number of points minus number of groups for a correlation within groups
_NOTHING = (np.nan, np.nan, np.nan)


def relate_all(table: pd.DataFrame, units: pd.Series | None = None) -> pd.DataFrame:
    """Return Pearson's r and Kendall's tau of every pair of columns, over the points that are finite in both.

    `units` labels the independent unit of each row, such as its seed; by default each row is one. The intervals are
    `clustered`'s. The columns: x, y, n, units (their number), pearson, pearson_low, pearson_high, kendall, kendall_low,
    kendall_high.
    """
    rows = []
    for names in combinations(table.columns, 2):
        kept = _usable(table, *names, units)
        x, y = table[list(names)][kept].to_numpy(dtype=np.float64).T
        labels = _labels(table, units)[kept]
        each: list[float] = []
        undefined = undefined_because(pd.DataFrame({"x": x, "y": y}))
        for coefficient, ordered in ((pearson, ()), (kendall, (x, y))):
            each += _NOTHING if undefined else _interval(partial(coefficient, x, y), labels, ordered)
        rows.append((*names, len(x), len(pd.unique(labels)), *each))
    coefficients = [f"{name}{end}" for name in ("pearson", "kendall") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["x", "y", "n", "units", *coefficients])


def relate_within(
    table: pd.DataFrame, target: str, groupings: Mapping[str, pd.Series], units: pd.Series | None = None
) -> pd.DataFrame:
    """Return the pooled Pearson's r within groups, of every other column with `target`; NaN if too few points are left.

    `groupings` gives, by name, each row's group label; `units` is as for `relate_all`. The columns: x, y, group (the
    grouping's name), groups (their number), n, units, pearson, pearson_low, pearson_high.
    """
    rows = []
    for grouping, name in product(groupings, table.columns.drop(target)):
        kept = _usable(table, name, target, units)
        x, y = table[[name, target]][kept].to_numpy(dtype=np.float64).T
        numbers, labels = pd.factorize(groupings[grouping][kept], use_na_sentinel=False)
        within, known = partial(pearson, x, y, groups=numbers), _labels(table, units)[kept]
        r = _interval(within, known) if len(x) - len(labels) >= FEWEST_WITHIN else _NOTHING
        rows.append((name, target, grouping, len(labels), len(x), len(pd.unique(known)), *r))
    ends = ["pearson", "pearson_low", "pearson_high"]
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "n", "units", *ends])


def _interval(
    coefficient: Coefficient, units: NDArray[np.object_], ordered: Sequence[Array] = ()
) -> tuple[float, float, float]:
    # `ordered`: the columns whose ranks it correlates
    found = clustered("", coefficient, units, fisher=True, fewest=FEWEST_DESCRIBED, ordered=ordered)
    return found.value, found.low, found.high


def _labels(table: pd.DataFrame, units: pd.Series | None) -> NDArray[np.object_]:
    return np.asarray(np.arange(len(table)) if units is None else units.to_numpy(), dtype=object)


def _usable(table: pd.DataFrame, x: str, y: str, units: pd.Series | None) -> NDArray[np.bool_]:
    # The rows with two finite numbers and, where units are given, a unit
    finite = np.isfinite(table[[x, y]].to_numpy(dtype=np.float64)).all(1)
    return np.asarray(finite if units is None else finite & units.notna().to_numpy())


USUAL_TARGET = "generalisation_gap"


class Relations(Result):
    """Correlations of every pair of columns; `frame()` is the table, `plot()` a picture of those with one of them.

    >>> import pandas as pd, flatlens as fl
    >>> table = pd.DataFrame({"mls": [1.0, 2.0, 3.0, 4.0], "gap": [0.1, 0.2, 0.4, 0.3], "seed": [0, 1, 2, 3]})
    >>> fl.relate(table, units="seed").of("gap")[["x", "pearson"]].round(9).to_dict("records")
    [{'x': 'mls', 'pearson': 0.8}]
    """

    _KIND = "table of relations"

    def __init__(self, pairs: pd.DataFrame, about: Mapping[str, Any]) -> None:
        self._pairs = pairs
        self.about = dict(about)  #: the number of rows, the columns, that of independent units, and what is left out

    def frame(self) -> pd.DataFrame:
        """Return one row for each pair, with the columns of `relate_all`."""
        return self._pairs.copy()

    def of(self, target: object = None) -> pd.DataFrame:
        """Return the pairs with one column, which is called y; by default the gap, or else the table's last column.

        Raises:
            UnknownName: there is no such column.
        """
        columns = self.about["columns"]
        usual = USUAL_TARGET if USUAL_TARGET in columns else columns[-1]
        target = usual if target is None else str(target)  # names are text here, also those of numbered columns
        if target not in columns:
            raise UnknownName.among("column", target, columns, where="in these relations")
        pairs = self._pairs[(self._pairs["x"] == target) | (self._pairs["y"] == target)]
        other = pairs["x"].where(pairs["y"] == target, pairs["y"])
        return pairs.assign(x=other, y=target).reset_index(drop=True)

    def plot(self, target: str | None = None) -> Any:
        """Return an Altair chart of the correlations with one column, the `target`; a notebook shows it by itself."""
        return of_report("figures.picture")(self, target)

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"pairs": self._pairs.to_dict("list")}, {}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls(pd.DataFrame(content["pairs"]), content["about"])


def relate(table: pd.DataFrame, *, units: Any = None) -> Relations:
    """Return the correlations of all columns of numbers, over the rows that are finite in both.

    Of skewed columns, such as norms over several powers of ten, believe Pearson's interval only if Spearman's
    (`correlate`) or Kendall's agrees, or take logarithms: docs/sizes.md has the error rates.

    Args:
        table: One row for each network, such as measured values and settings; `about["left_out"]` has the columns of
            other types, with the reason.
        units: The column that names the independent unit of each row, such as "seed", or one label for each row (a
            list, array or Series); without it, each row is one. The intervals are over units.

    >>> table = pd.DataFrame({"mls": [1.0, 2.0, 3.0, 4.0], "gap": [0.1, 0.2, 0.3, 0.4], "name": list("abcd")})
    >>> found = relate(table)
    >>> found.of("gap")[["x", "pearson", "kendall", "n"]].to_dict("records")
    [{'x': 'mls', 'pearson': 1.0, 'kendall': 1.0, 'n': 4}]
    >>> list(found.about["left_out"])
    ['name']

    Raises:
        BadInput: it is not a table with at least two columns of numbers, or there is not one unit for each row.
        UnknownName: it has no column of the units' name.
    """
    if not isinstance(table, pd.DataFrame):
        raise BadInput(f"relate(...): expected a pandas DataFrame, got {type(table).__name__}")
    column, labels = (None, None) if units is None else _units_of(table, units)
    columns = table if column is None else table.drop(columns=[column])
    numbers = columns.select_dtypes("number", exclude=["timedelta", "complex"])
    # Columns of other types have no correlations, nor have numbers that are stored as objects
    left_out = {}
    for name, one in columns.items():
        if name not in numbers:
            parsed = pd.to_numeric(one, errors="coerce") if one.dtype == object else pd.Series()
            stored = one.dtype == object and parsed.notna().sum() == one.notna().sum() > 0
            why = "numbers stored as objects: convert them with pd.to_numeric" if stored else f"no numbers: {one.dtype}"
            left_out[str(name)] = why
    numbers.columns = numbers.columns.map(str)
    if numbers.shape[1] < 2 or not numbers.columns.is_unique:
        names = ", ".join(numbers.columns) or "none"
        others = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise BadInput(
            f"relate(...): expected at least two columns of numbers with names of their own, got {names}"
            + (f" (left out: {others})" if others else "")
        )
    pairs = relate_all(numbers, labels)
    named = "one label for each row" if column is None and labels is not None else column
    about = {"rows": len(table), "columns": list(numbers.columns), "units": named, "left_out": left_out}
    return Relations(pairs, about)


def _units_of(table: pd.DataFrame, units: Any) -> tuple[Any, pd.Series]:
    # The column that names the units, None if labels are given, and the unit of each row
    if pd.api.types.is_list_like(units) and not (isinstance(units, tuple) and units in table):
        labels = pd.Series(np.asarray(units, dtype=object), index=table.index) if len(units) == len(table) else None
        if labels is None:
            raise BadInput(f"relate(units=...): expected one label for each of {len(table)} rows, got {len(units)}")
        return None, labels
    if units not in table:
        raise UnknownName.among("column", str(units), map(str, table.columns), where="in this table")
    if (table.columns == units).sum() > 1:
        raise BadInput(f"relate(units={units!r}): expected one column of this name, the table has several")
    return units, table[units]
