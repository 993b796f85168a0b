"""The weight and bias of a matrix product, found in autograd's graph as positions in parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.operations.graph import Node
from flatlens.operations.pairs import Entries
from flatlens.operations.paths import GraphEdge, Paths, dtype_of, shape_of, taken_back
from flatlens.operations.reads import RESHAPING

NEGLIGIBLE = 1e-9  #: relative size of a coupling that is rounding, in float64
_BLOCK = 1 << 22  #: entries of the vectors that are taken back together


class NotUnderstood(Exception):
    """Why the weights of an attention cannot be told."""


@dataclass(frozen=True, eq=False)
class ProductWeights:
    """The weight and bias of a matrix product, as positions in parameters."""

    product: Node
    parameter: str
    at: Tensor  #: (outputs, inputs)
    bias: str | None
    bias_at: Tensor | None  #: (outputs,)
    nodes: frozenset[Node]  #: the product, and the sum that adds the bias

    def rows(self, features: Tensor, basis: Tensor | None = None) -> tuple[Entries, ...]:
        """Return the rows that make some of the outputs, with their part of the bias."""
        found = [Entries(self.parameter, self.at[features], basis)]
        if self.bias is not None and self.bias_at is not None:
            found.append(Entries(self.bias, self.bias_at[features, None], basis))
        return tuple(found)

    def columns(self, features: Tensor, basis: Tensor | None = None) -> Entries:
        """Return the columns that read some of the inputs."""
        return Entries(self.parameter, self.at[:, features].T.contiguous(), basis)


class WeightReader:
    """The weights of the matrix products in a graph, each read once."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self._known: dict[Node, ProductWeights] = {}

    def of(self, product: Node) -> ProductWeights:
        """Return the weight and bias of a matrix product, as positions in parameters."""
        if product not in self._known:
            self._known[product] = self._read(product)
        return self._known[product]

    def _read(self, product: Node) -> ProductWeights:
        known = self.paths.leaf_of(product.next_functions[-1])
        if known is None:
            raise NotUnderstood("one of its weights is no parameter itself, but made from some")
        bias = self._bias(product)
        at = None if bias is None else self.paths.leaf_of(bias[1])
        if bias is not None and at is None:
            raise NotUnderstood("one of its biases is no parameter itself, but made from some")
        name, positions = known
        nodes = frozenset({product} if bias is None else {product, bias[0]})
        return ProductWeights(product, name, positions.T, at[0] if at else None, at[1] if at else None, nodes)

    def _bias(self, product: Node) -> tuple[Node, GraphEdge] | None:
        """Return (the operation that adds a vector to the rows of a product, the vector); None if there is none."""
        if product.name() == "AddmmBackward0":
            added = product.next_functions[0]
            return None if added[0] is None else (product, added)
        node = product
        while len(readers := self.paths.graph.read_by(node)) == 1:
            node = readers[0][0]
            if node.name() == "AddBackward0":
                bias = self.paths.bias_behind(node)
                return None if bias is None else (node, bias)
            if node.name() not in RESHAPING:
                return None
        return None


def unit_vectors(edge: GraphEdge, to: GraphEdge) -> Iterator[tuple[int, Tensor]]:
    """Yield each column of a tensor (rows, columns), positive at every row and 0 elsewhere, taken back to `to`."""
    shape = shape_of(edge)
    rows, columns = probe(shape[0]), shape[1]
    step = max(1, _BLOCK // (shape.numel() + shape_of(to).numel()))
    for start in range(0, columns, step):
        block = range(start, min(columns, start + step))
        u = torch.zeros(len(block), *shape, dtype=torch.float64)
        for at, c in enumerate(block):
            u[at, :, c] = rows
        yield from zip(block, taken_back(edge, to, u.to(dtype_of(to))).to("cpu", torch.float64), strict=True)


def probe(n: int) -> Tensor:
    """Return n positive numbers that differ."""
    return 1 + torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rounding(edge: GraphEdge) -> float:
    """Return the relative size below which an entry that was taken back to `edge` is rounding."""
    return NEGLIGIBLE if dtype_of(edge) == torch.float64 else 1e-5
