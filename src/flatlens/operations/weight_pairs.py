"""Two sets of weights of which only a product acts: A times the one and A^-T times the other leave the function alone.

Such are queries and keys of a head (their scalar products count), values and the columns that read them, a factor of a
gate and the columns that read the product, a norm's scale and the columns that read its features. Weights and biases of
matrix products are positions in parameters, read from autograd's graph (`WeightReader`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.operations.graph import Graph, GraphEdge, Node, dtype_of, shape_of, taken_back
from flatlens.operations.parameter_uses import RESHAPING


@dataclass(frozen=True, eq=False)
class Entries:
    """Some entries of a parameter, a row for each of h features: rows of a weight, a part of a bias, columns."""

    parameter: str
    at: Tensor  #: flat positions in the parameter, (h, k)
    basis: Tensor | None = None
    """(h, h) float64: the coordinates that are multiplied are `basis @ features`; None: the features themselves."""
    added: Tensor | None = None  #: (h, k): a constant that the network adds before it uses the entries, as in 1 + w

    @cached_property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Return what two uses of the same entries have in common."""
        return self.parameter, tuple(self.at.flatten().tolist())

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the values as the network uses them, (h, k)."""
        values: Tensor = parameters[self.parameter].detach().flatten()[self.at.to(parameters[self.parameter].device)]
        return values if self.added is None else values + self.added.to(values)

    def set(self, parameters: Mapping[str, Tensor], values: Tensor) -> None:
        """Write values, (h, k), as the network is to use them."""
        live = parameters[self.parameter]
        values = values if self.added is None else values - self.added.to(values)
        with torch.no_grad():
            whole = live.detach().clone().flatten()
            whole[self.at.to(live.device)] = values.to(whole)
            live.copy_(whole.reshape(live.shape))

    def turn(self, parameters: Mapping[str, Tensor], A: Tensor) -> None:
        """Multiply the coordinates by A, (h, h) or a diagonal (h,): the features by basis^-1 A basis."""
        values = self.of(parameters)
        if A.ndim == 1:
            self.set(parameters, A.to(values)[:, None] * values)
            return
        own = A if self.basis is None else torch.linalg.solve(self.basis, A @ self.basis)
        self.set(parameters, own.to(values) @ values)


@dataclass(frozen=True, eq=False)
class WeightPair:
    """Weights that meet in one product: `left` may be multiplied by A if `right` is by A^-T."""

    name: str
    left: tuple[Entries, ...]
    right: tuple[Entries, ...]
    free: tuple[tuple[int, ...], ...] | None
    """The coordinates among which A may be any invertible matrix; None: A is diagonal, and the bases are None."""
    turned: tuple[tuple[int, int], ...]  #: pairs of coordinates that positions turn: there A is a rotation and a scale
    nodes: frozenset[Node]  #: the operations through which these weights act here

    @property
    def features(self) -> int:
        """Return h."""
        return len(self.left[0].at)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Return what two uses of the same weights have in common."""
        return tuple(sorted(one.key for one in self.left)), tuple(sorted(one.key for one in self.right))

    @property
    def entries(self) -> tuple[Entries, ...]:
        """Return the entries of either side."""
        return self.left + self.right

    def move(self, parameters: Mapping[str, Tensor], A: Tensor) -> None:
        """Multiply the left side by A, (h, h) or a diagonal (h,), float64, and the right side by A^-T."""
        for one in self.left:
            one.turn(parameters, A)
        inverse = 1 / A if A.ndim == 1 else torch.linalg.inv(A).T
        for one in self.right:
            one.turn(parameters, inverse)

    def drawn(self, generator: torch.Generator) -> Tensor:
        """Return a random A, (h, h) or a diagonal (h,), float64, with singular values in [5, 25]."""
        if self.free is None:
            return factors(self.features, generator)
        A = torch.zeros(self.features, self.features, dtype=torch.float64)
        for block in self.free:
            at = torch.tensor(block)
            normal = (torch.randn(len(block), len(block), generator=generator, dtype=torch.float64) for _ in range(2))
            left, right = (torch.linalg.qr(one)[0] for one in normal)
            A[at[:, None], at] = left * factors(len(block), generator) @ right
        for i, j in self.turned:
            angle = 2 * math.pi * torch.rand((), generator=generator, dtype=torch.float64)
            r = factors(1, generator)[0]
            A[i, i] = A[j, j] = r * angle.cos()
            A[j, i], A[i, j] = r * angle.sin(), -r * angle.sin()
        return A

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class HeadOrder:
    """The heads of one attention: groups that share keys and values, and their members; either may change places."""

    name: str
    groups: tuple[tuple[Entries, ...], ...]  #: entries of each group: keys and values
    members: tuple[tuple[tuple[Entries, ...], ...], ...]  #: by group, by head: queries, and columns that read the head
    nodes: frozenset[Node]

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Return what two uses of the same weights have in common."""
        return tuple(sorted(one.key for one in self.entries))

    @property
    def entries(self) -> tuple[Entries, ...]:
        """Return all entries."""
        heads = [one for group in self.members for head in group for one in head]
        return (*(one for group in self.groups for one in group), *heads)

    def move(self, parameters: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Put the groups, and the heads of each group, in another order."""
        written = []
        order = _other_order(len(self.groups), generator)
        for new, old in enumerate(order):
            written += _put(parameters, self.groups[old], self.groups[new])
            inside = _other_order(len(self.members[old]), generator)
            for at, was in enumerate(inside):
                written += _put(parameters, self.members[old][was], self.members[new][at])
        for to, values in written:
            to.set(parameters, values)

    def __str__(self) -> str:
        return self.name


def _put(
    parameters: Mapping[str, Tensor], old: tuple[Entries, ...], new: tuple[Entries, ...]
) -> list[tuple[Entries, Tensor]]:
    """Return what to write into entries so that their coordinates become those of other entries."""
    values = []
    for source, to in zip(old, new, strict=True):
        here = source.of(parameters)
        if source.basis is not None and to.basis is not None:
            here = torch.linalg.solve(to.basis, source.basis).to(here) @ here
        values.append((to, here))
    return values


def _other_order(n: int, generator: torch.Generator) -> list[int]:
    """Return a random order of n that is not the present one, if there is another."""
    order = list(range(n))
    while n > 1 and order == sorted(order):
        order = torch.randperm(n, generator=generator).tolist()
    return order


def factors(n: int, generator: torch.Generator) -> Tensor:
    """Return random factors, (n,) float64: in [5, 25], as published."""
    return 5 + 20 * torch.rand(n, generator=generator, dtype=torch.float64)


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

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[Node, ProductWeights] = {}

    def of(self, product: Node) -> ProductWeights:
        """Return the weight and bias of a matrix product, as positions in parameters."""
        if product not in self._known:
            self._known[product] = self._read(product)
        return self._known[product]

    def _read(self, product: Node) -> ProductWeights:
        known = self.graph.leaf_of(product.next_functions[-1])
        if known is None:
            raise NotUnderstood("one of its weights is not a parameter itself, but made from some")
        bias = self._bias(product)
        at = None if bias is None else self.graph.leaf_of(bias[1])
        if bias is not None and at is None:
            raise NotUnderstood("one of its biases is not a parameter itself, but made from some")
        name, positions = known
        nodes = frozenset({product} if bias is None else {product, bias[0]})
        return ProductWeights(product, name, positions.T, at[0] if at else None, at[1] if at else None, nodes)

    def _bias(self, product: Node) -> tuple[Node, GraphEdge] | None:
        """Return (the operation that adds a vector to the rows of a product, the vector); None if there is none."""
        if product.name() == "AddmmBackward0":
            added = product.next_functions[0]
            return None if added[0] is None else (product, added)
        node = product
        while len(readers := self.graph.readers[node]) == 1:
            node = readers[0][0]
            if node.name() == "AddBackward0":
                bias = self.graph.bias_behind(node)
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
