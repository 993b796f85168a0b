"""The name of a number: a column of a study's table, or a row of a report."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from flatlens.deprecated_names import FORMER_TRANSFORMS, present_measure, present_part
from flatlens.errors import BadInput

BoundSide: TypeAlias = Literal["lhs", "rhs"]

_OPTIONS = r"""\((?:[^()'"]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")*\)"""
_NAME = re.compile(rf"([^.@()\[\]]+(?:{_OPTIONS})?)(?:\.([^@\[\]]+))?(?:@([^@\[\]]+))?(?:\[(.*)\])?", re.DOTALL)


@dataclass(frozen=True)
class Column:
    """A name taken apart; `str` puts it together again.

    >>> Column.parse("layer_sharpness.kappa@layerwise[fc3]")
    Column(measure='layer_sharpness', part='kappa', transform='layerwise', rule='', layer='fc3')
    >>> Column.parse("jacobian_generalisation.rhs@tight").rule
    'tight'
    """

    measure: str  #: with its options: "local_volume(top_k=3)"; the bound whose side it is; the first part of a setting
    part: str = ""  #: behind the first dot; ends with "lhs" or "rhs" for a side of a bound
    transform: str = ""  #: transform of the weights before the measurement; empty for the weights as they were
    rule: str = ""  #: for the covering radius in a side of a bound; empty for "exact"
    layer: str | None = None  #: None for the network's answer

    def __post_init__(self) -> None:
        if _fields(str(self)) != (self.measure, self.part, self.transform, self.rule, self.layer):
            raise BadInput(f"{str(self)!r} would be read as another column than {self.__dict__}")

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(name: str) -> Column:
        """Return what a name says, also one with former names; one of another form is a measure's as a whole."""
        measure, part, transform, rule, layer = _fields(name)
        part, transform = present_part(measure, part), FORMER_TRANSFORMS.get(transform, transform)
        return Column(present_measure(measure), part, transform, rule, layer)

    @classmethod
    def of(cls, row: str, layer: str | None = None) -> Column:
        """Return the column of a report's row: `Column.of(*key)`."""
        return replace(cls.parse(row), layer=layer)

    def __str__(self) -> str:
        return self.row + ("" if self.layer is None else f"[{self.layer}]")

    @property
    def name(self) -> str:
        """The measure's name without options."""
        return self.measure.partition("(")[0]

    @property
    def row(self) -> str:
        """The name without the layer, as a report's rows are called."""
        at = self.transform + self.rule
        return self.measure + (f".{self.part}" if self.part else "") + (f"@{at}" if at else "")

    @property
    def side(self) -> str:
        """The side of a bound, "lhs" or "rhs"; empty for a measure."""
        return _side(self.part)

    def after(self, transform: str) -> Column:
        """Return the column of the same number after a transform of the weights.

        >>> str(Column.parse("kappa_trace[fc3]").after("layerwise"))
        'kappa_trace@layerwise[fc3]'
        """
        return replace(self, transform=transform)

    def of_side(self, side: BoundSide, rule: str = "") -> Column:
        """Return the column of one side of the bound that this one names."""
        return replace(self, part=f"{self.part}.{side}" if self.part else side, rule=rule)


def split_at_commas(text: str) -> list[str]:
    """Return the names or values in a list, without the space around them; a comma inside brackets belongs to its name.

    >>> split_at_commas("mls, local_volume(top_k=3, log=True),[1, {2, 3}]")
    ['mls', 'local_volume(top_k=3, log=True)', '[1, {2, 3}]']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _fields(name: str) -> tuple[str, str, str, str, str | None]:
    """Return the fields of the column with this name."""
    if (found := _NAME.fullmatch(name)) is None:
        return name, "", "", "", None
    measure, part, at, layer = found.groups()
    part, at = part or "", at or ""
    return (measure, part, "", at, layer) if _side(part) else (measure, part, at, "", layer)


def _side(part: str) -> str:
    last = part.rpartition(".")[2]
    return last if last in get_args(BoundSide) else ""
