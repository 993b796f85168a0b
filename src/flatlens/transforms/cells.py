"""The table of invariances: one cell per number and transform, with what is declared about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, overload

import pandas as pd
import torch
from torch import Tensor

from flatlens.column import Column
from flatlens.errors import UnknownName
from flatlens.estimate import Estimate
from flatlens.former import FORMER_TRANSFORMS
from flatlens.measures import Measure, PassMeasure
from flatlens.result import Result
from flatlens.transforms.transform import Moved, Transform

STDERRS = 4.0  #: combined standard errors within which two estimates are equal
_SEARCHED = 1e-3  #: relative error of a search or an iteration
_SHORT = 0.1  #: relative difference; a smaller one may come from one search that stopped too early
UNDECIDED = "undecided: a search may have stopped short on one side; a smaller rtol decides"
ILL = "undecided: the smallest eigenvalues of some samples are rounding"
CELL_COLUMNS = [
    "measure", "transform", "before", "after", "change", "stderr", "unchanged", "declared", "agrees", "note",
]  # fmt: skip

_TABLE_1 = {
    "layer_sharpness.kappa": frozenset({"layerwise", "permutation"}),
    "layer_sharpness.kappa_max": frozenset({"layerwise", "permutation"}),
}
"""The statements of reparam2019 Table 1 on parts of measures whose cards are about another number."""


@dataclass(frozen=True)
class Cell:
    """A number before and after a transform."""

    measure: str  #: name of the measure, with its part
    transform: str
    before: float
    after: float
    change: float  #: relative to `before`
    stderr: float  #: standard error of after - before
    unchanged: (
        bool | None
    )  #: whether before and after agree within rounding and error; None if a number is missing or unreliable
    declared: (
        bool | None
    )  #: whether it must be unchanged, by the literature and the measure's card; None: they do not say
    agrees: bool | None
    """Whether the number does what is declared.

    None if nothing is declared, and if a measure that is not declared unchanged is unchanged here: the claim is about
    networks in general.
    """
    note: str = ""


@dataclass(frozen=True)
class Applied:
    """The effect of a transform on the network, and the proof."""

    difference: float  #: max |f' - f| over the data
    links: tuple[str, ...]  #: links whose features moved, as `fc1 -> fc2`
    left: Mapping[str, str] = field(default_factory=dict)  #: layers whose features did not move, with the reason
    note: str = ""

    @classmethod
    def of(cls, moved: Moved) -> Applied:
        """Return the facts without the network."""
        return cls(moved.difference, moved.links, dict(moved.left), moved.note)


class InvarianceReport(Result, Sequence[Cell]):
    """Cells, one a measure and transform; `frame()` is the table.

    `moved` maps a transform to what it did, with the proof that the outputs stayed the same; `left_out` maps a
    transform that does not apply to this network to the reason; `about` says what was measured.
    """

    _KIND = "invariance report"

    def __init__(
        self, cells: Iterable[Cell], moved: Mapping[str, Applied], left_out: Mapping[str, str], about: Mapping[str, Any]
    ) -> None:
        self._cells = list(cells)
        self.moved = dict(moved)
        self.left_out = dict(left_out)
        self.about = dict(about)

    @overload
    def __getitem__(self, which: int | tuple[str, str]) -> Cell: ...

    @overload
    def __getitem__(self, which: slice) -> list[Cell]: ...

    def __getitem__(self, which: int | tuple[str, str] | slice) -> Cell | list[Cell]:
        """Return a cell by its position, or by (measure, transform)."""
        if not isinstance(which, tuple):
            return self._cells[which]
        for cell in self._cells:
            if (cell.measure, cell.transform) == which:
                return cell
        if which[1] in self.left_out:
            raise UnknownName(f"transform {which[1]} does not apply to this network: {self.left_out[which[1]]}")
        known = [name for cell in self._cells for name in (cell.measure, cell.transform)]
        unknown = next((name for name in which if name not in known), str(which))
        raise UnknownName.among("cell of this table", unknown, set(known))

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def disagreeing(self) -> list[Cell]:
        """Return the numbers that changed though they are declared unchanged: an error in flatlens, or in a theorem."""
        return [cell for cell in self._cells if cell.agrees is False]

    def frame(self) -> pd.DataFrame:
        """Return the tidy table: one row per measure and transform."""
        return pd.DataFrame(
            [{name: getattr(cell, name) for name in CELL_COLUMNS} for cell in self._cells], columns=CELL_COLUMNS
        )

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        moved = {name: asdict(one) for name, one in self.moved.items()}
        return {"rows": [asdict(cell) for cell in self._cells], "moved": moved, "left_out": self.left_out}, {}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        moved = {name: Applied(**{**one, "links": tuple(one["links"])}) for name, one in content["moved"].items()}
        moved = {FORMER_TRANSFORMS.get(name, name): one for name, one in moved.items()}
        left_out = {FORMER_TRANSFORMS.get(name, name): why for name, why in content["left_out"].items()}
        rows = [
            {**row, "measure": str(Column.parse(row["measure"])),
             "transform": FORMER_TRANSFORMS.get(row["transform"], row["transform"])}
            for row in content["rows"]
        ]  # fmt: skip
        return cls([Cell(**row) for row in rows], moved, left_out, content["about"])


def compare(transform: Transform, one: Measure, row: str, a: Estimate, b: Estimate, dtype: torch.dtype) -> Cell:
    """Return the cell of one number, before (a) and after (b)."""
    stderr = math.hypot(a.stderr, b.stderr)
    must = declared(one, row, transform)
    if a.kind == "undefined" or b.kind == "undefined":
        lost = (a.kind == "undefined") != (b.kind == "undefined")
        note = f"undefined{' on one side only' if lost else ''}: {a.note or b.note}"
        agrees = False if lost and must else None
        return Cell(row, transform.name, a.value, b.value, math.nan, math.nan, None, must, agrees, note)
    eps = torch.finfo(dtype).eps
    searched = max(_left_open(one, a), _left_open(one, b))
    slack = max(64 * eps**0.5, searched)
    off = abs(b.value - a.value)
    size = 0.0 if math.isinf(off) else max(abs(a.value), abs(b.value))
    rounding = 0.0 if must is False else 8 * eps  # of a number that is 0 on both sides, and must be
    unchanged = a.value == b.value or off <= slack * size + rounding + STDERRS * stderr
    change = _change(a.value, b.value)
    if must and not unchanged and searched and off <= _SHORT * size:
        return Cell(row, transform.name, a.value, b.value, change, stderr, None, must, None, UNDECIDED)
    if must and not unchanged and one.card.family == "compression" and (off <= _SEARCHED * size or math.isinf(off)):
        return Cell(row, transform.name, a.value, b.value, change, stderr, None, must, None, ILL)
    stays = unchanged and must is False
    note = "unchanged here, but not in general" if stays else ""
    agrees = None if must is None or stays else unchanged == must
    return Cell(row, transform.name, a.value, b.value, change, stderr, unchanged, must, agrees, note)


def declared(one: Measure, row: str, transform: Transform) -> bool | None:
    """Return whether the number of this row must be unchanged by the transform; None if nothing is declared."""
    part = Column.parse(row).part
    if transform.declared_as is None:
        at_input = isinstance(one, PassMeasure) and one.place == one.answer == "input"
        of_function = at_input or one.card.family == "generalisation"
        return True if of_function and not part else None
    if f"{one.card.name}.{part}" in _TABLE_1:
        return transform.declared_as in _TABLE_1[f"{one.card.name}.{part}"]
    if part and not (isinstance(one, PassMeasure) and one.place != "input"):
        return None
    return transform.declared_as in one.invariant_under


def _left_open(one: Measure, estimate: Estimate) -> float:
    """Return the relative error at which a search or an iteration stops."""
    rtol = dict(one.options).get("rtol")
    found = max(_SEARCHED, 2 * rtol) if isinstance(rtol, float) else _SEARCHED
    return 0.0 if estimate.kind in ("exact", "estimate") else found


def _change(before: float, after: float) -> float:
    """Return the change relative to the value before.

    >>> _change(2.0, 3.0), _change(0.0, 0.0), _change(0.0, -1.0)
    (0.5, 0.0, -inf)
    """
    if before == after:
        return 0.0
    return (after - before) / abs(before) if before else math.copysign(math.inf, after)
