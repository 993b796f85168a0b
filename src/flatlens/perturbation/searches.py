"""Searches on a function known by its values or slopes: ascent in a ball, the critical step, the noise at a level."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.curvature.probes import skewed


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


_WIDE = 4.0  #: ratio of the ends from which an interval is halved if no curve has shown the way
_FURTHER, _AT_MOST = 8.0, 1000.0
"""The factor by which a search moves on if no curve shows the way, and the largest factor if one does."""
_MOST = 7  #: evaluations


@dataclass(frozen=True, eq=False)
class CriticalStep:
    """The step at which the change of a function turns from negative to positive."""

    step: float  #: inf if the function never rose, 0 if it rose at every step tried
    error: float  #: how far the last evaluation moved `step`, was from it, or puts it by its neighbour: the largest
    steps: Tensor  #: steps tried, ascending
    changes: Tensor  #: the function's change at each


def critical_step(
    change: Callable[[float], float],
    first: float,
    *,
    slope: float | None = None,
    rtol: float = 0.02,
) -> CriticalStep:
    """Return the first step > 0 from which on change(step) > 0, from at most 7 evaluations.

    change(step) / step is a straight line where the function is quadratic. So the search follows the line through two
    tried steps; on a quadratic the second one is exact (the third if `slope`, the derivative of `change` at 0, is not
    known). Between two steps with changes of either sign it follows the parabola through these and a third one. It ends
    when an evaluation within `rtol` of the zero moves it by at most that, and the line through this one and the nearest
    on its side leads there, too. If none did, 1 / step is the middle, and the error reaches the ends, of the interval
    between the last two steps with changes of either sign. A rise between two steps that were tried, followed by a
    fall, goes unseen.
    """
    seen: dict[float, float] = {} if slope is None else {0.0: slope}  # mean slopes by step
    tried: dict[float, float] = {}
    step, guess, error = first, math.nan, math.inf
    for _ in range(_MOST):
        tried[step] = change(step)
        seen[step] = tried[step] / step if math.isfinite(tried[step]) else math.inf
        found, alone = _zero(seen), _on_line(step, seen, one_side=True)
        # an evaluation away from the zero does not confirm it, nor does a curve that a far end has drawn
        error = max(abs(found - guess), abs(found - step), 0.0 if alone is None else abs(found - alone))
        guess = found
        below, above = _bracket(seen)
        if error <= rtol * guess:
            break
        step = guess if guess not in tried else guess * (1 + rtol / 2)
        if below and above and above > _WIDE * below and guess / 2 < error < math.inf:
            step = math.sqrt(below * above)  # the curve that was followed led astray
    if error > rtol * guess and all(value > 0 for value in tried.values()):
        guess = 0.0
    elif error > rtol * guess and not any(value > 0 or math.isnan(value) for value in tried.values()):
        guess = math.inf
    elif error > rtol * guess and below and above:
        guess = 2 / (1 / below + 1 / above)
        error = guess * (above - below) / (above + below)
    steps = sorted(tried)
    changes = torch.tensor([tried[one] for one in steps], dtype=torch.float64)
    return CriticalStep(guess, error, torch.tensor(steps, dtype=torch.float64), changes)


def _bracket(seen: dict[float, float]) -> tuple[float | None, float | None]:
    """Return the last step before the zero and the first one after it, as far as they are known."""
    below = max((step for step, value in seen.items() if value <= 0), default=None)
    above = min((step for step, value in seen.items() if value > 0 and (below is None or step > below)), default=None)
    return below, above


def _on_line(step: float, seen: dict[float, float], one_side: bool) -> float | None:
    """Return the zero of the line through a tried step and the nearest one (on its side), where that line rises."""
    here, others = seen[step], [one for one, value in seen.items() if one != step and math.isfinite(value)]
    others = [one for one in others if (seen[one] > 0) == (here > 0) or not one_side]
    if not others or math.isinf(here):
        return None
    other = min(others, key=lambda one: abs(one - step))
    bend = (here - seen[other]) / (step - other)
    return step - here / bend if bend > 0 else None


def _zero(seen: dict[float, float]) -> float:
    """Return where the mean slope is expected to be zero."""
    below, above = _bracket(seen)
    # all on one side: on the line through the two nearest to the zero, but not too far away
    if above is None:
        assert below is not None
        zero = _on_line(below, seen, one_side=False)
        return below * _FURTHER if zero is None else min(zero, below * _AT_MOST)
    if below is None:
        zero = _on_line(above, seen, one_side=False)
        return above * (1 / _FURTHER) if zero is None else max(zero, above * (1 / _AT_MOST))
    # between two steps: on the parabola through them and the nearest third one
    low, high = seen[below], seen[above]
    if math.isinf(high):
        return math.sqrt(below * above) if below else above / _FURTHER
    line = (high - low) / (above - below)
    others = [step for step, value in seen.items() if step not in (below, above) and math.isfinite(value)]
    if others:
        third = min(others, key=lambda step: abs(math.log((step or 1e-3 * above) / above)))
        bend = ((seen[third] - low) / (third - below) - line) / (third - above)
        b = line - bend * (above - below)  # low + b t + bend t^2 at below + t
        root = math.sqrt(max(b * b - 4 * bend * low, 0.0))
        t = -2 * low / (b + root) if b + root > 0 else math.nan
        if 0 <= t <= above - below:
            return below + t
    return below - low / line


_DOUBLINGS = 60
_SETTLED = 20, 4
"""After 20 doublings the network is noise: if 4 more change no draw, none will, as where it guesses."""
HALVINGS = 8  #: bisections of the last factor of 2: 0.3% of sigma, less if the mean is interpolated
_LEAST = 0.05  #: smallest lower end of the interval around the level, as a share of the level
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

    # a factor of 2 that holds the crossing
    low = high = start
    if above(start):
        while above(low := low / 2):
            if len(seen) > _DOUBLINGS:
                return None
        high = 2 * low
    else:
        while not above(high := high * 2):
            # a large noise whose last doublings changed nothing
            changes, (most, last) = [*seen.values()], _SETTLED
            settled = len(changes) > most + last and all(torch.equal(changes[-1], c) for c in changes[-1 - last : -1])
            if len(seen) > _DOUBLINGS or settled:
                return None
        low = high / 2
    # bisected
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if above(middle) else (middle, high)
    if not bool(torch.isfinite(seen[high]).all()):
        return None
    reach = 1.96 * float(skewed(seen[high])[1])
    ends = level + reach, max(level - reach, _LEAST * level)
    for _ in range(FURTHER):  # the interval's ends may lie beyond
        if float(seen[max(seen)].mean()) <= ends[0]:
            above(2 * max(seen))
        if float(seen[min(seen)].mean()) > ends[1]:
            above(min(seen) / 2)
    sigmas = sorted(seen)
    curve = torch.stack([seen[sigma] for sigma in sigmas])
    means = curve.mean(1).tolist()

    def crossed(level: float) -> float:
        """Return log sigma at the first crossing; between neighbours the mean is a power of sigma."""
        number = next((k for k, mean in enumerate(means) if not mean <= level), -1)
        if number <= 0:
            return math.log(sigmas[number])
        before, value = means[number - 1], means[number]
        if not math.isfinite(value):
            share = 1.0
        elif before > 0:
            share = math.log(level / before) / math.log(value / before)
        else:  # it is linear in log sigma where it is not positive
            share = (level - before) / (value - before)
        return math.log(sigmas[number - 1]) + share * math.log(sigmas[number] / sigmas[number - 1])

    log_sigma, up, down = map(crossed, (level, *ends))
    return Crossing(log_sigma, (up - down) / 2 / 1.96, torch.tensor(sigmas, dtype=torch.float64), curve)
