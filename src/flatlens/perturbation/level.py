"""The largest noise that changes a value by no more than a given level, from random draws of the change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.curvature.probes import skewed

_DOUBLINGS = 60
_SETTLED = 20, 4
"""After so many doublings the network is noise: if so many more change no draw, none will, as where it guesses."""
HALVINGS = 8  #: bisections of the last factor of 2: 0.3% of sigma, less if the mean is interpolated
LEAST = 0.05  #: smallest lower end of the interval around the level, as a share of the level
FURTHER = 3  #: doublings beyond the crossing while the mean stays below the interval's end


@dataclass(frozen=True, eq=False)
class Crossing:
    """The first crossing of the level by the mean change."""

    log_sigma: float
    stderr: float  #: standard error of log_sigma, over the draws: the interval's half-width is 1.96 times this
    sigmas: Tensor  #: levels tried, ascending
    changes: Tensor  #: change of each draw at each sigma, (sigmas, draws)


def first_crossing(change: Callable[[float], Tensor], level: float, start: float) -> Crossing | None:
    """Return where the mean change first reaches `level`: log sigma, its error, and the levels that were tried.

    None if it never reaches it, or overflows first.

    `change`: sigma -> the change under each of m fixed draws scaled by sigma, (m,). Sigma is doubled from `start`, or
    halved until the change is small, then bisected. The draws are the same at every sigma, so that the mean varies
    smoothly. The error is that of the mean change at the crossing, translated to sigma where the ends of its interval
    cross the level. A derivative would not work, because the mean of 0-1 errors is a step function. Nor would the
    jackknife: leaving out one draw changes the mean too little.
    """
    seen: dict[float, Tensor] = {}

    def above(sigma: float) -> bool:
        seen[sigma] = change(sigma)
        return not float(seen[sigma].mean()) <= level  # NaN and inf count as above

    low = high = start
    if above(start):
        while above(low := low / 2):
            if len(seen) > _DOUBLINGS:
                return None
        high = 2 * low
    else:
        while not above(high := high * 2):
            if len(seen) > _DOUBLINGS or _settled(list(seen.values())):
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


def _settled(changes: list[Tensor]) -> bool:
    """Return whether the last doublings of a large noise changed nothing."""
    most, last = _SETTLED
    return len(changes) > most + last and all(torch.equal(changes[-1], each) for each in changes[-1 - last : -1])


def _interpolated(sigmas: list[float], means: Tensor, level: float) -> float:
    """Return log sigma at the first crossing.

    Between neighbours the mean is taken as a power of sigma, or as linear in log sigma if it is not positive.
    """
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
