"""A statistic with its interval and its p-value, and the selection of the networks that count.

Networks without a finite number in every column are left out, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flatlens.errors import BadInput, UnknownName

Array: TypeAlias = NDArray[np.float64]


NAN = float("nan")

Tails: TypeAlias = Callable[[float], tuple[float, float]]
"""One-sided p-values that the truth is above a number, and below it: that it is so is believed where p is small."""


@dataclass(frozen=True)
class Statistic:
    """A number about a population of networks, with its interval, p-value, and the networks left out.

    >>> Statistic("Kendall tau-b of a and b", 0.5, 20, 0.2, 0.7, 0.01, excluded=(("a is missing", 2),))
    Kendall tau-b of a and b = 0.5 [0.2, 0.7], p = 0.01 (n = 20; 2 left out: a is missing)
    """

    name: str
    value: float  #: NaN where undefined
    n: int  #: number of networks used
    low: float = NAN  #: lower end of the 95% interval; NaN where there is none
    high: float = NAN  #: upper end
    p: float = NAN  #: two-sided; NaN where no test was asked for
    excluded: tuple[tuple[str, int], ...] = ()  #: (reason, number of networks); a network has one reason
    method: str = ""  #: the way in which the interval and p were computed
    note: str = ""  #: why undefined; what was not counted
    parts: Mapping[str, Statistic] = field(default_factory=dict)  #: the statistics that it is the mean of, by name
    readings: bool = False  #: whether the parts are ways to read one claim, and this is the first of them
    units: int | None = None  #: number of independent units that the networks make; None where not known
    unit: str = ""  #: name of a unit: "seed", "network", "architecture"
    leave_one_out: tuple[float, float] = (NAN, NAN)  #: least and largest value without one of the units
    of_ranks: float = NAN  #: the same statistic of ranks, beside a Pearson correlation
    correlation: bool = False  #: whether it is Pearson's or Spearman's, or a mean of them
    tails: Tails | None = field(default=None, compare=False, repr=False)  #: p against any number; None if no interval
    grown: Callable[[float], Tails] | None = field(default=None, compare=False, repr=False)
    """`tails` if the units were some times as many, and all values stayed; None where that is not known."""

    @property
    def left_out(self) -> int:
        """Return the number of networks left out."""
        return sum(number for _, number in self.excluded)

    @property
    def why(self) -> str:
        """Return in words how many networks were left out and why; an empty string if none were."""
        return "; ".join(f"{number} left out: {reason}" for reason, number in self.excluded)

    @property
    def size(self) -> str:
        """Return the number of networks and of independent units.

        >>> Statistic("r", 0.5, 20, units=5, unit="seed").size, Statistic("r", 0.5, 20).size
        ('20, 5 seeds', '20')
        """
        if self.units is None:
            return str(self.n)
        return f"{self.n}, {self.units} {self.unit or 'unit'}{'' if self.units == 1 else 's'}"

    @property
    def in_words(self) -> str:
        """Return the value with its interval, to two decimals.

        >>> Statistic("r", 0.5, 20, -0.2, 0.75).in_words, Statistic("r", NAN, 0).in_words
        ('0.50 [-0.20, 0.75]', 'undefined')
        """
        if self.value != self.value:
            return "undefined"
        interval = f" [{_short(self.low)}, {_short(self.high)}]" if self.low == self.low else ""
        return _short(self.value) + interval

    @property
    def beside(self) -> str:
        """Return in words what stands beside the value: that of ranks, that without one unit, each case, and notes.

        >>> Statistic("r", 0.5, 20, leave_one_out=(0.3, 0.6), unit="seed", of_ranks=0.4).beside
        '0.40 of ranks; 0.30 to 0.60 without one seed'
        """
        least, most = self.leave_one_out
        said = [
            f"{_short(self.of_ranks)} of ranks" if self.of_ranks == self.of_ranks else "",
            f"{_short(least)} to {_short(most)} without one {self.unit or 'unit'}" if least == least else "",
            self.note,
            ", ".join(f"{name} {part.in_words}" for name, part in self.parts.items()),
        ]
        return "; ".join(part for part in said if part)

    def __repr__(self) -> str:
        interval = f" [{self.low:.3g}, {self.high:.3g}]" if self.low == self.low else ""
        p = f", p = {self.p:.2g}" if self.p == self.p else ""
        value = f"{self.value:.3g}" if self.value == self.value else "undefined"
        said = "; ".join(part for part in (f"n = {self.size}", self.why, self.note) if part)
        return f"{self.name} = {value}{interval}{p} ({said})"


def _short(number: float) -> str:
    return f"{number:.1g}" if 0 < abs(number) < 0.005 else f"{number:.2f}"


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
    """
    for name in log:
        if name not in columns:
            raise UnknownName.among("column", str(name), map(str, columns), where="in log=")
    # The first reason of each network to leave it out
    faults, numbers = [], dict[Any, Array]()
    for name in columns:
        try:
            values = numbers[name] = np.asarray(table[name].to_numpy(dtype=np.float64, na_value=np.nan))
        except (TypeError, ValueError) as error:
            raise BadInput(f"column {name!r}: expected numbers ({error})") from error
        faults += [(np.isnan(values), f"{name} is missing"), (np.isinf(values), f"{name} is infinite")]
        faults += [(values <= 0, f"{name} is not positive, and has no logarithm")] if name in log else []
    faults += [(table[name].isna().to_numpy(), f"{name} is missing") for name in present]
    reasons = np.full(len(table), "", dtype=object)
    for here, why in faults:
        reasons[here & (reasons == "")] = why
    kept = reasons == ""
    found = {name: np.log(values[kept]) if name in log else values[kept] for name, values in numbers.items()}
    others = {name: table[name].to_numpy()[kept] for name in present}
    counts = Counter(map(str, reasons[~kept]))  # in the order of first appearance
    return Retained(pd.DataFrame({**found, **others}), tuple(counts.items()))


def as_columns(**columns: Any) -> pd.DataFrame:
    """Return a table of columns of equal length; pandas indices are ignored."""
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    shapes = {name: values.shape for name, values in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        each = ", ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
        raise BadInput(f"columns must have equal lengths, one number per network: {each}")
    return pd.DataFrame(arrays)
