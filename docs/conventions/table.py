"""What the page is made of: quantities, their rival conventions, and the value of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import flatlens as fl

if TYPE_CHECKING:
    from conventions.networks import Networks


FOR_SCALE = "for scale"  #: of a row that no source has


@dataclass(frozen=True)
class Convention:
    """One way to compute a quantity."""

    text: str
    found_in: str
    value: float
    exactly: str = ""  #: what its ratio to flatlens's is in theory, where that is known


@dataclass(frozen=True)
class Quantity:
    """Something with several conventions; the first row is flatlens's."""

    name: str
    network: str
    used: str
    why: str
    rows: list[Convention]
    at: str = ""  #: which layer
    difference: bool = False  #: a logarithm: conventions differ by a sum, not by a factor

    def ratio(self, row: Convention) -> float:
        """A row's value over flatlens's; of logarithms, their difference."""
        own = self.rows[0].value
        return row.value - own if self.difference else row.value / own

    def furthest(self) -> Convention | None:
        """The rival of some source that moves the number most."""
        rivals = [row for row in self.rows[1:] if row.found_in not in (FOR_SCALE, "flatlens")]
        return max(rivals, key=self._distance, default=None)

    def _distance(self, row: Convention) -> float:
        ratio = abs(self.ratio(row))
        return ratio if self.difference else abs(math.log(ratio)) if ratio else math.inf


@dataclass(frozen=True)
class Agreed:
    """A measure for which no rival convention was found."""

    measure: str
    network: str
    value: float
    remark: str


@dataclass(frozen=True)
class Entry:
    """A section of the page and the measures that it covers."""

    measures: tuple[str, ...]
    make: Callable[[Networks], Quantity | Agreed]

    @property
    def ready(self) -> bool:
        """Whether all its measures are registered."""
        return set(self.measures) <= set(fl.measures.MEASURES)


ENTRIES: list[Entry] = []


def covers(
    *measures: str,
) -> Callable[[Callable[[Networks], Quantity | Agreed]], Callable[[Networks], Quantity | Agreed]]:
    """Put what the function makes on the page, as the section of these measures."""

    def keep(make: Callable[[Networks], Quantity | Agreed]) -> Callable[[Networks], Quantity | Agreed]:
        ENTRIES.append(Entry(measures, make))
        return make

    return keep
