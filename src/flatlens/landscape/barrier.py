"""The barrier of a path: the largest loss along it less the chord, bracketed by the loss and its slope at some points.

    barrier = max over t in [0, 1] of E(t),   E(t) = L(t) - (1 - t) L(0) - t L(1)

The lower end of the bracket is the largest value that was seen. The upper end assumes that between two neighbouring
looks E'' is at most U: then E lies below both parabolas

    E(s) + E'(s) (t - s) + U (t - s)^2 / 2,   s either look,

and so below their intersection. U is `SAFETY` times the largest of the means of E'' over the interval and its
neighbours that values and slopes show, or `CONCAVE` times the largest of them in size. This is no proof: a spike
narrower than the looks are apart can be missed. The interval where the bound is largest is halved until the bracket is
narrow.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from flatlens.curvature.probes import student
from flatlens.curvature.space import dot
from flatlens.landscape.curve import Curve
from flatlens.perturbation import Elsewhere

SAFETY, CONCAVE = 2.0, 0.5  #: how many times the second derivative seen is assumed between looks
_NARROWEST = 2.0**-12  #: width of an interval that is not halved any more


@dataclass(frozen=True, eq=False)
class Look:
    """The loss at one point of a path."""

    t: float
    loss: float
    slope: float  #: the derivative in t
    samples: Tensor = field(repr=False)  #: each sample's loss, (n,) float64, their mean is the risk


@dataclass(frozen=True, eq=False)
class Barrier:
    """The barrier along one path, and where it was looked for."""

    looks: tuple[Look, ...]  #: by t, the ends included
    low: float  #: lower end of the bracket
    high: float  #: upper end of the bracket
    rounding: float  #: by how much rounding may move a value; both ends hold it
    unproved: str = ""  #: why the upper end is not proved; empty where it is

    def excess(self, look: Look) -> float:
        """Return E at a look."""
        return excess(self.looks[0], self.looks[-1], look)

    @property
    def top(self) -> Look:
        """Return the look with the largest excess; an end where none is above the chord."""
        return max(self.looks, key=self.excess)

    @property
    def value(self) -> float:
        """Return the largest excess seen: at least 0, its value at the ends."""
        return max(self.excess(self.top), 0.0)

    @property
    def stderr(self) -> float:
        """Return the standard error of the excess at the top over samples: how it varies with other such samples."""
        first, last, top = self.looks[0], self.looks[-1], self.top
        each = top.samples - first.samples - top.t * (last.samples - first.samples)
        return float(student(each)[1])


def excess(first: Look, last: Look, look: Look) -> float:
    """Return the loss less the chord between the ends."""
    if look.t in (0.0, 1.0):
        return 0.0
    return look.loss - first.loss - look.t * (last.loss - first.loss)


def look_at(elsewhere: Elsewhere, curve: Curve, t: float) -> Look:
    """Return the loss at one point and its slope, from a forward pass and a gradient."""
    theta = curve.at(t)
    found = elsewhere.outcomes(theta)
    _, gradient = elsewhere.slope(theta, elsewhere.chunks(), elsewhere.problem.mass)
    return Look(t, found.risk, dot([gradient], [curve.velocity(t)]), found.losses)


def bracketed(
    look: Callable[[float], Look],
    rounding: Callable[[float], float],
    *,
    points: int,
    most: int,
    enough: float,
    progress: Callable[[int, int], object],
) -> Barrier:
    """Return the barrier from `points` even looks, and more, up to `most`, until the bracket is below `enough`."""
    looks = []
    for k in range(points):
        looks.append(look(k / (points - 1)))
        progress(len(looks), points)
    first, last = looks[0], looks[-1]
    while True:
        best = max(max(excess(first, last, one) for one in looks), 0.0)
        bounds = upper_bounds(looks)
        top = max(range(len(bounds)), key=bounds.__getitem__)
        wide = looks[top + 1].t - looks[top].t > _NARROWEST
        if len(looks) >= most or not wide or bounds[top] - best <= max(enough, best / 20):
            break
        insort(looks, look((looks[top].t + looks[top + 1].t) / 2), key=lambda one: one.t)
        progress(len(looks), most)
    at = max(looks, key=lambda one: excess(first, last, one)).t
    error = 2 * rounding(at) if len({one.loss for one in looks}) > 1 else 0.0
    return Barrier(tuple(looks), max(best - error, 0.0), max(best, *bounds) + error, error, "it was not tried")


def upper_bounds(looks: list[Look]) -> list[float]:
    """Return the largest excess that is possible between each two neighbouring looks, under the assumed curvature.

    >>> import torch
    >>> none = torch.zeros(2)
    >>> upper_bounds([Look(0.0, 0.0, 4.0, none), Look(1.0, 0.0, -4.0, none)])  # 4 t (1 - t) has 1, its tangents 2
    [2.5]
    """
    first, last = looks[0], looks[-1]
    rise = last.loss - first.loss
    rows = [(one.t, excess(first, last, one), one.slope - rise) for one in looks]
    seen = []
    for (t, f, s), (u, g, r) in pairwise(rows):
        h = u - t
        means = 2 * (g - f - h * s) / h**2, 2 * (f - g + h * r) / h**2, (r - s) / h
        seen.append(max(SAFETY * max(means), CONCAVE * max(map(abs, means))))
    found = []
    for at, ((t, f, s), (u, g, r)) in enumerate(pairwise(rows)):
        h, U = u - t, max(seen[max(at - 1, 0) : at + 2])
        apart = s - r + U * h  # the parabolas' difference is linear in t
        crossing = (g - f - r * h + U * h**2 / 2) / apart if apart > 0 else math.inf
        inside = f + s * crossing + U * crossing**2 / 2 if 0 < crossing < h else -math.inf
        found.append(max(f, g, inside))
    return found
