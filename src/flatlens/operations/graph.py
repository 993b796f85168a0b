"""The autograd graph of one forward pass: which operations read which outputs, and along which paths entries only move.

Everything that a network does with a parameter is in this graph, including hooks, functional calls and branches that
were not active. Its findings hold for every sample of the batch: both arms of a `where` are in the graph, and an
operation with derivative 0 on these samples still has its name.

Views, slices, joins, sums of these and products with constants leave a linear map between two places of the graph.
Turning queries by an angle (rotary positions) is one: slices, signs, products with constants, a sum. Vectors taken back
from one place to the other give the map itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from flatlens.operations.table import ARITHMETIC, operation_of, role_of

Node: TypeAlias = Any
"""A node of autograd's graph; torch does not type its `name()`, `next_functions` and `_saved_...`."""

GraphEdge: TypeAlias = tuple[Node, int]
"""An output of a node: the node, and which of its outputs."""

Place: TypeAlias = Any
"""A place to differentiate to: a tensor or an edge of the graph. torch's own types allow only lists of one kind."""

LEAF = "torch::autograd::AccumulateGrad"
SOFTMAXES = ("SoftmaxBackward0", "LogSoftmaxBackward0")
STATISTICS = ("NativeLayerNormBackward0", "NativeGroupNormBackward0")  #: curved in the normalised tensor

_SUMS = ("addition", "subtraction")
_PLAIN = (*_SUMS, "negation", "identity", "shape", "selection", "joining", "average", "padding")
_SCALED = ("multiplication", "division")
_KEPT = ("negation", "identity", "shape", "selection", "choice", "average", "running sum", "padding")
_LOOKUPS = ("EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "TakeBackward0")
_COMPLEX = ("ViewAsComplexBackward0", "ViewAsRealBackward0", "ViewAsRealPhysicalBackward0")
_MOST = 4  #: origins after which a search stops: a sum over many layers

_T = TypeVar("_T", bound=Hashable)


def walk(starts: Iterable[_T], onward: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield the starts and all that `onward` reaches from them, each once, the newest first.

    >>> sorted(walk([12], lambda n: [n // 2, n // 3] if n > 1 else []))
    [0, 1, 2, 3, 4, 6, 12]
    """
    waiting = list(dict.fromkeys(starts))
    seen = set(waiting)
    while waiting:
        one = waiting.pop()
        yield one
        for new in onward(one):
            if new not in seen:
                seen.add(new)
                waiting.append(new)


def sources_of(node: Node) -> list[Node]:
    """Nodes whose outputs a node reads."""
    return [source for source, _ in node.next_functions if source is not None]


def shape_of(edge: GraphEdge) -> torch.Size:
    """Shape of a tensor of the graph."""
    return torch.Size(edge[0]._input_metadata[edge[1]].shape)


def dtype_of(edge: GraphEdge) -> torch.dtype:
    """Dtype of a tensor of the graph."""
    found: torch.dtype = edge[0]._input_metadata[edge[1]].dtype
    return found


@dataclass(frozen=True)
class Origins:
    """The places that a tensor is moved from."""

    edges: tuple[GraphEdge, ...]
    joined: bool = False  #: whether a parameter is added or joined on the way

    @property
    def single(self) -> GraphEdge | None:
        """The only origin; None if there are several, or a parameter joins."""
        return self.edges[0] if len(self.edges) == 1 and not self.joined else None


class Graph:
    """The graph that made a tensor; nodes are in the order in which they ran, inputs first.

    Paths along which entries move, and weights, are those of the parameters of `model`.
    """

    def __init__(self, f: Tensor, model: nn.Module | None = None) -> None:
        self.nodes: list[Node] = []
        self.parameters = {} if model is None else dict(model.named_parameters())
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.readers: dict[Node, list[tuple[Node, int]]] = defaultdict(list)
        """By node: the operations that read its output, and as which of their inputs."""
        self.leaves: dict[int, Node] = {}  #: leaf nodes by the id of the leaf tensor
        self._moved: dict[Node, list[GraphEdge] | None] = {}
        # every node behind f; each comes after the nodes whose output it reads
        seen: set[Node] = {f.grad_fn} - {None}
        stack: list[tuple[Node, Iterator[Any]]] = [(root, iter(root.next_functions)) for root in seen]
        while stack:
            node, inputs = stack[-1]
            for source, _ in inputs:
                if source is not None and source not in seen:
                    seen.add(source)
                    stack.append((source, iter(source.next_functions)))
                    break
            else:
                self.nodes.append(node)
                stack.pop()
        for node in self.nodes:
            if node.name() == LEAF:
                self.leaves[id(node.variable)] = node
            for operand, (source, _) in enumerate(node.next_functions):
                if source is not None:
                    self.readers[source].append((node, operand))

    def behind(self, sources: Collection[Node]) -> set[Node]:
        """Nodes whose output depends on that of one of the sources, and the sources."""
        found: set[Node] = set(sources)
        for node in self.nodes:
            if any(source in found for source, _ in node.next_functions):
                found.add(node)
        return found

    @cached_property
    def fixed(self) -> set[Node]:
        """Nodes whose output is made from the model's parameters alone."""
        found: set[Node] = set()
        for node in self.nodes:
            if node.name() == LEAF:
                if id(node.variable) in self.names:
                    found.add(node)
            elif node.name() not in _LOOKUPS and (sources := sources_of(node)) and found.issuperset(sources):
                found.add(node)
        return found

    def is_layer(self, node: Node) -> bool:
        """Return whether a node multiplies by a matrix or a kernel that is made from parameters alone."""
        known = operation_of(node.name())
        multiplies = known is not None and known.name in ("linear", "convolution", "matrix product")
        return multiplies and any(source in self.fixed for source, _ in node.next_functions[-2:])

    def is_product(self, node: Node) -> bool:
        """Return whether a node multiplies rows of features by a matrix that is made from parameters alone."""
        return node.name() in ("AddmmBackward0", "MmBackward0") and node.next_functions[-1][0] in self.fixed

    def curved_in(self, sources: Mapping[Node, int]) -> int:
        """Return the bits of the sources in which the output is not piecewise linear; `sources` maps nodes to bits.

        The output is piecewise linear in a source if every operation between them is, and at most one factor of each
        product depends on the source.
        """
        if not self.nodes:
            return 0
        reached: dict[Node, int] = {}  # the sources on which a node's output depends...
        curved: dict[Node, int] = {}  # ...and those among them in which it is curved
        for node in self.nodes:
            operands = [(reached[s], curved[s]) if s is not None else (0, 0) for s, _ in node.next_functions]
            every = bent = 0
            for dependent, bends in operands:
                every, bent = every | dependent, bent | bends
            if not every:
                reached[node], curved[node] = sources.get(node, 0), 0
                continue
            # the sources in which the node's own operation is curved
            name, role, own = node.name(), role_of(node), every
            if name in STATISTICS or (name == "NativeBatchNormBackward0" and node._saved_training):
                own = operands[0][0]
            elif role in ("linear", "piecewise linear"):
                own = 0
            elif role == "quotient":
                own = operands[1][0] if len(operands) > 1 else 0
            elif role == "bilinear":
                met = own = 0
                for dependent, _ in operands:
                    own |= met & dependent
                    met |= dependent
            else:
                kind = operation_of(name)
                if kind is not None and kind.name == "attention":  # linear in its third, the values
                    own = reduce(or_, (dependent for number, (dependent, _) in enumerate(operands) if number != 2), 0)
            reached[node], curved[node] = every | sources.get(node, 0), bent | own
        return curved[self.nodes[-1]]

    def origins(self, edge: GraphEdge) -> Origins:
        """Return the places from which the entries of a tensor are moved."""
        found: list[GraphEdge] = []
        joined = False
        for one in walk([edge], lambda one: () if one[0] in self.fixed else self._moves(one[0]) or ()):
            if one[0] in self.fixed:
                joined = True
            elif self._moves(one[0]) is None:
                found.append(one)
                if len(found) > _MOST:
                    break
        return Origins(tuple(found), joined)

    def readers_of(self, edge: GraphEdge) -> list[Node]:
        """Return the operations that read the entries of a tensor, wherever these have been moved."""
        found = []

        def onward(one: GraphEdge) -> Iterator[GraphEdge]:
            for reader, operand in self.readers[one[0]]:
                if reader.next_functions[operand] != one:
                    continue
                if one[0] in self.fixed or one not in (self._moves(reader) or ()):
                    found.append(reader)
                else:
                    yield from ((reader, number) for number in range(len(reader._input_metadata)))

        for _ in walk([edge], onward):
            pass
        return found

    def acting(self, parameter: Tensor) -> list[tuple[Node, GraphEdge]]:
        """Return the operations on samples that read a parameter or what is made from it, each with what it reads."""
        leaf = self.leaves.get(id(parameter))
        made = walk([] if leaf is None else [leaf], lambda node: [r for r, _ in self.readers[node] if r in self.fixed])
        return [
            (reader, reader.next_functions[operand])
            for node in made
            for reader, operand in self.readers[node]
            if reader not in self.fixed
        ]

    def _moves(self, node: Node) -> list[GraphEdge] | None:
        """The tensors whose entries a node moves; None if it does more than that."""
        if node not in self._moved:
            operands = [edge for edge in node.next_functions if edge[0] is not None]
            operation = operation_of(node.name())
            kind = "" if operation is None else operation.name
            moves = node.name() in _COMPLEX or (kind in _PLAIN and node.name() != "EmbeddingBackward0")
            if kind in _SUMS and any(source in self.fixed for source, _ in operands):
                bias = self.bias_behind(node)
                moves, operands = bias is not None, [edge for edge in operands if edge != bias]
            elif kind in _SCALED:
                moves = len(operands) == 1
            self._moved[node] = operands if moves and operands and node.name() != LEAF else None
        return self._moved[node]

    def bias_behind(self, node: Node) -> GraphEdge | None:
        """Return the vector that a sum adds to the rows of a product without a bias; None if there is none."""
        if node.name() != "AddBackward0" or node._saved_alpha != 1:
            return None
        first, second = node.next_functions
        for one, other in ((first, second), (second, first)):
            if one[0] not in self.fixed or other[0] is None or other[0] in self.fixed:
                continue
            origin = self.origins(other).single
            if origin is None or not self.is_product(origin[0]) or origin[0].name() != "MmBackward0":
                continue
            if shape_of(one) == shape_of(origin)[-1:]:
                bias: GraphEdge = one
                return bias
        return None

    def leaf_of(self, edge: GraphEdge, *, shifted: bool = False) -> tuple[str, Tensor] | None:
        """Return the parameter whose entries a tensor consists of, and their flat positions in it; None if it is made.

        The positions have the tensor's shape. If `shifted`, constants may be added to the entries: `1 + w`.
        """
        leaves = {}
        for node in walk([edge[0]], sources_of):
            if node.name() == LEAF:
                leaves[id(node.variable)] = node.variable
            elif not _keeps(node, shifted=shifted):
                return None
        if len(leaves) != 1:
            return None
        (leaf,) = leaves.values()
        name, shape = self.names[id(leaf)], shape_of(edge)
        if edge[0].name() == LEAF:
            return name, torch.arange(leaf.numel()).reshape(shape)
        # Taken back, ones show which entries are used, and the digits of numbers (exact in float32) in which order.
        numbers = torch.arange(shape.numel()).reshape(shape)
        ones, high, low = (
            torch.autograd.grad([GradientEdge(*edge)], [leaf], [u.to(leaf)], retain_graph=True)[0].detach().cpu()
            for u in (torch.ones(shape), numbers // 2048, numbers % 2048)
        )
        taken = ones != 0
        if not bool((ones[taken] == 1).all()) or int(taken.sum()) != shape.numel():
            return None  # scaled, normalised, repeated
        positions = torch.empty(shape.numel(), dtype=torch.long)
        positions[(high[taken] * 2048 + low[taken]).long()] = taken.flatten().nonzero()[:, 0]
        return name, positions.reshape(shape)


def _keeps(node: Node, *, shifted: bool) -> bool:
    """Return whether a node gives multiples of the entries that it reads, and sums of these.

    If `shifted`, constants may be added, too. A derivative of 1 does not tell: `w + 1` has it, and so has `exp(w)` at
    w = 0.
    """
    operation = operation_of(node.name())
    kind = "" if operation is None else operation.name
    read = [source is not None for source, _ in node.next_functions]
    if kind in _SUMS:
        return shifted or read == [True, True]  # a constant is an operand without a node, or none
    if kind in _SCALED:
        return sum(read) == 1 and (read[0] or kind == "multiplication")
    return kind in _KEPT or (kind == "joining" and all(read))


def taken_back(edge: GraphEdge, to: GraphEdge, vectors: Tensor) -> Tensor:
    """Return vectors (k, the shape of `edge`), taken back along the graph to `to`, (k, its shape)."""
    if edge == to:
        return vectors
    try:
        return _taken_back(edge, to, vectors, batched=True)
    except RuntimeError:  # an operation on the way that torch cannot batch
        return torch.stack([_taken_back(edge, to, vector, batched=False) for vector in vectors])


def _taken_back(edge: GraphEdge, to: GraphEdge, vectors: Tensor, *, batched: bool) -> Tensor:
    (found,) = torch.autograd.grad(
        [GradientEdge(*edge)], [GradientEdge(*to)], [vectors], retain_graph=True, is_grads_batched=batched,
        allow_unused=True,
    )  # fmt: skip
    lead = vectors.shape[: int(batched)]
    return vectors.new_zeros(*lead, *shape_of(to)) if found is None else found.detach()


def closing_softmax(f: Tensor) -> int:
    """Return how many outputs share each softmax that a network ends in, or logarithm of one; 0 if it ends otherwise.

    Each takes one dimension from the derivatives of its outputs: their sum is 0, weighted by p for logarithms. What
    moves entries or maps each alone, such as a mask, gives no dimension back.

    >>> z = torch.zeros(5, 2, 3, requires_grad=True)
    >>> [closing_softmax(f) for f in (z.softmax(2).flatten(1), -2 * z.log_softmax(2), z.softmax(2)[:, 1:], z.exp())]
    [3, 3, 0, 0]
    """
    node: Node | None = None if f._backward_hooks else f.grad_fn  # a hook may change the derivative
    while node is not None and node.name() not in SOFTMAXES:
        one, sources = operation_of(node.name()), sources_of(node)
        alone = one is not None and (one.moves or one.effect == "each" or one.name in ARITHMETIC)
        node = sources[0] if alone and len(sources) == 1 else None
    if node is None:
        return 0
    shape, axis = node._input_metadata[0].shape, int(node._saved_dim)
    if math.prod(shape) != f.numel():  # repeated on the way
        return 0
    return int(shape[axis if axis < len(shape) else axis - 2**64])  # torch saves -1 as 2^64 - 1
