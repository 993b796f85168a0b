"""The steepest secant of a given length from every sample, by gradient ascent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatlens.estimate import Progress
from flatlens.grams.sketch import random_signs
from flatlens.perturbation.inputs import ROUNDINGS, Inputs, inputs_of, require_seen
from flatlens.problem import Problem

ROUNDED = 2.0  #: rounding error of a difference of outputs, in units of that of the outputs
NEAR = 4  #: pairs of points near each start that show the outputs' rounding error


def steepest_secants(
    problem: Problem,
    model: nn.Module,
    delta: float,
    *,
    restarts: int,
    steps: int,
    generator: torch.Generator,
    normalized: bool = False,
    progress: Progress | None = None,
) -> tuple[Tensor, int]:
    """Return (max ||f(x_i + d) - f(x_i)|| / ||d|| over ||d|| = delta ||x_i||, (n,) float64; how many are rounding).

    compression Eq. (47). Each number is a lower bound of the maximum: the largest found by `restarts` gradient ascents
    of `steps` steps. It is NaN where x_i = 0, and infinite where the search met outputs that are not finite.
    `normalized` multiplies it by ||x_i||. The search takes differences of outputs in the model's dtype. What it found
    is evaluated in float64, where the network runs in it; else the rounding error is taken off. Raises `Refused`.

    >>> net = nn.Linear(2, 1, dtype=torch.float64)
    >>> with torch.no_grad():
    ...     _ = net.weight.copy_(torch.tensor([[3.0, 4.0]]))
    >>> problem = Problem(net, "mse", (torch.ones(1, 2), torch.zeros(1, 1)))
    >>> generator = torch.Generator().manual_seed(0)
    >>> slopes, _ = steepest_secants(problem, net, 1e-3, restarts=1, steps=5, generator=generator)
    >>> round(float(slopes), 9)
    5.0
    """
    require_seen(f"delta={delta!r}", delta, problem.dtype)
    parts = []
    with problem.measuring(model):
        for inputs in inputs_of(problem, model, lambda _: restarts, with_fine=True):
            slopes, coarse = _steepest(inputs, delta, restarts, steps, generator)
            norms = inputs.x.to(torch.float64).norm(dim=1).to(slopes.device) if normalized else 1.0
            parts.append((slopes * norms, coarse))
            if progress is not None:
                progress("secants", sum(len(slopes) for slopes, _ in parts), problem.n)
    return torch.cat([slopes for slopes, _ in parts]), sum(coarse for _, coarse in parts)


def _steepest(
    inputs: Inputs, delta: float, restarts: int, steps: int, generator: torch.Generator
) -> tuple[Tensor, int]:
    """Return (the steepest secant from each sample, how many are differences of a few roundings)."""
    base = inputs.x.repeat_interleave(restarts, 0)
    length = delta * base.norm(dim=1, keepdim=True)
    with torch.no_grad():
        f = inputs.outputs(base).to(torch.float64)
    d = _starts(len(inputs.x), restarts, base.shape[1], generator).to(base)
    lost = _lost(inputs, base + length * d, restarts)
    steepest, coarse = torch.zeros_like(f[:, 0]), torch.zeros_like(f[:, 0], dtype=torch.bool)
    beyond, ends = torch.zeros_like(coarse), base.clone()
    for step in range(steps + 1):
        leaf = (base + length * d).requires_grad_()
        rise = inputs.outputs(leaf).to(torch.float64) - f
        size = rise.detach().norm(dim=1)
        moved = (leaf.detach() - base).to(torch.float64).norm(dim=1)  # the part that survives rounding
        slope = (size - lost).clamp(min=0) / moved  # a lower bound: the largest of many is the largest rounding, too
        beyond |= ~size.isfinite()
        better = ~(slope <= steepest)  # NaN passes: x is 0
        steepest = torch.where(better, slope, steepest)
        ends = torch.where((better | (steepest == 0))[:, None], leaf.detach(), ends)
        few = (size > 0) & (size < ROUNDINGS / ROUNDED * lost)
        coarse = torch.where(better | (steepest == 0), few, coarse)
        if step == steps or not rise.requires_grad:
            break
        (g,) = torch.autograd.grad(rise.square().sum() / 2, leaf)
        norm = g.norm(dim=1, keepdim=True)
        d = torch.where(norm > 0, g / norm, d)  # the whole step: for a linear map this is power iteration
    if inputs.fine is not None:
        steepest = _in_float64(inputs.fine, base, ends)
    best = torch.where(beyond, torch.inf, steepest).reshape(-1, restarts).max(1)
    return best.values.cpu(), int(coarse.reshape(-1, restarts).gather(1, best.indices[:, None]).sum())


def _in_float64(outputs: Callable[[Tensor], Tensor], base: Tensor, ends: Tensor) -> Tensor:
    """Return the secants' slopes; NaN where an end is where it began.

    The largest of many differences is the largest rounding, too: it may be far above that of a start.
    """
    start, end = base.to(torch.float64), ends.to(torch.float64)
    with torch.no_grad():
        slopes: Tensor = (outputs(end) - outputs(start)).norm(dim=1) / (end - start).norm(dim=1)
    return slopes


def _lost(inputs: Inputs, points: Tensor, restarts: int) -> Tensor:
    """Return the rounding error of a difference of outputs, (n restarts,).

    The error of the outputs is one rounding of their own. It is larger where the network rounds large numbers that
    cancel: second differences over the shortest visible moves show it, as there is no room for a curvature. They are
    taken where a search starts: a sample may lie on a kink (pixels that are equal), a random point near it does not.
    """
    eps, generator = torch.finfo(points.dtype).eps, torch.Generator().manual_seed(0)
    with torch.no_grad():
        f = inputs.outputs(points).to(torch.float64)
        error = eps * f.norm(dim=1)
        for _ in range(NEAR):
            d = ROUNDINGS * eps * points.abs() * random_signs(points.shape, points, generator)
            ahead, behind = (inputs.outputs(points + s * d).to(torch.float64) for s in (1, -1))
            error = torch.maximum(error, ((ahead + behind) / 2 - f).norm(dim=1))
    most: Tensor = error.reshape(-1, restarts).amax(1).repeat_interleave(restarts)
    return ROUNDED * most


def _starts(n: int, restarts: int, width: int, generator: torch.Generator) -> Tensor:
    """Return unit vectors in opposite pairs, (n restarts, width)."""
    drawn = torch.randn(n, (restarts + 1) // 2, width, generator=generator, dtype=torch.float64)
    drawn = drawn / drawn.norm(dim=2, keepdim=True)
    return torch.stack([drawn, -drawn], 2).flatten(1, 2)[:, :restarts].flatten(0, 1)
