"""The largest noise that changes something by no more than a stated level, from noisy looks at the change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.curvature.probes import quantile

DOUBLINGS = 60
HALVINGS = 8  #: of the last factor of 2: 0.3% of sigma, less where the mean is interpolated


@dataclass(frozen=True, eq=False)
class Crossing:
    """Where the mean change first crosses the level."""

    log_sigma: float
    stderr: float  #: of log_sigma, over the draws
    sigmas: Tensor  #: looked at, ascending
    changes: Tensor  #: the change of each draw there, (sigmas, draws)


def first_crossing(change: Callable[[float], Tensor], level: float, start: float) -> Crossing | None:
    """The sigma up to which the mean change stays below `level`; None where none reaches it, or overflow comes first.

    `change`: sigma -> the change under each of m fixed draws scaled by sigma, (m,). Doubling from `start`, or halving
    until the change is small, then bisection: the same draws at every sigma, so that the mean moves smoothly between
    them. The error leaves out one draw after the other (jackknife, Student's quantile).
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
    for beyond in (low / 2, 2 * high):  # with one draw left out the crossing may lie there
        if beyond not in seen:
            above(beyond)
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if above(middle) else (middle, high)
    if not bool(torch.isfinite(seen[high]).all()):
        return None
    sigmas = sorted(seen)
    changes = torch.stack([seen[sigma] for sigma in sigmas])
    m = changes.shape[1]
    whole = _interpolated(sigmas, changes.mean(1), level)
    left_out = torch.tensor([
        _interpolated(sigmas, (changes.sum(1) - changes[:, j]) / (m - 1), level) for j in range(m)
    ])  # fmt: skip
    spread = float(((left_out - left_out.mean()).square().sum() * (m - 1) / m).sqrt())
    return Crossing(whole, spread * quantile(m), torch.tensor(sigmas, dtype=torch.float64), changes)


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
