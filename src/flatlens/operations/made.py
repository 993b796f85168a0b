"""Tensors that a network makes from parameters, without its input, before an operation reads them with samples.

Slices and parts of a weight, table rows at fixed positions, weights that are scaled or normalised, masks of them. The
derivative in the parameter follows from the one in the tensor made: autograd takes it back from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

from flatlens.operations.graph import LEAF, Graph, Node
from flatlens.operations.layers import Adapter, Dense
from flatlens.operations.reads import Entrywise, Lookup, Product, Read, read_of, transposes

_MOST = 64  #: nodes between a parameter and its reads at most
_BLOCKS = (
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "SliceBackward0", "CloneBackward0", "AliasBackward0",
)  # fmt: skip
"""Operations that give a block of a matrix's rows and columns."""


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor made from parameters, or the parameter itself, and the operations that read it with samples."""

    node: Node
    number: int  #: which of the node's outputs it is
    shape: torch.Size
    reads: tuple[Read, ...]

    @property
    def edge(self) -> GradientEdge:
        """Return the tensor, as a place to differentiate from or to."""
        return GradientEdge(self.node, self.number)

    @property
    def dtype(self) -> torch.dtype:
        """Return the tensor's dtype."""
        leaf = self.node.name() == LEAF
        found: torch.dtype = self.node.variable.dtype if leaf else self.node._input_metadata[self.number].dtype
        return found

    @property
    def signature(self) -> tuple[object, ...]:
        """Return the signature: equal in two passes if both did the same here."""
        return (self.node.name(), self.number, self.shape, *(read.signature for read in self.reads))


def sampled_nodes(graph: Graph, sources: Collection[Node]) -> set[Node]:
    """Return the nodes whose output depends on the network's input, of which `sources` are the nodes."""
    found: set[Node] = set(sources)
    for node in graph.nodes:
        if any(source in found for source, _ in node.next_functions):
            found.add(node)
    return found


def made_of(graph: Graph, leaf: Node, shape: torch.Size, sampled: Collection[Node]) -> tuple[Made, ...] | None:
    """Return the tensors made from a parameter that operations read with samples; None if one read is unknown.

    `leaf` is the parameter's node, or that of a lookup in it; `sampled` are the nodes that depend on the input.
    """
    found, seen = [], {(leaf, 0)}
    waiting = [(leaf, 0, shape)]
    while waiting:
        node, number, shape = waiting.pop()
        reads: list[Read] = []
        for reader, operand in graph.read_by(node):
            if reader.next_functions[operand][1] != number:
                continue
            outputs = reader._input_metadata
            if any(made.dtype.is_complex for made in outputs):
                return None  # the derivative would take conjugates and real parts
            read = read_of(graph, reader, operand, shape)
            if reader in sampled or _repeats(read):
                if read is None or (isinstance(read, Lookup) and len(shape) != 2):
                    return None
                reads.append(read)
                continue
            for which, made in enumerate(outputs):
                if (reader, which) not in seen:
                    seen.add((reader, which))
                    waiting.append((reader, which, torch.Size(made.shape)))
        if reads:
            found.append(Made(node, number, shape, tuple(reads)))
        if len(seen) > _MOST:
            return None
    return tuple(sorted(found, key=lambda made: min(read.turn for read in made.reads)))


def matrix_in_products(made: Iterable[Made]) -> Dense | None:
    """Return how a parameter stores the matrix whose blocks its products multiply by.

    None if no product reads it, if a product reads other entries than a block of its rows and columns, or if its
    products take its rows for outputs in some places and for inputs in others.
    """
    sides: set[Dense | None] = set()
    for one in made:
        products = [read for read in one.reads if isinstance(read, Product)]
        sides |= {_side(one.node, read.adapter) for read in products}
    return sides.pop() if len(sides) == 1 else None


def _side(node: Node, adapter: Adapter) -> Dense | None:
    """Return how the parameter behind a node stores its matrix, from how the node's output stores the product's."""
    if not isinstance(adapter, Dense):
        return None
    transposed = adapter.transposed
    while node.name() != LEAF:
        if node.name() not in _BLOCKS or len(node._input_metadata[0].shape) != 2:
            return None
        transposed ^= transposes(node)
        node = node.next_functions[0][0]
    return Dense(transposed) if node.variable.ndim == 2 else None


def _repeats(read: Read | None) -> bool:
    """Return whether an operation repeats the tensor along an axis, which may be that of the samples."""
    if not isinstance(read, Entrywise):
        return False
    return read.broadcast != read.shape or bool(read.node.name() == "ExpandBackward0")  # to a chunk of one sample, too
