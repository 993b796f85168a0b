"""The change of the risk under delta A as a series in delta: its leading coefficient, and the size of the rest.

Theorems of relative2021 end in "+ O(delta^3)". An inequality with an unknown constant cannot be checked, so the rest is
observed: the change of the risk is computed at delta, delta/2 and delta/4 along the same A, and the rest is the part
that no multiple of delta^2 explains. No curvature is used here, so that the two sides of a claim stay independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatlens.bounds.claim import Assumption
from flatlens.bounds.context import Context
from flatlens.curvature.probes import student
from flatlens.perturbation.features import RotatedFeatures

_STEPS = (1.0, 0.5, 0.25, 1 / 32)  #: multiples of delta; the last one shows whether the series differs nearer to 0
AT_ZERO = (1 / 45, -20 / 45, 64 / 45, 0.0)  #: weights of the four steps that give a from a + c delta^2 + e delta^4
RESOLVED = 0.01  #: largest accepted relative error of the leading coefficient
PAIRS = 512  #: largest number of pairs A and -A of a balanced set; if more are needed, rotations are random
_DRAWS = 32  #: number of random rotations
WATCHED, RUNGS = 4, 12  #: number of matrices A, and of values of delta, from which orders are found
SETTLED = 0.05  #: largest change of an order from one delta to the next


@dataclass(frozen=True, eq=False)
class Expansion:
    """A series M(delta) = a delta^2 + c delta^4 + ..., where M is the mean of the changes along A and -A."""

    delta: float  #: the largest step
    quotients: Tensor  #: M / delta^2 at the steps for each A, (4, draws)
    floor: float  #: rounding error of the third quotient
    exact: bool  #: true if the mean of a quadratic form over the draws equals its mean over all rotations
    apart: float = 0.0  #: difference between a and its value from a series nearer to 0, less rounding

    @property
    def mean(self) -> Tensor:
        """Return the mean over A, (4,)."""
        return self.quotients.mean(1)

    @property
    def change(self) -> float:
        """Return M(delta)."""
        return self.delta**2 * float(self.mean[0])

    @property
    def leading(self) -> float:
        """Return a, extrapolated from the first three quotients: its error is of order delta^6."""
        return float(self.mean @ torch.tensor(AT_ZERO, dtype=torch.float64))

    @property
    def rest(self) -> float:
        """Return M(delta) - a delta^2."""
        return self.change - self.delta**2 * self.leading

    @property
    def error(self) -> float:
        """Return the relative error of a: the largest of three differences, plus rounding.

        The differences are: a from three steps against a from two; a against the quotient nearest to 0; `apart`.
        """
        two = float(4 * self.mean[2] - self.mean[1]) / 3
        if not bool(self.quotients.any()):  # nothing changes, for any A
            return 0.0
        rests = 2 * _STEPS[3] ** 2 * float((self.mean[0] - self.leading).abs())
        far = max(0.0, abs(self.leading - float(self.mean[3])) - rests - self.floor * (_STEPS[2] / _STEPS[3]) ** 2)
        off = max(abs(self.leading - two), far, self.apart) + self.floor
        return off / abs(self.leading) if self.leading else math.inf

    @property
    def stderr(self) -> float:
        """Return the standard error of the leading term of M(delta): 0 if the draws are balanced."""
        if self.exact:
            return 0.0
        return self.delta**2 * float(student(torch.tensor(AT_ZERO, dtype=torch.float64) @ self.quotients)[1])

    @property
    def resolved(self) -> Assumption:
        """Return the assumption that the steps are small enough for the series, and large enough for the arithmetic."""
        holds = self.error <= RESOLVED
        why = "" if holds else f"at delta = {self.delta:.3g} the leading term is known to {self.error:.1g} of its size"
        return Assumption("resolved_expansion", holds, why)


def series(context: Context, features: RotatedFeatures, moves: Tensor, delta: float, exact: bool) -> Expansion:
    """Return the series for the given moves W A, (draws, g, d, m); each move is taken with both signs."""
    quotients = torch.empty(len(_STEPS), len(moves), dtype=torch.float64)
    for number, move in enumerate(moves):
        for k, step in enumerate(_STEPS):
            there = step * delta * move
            quotients[k, number] = (features.change(there) + features.change(-there)) / (2 * (step * delta) ** 2)
        if context.progress is not None:
            context.progress("moved features", number + 1, len(moves))
    floor = rounding_of(context, features, delta**2 * float(quotients[0].abs().max())) / (_STEPS[2] * delta) ** 2
    return Expansion(delta, quotients, floor, exact)


def looked_at_twice(context: Context, features: RotatedFeatures, moves: Tensor, found: Expansion) -> Expansion:
    """Return the series with its difference from a second series that starts four times nearer to 0."""
    nearer = series(context, features, moves, found.delta / 4, found.exact)
    return replace(found, apart=max(0.0, abs(found.leading - nearer.leading) - 3 * nearer.floor))


def rounding_of(context: Context, features: RotatedFeatures, change: float) -> float:
    """Return the rounding error of a change of the risk."""
    return 8 * torch.finfo(context.lens.problem.dtype).eps * (abs(features.risk) + abs(change))


def first_step(context: Context) -> float:
    """Return the first delta to try; in low precision it cannot be small."""
    return 0.1 if context.lens.problem.dtype == torch.float64 else 0.3


def averaged(context: Context, features: RotatedFeatures) -> Expansion:
    """Return the mean series over rotations drawn from Haar's law.

    Delta is divided by 4, at most three times, until the error of the leading coefficient is small.
    """
    moves = features.balanced(PAIRS, context.generator)
    exact = moves is not None
    if moves is None:
        drawn = [features.draw(1.0, "rotations", 1.0, context.generator) for _ in range(_DRAWS)]
        moves = torch.stack(drawn)
    delta, best = first_step(context), None
    for _ in range(4):
        found = looked_at_twice(context, features, moves, series(context, features, moves, delta, exact))
        best = found if best is None or found.error < best.error else best
        if best.error <= RESOLVED / 100:
            break
        delta /= 4
    assert best is not None
    return best


@dataclass(frozen=True)
class Order:
    """The observed order p of a remainder that falls like delta^p."""

    value: float  #: infinite if there is no remainder beyond rounding
    settled: Assumption


def orders(context: Context, features: RotatedFeatures) -> tuple[Order, Order]:
    """Return the orders of two remainders of E_F(delta A), from a few random A.

    The first is of the mean over A and -A, without its second-order term; the second of A alone, without its terms of
    first and second order.
    """
    moves = [features.draw(1.0, "rotations", 1.0, context.generator) for _ in range(WATCHED)]
    _, G = features.slope(torch.zeros_like(features.W))
    deltas = first_step(context) * 0.5 ** torch.arange(RUNGS, dtype=torch.float64)
    even, single = torch.empty(2, RUNGS, WATCHED, dtype=torch.float64)
    for number, move in enumerate(moves):
        slope = float((G * move).sum())
        for k, delta in enumerate(deltas.tolist()):
            ahead, back = features.change(delta * move), features.change(-delta * move)
            even[k, number], single[k, number] = (ahead + back) / 2, ahead - delta * slope
    floors = rounding_of(context, features, 0.0) / deltas.square()
    return tuple(order_of(part / deltas[:, None].square(), floors) for part in (even, single))  # type: ignore[return-value]


def order_of(quotients: Tensor, floors: Tensor) -> Order:
    """Return the order of a remainder from remainder / delta^2, known up to a constant.

    Differences between successive deltas do not contain the constant; they are taken as root mean squares over A. The
    order is read at the smallest delta at which rounding is negligible.

    Args:
        quotients: remainder / delta^2 plus a constant, (deltas, draws); each delta is half of the one before.
        floors: rounding errors of the quotients, (deltas,).

    >>> rungs = 0.5 ** torch.arange(6, dtype=torch.float64)
    >>> order_of(1 + rungs[:, None] ** 2, torch.zeros(6)).value
    4.0
    """
    differences = (quotients[1:] - quotients[:-1]).square().mean(1).sqrt()
    size = quotients.abs().amax(1)[1:]
    above = differences > 100 * (floors[1:] + torch.finfo(quotients.dtype).eps * size)
    count = len(above) if bool(above.all()) else int((~above).int().argmax())
    if count == 0:
        hidden = bool(100 * floors[1] > 1e-6 * size[0]) and bool(size.any())
        return Order(math.inf, Assumption("settled_order", not hidden, "rounding hides the rest" if hidden else ""))
    seen = 2 + (differences[: count - 1] / differences[1:count]).log2()
    if len(seen) < 2:
        return Order(math.nan, Assumption("settled_order", False, "rounding hides the rest"))
    moved = abs(float(seen[-1] - seen[-2]))
    why = "" if moved <= SETTLED else f"the order still changes by {moved:.2g} from delta to delta/2"
    return Order(float(seen[-1]), Assumption("settled_order", not why, why))
