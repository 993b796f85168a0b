"""The largest step along a direction that does not raise a function, from few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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

    >>> found = critical_step(lambda step: -2 * step + 3 * step**2, 0.01, slope=-2.0)
    >>> round(found.step, 9), len(found.steps)
    (0.666666667, 2)
    """
    seen: dict[float, float] = {} if slope is None else {0.0: slope}  # mean slopes by step
    tried: dict[float, float] = {}
    step, guess, error = first, math.nan, math.inf
    for _ in range(_MOST):
        tried[step] = change(step)
        seen[step] = tried[step] / step if math.isfinite(tried[step]) else math.inf
        found = _zero(seen)
        # an evaluation away from the zero does not confirm it, nor does a curve that a far end has drawn
        error = max(abs(found - guess), abs(found - step), abs(found - _by_one_side(step, seen, found)))
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


def _zero(seen: dict[float, float]) -> float:
    """Return where the mean slope is expected to be zero."""
    below, above = _bracket(seen)
    if below is not None and above is not None:
        return _between(below, above, seen)
    end = below if above is None else above  # all on one side: the two nearest to the zero
    assert end is not None
    others = [step for step, value in seen.items() if step != end and math.isfinite(value)]
    least, greatest = (_FURTHER, _AT_MOST) if above is None else (1 / _AT_MOST, 1 / _FURTHER)
    if not others or math.isinf(seen[end]):
        return end * (_FURTHER if above is None else 1 / _FURTHER)
    other = min(others, key=lambda step: abs(step - end))
    bend = (seen[end] - seen[other]) / (end - other)
    if bend <= 0:
        return end * (_FURTHER if above is None else 1 / _FURTHER)
    zero = end - seen[end] / bend
    return min(zero, end * greatest) if above is None else max(zero, end * least)


def _by_one_side(step: float, seen: dict[float, float], otherwise: float) -> float:
    """Return the zero of the line through a tried step and the nearest one on its side, where that line rises."""
    here = seen[step]
    same = [one for one, value in seen.items() if one != step and math.isfinite(value) and (value > 0) == (here > 0)]
    if not same or math.isinf(here):
        return otherwise
    other = min(same, key=lambda one: abs(one - step))
    bend = (here - seen[other]) / (step - other)
    return step - here / bend if bend > 0 else otherwise


def _between(below: float, above: float, seen: dict[float, float]) -> float:
    """Return the zero between two steps of the parabola through them and the nearest third one."""
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
