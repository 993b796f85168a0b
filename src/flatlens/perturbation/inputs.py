"""The network as a function of its only floating input, and its steepest secant of a given length from every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from flatlens.curvature.operators import bytes_of_a_sample, samples_at_once
from flatlens.errors import BadModel, BadOption
from flatlens.estimate import Progress
from flatlens.grams.data_pass import random_signs
from flatlens.grams.record import run_recorded
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import counts_samples, has_lists, size
from flatlens.problem.diagnosis import why_no_slope
from flatlens.problem.eval_context import copy_of
from flatlens.problem.ranks import ALONE

_NEARLY = 0.1  #: largest difference of outputs by rounding, relative to the largest output
ROUNDINGS = 100  #: smallest allowed perturbation, in units of the rounding error of the value it is added to


class Refused(Exception):
    """The reason why a measure is undefined for this network."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of one chunk of samples, and the function that gives the outputs at other points."""

    x: Tensor  #: (n, M)
    outputs: Callable[[Tensor], Tensor]  #: (n k, M) -> (n k, N): k points per sample, a sample's points together
    fine: Callable[[Tensor], Tensor] | None = None
    """The same in float64, for points in float64; None if `outputs` is, or if the network does not run in it."""

    def jacobians(self, points: Tensor) -> Tensor:
        """Return df/dx at points (n k, M), (n k, N, M) float64, by N backward passes."""
        leaf = points.detach().requires_grad_()
        f = self.outputs(leaf)
        if not f.requires_grad:
            return points.new_zeros(*f.shape, points.shape[1], dtype=torch.float64)
        rows = [torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0] for column in f.unbind(1)]
        return torch.stack(rows, 1).to(torch.float64)

    def pulled_back(self, points: Tensor, s: Tensor) -> Tensor:
        """Return (df/dx)^T s at points (n k, M), for s (n k, N): (n k, M) float64."""
        leaf = points.detach().requires_grad_()
        f = self.outputs(leaf)
        if not f.requires_grad:
            return torch.zeros_like(points, dtype=torch.float64)
        return torch.autograd.grad(f, leaf, s.to(f.dtype))[0].to(torch.float64)


def in_float64(problem: Problem, model: nn.Module, needed_by: str) -> tuple[nn.Module, Tensor]:
    """Return a float64 copy of the network in evaluation mode, and one batch's inputs in float64; raises `Refused`."""
    batch = problem.place(problem.probes[0])
    if problem.forward is not None or not isinstance(batch[0], Tensor) or not batch[0].is_floating_point():
        raise Refused("the network must take exactly one floating tensor as its input")
    try:
        return copy_of(model, needed_by).to(torch.float64).eval(), batch[0].detach().to(torch.float64)
    except BadModel as error:
        raise Refused(str(error.but(argument="", call=""))) from error


def inputs_of(
    problem: Problem,
    model: nn.Module,
    points: Callable[[int], int],
    floats: Callable[[int], int] = lambda _: 0,
    *,
    with_fine: bool = False,
    what: str = "",
    progress: Progress | None = None,
) -> Iterator[Inputs]:
    """Yield the data in chunks for which a given number of points per sample fits in half the problem's memory.

    `points`: width of the input -> points per sample; `floats`: points -> numbers stored for each, beside the graph and
    its Jacobian; `with_fine`: whether `Inputs.fine` is wanted; `what`: the name of the work for `progress`. Raises
    `Refused` if the outputs depend on no floating input, or on several.
    """
    # the index of the batch's tensor that the outputs depend on, and its entries per sample
    if has_lists(batch := problem.place(problem.probes[0])):
        raise Refused("one floating input, samples first, can be perturbed; the data have lists of samples")
    leaves, form = tree_flatten(batch)
    fed = len(leaves) if problem.forward is not None else len(tree_leaves(tree_unflatten(leaves, form)[0]))
    floating = [i for i, leaf in enumerate(leaves[:fed]) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for i in floating:
        leaves[i] = leaves[i].requires_grad_()
    copies = [leaf.clone() if i in floating else leaf for i, leaf in enumerate(leaves)]
    f = problem.run(model, tree_unflatten(copies, form))[0]
    at = [leaves[i] for i in floating]
    slopes = torch.autograd.grad(f.sum(), at, allow_unused=True) if f.requires_grad and at else [None] * len(at)
    met = [i for i, slope in zip(floating, slopes, strict=True) if slope is not None]
    if not met:
        why = why_no_slope(problem.probes[0])
        raise Refused(f"the outputs do not depend differentiably on a floating input: {why}")
    if len(met) > 1 or not counts_samples(leaves[met[0]], len(f)):
        raise Refused(f"one floating input, samples first, can be perturbed; the outputs depend on {len(met)}")
    place, width = met[0], leaves[met[0]][0].numel()
    # the number of samples that fit
    k = points(width)
    graph = bytes_of_a_sample(problem, model, lambda probe: run_recorded(problem, model, probe)[2], None)
    each = k * (2 * graph + 8 * (floats(k) + 3 * problem.outputs * width))
    # a float64 copy of a coarser network, if it gives nearly the same outputs; users' modules may raise anything
    fine, wide = None, problem.widened()
    if with_fine and problem.dtype != torch.float64:
        with suppress(Exception), torch.no_grad():  # it may work in float32 alone
            twin = copy_of(model, "a comparison with float64").to(torch.float64)
            f, g = (one.run(net, one.place(one.probes[0]))[0] for one, net in ((problem, model), (wide, twin)))
            fine = twin if float((f - g).abs().max()) <= _NEARLY * float(g.abs().max()) else None
    for _, raw in problem.shared(samples_at_once(problem, each), ALONE, what, progress):
        inputs = _opened(problem, model, problem.place(raw), place)
        if fine is not None:
            inputs = replace(inputs, fine=_opened(wide, fine, wide.place(raw), place).outputs)
        yield inputs


def _opened(problem: Problem, model: nn.Module, batch: Batch, place: int) -> Inputs:
    leaves, form = tree_flatten(batch)
    n, x = size(batch), leaves[place].detach()

    def outputs(points: Tensor) -> Tensor:
        k = len(points) // n
        moved = [leaf.repeat_interleave(k, 0) if counts_samples(leaf, n) else leaf for leaf in leaves]
        moved[place] = points.reshape(-1, *x.shape[1:]).clone()  # the network may begin with an in-place operation
        return problem.run(model, tree_unflatten(moved, form))[0]

    return Inputs(x.reshape(n, -1), outputs)


def require_seen(option: str, share: float, dtype: torch.dtype) -> None:
    """Refuse a perturbation smaller than rounding: `share` is its size relative to the input's norm."""
    least = ROUNDINGS * torch.finfo(dtype).eps
    if share < least:
        mend = "" if dtype == torch.float64 else ", or Problem(dtype=torch.float64)"
        raise BadOption(
            f"option {option}: too small for {str(dtype).removeprefix('torch.')}: rounding hides a change of "
            f"{share:.1g} of an input's norm: use at least {least:.1g} of it{mend}"
        )


ROUNDED = 2.0  #: rounding error of a difference of outputs, in units of that of the outputs
_NEAR = 4  #: pairs of points near each start that show the outputs' rounding error


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
    """
    require_seen(f"delta={delta!r}", delta, problem.dtype)
    parts = []
    with problem.measuring(model):
        for inputs in inputs_of(problem, model, lambda _: restarts, with_fine=True, what="secants", progress=progress):
            slopes, coarse = _steepest(inputs, delta, restarts, steps, generator)
            norms = inputs.x.to(torch.float64).norm(dim=1).to(slopes.device) if normalized else 1.0
            parts.append((slopes * norms, coarse))
    return torch.cat([slopes for slopes, _ in parts]), sum(coarse for _, coarse in parts)


def _steepest(
    inputs: Inputs, delta: float, restarts: int, steps: int, generator: torch.Generator
) -> tuple[Tensor, int]:
    base = inputs.x.repeat_interleave(restarts, 0)
    length = delta * base.norm(dim=1, keepdim=True)
    with torch.no_grad():
        f = inputs.outputs(base).to(torch.float64)
    # the search starts from unit vectors in opposite pairs, (n restarts, M)
    drawn = torch.randn(len(inputs.x), (restarts + 1) // 2, base.shape[1], generator=generator, dtype=torch.float64)
    drawn = drawn / drawn.norm(dim=2, keepdim=True)
    d = torch.stack([drawn, -drawn], 2).flatten(1, 2)[:, :restarts].flatten(0, 1).to(base)
    lost = _lost(inputs, base + length * d, restarts)
    steepest, coarse = torch.zeros_like(f[:, 0]), torch.zeros_like(f[:, 0], dtype=torch.bool)
    beyond, ends = torch.zeros_like(coarse), base.clone()
    # each step goes to the point of the sphere along the gradient; the steepest secant on the way is kept
    for step in range(steps + 1):
        leaf = (base + length * d).requires_grad_()
        rise = inputs.outputs(leaf).to(torch.float64) - f
        size = rise.detach().norm(dim=1)
        moved = (leaf.detach() - base).to(torch.float64).norm(dim=1)  # the part that is left after rounding
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
    if inputs.fine is not None:  # the largest of many differences is the largest rounding, too: they are taken anew
        start, end = base.to(torch.float64), ends.to(torch.float64)
        with torch.no_grad():  # NaN where an end is where it began
            steepest = (inputs.fine(end) - inputs.fine(start)).norm(dim=1) / (end - start).norm(dim=1)
    best = torch.where(beyond, torch.inf, steepest).reshape(-1, restarts).max(1)
    return best.values.cpu(), int(coarse.reshape(-1, restarts).gather(1, best.indices[:, None]).sum())


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
        for _ in range(_NEAR):
            d = ROUNDINGS * eps * points.abs() * random_signs(points.shape, points, generator)
            ahead, behind = (inputs.outputs(points + s * d).to(torch.float64) for s in (1, -1))
            error = torch.maximum(error, ((ahead + behind) / 2 - f).norm(dim=1))
    most: Tensor = error.reshape(-1, restarts).amax(1).repeat_interleave(restarts)
    return ROUNDED * most
