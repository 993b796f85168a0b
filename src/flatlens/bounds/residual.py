"""Chen et al., Appendix A: residual networks, where sharpness bounds what a block adds to the sensitivity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, fx

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.quantities import input_norm2, output_slope2, weight_slope2
from flatlens.bounds.skips import ResidualBlock, SkipGraph, wiring
from flatlens.errors import typed_line
from flatlens.grams.one_pass import PASS_CHUNK
from flatlens.measures.gauss_newton import interpolation_sharpness


@bound(
    id="B5",
    symbol=r"\|\partial g/\partial x\|_2 \leq \|J\|_2 + \|W\|_2 \|\partial g/\partial W\|_F / \|x\|",
    source="compression Eq. 17, App. A",
    cost="N backward passes, where there are residual blocks",
)
def residual_bound(context: Context) -> Iterator[Claim]:
    """Residual blocks add no more to the sensitivity than their weights allow.

    Eq. 17, per sample, for a block y = x + branch(W x) whose input x is read by the skip and by W alone:

        ||df/dx||_2 <= ||J||_2 + ||W||_2 ||df/dW||_F / ||x||,    J = df/dy

    The paper prints ||J||_2 on the left. The slack is the same; here ||J||_2 stays on the right, so that the tightness
    compares quantities of one kind. Each block is a row with the name of the layer of W. `.sound` has ||T||_2
    ||df/dz||_F in the last place, with the layer's operator T and z = W x; it also holds for shared weights.

    `.sum` is the sum over consecutive blocks that end in one linear layer, ||df/dx_1||_2 <= ||W_L||_2 + sum_l ||W_l||_2
    ||df/dW_l||_F / ||x_l||. `.mean` is its mean over samples, with S by Cauchy's inequality as in Eq. 33.
    """
    found = wiring(context.lens.model)
    why = found if isinstance(found, str) else _no_block(found)
    if isinstance(found, str) or not found.blocks:
        yield _none(why)
        return
    norms = _norms(context, found)
    if isinstance(norms, str):
        yield _none(norms)
        return
    for block in found.blocks:
        yield from _of_block(context, block, norms)
    yield from _telescoped(context, found, norms)


def _no_block(found: SkipGraph) -> str:
    """Return why no residual block is found."""
    if found.closed:
        kinds = ", ".join(sorted(set(found.closed)))
        return f"no residual block is found: torch.fx does not look into {kinds}"
    return "no residual block: nothing is added to what a linear layer reads"


def _none(why: str) -> Claim:
    return Claim(math.nan, math.nan, assumptions=(Assumption("identity_skips", False, why),))


def _norms(context: Context, found: SkipGraph) -> dict[fx.Node, Tensor] | str:
    """Return ||df/d(node)||_2 per sample, where blocks begin and end, (n,); or why there are none."""
    lens, problem = context.lens, context.lens.problem
    nodes, watched = found.ends, found.in_place()
    gathered: dict[fx.Node, list[Tensor]] = {node: [] for node in nodes}
    most = max(1, min(PASS_CHUNK, problem.memory // max(1, 2 * lens.layout.bytes_per_sample(problem.outputs))))
    for raw in problem.data.chunks(most):
        found.kept.clear()
        try:
            f, _ = problem.run(watched, problem.place(raw))
        except Exception as error:  # for example, a forward= that uses more of the model than its outputs
            return f"its trace does not run ({typed_line(error, 100)})"
        true = problem.run(lens.model, problem.place(raw))[0]
        if float((f - true).detach().abs().max()) > context.rounding * float(true.detach().abs().max()):
            return "its trace computes something else: forward() depends on the data or its arguments"
        if any(node not in found.kept for node in nodes):
            return "a skip begins at indices, which have no derivative"
        if any(len(found.kept[node]) != len(f) for node in nodes):
            return "samples are not on the first axis"
        for block in found.blocks:
            if not block.through and found.kept[block.start].numel() != found.kept[block.end].numel():
                return f"the skip at {block.end.name} repeats its input: the two sides of the sum differ in size"
        for node, norm in zip(nodes, _spectral(f, [found.kept[node] for node in nodes]), strict=True):
            gathered[node].append(norm.cpu())
    return {node: torch.cat(parts) for node, parts in gathered.items()}


def _spectral(f: Tensor, at: list[Tensor]) -> list[Tensor]:
    """Return ||df/dx||_2 per sample for each tensor x, by one backward pass per output."""
    n, N = f.shape
    slopes = [torch.autograd.grad(f[:, k].sum(), at, retain_graph=True, allow_unused=True) for k in range(N)]
    norms = []
    for x, rows in zip(at, zip(*slopes, strict=True), strict=True):
        flat = [x.new_zeros(n, x[0].numel()) if row is None else row.reshape(n, -1) for row in rows]
        J = torch.stack(flat, 1).to(torch.float64)
        norms.append(torch.linalg.eigvalsh(J @ J.mT)[:, -1].clamp(min=0).sqrt())
    return norms


def _called(node: fx.Node) -> str:
    """Return a module's own name, or the node's name for another operation."""
    return str(node.target) if node.op == "call_module" else node.name


def _premises(context: Context, block: ResidualBlock) -> tuple[Assumption, Assumption]:
    """Return the assumptions: an identity skip, and a branch that begins with a linear layer with two known sides."""
    through = f"the skip at {block.end.name} goes through {', '.join(block.through)}"
    names = ", ".join(_called(node) for node in block.readers)
    layer = block.layer(context.layers)
    why = f"the branch of {block.end.name} begins with {names or 'nothing'}, not with one linear layer"
    begins = layer is not None and layer in context.readable
    why = why if layer is None or begins else context.unshared(layer).detail
    return (
        Assumption("identity_skips", not block.through, through if block.through else ""),
        Assumption("branch_begins_linear", begins, "" if begins else why),
    )


def _added(context: Context, layer: str) -> Tensor:
    """Return ||W||_2 ||df/dW||_F / ||x|| per sample."""
    slope2, x2 = context.each(weight_slope2, layer), context.each(input_norm2, layer)
    return context.layers[layer].spectral_norm * (slope2 / x2).sqrt()


def _of_block(context: Context, block: ResidualBlock, norms: dict[fx.Node, Tensor]) -> Iterator[Claim]:
    layer, premises = block.layer(context.readable), _premises(context, block)
    if layer is None:
        names = [_called(node) for node in block.readers]
        yield Claim(math.nan, math.nan, names[0] if len(names) == 1 else None, "", premises)
        return
    x2, W = context.each(input_norm2, layer), context.layers[layer].spectral_norm
    more, found = (context.unshared(layer), context.nonzero(layer, x2)), context.norm_found(layer)
    before, after = norms[block.start], norms[block.end]
    yield Claim(before, after + _added(context, layer), layer, "", (*premises, *more, found))
    yield Claim(before, after + W * context.each(output_slope2, layer).sqrt(), layer, "sound", (*premises, found))


def _telescoped(context: Context, found: SkipGraph, norms: dict[fx.Node, Tensor]) -> Iterator[Claim]:
    blocks = found.blocks
    premises = [one for block in blocks for one in _premises(context, block)]
    layers = [layer for block in blocks if (layer := block.layer(context.readable)) is not None]
    if len(layers) < len(blocks):
        yield Claim(math.nan, math.nan, None, "sum", tuple(premises))
        return
    gaps = [after.start.name for before, after in pairwise(blocks) if after.start is not before.end]
    premises.append(Assumption("consecutive_blocks", not gaps, f"{gaps[0]} does not follow a sum" if gaps else ""))
    last = found.last(context.layers)
    why = "" if last else "what follows the last block is more than one linear layer"
    premises.append(Assumption("ends_in_linear", last is not None, why))
    premises += [context.unshared(layer) for layer in layers]
    premises += [context.nonzero(layer, context.each(input_norm2, layer)) for layer in layers]
    premises += map(context.norm_found, layers)
    first, end = norms[blocks[0].start], norms[blocks[-1].end]  # the latter is ||W_L||_2, unless forward= goes on
    yield Claim(first, end + sum(_added(context, layer) for layer in layers), None, "sum", tuple(premises))
    squares = [(context.layers[one].spectral_norm ** 2 / context.each(input_norm2, one)).mean() for one in layers]
    S = context.total(interpolation_sharpness).mean()
    right = end.mean() + (torch.stack(squares).sum() * S).sqrt()
    yield Claim(first.mean(), right, None, "mean", (*premises, context.counted(layers)))
