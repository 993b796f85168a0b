"""Slices of the loss through a network, and the distance to which its quadratic holds.

    q(x) = L + x g^T d + x^2 d^T H d / 2,
    holds at x where |L(theta + x d) - q(x)| <= rtol max(|d^T H d| x^2 / 2, L / 100)

The right side is a share of the quadratic's own rise, that of its second order, or of a hundredth of the loss: nearer
to the network, the kinks of a ReLU would decide what nobody sees. Towards each side, looks at distances that grow by
`FACTOR` go on until the first failure; the last distance that held and the first that failed bracket the end, and are
brought together by bisection. A failure between two looks that held would be missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature import Hessian
from flatlens.curvature.space import dot
from flatlens.perturbation import Elsewhere

FACTOR = math.sqrt(2)  #: factor between distances
SEEN = 0.01  #: a rise below this share of the loss counts as one of this size
_HALVINGS = 6  #: bisections of the bracket, in the logarithm: its ends then differ by half a percent
_NEAREST = 100.0  #: the first look is where the allowed difference is this many roundings
_LONGEST = 64.0  #: looks end at this many times the norm of the weights


@dataclass(frozen=True, eq=False)
class Slice:
    """The loss along one direction through the network, with its quadratic."""

    name: str
    length: float  #: ||d||: the distance of the weights for x = 1
    first: float  #: g^T d
    second: float  #: d^T H d
    holds: tuple[tuple[float, float], tuple[float, float]]
    """Towards -d and towards d, in x: the farthest look to which the quadratic holds, and the first at which not.

    The first is 0 where rounding hides the nearest looks or they fail, the second inf where no look fails.
    """
    x: Tensor = field(repr=False)  #: (k,) float64
    loss: Tensor = field(repr=False)  #: (k,) float64, the risk at theta + x d

    @property
    def quadratic(self) -> Tensor:
        """The Hessian's quadratic at x, (k,)."""
        at = self.loss[len(self.loss) // 2]  # x = 0
        return at + self.x * self.first + self.x.square() * self.second / 2

    @property
    def nearest(self) -> tuple[float, float]:
        """The bracket of the side where the quadratic ends first, in x."""
        return min(self.holds, key=lambda side: side[1])


def sliced(
    elsewhere: Elsewhere,
    hessian: Hessian,
    direction: Tensor,
    name: str,
    x: Tensor,
    *,
    rtol: float,
    progress: Callable[[int, int], object] | None = None,
) -> Slice:
    """Return the slice along a direction (P,) at distances x, odd in number with 0 in the middle."""
    here = elsewhere.here
    named = elsewhere.space.named(direction)
    _, gradient = hessian.risk_and_gradient()
    first = dot(gradient.values(), [named[one] for one in gradient])
    second = hessian.quadratic(named)

    def loss(at: float) -> float:
        return elsewhere.outcomes(here + at * direction).risk

    values = []
    for done, at in enumerate(x.tolist()):
        values.append(loss(at))
        if progress is not None:
            progress(done + 1, len(x))
    centre, rounding = values[len(values) // 2], elsewhere.rounding()
    length = float(direction.norm(dtype=torch.float64))
    farthest = _LONGEST * max(float(here.norm(dtype=torch.float64)), 1.0) / max(length, 1e-300)
    sides = []
    for sign in (-1.0, 1.0):
        rest = partial(_without_first, loss, centre, first, sign)
        sides.append(_held(rest, second, rtol, rounding, farthest, SEEN * abs(centre)))
    of_losses = torch.tensor(values, dtype=torch.float64)
    return Slice(name, length, first, second, (sides[0], sides[1]), x.to(torch.float64), of_losses)


def _without_first(loss: Callable[[float], float], centre: float, first: float, sign: float, at: float) -> float:
    return loss(sign * at) - centre - sign * at * first


def _held(
    rest: Callable[[float], float], second: float, rtol: float, rounding: float, farthest: float, seen: float
) -> tuple[float, float]:
    """Return the bracket of the distance to which the loss without its first order is second x^2 / 2."""
    if second == 0 or not math.isfinite(second):
        return 0.0, 0.0

    def fails(at: float) -> bool:
        rise = second * at**2 / 2
        return not abs(rest(at) - rise) <= rtol * max(abs(rise), seen)

    good, bad = 0.0, math.sqrt(2 * _NEAREST * max(rounding, 1e-300) / (rtol * abs(second)))
    while bad <= farthest and not fails(bad):
        good, bad = bad, FACTOR * bad
    if bad > farthest:
        return good, math.inf
    for _ in range(_HALVINGS if good else 0):
        middle = math.sqrt(good * bad)
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return good, bad
