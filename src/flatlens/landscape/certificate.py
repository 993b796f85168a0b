"""A proved upper end of a line's barrier, for chains of layers under cross-entropy.

On an interval of t with centre c and half-width r, every weight is W(c) + s D with |s| <= r, D = W(1) - W(0). Interval
arithmetic bounds, for each sample, the values z_l(t) and their derivatives z_l'(t) of each layer, and so the derivative
of its loss, sum_j p_j (f_j' - f_y'). The mean over samples bounds L' by [low, high], of width O(r); then

    E(t) <= min(E(u) + (t - u) (high - rise), E(v) - (v - t) (low - rise)),   u and v the ends of the interval

Each z_l is bounded twice, by the values of the layer below and by r |z_l'| about z_l(c). It is a proof but for the
rounding of float64, which the sums are widened for.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heapify, heappush, heapreplace
from itertools import pairwise

import torch
from torch import Tensor, nn

from flatlens.landscape.barrier import Barrier, Look
from flatlens.perturbation.inputs import Refused
from flatlens.perturbation.variation import AGREEMENT, MARGIN, Chain, read_chain
from flatlens.problem import Problem
from flatlens.problem.eval_context import copy_of
from flatlens.problem.losses import CrossEntropy

_WORK = 1e12  #: multiplications of a proof at most: a minute or two of one core
_PRODUCTS = 24  #: products of each matrix for a halving, which bounds two intervals
_FEWEST = 20  #: halvings below which no proof is tried

_Range = tuple[Tensor, Tensor]  # the least and the largest value of each entry


@dataclass(frozen=True, eq=False)
class MovingChain:
    """A chain whose weights move along a line, on all samples: bounds of the derivative of the mean loss in t."""

    first: Chain
    last: Chain
    data: list[tuple[Tensor, Tensor]]  #: chunks of (inputs (n, M) float64, labels (n,))

    @property
    def halvings(self) -> int:
        """Return how many times an interval may be halved with `_WORK` multiplications."""
        entries = sum(W.numel() for W, _ in self.first.maps)
        return int(_WORK // (_PRODUCTS * entries * sum(len(y) for _, y in self.data)))

    @classmethod
    def of(cls, problem: Problem, a: nn.Module, b: nn.Module, middle: nn.Module) -> MovingChain:
        """Return the chain between two networks, if they are one; `middle` is the network halfway."""
        plain = isinstance(problem.loss, CrossEntropy) and not problem.loss.settings
        if not plain or problem.coupled:
            raise Refused("only cross-entropy of labels, without weights or smoothing, and BatchNorm in eval mode")
        ends = [read_chain(problem, net) for net in (a, middle, b)]
        for (W, p), (V, q), (U, r) in zip(*(chain.maps for chain in ends), strict=True):
            for at, halfway, end in ((W, V, U), (p, q, r)):
                if float((halfway - (at + end) / 2).abs().max()) > AGREEMENT * (1 + float(halfway.abs().max())):
                    raise Refused("its maps are not linear in the weights")
        inputs, outputs = ends[0].maps[0][0].shape[1], len(ends[0].maps[-1][1])
        widest = max(inputs, *(len(b) for _, b in ends[0].maps))
        if problem.n * inputs * 8 > problem.memory // 4:
            raise Refused("its inputs in float64 do not fit in a quarter of the problem's memory")
        rows = max(1, problem.memory // (8 * (64 * widest + 8 * outputs**2)))
        data = []
        for raw in problem.batches(min(rows, 1 << 12)):
            x, y = problem.place(raw)
            if not isinstance(y, Tensor) or y.shape != (len(x),) or y.is_floating_point() or bool((y < 0).any()):
                raise Refused("the targets are not one label for each sample")
            data.append((x.to(torch.float64).flatten(1), y.to(torch.int64)))
        return cls(ends[0], ends[2], data)

    def slopes(self, u: float, v: float) -> tuple[float, float]:
        """Return bounds (low, high) of dL/dt over [u, v]."""
        n = sum(len(y) for _, y in self.data)
        parts = [self._of_chunk(x, y, (u + v) / 2, (v - u) / 2) for x, y in self.data]
        low, high = (sum(part[side] for part in parts) / n for side in (0, 1))
        return low - MARGIN, high + MARGIN

    def _of_chunk(self, x: Tensor, y: Tensor, c: float, r: float) -> tuple[float, float]:
        """Return bounds of the sum over samples of the derivatives of their losses, for t within r of c."""
        at = x  # the features at c, and the ranges of features and of their derivatives
        h: _Range = (x, x)
        dh: _Range = (torch.zeros_like(x), torch.zeros_like(x))
        activations = [*self.first.activations, None]
        for (W0, b0), (W1, b1), act in zip(self.first.maps, self.last.maps, activations, strict=True):
            W, b, D, d = torch.lerp(W0, W1, c), torch.lerp(b0, b1, c), W1 - W0, b1 - b0
            at = at @ W.mT + b
            z, dz = _moved(W, b, D, d, h, dh, r)
            reach = r * torch.maximum(dz[0].abs(), dz[1].abs())
            rounding = MARGIN * (1 + at.abs())
            z = torch.maximum(z[0], at - reach - rounding), torch.minimum(z[1], at + reach + rounding)
            if act is None:
                return _of_loss(z, dz, y)
            low, high = act.slopes(*z)
            products = torch.stack([slope * part for slope in (low, high) for part in dz])
            at, h, dh = act.value(at), act.values(*z), (products.amin(0), products.amax(0))
        raise AssertionError("a chain ends with a map")


def _moved(
    W: Tensor, b: Tensor, D: Tensor, d: Tensor, h: _Range, dh: _Range, r: float
) -> tuple[_Range, _Range]:  # fmt: skip
    """Return the ranges of z = W h + b and of z' = D h + W h' + b', with W within r |D| of its centre."""
    (m, s), (p, q) = (((high + low) / 2, (high - low) / 2) for low, high in (h, dh))
    most, slope = m.abs() + s, p.abs() + q
    around = s @ W.abs().mT + r * (most @ D.abs().mT + d.abs())
    rounding = MARGIN * (most @ (W.abs() + D.abs()).mT + b.abs() + d.abs() + slope @ W.abs().mT)
    centre, wide = m @ W.mT + b, around + rounding
    turned, spread = m @ D.mT + p @ W.mT + d, s @ D.abs().mT + q @ W.abs().mT + r * (slope @ D.abs().mT) + rounding
    return (centre - wide, centre + wide), (turned - spread, turned + spread)


def _of_loss(f: _Range, df: _Range, y: Tensor) -> tuple[float, float]:
    """Return bounds of the sum over samples of sum_j p_j (f_j' - f_y'), p the softmax of f."""
    (low, high), rows = f, torch.arange(len(y), device=y.device)
    others = ~torch.eye(low.shape[1], dtype=torch.bool, device=y.device)
    # p_j is largest where f_j is and the others are smallest
    gaps = low[:, None, :] - high[:, :, None], high[:, None, :] - low[:, :, None]  # of f_k - f_j
    most, least = (1 / (1 + (gap.exp() * others).sum(2)) for gap in gaps)
    g = df[0] - df[1][rows, y][:, None], df[1] - df[0][rows, y][:, None]
    g[0][rows, y] = g[1][rows, y] = 0.0
    up = torch.maximum(most * g[1], least * g[1]).sum(1)
    down = torch.minimum(most * g[0], least * g[0]).sum(1)
    return float(down.sum()), float(up.sum())


def proved_excess(
    chain: MovingChain, loss: Callable[[float], float], known: dict[float, float], *, enough: float, most: int
) -> float:
    """Return a number that the loss less its chord exceeds nowhere on [0, 1].

    The interval with the largest bound is halved until the bound is within `enough` of the largest value known, or
    `most` times; the bound is proved in either case. `known` has the loss at some t, the ends among them.
    """
    rise = known[1.0] - known[0.0]

    def excess(t: float) -> float:
        if t not in known:
            known[t] = loss(t)
        return known[t] - known[0.0] - t * rise

    def bound(u: float, v: float) -> float:
        low, high = (slope - rise for slope in chain.slopes(u, v))
        at, end, h = excess(u), excess(v), v - u
        if high <= 0 or low >= 0:
            return max(at, end)
        s = min(max((end - at - low * h) / (high - low), 0.0), h)  # where the two lines meet
        return max(at, end, at + high * s)

    ends = sorted(known)
    heap = [(-bound(u, v), u, v) for u, v in pairwise(ends)]
    heapify(heap)
    for _ in range(most):
        largest, u, v = heap[0]
        if -largest - max(excess(t) for t in ends) <= enough:
            break
        middle = (u + v) / 2
        ends.append(middle)
        heapreplace(heap, (-bound(u, middle), u, middle))
        heappush(heap, (-bound(middle, v), middle, v))
    return -heap[0][0]


def with_proof(
    problem: Problem, a: nn.Module, b: nn.Module, found: Barrier, look: Callable[[float], Look], *, enough: float,
    most: int,
) -> Barrier:  # fmt: skip
    """Return the barrier of the line between two networks with an upper end that is proved, where it can be.

    Looks are added where the bound is largest. Elsewhere the barrier is returned with the reason.
    """
    middle = copy_of(b, "a proof")
    with torch.no_grad():
        for p, start, end in zip(middle.parameters(), a.parameters(), b.parameters(), strict=True):
            p.copy_(torch.lerp(start.detach(), end.detach(), 0.5))
    try:
        with problem.measuring(a):
            chain = MovingChain.of(problem, a, b, middle)
    except Refused as why:
        return replace(found, unproved=str(why))
    if chain.halvings < _FEWEST:
        return replace(found, unproved="interval arithmetic on all samples would take too long")
    looks = list(found.looks)

    def loss(t: float) -> float:
        insort(looks, look(t), key=lambda one: one.t)
        return next(one.loss for one in looks if one.t == t)

    known = {one.t: one.loss for one in looks}
    enough = max(enough, found.value / 20)
    high = proved_excess(chain, loss, known, enough=enough, most=min(most, chain.halvings))
    seen = replace(found, looks=tuple(looks))
    low, high = max(seen.value - found.rounding, 0.0), max(high, seen.value) + found.rounding
    if high > max(found.high, seen.value + 2 * enough):
        loose = f"interval arithmetic alone gives {high:.3g}"
        return replace(seen, low=low, high=max(found.high, seen.value + found.rounding), unproved=loose)
    return replace(seen, low=low, high=high, unproved="")
