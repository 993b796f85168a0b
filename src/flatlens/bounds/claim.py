"""What a theorem says of one network: two sides, and what it supposes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Side: TypeAlias = Tensor | float
"""One number, or one per sample, (n,) float64."""


@dataclass(frozen=True)
class Assumption:
    """What a theorem supposes, and whether it is so here."""

    name: str
    holds: bool | None  #: None where neither checked nor declared
    detail: str = ""
    declared: bool = False  #: by the user: no sample can check it


@dataclass(frozen=True, eq=False)
class Claim:
    """lhs <= rhs on this network: one row of the table.

    Sides with one number per sample make the claim for each; those in logarithms are compared as they are.
    """

    lhs: Side
    rhs: Side
    layer: str | None = None
    part: str = ""  #: the dotted name after the bound's
    assumptions: tuple[Assumption, ...] = ()
    stderr: float = 0.0  #: of the slack, where a side was estimated
    logs: bool = False  #: whether the sides are logarithms of what the theorem compares
    rounding: float = 1e-6  #: slack below this share of the larger side is none
    floor: float = 1e-150  #: and so is what is smaller: squares of it underflow
    note: str = ""
