"""A search for the variation of the input-output Jacobian in a ball around every sample: a lower bound."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from flatlens.estimate import Progress
from flatlens.grams.sketch import random_signs
from flatlens.perturbation.inputs import ROUNDINGS, Inputs, inputs_of, require_seen
from flatlens.problem import Problem

POOL = 128  #: points drawn in a ball; all their pairs are compared
FEW, COVERING = 3, 512  #: up to FEW dimensions, COVERING points come near every kink
MANY, SPARSE = 256, 16  #: above MANY dimensions random pairs differ alike: SPARSE points, as moving them finds far more
INSIDE = 1 - 1e-6  #: a kink that only touches the ball's boundary does not count
AROUND = 4  #: pairs of points near each end of a pair that show the rounding error of its Jacobian
NUDGE = 4  #: their distance, in roundings of the input; as a share of the ball's radius at most NUDGE / ROUNDINGS
SHORTEST = 1e-3  #: step, in units of the ball's radius, below which a search starts again with long steps


def found_variation(
    problem: Problem,
    model: nn.Module,
    delta: float,
    *,
    restarts: int,
    steps: int,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Tensor:
    """Return lower bounds of sup ||Jf(u) - Jf(v)||_2 over the balls of radius `delta` around the samples, (n,) float64.

    sharpening Eq. (5), for the Jacobian, in output / input; `delta` is in the input's units. The random points with the
    most different Jacobians make `restarts` disjoint pairs, and each pair is moved uphill `steps` times. The rounding
    error of its Jacobians is taken off the difference. Raises `Refused`.
    """
    parts: list[Tensor] = []
    with problem.measuring(model):
        for inputs in inputs_of(problem, model, lambda width: pool_size(width, restarts), lambda k: k):
            norm = float(inputs.x.norm(dim=1).max())
            if norm > 0:
                require_seen(f"delta={delta!r}", delta / norm, problem.dtype)
            parts.append(_Pairs(inputs, delta, restarts, generator).climb(steps).cpu())
            if progress is not None:
                progress("local variation", sum(map(len, parts)), problem.n)
    return torch.cat(parts)


@final
class _Pairs:
    """Pairs of points in each sample's ball, in units of its radius, moved so that their Jacobians differ more."""

    def __init__(self, inputs: Inputs, delta: float, restarts: int, generator: torch.Generator) -> None:
        self.inputs, self.restarts, self.generator = inputs, restarts, generator
        rounding = torch.finfo(inputs.x.dtype).eps / 2 * (inputs.x.to(torch.float64).norm(dim=1) + delta)
        self.delta: Tensor = (delta * INSIDE - rounding)[:, None, None]  #: rounded points stay in the ball
        pool = in_ball(len(inputs.x), inputs.x.shape[1], restarts, generator).to(inputs.x.device)
        J = inputs.jacobians(self._at(pool)).reshape(*pool.shape[:2], -1, pool.shape[2])
        self.scale = J.flatten(2).norm(dim=2).max(1, keepdim=True).values
        self.rounding = ROUNDINGS * torch.finfo(inputs.x.dtype).eps * self.scale
        ends = farthest_pairs(J.flatten(2), restarts, self.rounding)
        rows = torch.arange(len(pool), device=pool.device)[:, None]
        self.w = [pool[rows, end] for end in ends]  # (n, restarts, M) each
        self.J = [J[rows, end] for end in ends]
        self.top = largest_singular(self.J[0] - self.J[1])
        self.length = [torch.ones_like(self.top[0]) for _ in ends]
        self.stuck = [torch.zeros_like(self.top[0], dtype=torch.bool) for _ in ends]

    def climb(self, steps: int) -> Tensor:
        """Return the largest norm found, less its rounding error, (n,)."""
        for _ in range(steps):
            for end in (0, 1):
                self._move(end)
        found = torch.where(self.top[0] > self.rounding, self.top[0], 0.0)
        return (found - self._lost()).clamp(min=0).max(1).values

    def _lost(self) -> Tensor:
        """Return the rounding error of each pair's difference, (n, restarts).

        That of a Jacobian is at least one rounding of its length. It is larger where derivatives cancel inside the
        network. Two things show it: second differences over the shortest moves, as there is no room for a curvature,
        and J^T u from one backward pass beside that from the rows of J, as in the certificate of `grams`.
        """
        eps, generator = torch.finfo(self.inputs.x.dtype).eps, torch.Generator().manual_seed(0)
        J = torch.cat(self.J, 1)
        points = self._at(torch.cat(self.w, 1))
        error = eps * J.flatten(2).norm(dim=2)
        for _ in range(AROUND):
            d = NUDGE * eps * points.abs() * random_signs(points.shape, points, generator)
            ahead, behind = (self.inputs.jacobians(points + s * d).reshape(J.shape) for s in (1, -1))
            error = torch.maximum(error, ((ahead + behind) / 2 - J).flatten(2).norm(dim=2))
            u = torch.randn(J.shape[:3], generator=generator).to(J)  # of float32, which the network's dtype holds
            pulled = self.inputs.pulled_back(points, u.flatten(0, 1)).reshape(*J.shape[:2], -1)
            apart = ((u[:, :, None] @ J)[:, :, 0] - pulled).norm(dim=2)
            error = torch.maximum(error, apart.amax(1, keepdim=True))  # of all ends: it sees no kinks between points
        ends = torch.stack(error.chunk(2, 1))
        return 2 * ends.sum(0)  # the largest of many differences has the largest rounding, too

    def _move(self, end: int) -> None:
        """Move one end of each pair if that makes the norm larger; steps grow after success and shrink after failure.

        The direction is uphill. If no slope shows, or if the last uphill step failed, direction and length are random.
        """
        sign, other = 1 - 2 * end, self.J[1 - end]
        norm, uphill = unit(sign * self._slope(end))
        informed = (norm > self.rounding) & ~self.stuck[end]
        step = torch.where(informed[..., None], self.length[end][..., None] * uphill, self._anywhere())
        w = self.w[end] + step
        w = w / w.norm(dim=2, keepdim=True).clamp(min=1)
        J = self.inputs.jacobians(self._at(w)).reshape(other.shape)
        top = largest_singular(sign * (J - other))
        better = top[0] > self.top[0] + self.rounding
        self.w[end], self.J[end] = _chosen(better, w, self.w[end]), _chosen(better, J, self.J[end])
        self.top = tuple(_chosen(better, new, old) for new, old in zip(top, self.top, strict=True))
        length = self.length[end] * torch.where(informed, torch.where(better, 1.5, 0.5), 1.0)
        self.length[end] = torch.where(length < SHORTEST, 1.0, length.clamp(max=1))
        self.stuck[end] = informed & ~better

    def _slope(self, end: int) -> Tensor:
        """Return the gradient of s^T J t at one end, (n, restarts, M), up to a factor > 0.

        s and t are the top singular vectors. The derivative of s^T J t is that of J^T s along t. It is taken as a
        difference over part of the next step. This sees the kinks of piecewise linear networks, whose second derivative
        is 0 elsewhere.
        """
        _, s, t = self.top
        apart = self.length[end][..., None] * t / 4
        points = torch.cat([self.w[end] + apart, self.w[end] - apart], 1)
        ahead, behind = self.inputs.pulled_back(self._at(points), s.repeat(1, 2, 1).flatten(0, 1)).reshape(
            len(s), 2, *t.shape[1:]).unbind(1)  # fmt: skip
        return ahead - behind

    def _anywhere(self) -> Tensor:
        """Return a step in a random direction, of a length between the ball's diameter and a 256th of it."""
        n, restarts, width = self.w[0].shape
        directions = torch.randn(n, restarts, width, generator=self.generator, dtype=torch.float64)
        lengths = 2 * 4.0 ** (-4 * torch.rand(n, restarts, 1, generator=self.generator, dtype=torch.float64))
        return (lengths * unit(directions)[1]).to(self.w[0])

    def _at(self, w: Tensor) -> Tensor:
        """Return the inputs at (n, k, M) in units of the ball, (n k, M)."""
        points = self.inputs.x[:, None].to(torch.float64) + self.delta * w
        return points.flatten(0, 1).to(self.inputs.x.dtype)


def pool_size(width: int, restarts: int) -> int:
    """Return the number of points to draw in each ball.

    >>> pool_size(2, 4), pool_size(64, 4), pool_size(3072, 4), pool_size(3072, 10)
    (512, 128, 16, 40)
    """
    return max(COVERING if width <= FEW else SPARSE if width > MANY else POOL, 4 * restarts)


def in_ball(n: int, width: int, restarts: int, generator: torch.Generator) -> Tensor:
    """Return random points of the unit ball in opposite pairs, half of them on its rim, (n, pool, width) float64."""
    pairs = pool_size(width, restarts) // 2
    directions = unit(torch.randn(n, pairs, width, generator=generator, dtype=torch.float64))[1]
    radii = torch.rand(n, pairs, 1, generator=generator, dtype=torch.float64)
    radii[:, ::2] = 1.0
    return torch.cat([radii * directions, -radii * directions], 1)


def farthest_pairs(points: Tensor, count: int, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Return `count` disjoint pairs far apart from each set of points (n, k, D), the farthest first.

    The result is two tensors of indices, (n, count). Among distances equal within `rounding`, (n, 1), the first is
    taken, so that rounding decides nothing.

    >>> farthest_pairs(torch.tensor([[[0.0], [5.0], [1.0], [3.0]]]), 2, torch.tensor([[1e-6]]))
    (tensor([[0, 2]]), tensor([[1, 3]]))
    """
    centred = points - points.mean(1, keepdim=True)  # less cancellation in the distances
    far = torch.cdist(centred, centred, compute_mode="use_mm_for_euclid_dist")
    rows, pairs = torch.arange(len(far), device=far.device), []
    for _ in range(count):
        alike = far.flatten(1) >= far.flatten(1).max(1, keepdim=True).values - rounding
        flat = alike.to(torch.uint8).argmax(1)
        pairs.append((flat // far.shape[1], flat % far.shape[1]))
        for end in pairs[-1]:
            far[rows, end], far[rows, :, end] = -1.0, -1.0
    return torch.stack([a for a, _ in pairs], 1), torch.stack([b for _, b in pairs], 1)


def largest_singular(D: Tensor) -> tuple[Tensor, ...]:
    """Return (sigma, s, t): the largest singular value of matrices (..., N, M) and its vectors, s^T D t = sigma.

    >>> sigma, s, t = largest_singular(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
    >>> float(sigma), float(s @ torch.tensor([[3.0, 0.0], [0.0, -4.0]]) @ t)
    (4.0, 4.0)
    """
    A = D if D.shape[-2] <= D.shape[-1] else D.mT
    s = torch.linalg.eigh(A @ A.mT).eigenvectors[..., -1]
    sigma, t = unit((s[..., None, :] @ A)[..., 0, :])
    return (sigma, s, t) if A is D else (sigma, t, s)


def unit(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (norms, vectors (..., M) of norm 1); 0 stays 0."""
    norm = v.norm(dim=-1)
    return norm, v / torch.where(norm > 0, norm, 1.0)[..., None]


def _chosen(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the new value where it is better, by pair (n, restarts)."""
    return torch.where(better.reshape(better.shape + (1,) * (new.ndim - 2)), new, old)
