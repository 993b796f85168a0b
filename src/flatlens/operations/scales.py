"""Scales that may move from one weight to another: a norm's own scale and shift, and one factor of a gate.

A norm's scale multiplies each feature, and the matrix products that read the features may be divided by it. A gated
layer multiplies a(G x) by U x, entry by entry: the rows of U may be multiplied and the columns that read the product
divided. Both are found in autograd's graph, as heads are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatlens.operations.graph import Node
from flatlens.operations.heads import HeadFinder
from flatlens.operations.pairs import Entries, WeightPair
from flatlens.operations.paths import GraphEdge, Paths, dtype_of, is_product, shape_of, taken_back
from flatlens.operations.product_weights import NotUnderstood, ProductWeights, unit_vectors

_NORMS = ("NativeLayerNormBackward0", "FusedRmsNormBackward0")


@dataclass(frozen=True, eq=False)
class NormScale:
    """A norm's scale and shift, and the weights that read its features."""

    name: str
    scale: Entries
    shift: Entries | None
    readers: tuple[tuple[Entries, Entries | None], ...]  #: (columns, the bias that may take the shift) of each reader
    nodes: frozenset[Node]

    @property
    def pair(self) -> WeightPair:
        """Return the pair of scale and columns."""
        left = (self.scale,) if self.shift is None else (self.scale, self.shift)
        right = tuple(columns for columns, _ in self.readers)
        return WeightPair(self.name, left, right, None, (), self.nodes)

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> tuple[object, ...]:
        """Return what two uses of the same norm have in common."""
        return self.pair.key

    @property
    def entries(self) -> tuple[Entries, ...]:
        """Return the entries of the scale and the columns."""
        return self.pair.entries


@dataclass(eq=False)
class Scales:
    """The scales of norms, and the gates, that a network's graph shows."""

    norms: list[NormScale] = field(default_factory=list)
    gates: list[WeightPair] = field(default_factory=list)
    refused_norms: dict[str, str] = field(default_factory=dict)  #: norms whose scale cannot move, with the reason
    refused_gates: dict[str, str] = field(default_factory=dict)


class ScaleFinder:
    """A search for norms and gates in the graph of one forward pass."""

    def __init__(self, paths: Paths, heads: HeadFinder) -> None:
        self.paths, self.heads = paths, heads
        self.found = Scales()

    def run(self) -> Scales:
        """Return the norms and the gates."""
        read: dict[GraphEdge, list[Node]] = {}
        for node in self.paths.graph.nodes:
            if is_product(self.paths, node) and node.next_functions[-2][0] is not None:
                origin = self.paths.origins(node.next_functions[-2]).single
                if origin is not None:
                    read.setdefault(origin, []).append(node)
        for node in self.paths.graph.nodes:
            affine = self._affine(node)
            if affine is not None:
                self._read_norm((node, 0), *affine, read.get((node, 0), []))
        for origin, readers in read.items():
            if origin[0].name() == "MulBackward0" and self._affine(origin[0]) is None:
                self._read_gate(origin, readers)
        return self.found

    def _vector(self, node: Node, operand: int) -> Entries | None:
        """Return the entries of an operand that is a vector: a parameter, perhaps with a constant added."""
        edge = node.next_functions[operand]
        if edge[0] is None or edge[0] not in self.paths.fixed or len(shape_of(edge)) != 1:
            return None
        known = self.paths.leaf_of(edge)
        if known is not None:
            return Entries(known[0], known[1][:, None])
        known, used = self.paths.leaf_of(edge, shifted=True), _used(node, operand)
        if known is None or used is None:
            return None
        entries = Entries(known[0], known[1][:, None])
        return replace(entries, added=used.detach()[:, None] - entries.of(self.paths.parameters))

    def _affine(self, node: Node) -> tuple[Entries, Entries | None, frozenset[Node]] | None:
        """Return (scale, shift, the nodes that apply them) of a norm that ends in this node; None if none does."""
        name = node.name()
        if name in _NORMS:
            scale, shift = (*(self._vector(node, operand) for operand in range(1, len(node.next_functions))), None)[:2]
            if scale is None or (shift is None and any(source is not None for source, _ in node.next_functions[2:])):
                return None
            return scale, shift, frozenset({node})
        if name == "MulBackward0":
            for operand in range(2):
                vector, other = self._vector(node, operand), node.next_functions[1 - operand]
                if vector is not None and other[0] is not None and other[0] not in self.paths.fixed:
                    adds = [reader for reader, _ in self.paths.graph.read_by(node) if self._shifts(reader, node)]
                    return None if adds else (vector, None, frozenset({node}))
        if name == "AddBackward0":
            for operand in range(2):
                shift, below = self._vector(node, operand), node.next_functions[1 - operand][0]
                if shift is not None and below is not None and self._shifts(node, below):
                    scaled = next(filter(None, (self._vector(below, one) for one in range(2))))
                    return scaled, shift, frozenset({node, below})
        return None

    def _shifts(self, node: Node, below: Node) -> bool:
        """Return whether a node adds a vector to what another one has scaled by a vector."""
        if node.name() != "AddBackward0" or below.name() != "MulBackward0" or node._saved_alpha != 1:
            return False
        return all(any(self._vector(one, operand) is not None for operand in range(2)) for one in (node, below))

    def _read_norm(
        self,
        out: GraphEdge,
        scale: Entries,
        shift: Entries | None,
        nodes: frozenset[Node],
        readers: list[Node],
    ) -> None:
        name, reading = scale.parameter, self.paths.readers(out)
        try:
            others = sorted({node.name().partition("Backward")[0] for node in reading if node not in readers})
            if others or not reading:
                raise NotUnderstood(
                    f"its features are read by {', '.join(others) or 'nothing'}, too, directly or over a skip"
                )
            read = tuple(self._columns(out, reader) for reader in readers)
            nodes = nodes.union(*(self.heads.weights.of(reader).nodes for reader in readers))
        except NotUnderstood as why:
            self.found.refused_norms[name] = str(why)
            return
        read = tuple({columns.key: (columns, bias) for columns, bias in read}.values())
        told = f"{name} -> {', '.join(columns.parameter for columns, _ in read)}"
        self.found.norms.append(NormScale(told, scale, shift, read, nodes))

    def _columns(self, out: GraphEdge, reader: Node) -> tuple[Entries, Entries | None]:
        """Return the columns of a product in the order of the features that it reads, and its bias."""
        weights = self.heads.weights.of(reader)
        owner = _feature_of(reader.next_functions[-2], out)
        if sorted(owner) != list(range(len(owner))) or len(owner) != shape_of(out)[-1]:
            raise NotUnderstood(f"{weights.parameter} reads some of its features several times, or not at all")
        bias = None
        if weights.bias is not None and weights.bias_at is not None:
            bias = Entries(weights.bias, weights.bias_at[:, None])
        return weights.columns(torch.tensor(owner).argsort()), bias

    def _read_gate(self, out: GraphEdge, readers: list[Node]) -> None:
        """Read the factors of a product, entry by entry, that come straight from a matrix product."""
        for edge in out[0].next_functions:
            origin = None if edge[0] is None else self.paths.origins(edge).single
            if origin is None or not is_product(self.paths, origin[0]):
                continue
            name = ""
            try:
                weights = self.heads.weights.of(origin[0])
                name = weights.parameter
                if set(self.paths.readers(out)) != set(readers) or len(readers) != 1:
                    raise NotUnderstood("not one matrix product alone reads the gated features")
                columns, _ = self._columns(out, readers[0])
                self.found.gates.append(self._gate(weights, _output_of(edge, origin), columns, readers[0]))
            except NotUnderstood as why:
                self.found.refused_gates[name] = str(why)

    def _gate(self, weights: ProductWeights, features: list[int], columns: Entries, reader: Node) -> WeightPair:
        rows = weights.rows(torch.tensor(features))
        told = f"{weights.parameter} -> {columns.parameter}"
        return WeightPair(told, rows, (columns,), None, (), weights.nodes | {reader})


def _used(node: Node, operand: int) -> Tensor | None:
    """Return what an operand of a product or a norm was in the forward pass; None if autograd does not keep it."""
    names = ("self", "other") if node.name() == "MulBackward0" else ("input", "weight", "bias")
    used: Tensor | None = getattr(node, f"_saved_{names[operand]}", None)
    return used


def _feature_of(edge: GraphEdge, out: GraphEdge) -> list[int]:
    """Return the feature, on the last axis of `out`, that each column of (rows, columns) is."""
    found = []
    for c, back in unit_vectors(edge, out):
        sizes = back.abs().flatten(0, -2).sum(0)
        if int((sizes > 1e-9 * sizes.max()).sum()) != 1:
            raise NotUnderstood(f"an input {c} of what reads them is several features, or none")
        found.append(int(sizes.argmax()))
    return found


def _output_of(edge: GraphEdge, origin: GraphEdge) -> list[int]:
    """Return the output of a matrix product that each feature on the last axis of a tensor is."""
    shape = shape_of(edge)
    found = []
    for f in range(shape[-1]):
        u = torch.zeros(1, *shape, dtype=dtype_of(origin))
        u[..., f] = 1
        sizes = taken_back(edge, origin, u).abs().sum((0, 1))
        if int((sizes > 1e-9 * sizes.max()).sum()) != 1:
            raise NotUnderstood("a gated feature is several outputs of its weight, or none")
        found.append(int(sizes.argmax()))
    return found
