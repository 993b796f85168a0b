"""The largest noise that changes something by no more than a stated level, from noisy looks at the change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.curvature.probes import skewed

DOUBLINGS = 60
HALVINGS = 8  #: of the last factor of 2: 0.3% of sigma, less where the mean is interpolated
LEAST = 0.05  #: of the level, where the interval of the change reaches down to nothing
FURTHER = 3  #: doublings beyond the crossing, after which a mean that stays below the interval's end tells enough


@dataclass(frozen=True, eq=False)
class Crossing:
    """Where the mean change first crosses the level."""

    log_sigma: float
    stderr: float  #: of log_sigma, over the draws: half of the way between the interval's ends is 1.96 of it
    sigmas: Tensor  #: looked at, ascending
    changes: Tensor  #: the change of each draw there, (sigmas, draws)


def first_crossing(change: Callable[[float], Tensor], level: float, start: float) -> Crossing | None:
    """The sigma up to which the mean change stays below `level`; None where none reaches it, or overflow comes first.

    `change`: sigma -> the change under each of m fixed draws scaled by sigma, (m,). Doubling from `start`, or halving
    until the change is small, then bisection: the same draws at every sigma, so that the mean moves smoothly between
    them. The error is that of the mean change at the crossing, read off as the levels at either end of its interval are
    crossed: a mean that moves in steps, as hits do, has no slope to go by, and to leave out a draw moves it too little.
    """
    seen: dict[float, Tensor] = {}

    def above(sigma: float) -> bool:
        seen[sigma] = change(sigma)
        return not float(seen[sigma].mean()) <= level  # NaN and inf are above

    low = high = start
    if above(start):
        while above(low := low / 2):
            if len(seen) > DOUBLINGS:
                return None
        high = 2 * low
    else:
        while not above(high := high * 2):
            if len(seen) > DOUBLINGS:
                return None
        low = high / 2
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if above(middle) else (middle, high)
    if not bool(torch.isfinite(seen[high]).all()):
        return None
    reach = 1.96 * float(skewed(seen[high])[1])
    ends = level + reach, max(level - reach, LEAST * level)
    for _ in range(FURTHER):  # the interval's ends may lie beyond
        if float(seen[max(seen)].mean()) <= ends[0]:
            above(2 * max(seen))
        if float(seen[min(seen)].mean()) > ends[1]:
            above(min(seen) / 2)
    sigmas = sorted(seen)
    changes = torch.stack([seen[sigma] for sigma in sigmas])
    log_sigma, up, down = (_interpolated(sigmas, changes.mean(1), value) for value in (level, *ends))
    return Crossing(log_sigma, (up - down) / 2 / 1.96, torch.tensor(sigmas, dtype=torch.float64), changes)


def _interpolated(sigmas: list[float], means: Tensor, level: float) -> float:
    """log sigma at the first crossing; between neighbours the mean is a power of sigma, or linear in log sigma where it
    is not positive."""
    values = means.tolist()
    for number, value in enumerate(values):
        if not value <= level:
            if number == 0:
                return math.log(sigmas[0])
            before = values[number - 1]
            if not math.isfinite(value):
                share = 1.0
            elif before > 0:
                share = math.log(level / before) / math.log(value / before)
            else:
                share = (level - before) / (value - before)
            return math.log(sigmas[number - 1]) + share * math.log(sigmas[number] / sigmas[number - 1])
    return math.log(sigmas[-1])
