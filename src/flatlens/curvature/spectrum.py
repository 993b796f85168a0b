"""Eigenvalues of operators: the ends of the spectrum, its density, and closed forms for the block of one dense layer.

A dense layer's Hessian blocks come from factors of one pass:

H_l V    = mean_i (J_i^T C_i J_i) V phi_i phi_i^T    the layer's block of the Gauss-Newton matrix; it equals H_l where
                                                     the network above the layer is piecewise linear
H_{s,s}  = mean_i D_i[s,s] phi_i phi_i^T             the block of row s, D_i = J_i^T C_i J_i + the functional Hessian
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flatlens.curvature.krylov import (
    RANDOM_SHARE,
    Eigenpairs,
    Krylov,
    Remembered,
    length,
    mixed_start,
    recall,
    relative_residual,
)
from flatlens.curvature.leading import lanczos
from flatlens.curvature.operators import Operator
from flatlens.curvature.probes import mean_of_forms, skewed
from flatlens.deprecated_names import renamed
from flatlens.errors import BadInput
from flatlens.estimate import Progress
from flatlens.grams import Plan, one_pass
from flatlens.grams.weight_jacobians import DenseJacobian
from flatlens.problem import Problem
from flatlens.progress import PRODUCTS, ROWS

_SHARE = 8  #: the start vector is computed on every 8th sample...
_WORTH = 512  #: ...if there are at least this many samples
WARMING = 12  #: products on those samples
_SMALL = 64  #: with fewer parameters, old pairs give only the start vector, as they do for several eigenvalues
_RESOLVED = 0.75  #: width of a Gaussian, times steps / range, that Gauss quadrature integrates to 1%
_LONG = 40  #: products after which a search from old pairs continues with Lanczos


@renamed(top="top_k", bottom="bottom_k", tolerance="rtol")
def eigenpairs(
    operator: Operator,
    *,
    top_k: int = 1,
    bottom_k: int = 0,
    rtol: float = 1e-3,
    most: int = 300,
    start: Tensor | Remembered | None = None,
    share: int | None = None,
    keep: int = 0,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Return the largest and smallest eigenvalues of an operator, each with its vector and residual.

    Of several, each occurs as often as in the spectrum: `converged` says, with probability 99.9%, that no other one
    exceeds the last by more than 1% of the spectrum's range, which takes ten products or more. `eigenspace` also has
    the whole of a multiplet that the number cuts, and what lies in the space.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> pairs = eigenpairs(fl.curvature.Hessian(problem), top_k=2)
    >>> [round(float(value), 9) for value in pairs.values], pairs.converged  # 1 + |x|^2, for each of two outputs
    ([4.0, 4.0], True)

    Args:
        operator: The symmetric matrix, by its products.
        top_k: The number of largest eigenvalues.
        bottom_k: The number of smallest eigenvalues.
        rtol: The largest residual over the eigenvalue at which the search stops.
        most: The largest number of products.
        start: A vector for Lanczos, or the `remembered` pairs of an earlier search on the same operator. None is a
            mixture of the leading Ritz vectors of the operator on every 8th sample: `WARMING` products there cost as
            much as 1.5 on all samples, and save more.
        share: Compute the start on every `share`-th sample, also of little data.
        keep: The number of pairs to keep for the next search, as memory allows.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total).
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    for what, count, least in (("top_k", top_k, 1), ("bottom_k", bottom_k, 0), ("most", most, 1)):
        if not (isinstance(count, int) and count >= least):
            raise BadInput(f"eigenpairs({what}={count!r}): expected a whole number of at least {least}")
    if not (isinstance(rtol, int | float) and 0 < rtol < 1):
        raise BadInput("expected a number between 0 and 1", argument="rtol", value=rtol, call="eigenpairs")
    vector = start.vectors[0] if isinstance(start, Remembered) else start
    if vector is not None and not (isinstance(vector, Tensor) and vector.shape == (operator.size,)):
        got = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
        raise BadInput(f"expected a tensor of shape ({operator.size},), got {got}", argument="start", call="eigenpairs")
    vectors = operator.problem.memory // (operator.size * operator.dtype.itemsize)  # that fit in the memory
    room, keep = max(8, vectors // 4), min(keep, max(top_k + bottom_k, vectors // 16))
    before, spent, random = operator.products, 0, 0.0
    # from old pairs by their model of the matrix; where it does not converge, Lanczos begins at what it found
    if isinstance(start, Remembered):
        known, fresh = start, _random(operator, generator)
        start = mixed_start(known, top_k + bottom_k, fresh)
        if bottom_k == 0 and top_k == 1 and operator.size >= _SMALL:
            most_here = min(most, room, _LONG)
            pairs = recall(operator, known, fresh, rtol=rtol, most=most_here, keep=keep, progress=progress)
            spent = pairs.products
            if pairs.converged or spent == most:
                return pairs
            start, random = pairs.vectors.sum(0), 0.0
    if start is None:
        start, random = _warm_start(operator, generator, share)
        before = operator.products
    start, most, room = start.to(operator.space.device, operator.dtype), most - spent, min(most, room)
    pairs = lanczos(
        operator, start, top_k=top_k, bottom_k=bottom_k, rtol=rtol, most=most, room=room, keep=keep, random=random,
        generator=generator, progress=progress,
    )  # fmt: skip
    assert operator.products - before == pairs.products + spent
    return replace(pairs, products=pairs.products + spent)


def _random(operator: Operator, generator: torch.Generator) -> Tensor:
    draws = torch.randn(operator.size, generator=generator, dtype=torch.float64)
    return draws.to(operator.space.device, operator.dtype)


def _warm_start(operator: Operator, generator: torch.Generator, share: int | None = None) -> tuple[Tensor, float]:
    """Return (a mixture of the leading Ritz vectors on a part of the data, the share of it that is random)."""
    fresh = _random(operator, generator)
    if (operator.problem.n < _WORTH and share is None) or operator.size < 4 * WARMING:  # on little data all is random
        return fresh, 1.0
    share = share or _SHARE
    small = operator.on_every(share)
    krylov = Krylov(small, fresh, WARMING)
    while not krylov.full:
        krylov.extend()
        if krylov.beta == 0:
            break
    operator.products += -(-krylov.products // share)
    theta, S, _ = krylov.ritz()
    weight = (theta.clamp(min=0) / theta.abs().max().clamp(min=1e-300)).square()
    mixed = krylov.vectors((S * weight).sum(1, keepdim=True))[0]
    norm = float(mixed.norm())
    if norm == 0:
        return fresh, 1.0
    new = _random(operator, generator)  # not `fresh`, on which the mixture depends
    return mixed / norm + RANDOM_SHARE * new / length(new), RANDOM_SHARE / (1 + RANDOM_SHARE)


@dataclass(frozen=True, eq=False)
class Density:
    """A spectrum smoothed by a Gaussian of width `width`, with a standard error at each point of the grid.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> density = fl.curvature.spectral_density(fl.curvature.Hessian(problem))
    >>> bool((density.density >= 0).all())
    True
    """

    grid: Tensor  #: (points,) float64
    density: Tensor  #: (points,) per unit of eigenvalue, integrates to 1
    stderr: Tensor  #: (points,)
    width: float  #: standard deviation of the Gaussian, in units of eigenvalue
    rms: float  #: root mean square eigenvalue, ||A||_F / sqrt(P)
    rms_stderr: float
    nodes: Tensor  #: (probes, steps) quadrature nodes, padded with NaN
    weights: Tensor  #: (probes, steps), the nodes' weights


@renamed(width="bandwidth")
def spectral_density(
    operator: Operator,
    *,
    probes: int = 8,
    steps: int = 40,
    points: int = 400,
    bandwidth: float | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Density:
    """Return the density of eigenvalues by stochastic Lanczos quadrature.

    It is the mean over random vectors of the Gauss quadrature from Lanczos steps; the standard error is over the
    vectors. The root mean square is that of ||H v|| over vectors of length 1, and needs no quadrature.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> density = spectral_density(fl.curvature.Hessian(problem))
    >>> density.grid.shape == density.density.shape
    True

    Args:
        operator: The symmetric matrix, by its products.
        probes: The number of random vectors, at least 2.
        steps: The number of Lanczos steps of each.
        points: The number of points of the curve.
        bandwidth: The width of the kernel. None is 1% of the spectrum's range, or 0.75 / `steps` of it if that is more
            and the matrix has more rows than `steps`: the quadrature does not resolve finer detail, and no error over
            probes would show it.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total).
    """
    if not (isinstance(probes, int) and probes >= 2 and isinstance(steps, int) and steps >= 1):
        raise BadInput(f"spectral_density(probes={probes!r}, steps={steps!r}): expected at least 2 probes and 1 step")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    nodes = torch.full((probes, min(steps, operator.size)), torch.nan, dtype=torch.float64)
    weights, squares = torch.zeros_like(nodes), torch.zeros(probes, dtype=torch.float64)
    # the nodes and weights of each probe's quadrature
    open_ended = False  # whether some basis ended before it was invariant
    for probe in range(probes):
        krylov = Krylov(operator, _random(operator, generator), steps)  # signs of few probes can agree by chance
        while not krylov.full:
            krylov.extend()
            if krylov.steps == 1:
                squares[probe] = krylov.T[0, 0].square() + krylov.beta**2  # ||H v||^2
            if progress is not None:
                progress(PRODUCTS, probe * steps + krylov.products, probes * steps)
            if krylov.beta == 0:
                break
        open_ended |= krylov.beta > 0 and krylov.steps < operator.size
        theta, S, _ = krylov.ritz()
        nodes[probe, : len(theta)], weights[probe, : len(theta)] = theta, S[0].square()
    # the curve, on a grid somewhat wider than the nodes
    seen = nodes[~nodes.isnan()]
    low, high = float(seen.min()), float(seen.max())
    size = max(abs(low), abs(high))
    spread = high - low if high - low > 1e-6 * size else size or 1.0
    finest = _RESOLVED / nodes.shape[1] if open_ended else 0.0
    width = max(0.01, finest) * spread if bandwidth is None else bandwidth
    grid = torch.linspace(low - 4 * width, high + 4 * width, points, dtype=torch.float64)
    bumps = torch.exp(-0.5 * ((grid - nodes.nan_to_num()[..., None]) / width).square()) / (
        width * (2 * torch.pi) ** 0.5
    )
    density, stderr = skewed((weights[..., None] * bumps).sum(1))
    # the root of the mean square; the wider side of its mapped interval counts: linearised, it would be too narrow
    square, square_stderr = (float(v) for v in mean_of_forms(squares))  # one eigenvalue may dominate
    rms, reach = max(square, 0.0) ** 0.5, 1.96 * square_stderr
    down, up = rms - max(square - reach, 0.0) ** 0.5, max(square + reach, 0.0) ** 0.5 - rms
    return Density(grid, density, stderr, width, rms, max(down, up) / 1.96, nodes, weights)


SMALL_MATRIX = 200  #: up to this size all eigenvalues of a matrix are computed; beyond it Lanczos finds the largest


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """The factors of a dense layer's block: J (n, N, d), C (n, N, N), phi (n, m), in the network's dtype."""

    J: Tensor
    C: Tensor
    phi: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """Return H_l v, (d m,), for v (d m,)."""
        V = v.reshape(self.J.shape[2], self.phi.shape[1])
        u = self.J @ (self.phi @ V.T)[..., None]
        back = (self.J.mT @ (self.C @ u))[..., 0]
        return (back.T @ self.phi / len(self.phi)).reshape(-1)

    def largest(self, rtol: float, progress: Progress | None = None) -> Eigenpairs:
        """Return the largest eigenvalue of the block, and its eigenvector."""
        size, generator = self.J.shape[2] * self.phi.shape[1], torch.Generator().manual_seed(0)
        start = torch.randn(size, generator=generator, dtype=torch.float64)
        return lanczos(self, start.to(self.phi), rtol=rtol, progress=progress)


def dense_blocks(
    problem: Problem, model: nn.Module, plan: Plan, layers: Iterable[str], progress: Progress | None = None
) -> dict[str, DenseBlock]:
    """Return the factors of those layers that are dense, and whose factors fit in half the memory, from one pass."""
    gathered: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for layer in layers:
        _, d, m = plan.weights[layer].matrix.W.shape
        numbers = problem.n * (problem.outputs * (d + problem.outputs) + m)
        if plan.weights[layer].dense and numbers * problem.dtype.itemsize <= problem.memory // 2:
            gathered[layer] = []
    if not gathered:
        return {}
    Cs: list[Tensor] = []
    with closing(one_pass(problem, model, plan, None, progress, {"C", "K"})) as chunks:
        for chunk in chunks:
            for layer, parts in gathered.items():
                jacobian = chunk.layers[layer].weight
                assert isinstance(jacobian, DenseJacobian)
                parts.append((jacobian.J.to(problem.dtype, copy=True), jacobian.phi))
            Cs.append(next(iter(chunk.layers.values())).C.to(problem.dtype))
    C = torch.cat(Cs)
    return {
        layer: DenseBlock(torch.cat([J for J, _ in parts]), C, torch.cat([phi for _, phi in parts]))
        for layer, parts in gathered.items()
    }


def row_block_maxima(D: Tensor, phi: Tensor, rtol: float, progress: Progress | None = None) -> tuple[Tensor, float]:
    """Return (lmax(mean_i D_is phi_i phi_i^T) by row s, (d,); largest relative residual), of D (n, d), phi (n, m)."""
    phi, maxima, share = phi.to(torch.float64), [], 0.0
    for s, weight in enumerate(D.to(torch.float64).T):
        if phi.shape[1] <= SMALL_MATRIX:
            maxima.append(torch.linalg.eigvalsh((phi * weight[:, None]).T @ phi / len(phi))[-1])
        else:

            def apply(v: Tensor, weight: Tensor = weight) -> Tensor:
                return phi.T @ (weight * (phi @ v)) / len(phi)

            start = phi.T @ weight if bool(weight.any()) else torch.ones_like(phi[0])
            found = lanczos(apply, start + 1e-3 * start.norm() * torch.ones_like(start), rtol=rtol)
            maxima.append(found.values[0])
            share = max(share, relative_residual(float(found.residuals[0]), found.largest))
        if progress is not None:
            progress(ROWS, s + 1, D.shape[1])
    return torch.stack([value.cpu() for value in maxima]), share
