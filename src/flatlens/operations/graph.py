"""The autograd graph of one forward pass: every operation that ran, and which operations read which outputs.

Everything that a network does with a parameter is in this graph, including hooks, functional calls and branches that
were not active. Its findings hold for every sample of the batch: both arms of a `where` are in the graph, and an
operation with derivative 0 on these samples still has its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from flatlens.operations.table import ARITHMETIC, operation_of, role_of

Node: TypeAlias = Any
"""A node of autograd's graph; torch does not type its `name()`, `next_functions` and `_saved_...`."""

Place: TypeAlias = Any
"""A place to differentiate to: a tensor or an edge of the graph. torch's own types allow only lists of one kind."""

LEAF = "torch::autograd::AccumulateGrad"
SOFTMAXES = ("SoftmaxBackward0", "LogSoftmaxBackward0")
STATISTICS = ("NativeLayerNormBackward0", "NativeGroupNormBackward0")  #: curved in the normalised tensor


class Graph:
    """The graph that made a tensor; nodes are in the order in which they ran, inputs first."""

    def __init__(self, f: Tensor) -> None:
        self.nodes = _inputs_first(f.grad_fn)
        self.readers: dict[Node, list[tuple[Node, int]]] = {}  #: by node: (reader, which of its inputs)
        self.leaves: dict[int, Node] = {}  #: leaf nodes by the id of the leaf tensor
        for node in self.nodes:
            if node.name() == LEAF:
                self.leaves[id(node.variable)] = node
            for operand, (source, _) in enumerate(node.next_functions):
                if source is not None:
                    self.readers.setdefault(source, []).append((node, operand))

    def read_by(self, node: Node) -> list[tuple[Node, int]]:
        """Return the operations that read a node's output, and as which of their inputs."""
        return self.readers.get(node, [])

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
            own = sources.get(node, 0)
            reached[node] = every | own
            curved[node] = bent | _bent_by(node, [dependent for dependent, _ in operands], every) if every else bent
        return curved[self.nodes[-1]]


def _bent_by(node: Node, operands: list[int], every: int) -> int:
    """Return the sources in which a node's own operation is curved; `operands`: the sources of each operand."""
    name = node.name()
    if name in STATISTICS:
        return operands[0]
    if name == "NativeBatchNormBackward0" and node._saved_training:
        return operands[0]
    role = role_of(node)
    if role in ("linear", "piecewise linear"):
        return 0
    if role == "quotient":
        return operands[1] if len(operands) > 1 else 0
    if role == "bilinear":
        met = twice = 0
        for dependent in operands:
            twice |= met & dependent
            met |= dependent
        return twice
    return every


def closing_softmax(f: Tensor) -> int:
    """Return how many outputs share each softmax that a network ends in, or logarithm of one; 0 if it ends otherwise.

    Each takes one dimension from the derivatives of its outputs: their sum is 0, weighted by p for logarithms. What
    moves entries or maps each alone, such as a mask, gives no dimension back.

    >>> import torch
    >>> z = torch.zeros(5, 2, 3, requires_grad=True)
    >>> [closing_softmax(f) for f in (z.softmax(2).flatten(1), -2 * z.log_softmax(2), z.softmax(2)[:, 1:], z.exp())]
    [3, 3, 0, 0]
    """
    node: Node | None = None if f._backward_hooks else f.grad_fn  # a hook may change the derivative
    while node is not None and node.name() not in SOFTMAXES:
        one, sources = operation_of(node.name()), [source for source, _ in node.next_functions if source is not None]
        alone = one is not None and (one.moves or one.effect == "each" or one.name in ARITHMETIC)
        node = sources[0] if alone and len(sources) == 1 else None
    if node is None:
        return 0
    shape, axis = node._input_metadata[0].shape, int(node._saved_dim)
    if math.prod(shape) != f.numel():  # repeated on the way
        return 0
    return int(shape[axis if axis < len(shape) else axis - 2**64])  # torch saves -1 as 2^64 - 1


def _inputs_first(root: Node | None) -> list[Node]:
    """Return every node behind `root`; each comes after the nodes whose output it reads."""
    order: list[Node] = []
    if root is None:
        return order
    seen: set[Node] = {root}
    stack: list[tuple[Node, Iterator[Any]]] = [(root, iter(root.next_functions))]
    while stack:
        node, inputs = stack[-1]
        for source, _ in inputs:
            if source is not None and source not in seen:
                seen.add(source)
                stack.append((source, iter(source.next_functions)))
                break
        else:
            order.append(node)
            stack.pop()
    return order
