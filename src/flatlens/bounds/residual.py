"""Chen et al., Appendix A: residual networks, where sharpness bounds what a block adds to the sensitivity.

The blocks are found by torch.fx: a network adds the input of a linear layer to the result of a branch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from flatlens.bounds.context import Assumption, Claim, Context, Inapplicable, input_norm2, output_slope2, weight_slope2
from flatlens.bounds.definition import bound
from flatlens.errors import typed_line
from flatlens.grams.data_pass import PASS_CHUNK
from flatlens.measures.traces import interpolation_sharpness
from flatlens.operations.table import Trace, asks


@dataclass(frozen=True, eq=False)
class ResidualBlock:
    """A sum, out = skip(x) + branch(x)."""

    start: fx.Node  #: x
    end: fx.Node  #: out
    through: tuple[str, ...]  #: modules on the skip; empty for the identity
    readers: tuple[fx.Node, ...]  #: other nodes that read x

    def layer(self, linear: Collection[str]) -> str | None:
        """Return the linear layer that alone reads x beside the skip."""
        if len(self.readers) == 1 and self.readers[0].op == "call_module" and str(self.readers[0].target) in linear:
            return str(self.readers[0].target)
        return None


class SkipGraph(Trace):
    """The graph of a network, its residual blocks in execution order, and the tensors at their ends in its last run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.kept: dict[fx.Node, Tensor] = {}

    @property
    def closed(self) -> list[str]:
        """Return types of modules with several layers that the graph has as one step, as torch's transformers are."""
        called = [self.what(node) for node in self.nodes if node.op == "call_module"]
        return [type(m).__name__ for m in called if any(True for _ in m.children())]

    @cached_property
    def _turns(self) -> dict[fx.Node, int]:
        return {node: turn for turn, node in enumerate(self.nodes)}

    def _leads(self, node: fx.Node, end: fx.Node) -> bool:
        # Whether a node's values lead to those of `end`; sizes do not count. What ran before it is not seen
        seen, waiting = {end}, [end]
        while waiting:
            one = waiting.pop()
            more = () if asks(one) else set(one.all_input_nodes) - seen
            if node in more:
                return True
            above = [source for source in more if self._turns[source] > self._turns[node]]
            seen.update(above)
            waiting += above
        return False

    def _passes(self, node: fx.Node) -> bool:
        # Whether the node changes the shape or order of its input at most: no norm changes
        found = self.operation(node)
        return found is not None and found.moves

    def source(self, node: fx.Node) -> fx.Node:
        """Return the node that a node's values come from."""
        while self._passes(node):
            node = node.all_input_nodes[0]
        return node

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that use a node's values."""
        for user in node.users:
            if self._passes(user):
                yield from self.readers(user)
            elif not asks(user):
                yield user

    @cached_property
    def blocks(self) -> list[ResidualBlock]:
        """Return every sum with one side that leads, through modules alone, to an input of the other side."""
        return [block for node in self.nodes if (block := self._block(node)) is not None]

    @cached_property
    def ends(self) -> list[fx.Node]:
        """Return the nodes where blocks begin and end."""
        return list(dict.fromkeys(node for block in self.blocks for node in (block.start, block.end)))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; keep its value, on the gradient's path, if a block begins or ends there."""
        value = super().run_node(n)
        if n not in self.ends or not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        self.kept[n] = value if value.requires_grad else value.detach().requires_grad_()
        return self.kept[n].clone()  # the next operation may change it in place

    def _block(self, end: fx.Node) -> ResidualBlock | None:
        found = self.operation(end)
        if found is None or found.name != "addition" or len(end.all_input_nodes) != 2:
            return None
        if any(value != 1 for value in end.kwargs.values()) or len(end.args) != 2:
            return None
        one, other = end.all_input_nodes
        walks = [walk for walk in (self._skip(one, other), self._skip(other, one)) if walk is not None]
        if not walks:
            return None
        start, path = min(walks, key=lambda walk: len(walk[1]))
        entry = path[-1] if path else end
        readers = list(self.readers(start))
        readers.remove(entry)
        return ResidualBlock(start, end, tuple(str(node.target) for node in reversed(path)), tuple(readers))

    def _skip(self, skip: fx.Node, branch: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        # The start of a skip, and its modules, last first
        path: list[fx.Node] = []
        node = self.source(skip)
        while node.op == "get_attr" or not self._leads(node, branch):  # a parameter is not an input of a block
            if node.op != "call_module" or len(node.all_input_nodes) != 1:
                return None
            path.append(node)
            node = self.source(node.all_input_nodes[0])
        return node, path

    def last(self, linear: Collection[str]) -> str | None:
        """Return the linear layer after the last block if it alone gives the outputs."""
        behind = list(self.readers(self.blocks[-1].end))
        if len(behind) != 1 or behind[0].op != "call_module" or str(behind[0].target) not in linear:
            return None
        return str(behind[0].target) if [node.op for node in self.readers(behind[0])] == ["output"] else None


@bound(id="B5", symbol=r"\|\partial g/\partial x\|_2 \leq \|J\|_2 + \|W\|_2 \|\partial g/\partial W\|_F / \|x\|",
       source="compression Eq. 17, App. A", cost="N backward passes, where there are residual blocks")  # fmt: skip
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
    try:
        found = SkipGraph(context.lens.model)
    except Exception as error:  # a forward() may raise anything on symbols
        raise _no_skips(f"torch.fx cannot trace it ({typed_line(error, 100)})") from error
    norms = _norms(context, found)
    blocks, chosen = found.blocks, [block.layer(context.readable) for block in found.blocks]
    # Each block
    every: list[Assumption] = []
    for block, layer in zip(blocks, chosen, strict=True):
        # An identity skip, and a branch that begins with a linear layer with two known sides
        names, named = [_called(node) for node in block.readers], block.layer(context.layers)
        through = f"the skip at {block.end.name} goes through {', '.join(block.through)}"
        why = f"the branch of {block.end.name} begins with {', '.join(names) or 'nothing'}, not with one linear layer"
        why = why if named is None else context.unshared(named).detail
        begins = Assumption("branch_begins_linear", layer is not None, why)
        premises = (Assumption("identity_skips", not block.through, through), begins)
        every += premises
        if layer is None:
            yield Claim(math.nan, math.nan, names[0] if len(names) == 1 else None, "", premises)
            continue
        x2, W = context.each(input_norm2, layer), context.layers[layer].spectral_norm
        more, norm_found = (context.unshared(layer), context.nonzero(layer, x2)), context.norm_found(layer)
        before, after = norms[block.start], norms[block.end]
        yield Claim(before, after + _added(context, layer), layer, "", (*premises, *more, norm_found))
        sound = after + W * context.each(output_slope2, layer).sqrt()
        yield Claim(before, sound, layer, "sound", (*premises, norm_found))
    # Blocks that begin with one linear layer, follow each other, and end in one
    layers = [layer for layer in chosen if layer is not None]
    if len(layers) < len(blocks):
        yield Claim(math.nan, math.nan, None, "sum", tuple(every))
        return
    gaps = [after.start.name for before, after in pairwise(blocks) if after.start is not before.end]
    every.append(Assumption("consecutive_blocks", not gaps, f"{''.join(gaps[:1])} does not follow a sum"))
    why = "what follows the last block is more than one linear layer"
    every.append(Assumption("ends_in_linear", found.last(context.layers) is not None, why))
    every += [context.unshared(layer) for layer in layers]
    every += [context.nonzero(layer, context.each(input_norm2, layer)) for layer in layers]
    every += map(context.norm_found, layers)
    # The sum per sample, and its mean with S by Cauchy's inequality
    first, end = norms[blocks[0].start], norms[blocks[-1].end]  # the latter is ||W_L||_2, unless forward= goes on
    yield Claim(first, end + sum(_added(context, layer) for layer in layers), None, "sum", tuple(every))
    squares = [(context.layers[one].spectral_norm ** 2 / context.each(input_norm2, one)).mean() for one in layers]
    S = context.total(interpolation_sharpness).mean()
    right = end.mean() + (torch.stack(squares).sum() * S).sqrt()
    yield Claim(first.mean(), right, None, "mean", (*every, context.counted(layers)))


def _no_skips(why: str) -> Inapplicable:
    return Inapplicable(Assumption("identity_skips", False, why))


def _norms(context: Context, found: SkipGraph) -> dict[fx.Node, Tensor]:
    """||df/d(node)||_2 per sample, where blocks begin and end, (n,)."""
    if not found.blocks and found.closed:
        kinds = ", ".join(sorted(set(found.closed)))
        raise _no_skips(f"no residual block is found: torch.fx does not look into {kinds}")
    if not found.blocks:
        raise _no_skips("no residual block: nothing is added to what a linear layer reads")
    lens, problem = context.lens, context.lens.problem
    nodes, watched = found.ends, found.in_place()
    gathered: dict[fx.Node, list[Tensor]] = {node: [] for node in nodes}
    most = max(1, min(PASS_CHUNK, problem.memory // max(1, 2 * lens.plan.bytes_per_sample(problem.outputs))))
    for raw in problem.data.chunks(most):
        # The trace has to run, and to compute what the network computes
        found.kept.clear()
        try:
            f, _ = problem.run(watched, problem.place(raw))
        except Exception as error:  # for example, a forward= that uses more of the model than its outputs
            raise _no_skips(f"its trace does not run ({typed_line(error, 100)})") from error
        true = problem.run(lens.model, problem.place(raw))[0]
        if float((f - true).detach().abs().max()) > context.rounding * float(true.detach().abs().max()):
            raise _no_skips("its trace computes something else: forward() depends on the data or its arguments")
        # Both ends of each block are tensors of samples, and the skip keeps its size
        if any(node not in found.kept for node in nodes):
            raise _no_skips("a skip begins at indices, which have no derivative")
        if any(len(found.kept[node]) != len(f) for node in nodes):
            raise _no_skips("samples are not on the first axis")
        for block in found.blocks:
            if not block.through and found.kept[block.start].numel() != found.kept[block.end].numel():
                raise _no_skips(
                    f"the skip at {block.end.name} repeats its input: the two sides of the sum differ in size"
                )
        # ||df/dx||_2 at each end x, by one backward pass per output
        n, at = len(f), [found.kept[node] for node in nodes]
        slopes = [torch.autograd.grad(part.sum(), at, retain_graph=True, allow_unused=True) for part in f.unbind(1)]
        for node, x, rows in zip(nodes, at, zip(*slopes, strict=True), strict=True):
            J = torch.stack([x.new_zeros(n, x[0].numel()) if s is None else s.reshape(n, -1) for s in rows], 1).double()
            gathered[node].append(torch.linalg.eigvalsh(J @ J.mT)[:, -1].clamp(min=0).sqrt().cpu())
    return {node: torch.cat(parts) for node, parts in gathered.items()}


def _called(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _added(context: Context, layer: str) -> Tensor:
    """||W||_2 ||df/dW||_F / ||x|| per sample."""
    slope2, x2 = context.each(weight_slope2, layer), context.each(input_norm2, layer)
    return context.layers[layer].spectral_norm * (slope2 / x2).sqrt()
