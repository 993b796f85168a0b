"""The network as a function of its only floating input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from flatlens.curvature.graphs import bytes_of_a_sample, samples_at_once
from flatlens.errors import BadModel, BadOption
from flatlens.grams.record import run_recorded
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import counts_samples
from flatlens.problem.causes import why_no_slope
from flatlens.problem.samples import has_lists, size
from flatlens.problem.state import copy_of

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
    """Return a float64 copy of the network in evaluation mode, and the inputs of one batch, in float64.

    Raises `Refused` if the network takes anything but one floating tensor, or cannot be copied.
    """
    batch = problem.place(problem.probes[0])
    if problem.forward is not None or not isinstance(batch[0], Tensor) or not batch[0].is_floating_point():
        raise Refused("the network must take exactly one floating tensor as its input")
    try:
        return copy_of(model, needed_by).to(torch.float64).eval(), batch[0].detach().to(torch.float64)
    except BadModel as error:
        raise Refused(str(error).removeprefix("Problem(model=...): ")) from error


def inputs_of(
    problem: Problem,
    model: nn.Module,
    points: Callable[[int], int],
    floats: Callable[[int], int] = lambda _: 0,
    *,
    with_fine: bool = False,
) -> Iterator[Inputs]:
    """Yield the data in chunks for which a given number of points per sample fits in half the problem's memory.

    `points`: width of the input -> points per sample; `floats`: points -> numbers stored for each, beside the graph and
    its Jacobian; `with_fine`: whether `Inputs.fine` is wanted. Raises `Refused` if the outputs depend on no floating
    input, or on several.
    """
    place, width = _where(problem, model)
    k = points(width)
    graph = bytes_of_a_sample(problem, model, lambda probe: run_recorded(problem, model, probe)[2], None)
    each = k * (2 * graph + 8 * (floats(k) + 3 * problem.outputs * width))
    fine, wide = _fine(problem, model) if with_fine else None, problem.widened()
    for raw in problem.data.chunks(samples_at_once(problem, each)):
        inputs = _opened(problem, model, problem.place(raw), place)
        if fine is not None:
            inputs = replace(inputs, fine=_opened(wide, fine, wide.place(raw), place).outputs)
        yield inputs


def _fine(problem: Problem, model: nn.Module) -> nn.Module | None:
    """Return a float64 copy of a coarser network that gives nearly the same outputs; None if there is none."""
    if problem.dtype == torch.float64:
        return None
    with suppress(Exception), torch.no_grad():  # it may work in float32 alone, and users' modules may raise anything
        fine, wide = copy_of(model, "a comparison with float64").to(torch.float64), problem.widened()
        f, g = (one.run(net, one.place(one.probes[0]))[0] for one, net in ((problem, model), (wide, fine)))
        if float((f - g).abs().max()) <= _NEARLY * float(g.abs().max()):
            return fine
    return None


def _opened(problem: Problem, model: nn.Module, batch: Batch, place: int) -> Inputs:
    leaves, form = tree_flatten(batch)
    n, x = size(batch), leaves[place].detach()

    def outputs(points: Tensor) -> Tensor:
        k = len(points) // n
        moved = [leaf.repeat_interleave(k, 0) if counts_samples(leaf, n) else leaf for leaf in leaves]
        moved[place] = points.reshape(-1, *x.shape[1:]).clone()  # the network may begin with an in-place operation
        return problem.run(model, tree_unflatten(moved, form))[0]

    return Inputs(x.reshape(n, -1), outputs)


def _where(problem: Problem, model: nn.Module) -> tuple[int, int]:
    """Return (the index of the batch's tensor that the outputs depend on, its entries per sample)."""
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
    return met[0], leaves[met[0]][0].numel()


def require_seen(option: str, share: float, dtype: torch.dtype) -> None:
    """Refuse a perturbation smaller than rounding: `share` is its size relative to the input's norm."""
    least = ROUNDINGS * torch.finfo(dtype).eps
    if share < least:
        mend = "" if dtype == torch.float64 else ", or Problem(dtype=torch.float64)"
        raise BadOption(
            f"option {option}: too small for {str(dtype).removeprefix('torch.')}: rounding hides a change of "
            f"{share:.1g} of an input's norm: at least {least:.1g} of it is needed{mend}"
        )
