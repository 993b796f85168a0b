"""Learning rate schedules: a factor on the optimiser's own rate, at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flatlens.errors import BadInput

Unit: TypeAlias = Literal["epochs", "steps"]


@dataclass(frozen=True)
class Constant:
    """The same learning rate throughout."""

    def factor(self, step: int, epoch: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Steps:
    """A factor that is multiplied by `factor_each` after each time in `at`.

    >>> drop = Steps(at=(50, 80), factor_each=0.1)
    >>> drop.factor(step=0, epoch=49), drop.factor(step=0, epoch=50)
    (1.0, 0.1)
    """

    at: tuple[int, ...]  #: times of the drops, counted from 0 in `unit`
    factor_each: float = 0.1
    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple(self.at))
        if list(self.at) != sorted(set(self.at)) or min(self.at, default=1) < 1:
            raise BadInput(f"Steps(at={self.at}): give increasing numbers of {self.unit}, such as (50, 80)")
        if not self.factor_each > 0:
            raise BadInput(f"Steps(factor_each={self.factor_each}): it must be positive")
        _require_unit(self.unit, "Steps")

    def factor(self, step: int, epoch: int) -> float:
        """Return the factor on the learning rate at step `step` of epoch `epoch`, both counted from 0."""
        now = epoch if self.unit == "epochs" else step
        return float(self.factor_each ** sum(now >= at for at in self.at))


@dataclass(frozen=True)
class Cosine:
    """Half a period of the cosine, from 1 down to `floor` over `length`; after that, `floor`.

    >>> [round(Cosine(length=10, unit="steps").factor(step, 0), 3) for step in (0, 5, 10, 20)]
    [1.0, 0.5, 0.0, 0.0]
    """

    length: int
    unit: Unit = "epochs"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1 or not 0 <= self.floor <= 1:
            raise BadInput(
                f"Cosine(length={self.length}, floor={self.floor}): length must be at least 1, and floor from 0 to 1"
            )
        _require_unit(self.unit, "Cosine")

    def factor(self, step: int, epoch: int) -> float:
        """Return the factor on the learning rate at step `step` of epoch `epoch`, both counted from 0."""
        share = min((epoch if self.unit == "epochs" else step) / self.length, 1.0)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


LearningRateSchedule: TypeAlias = Constant | Steps | Cosine


def _require_unit(unit: str, name: str) -> None:
    if unit not in ("epochs", "steps"):
        raise BadInput(f"{name}(unit={unit!r}): 'epochs' or 'steps' is needed")
