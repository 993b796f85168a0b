"""Gradient ascent in a ball: a lower bound of the largest value there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Peak:
    """The highest point that a search found."""

    value: float  #: rise above the centre, 0 if nothing rises; NaN if no value was finite
    where: Tensor  #: (P,)
    restarts: Tensor  #: largest rise of each search, (restarts,) float64: their agreement shows how reliable it is


def climb(slope: Callable[[Tensor], tuple[float, Tensor]], starts: Iterator[Tensor], radius: float, steps: int) -> Peak:
    """Return the largest rise that projected gradient ascent finds in the ball of `radius`, from each start.

    `slope` maps a place to (rise above the centre, gradient). A step moves by `radius` along the gradient's direction,
    then back to the nearest point of the ball. For a convex function, the search ends where the place has the
    gradient's direction. For other functions it might not end, so later steps are shorter.
    """
    best, where = 0.0, torch.zeros(0)
    reached = []
    for start in starts:
        e, highest = start, -math.inf
        where = where if len(where) else torch.zeros_like(e)
        for step in range(steps + 1):
            value, g = slope(e)
            norm = float(g.norm())
            if not (math.isfinite(value) and math.isfinite(norm)):
                break
            highest = max(highest, value)
            if value > best:
                best, where = value, e
            if step == steps or norm == 0:
                break
            length = radius * min(1.0, 2.0 - 2.0 * step / steps)
            e = onto_ball(e + (length / norm) * g, radius)
        reached.append(highest)
    best = best if max(reached) > -math.inf else math.nan
    return Peak(best, where, torch.tensor(reached, dtype=torch.float64))


def onto_ball(e: Tensor, radius: float) -> Tensor:
    """Return the nearest point of the ball."""
    norm = float(e.norm())
    return e if norm <= radius else e * (radius / norm)
