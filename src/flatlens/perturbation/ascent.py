"""The largest value on a ball that a search finds: a lower bound of the largest there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Peak:
    """The highest place met."""

    value: float  #: its rise above the centre, 0 if nothing rises; NaN where nothing finite was met
    where: Tensor  #: (P,)
    restarts: Tensor  #: the largest rise of each search, (restarts,) float64: how far they agree


def climb(slope: Callable[[Tensor], tuple[float, Tensor]], starts: Iterator[Tensor], radius: float, steps: int) -> Peak:
    """Projected gradient ascent in the ball of `radius`, from each start; the largest rise met anywhere counts.

    `slope`: place -> (rise above the centre, gradient). A step goes `radius` along the gradient's direction and back
    onto the ball: of a convex function it ends where place and gradient point the same way. Later steps are shorter, in
    case it is not.
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
    """The nearest point of the ball."""
    norm = float(e.norm())
    return e if norm <= radius else e * (radius / norm)
