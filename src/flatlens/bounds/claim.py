"""A theorem's claim on one network: two sides, and its assumptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

_Side: TypeAlias = Tensor | float
"""One number, or one per sample, (n,) float64."""


@dataclass(frozen=True)
class Assumption:
    """An assumption of a theorem, and whether it holds here."""

    name: str
    holds: bool | None  #: None if it was neither checked nor declared
    detail: str = ""
    declared: bool = False  #: whether the user declared it, because no sample can check it


@dataclass(frozen=True, eq=False)
class Claim:
    """The claim lhs <= rhs on this network: one row of the table.

    Sides with one number per sample make the claim for each; those in logarithms are compared as they are.
    """

    lhs: _Side
    rhs: _Side
    layer: str | None = None
    part: str = ""  #: the part of the name after the bound's name and a dot
    assumptions: tuple[Assumption, ...] = ()
    stderr: float = 0.0  #: standard error of the slack, if a side is an estimate
    logs: bool = False  #: whether the sides are logarithms of what the theorem compares
    rounding: float = 1e-6  #: share of the larger side below which slack counts as 0
    floor: float = 1e-150  #: absolute slack that counts as 0, because squares of it underflow
    note: str = ""
