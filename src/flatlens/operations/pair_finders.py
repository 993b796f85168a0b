"""Pairs of weights found in autograd's graph: attention's heads, norms' scales and gates. No name is read.

An attention multiplies queries by keys, and weighs values by what comes out. Both are products of two tensors that
depend on the samples. From each factor the graph is followed back to the matrix product that made it, along operations
that only move entries (views, slices, turns by an angle); vectors taken back along it show which rows of the weight
belong to which head, and in which coordinates they are multiplied.

A norm's scale multiplies each feature, and the matrix products that read the features may be divided by it. A gated
layer multiplies a(G x) by U x, entry by entry: the rows of U may be multiplied and the columns that read the product
divided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatlens.operations.graph import (
    LEAF,
    Graph,
    GraphEdge,
    Node,
    Origins,
    dtype_of,
    shape_of,
    sources_of,
    taken_back,
    walk,
)
from flatlens.operations.weight_pairs import (
    NEGLIGIBLE,
    Entries,
    HeadOrder,
    NotUnderstood,
    ProductWeights,
    WeightPair,
    WeightReader,
    probe,
    rounding,
    unit_vectors,
)


@dataclass(frozen=True, eq=False)
class HeadSide:
    """The features of one head in one factor of a product."""

    weights: ProductWeights
    features: Tensor  #: (h,) outputs of the matrix product
    maps: Tensor  #: (positions, h, h): the coordinates at each position, from the features

    @property
    def key(self) -> tuple[object, ...]:
        """Return what two heads that share these features have in common."""
        return id(self.weights), tuple(self.features.tolist())

    @property
    def entries(self) -> tuple[Entries, ...]:
        """Return the rows and their part of the bias."""
        return self.weights.rows(self.features, self.maps[0])


def together(heads: list[tuple[HeadSide, HeadSide]]) -> list[tuple[list[HeadSide], list[HeadSide]]]:
    """Return the sides that meet each other, directly or through others: all queries of one key, for example."""
    lefts, rights = ({side.key: side for side in sides} for sides in zip(*heads, strict=True))
    meets: dict[tuple[object, ...], list[tuple[object, ...]]] = {}
    for left, right in heads:
        meets.setdefault(("left", *left.key), []).append(("right", *right.key))
        meets.setdefault(("right", *right.key), []).append(("left", *left.key))
    groups = {frozenset(walk([("left", *key)], meets.__getitem__)): None for key in lefts}  # each once, in order
    return [
        (
            [side for key, side in lefts.items() if ("left", *key) in group],
            [side for key, side in rights.items() if ("right", *key) in group],
        )
        for group in groups
    ]


def structure(sides: list[HeadSide]) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    """Return the coordinates that all positions treat alike, and the pairs of coordinates that they turn."""
    turns = torch.cat([torch.linalg.solve(side.maps[0], side.maps, left=False) for side in sides])  # D = A_p A_0^-1
    size = turns.abs().amax(dim=(1, 2), keepdim=True)
    turns = turns / size
    h = turns.shape[1]
    coupled = (turns.abs() > NEGLIGIBLE).any(0) & ~torch.eye(h, dtype=torch.bool)
    coupled = coupled | coupled.T
    free: dict[tuple[float, ...], list[int]] = {}
    turned = []
    for i in range(h):
        partners = coupled[i].nonzero()[:, 0].tolist()
        if not partners:
            signature = tuple(turns[:, i, i].mul(1e8).round().tolist())
            free.setdefault(signature, []).append(i)
            continue
        j = partners[0]
        like_a_turn = torch.allclose(turns[:, i, i], turns[:, j, j], atol=1e-8) and torch.allclose(
            turns[:, i, j], -turns[:, j, i], atol=1e-8
        )
        if len(partners) > 1 or coupled[j].sum() > 1 or not like_a_turn:
            raise NotUnderstood("positions mix the coordinates of its queries and keys in an unknown way")
        if i < j:
            turned.append((i, j))
    return tuple(map(tuple, free.values())), tuple(turned)


_PRODUCTS = ("BmmBackward0", "BaddbmmBackward0")  #: the second adds a mask to scores


class HeadFinder:
    """A search for the heads in the graph of one forward pass."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.queries: list[WeightPair] = []  #: pairs of queries and keys
        self.values: list[WeightPair] = []  #: pairs of values and the columns that read them
        self.orders: list[HeadOrder] = []  #: heads that may change places
        self.refused_queries: dict[str, str] = {}  #: products not understood, with the reason
        self.refused_values: dict[str, str] = {}
        self.weights = WeightReader(graph)
        self._scores: dict[Node, list[tuple[HeadSide, HeadSide]]] = {}  #: by product: (query, key) of each head
        self._unread: dict[Node, str] = {}  #: products neither of whose factors comes from a weight, with the reason

    def run(self) -> HeadFinder:
        """Find the heads of every attention."""
        for node in self.graph.nodes:
            if node.name() in _PRODUCTS:
                self._read(node)
        return self

    def _read(self, node: Node) -> None:
        left, right = node.next_functions[-2:]
        if left[0] is None or right[0] is None:
            self._unread[node] = "depend on no weight"
            return
        origins = [self.graph.origins(edge) for edge in (left, right)]
        made = [any(self.graph.is_product(one) for one, _ in origin.edges) for origin in origins]
        if not any(made):
            self._unread[node] = next(self._told(one.edges, one.joined) for one in origins)
            self._refuse_unmade(node, origins)
            return
        operand, refused = made.index(True), self.refused_queries
        try:
            if all(made):
                self._read_scores(node, left, right)
            elif self._sums_features(node, operand):
                told = self._told(origins[1 - operand].edges, origins[1 - operand].joined)
                raise NotUnderstood(f"what is multiplied with its features: these {told}")
            else:
                refused = self.refused_values
                self._read_values(node, operand)
        except NotUnderstood as why:
            refused[self._name(origins[operand].edges)] = str(why)

    def _sums_features(self, node: Node, operand: int) -> bool:
        """Return whether a product sums over the features of an operand, as queries times keys do."""
        try:
            self.sides(node.next_functions[operand - 2], 1 if operand else 2, "features")
        except NotUnderstood:
            return False
        return True

    def _name(self, edges: Iterable[GraphEdge]) -> str:
        """Return the name of the first weight that makes a factor, or of the parameter that this weight is made from.

        Weights of matrix products come first.
        """
        fixed = self.graph.fixed
        for node, _ in sorted(edges, key=lambda edge: not self.graph.is_product(edge[0])):
            operands = node.next_functions[-1:] if self.graph.is_product(node) else node.next_functions
            made = next((source for source, _ in operands if source in fixed), None)
            while made is not None:
                if made.name() == LEAF:
                    return self.graph.names[id(made.variable)]
                made = next((source for source, _ in made.next_functions if source in fixed), None)
        return ""

    def _refuse_unmade(self, node: Node, origins: list[Origins]) -> None:
        """Refuse an attention whose values come from no matrix product: the product that weighs them by its scores."""
        if any(source in self.graph.fixed for source, _ in node.next_functions[-2:]):
            return
        for operand, values in enumerate(origins):
            scores = self._scores_behind(node.next_functions[-1 - operand][0], past_weights=False)
            if scores is not None:
                name = self._name(values.edges)
                self.refused_values[name] = f"its values {self._told(values.edges, values.joined)}"
                self._refuse_unread(scores, name)

    def _refuse_unread(self, scores: Node | None, name: str) -> None:
        if scores in self._unread:
            self.refused_queries[name] = f"its queries or keys {self._unread[scores]}"

    def _read_scores(self, node: Node, left: GraphEdge, right: GraphEdge) -> None:
        """Read a product of queries and keys: the last axis of the one, the middle axis of the other are summed."""
        queries, keys = self.sides(left, 2, "queries"), self.sides(right, 1, "keys")
        heads = list(zip(queries, keys, strict=True))
        self._scores[node] = heads
        for number, (some, others) in enumerate(together(heads)):
            free, turned = structure([*some, *others])
            name = _named(some[0].weights.parameter, others[0].weights.parameter, f"head {number}")
            one, other = (tuple(entries for side in sides for entries in side.entries) for sides in (some, others))
            if {entries.key for entries in one} & {entries.key for entries in other}:
                raise NotUnderstood("its queries and keys share a weight")
            self.queries.append(WeightPair(name, one, other, free, turned, _nodes([*some, *others])))

    def _read_values(self, node: Node, operand: int) -> None:
        """Read a product that weighs values: the axis of features passes through, and a matrix product reads it."""
        axis = 2 if operand else 1
        edge, scores = node.next_functions[operand - 2], self._scores_behind(node.next_functions[-1 - operand][0])
        self._refuse_unread(scores, self._name(self.graph.origins(edge).edges))
        sides = self.sides(edge, axis, "values")
        if node.name() != "BmmBackward0":
            raise NotUnderstood("something is added to what its heads make")
        columns = self._columns(node, axis)
        known: dict[tuple[object, ...], list[tuple[HeadSide, Entries]]] = {}
        for b, side in enumerate(sides):
            if b not in columns:
                raise NotUnderstood("what reads its values does not read every head")
            known.setdefault(side.key, []).append((side, columns[b]))
        pairs = []
        for number, heads in enumerate(known.values()):
            some = [side for side, _ in heads]
            free, turned = structure(some)
            if turned or len(free) > 1:
                raise NotUnderstood("its values are turned or scaled by their position")
            reading = {entries.key: entries for _, entries in heads}
            one = heads[0][0]
            name = _named(one.weights.parameter, heads[0][1].parameter, f"head {number}")
            nodes = _nodes(some) | {self._reader(node)}
            pairs.append(WeightPair(name, one.entries, tuple(reading.values()), free, (), nodes))
        self.values += pairs
        self._read_order(node, self._scores.get(scores, []), sides, columns)

    def _read_order(
        self, node: Node, heads: list[tuple[HeadSide, HeadSide]], sides: list[HeadSide], columns: dict[int, Entries]
    ) -> None:
        """Read which heads may change places: those of the product of queries and keys from which the weights come."""
        if len(heads) != len(sides):
            return
        groups: dict[tuple[object, ...], dict[tuple[object, ...], tuple[Entries, ...]]] = {}
        shared: dict[tuple[object, ...], tuple[Entries, ...]] = {}
        for b, (value, (query, key)) in enumerate(zip(sides, heads, strict=True)):
            group = (key.key, value.key)
            shared[group] = (*key.entries, *value.entries)
            groups.setdefault(group, {})[query.key] = (*query.entries, columns[b])
        members = tuple(tuple(heads.values()) for heads in groups.values())
        if len({len(heads) for heads in members}) != 1 or len(members) * len(members[0]) == 1:
            return
        nodes = _nodes([*sides, *(side for pair in heads for side in pair)]) | {self._reader(node)}
        name = _named(heads[0][0].weights.parameter, columns[0].parameter, f"{len(members) * len(members[0])} heads")
        self.orders.append(HeadOrder(name, tuple(shared.values()), members, nodes))

    def _scores_behind(self, node: Node | None, *, past_weights: bool = True) -> Node | None:
        """Return the nearest product of two tensors that depend on samples, from which a tensor is made.

        Without `past_weights`, one from which it comes through no product with parameters.
        """
        found = []

        def behind(one: Node) -> list[Node]:
            if one.name() in _PRODUCTS and self.graph.fixed.isdisjoint(source for source, _ in one.next_functions[-2:]):
                found.append(one)
                return []
            return [] if not past_weights and self.graph.is_layer(one) else sources_of(one)

        for _ in walk([] if node is None else [node], behind):
            pass
        return max(found, key=lambda one: int(one._sequence_nr()), default=None)

    def sides(self, edge: GraphEdge, axis: int, what: str) -> list[HeadSide]:
        """Return the features of every head in a factor (heads, ., .) whose axis `axis` counts coordinates."""
        origins = self.graph.origins(edge)
        if origins.single is None or not self.graph.is_product(origins.single[0]):
            raise NotUnderstood(f"its {what} {self._told(origins.edges, origins.joined)}")
        to, shape = origins.single, shape_of(edge)
        weights = self.weights.of(to[0])
        rows = probe(shape[3 - axis])
        found = []
        for b in range(shape[0]):
            u = torch.zeros(shape[axis], *shape, dtype=torch.float64)
            for i in range(shape[axis]):
                u[i, b].select(axis - 1, i).copy_(rows)
            back = taken_back(edge, to, u.to(dtype_of(to))).to("cpu", torch.float64)  # (h, rows, d)
            used = back.abs() > rounding(to) * back.abs().max()
            features = used.any(0).any(0).nonzero()[:, 0]
            at = used.any(0).any(1)
            if len(features) != shape[axis]:
                raise NotUnderstood(f"one coordinate of its {what} mixes several heads, or comes from none")
            maps = back[:, at][:, :, features].transpose(0, 1)
            if _singular(maps[0]):
                raise NotUnderstood(f"the coordinates of its {what} do not identify its features")
            found.append(HeadSide(weights, features, maps))
        return found

    def _told(self, edges: tuple[GraphEdge, ...], joined: bool) -> str:
        names = sorted({node.name().partition("Backward")[0] for node, _ in edges if not self.graph.is_product(node)})
        if joined:
            return "are joined with a parameter"
        return f"pass through {', '.join(names)} on their way" if names else "come from several weights"

    def _reader(self, node: Node) -> Node:
        """Return the matrix product that reads what a product of values gives, and nothing else does."""
        readers = self.graph.readers_of((node, 0))
        if len(readers) != 1 or not self.graph.is_product(readers[0]):
            names = ", ".join(sorted({one.name().partition("Backward")[0] for one in readers}))
            raise NotUnderstood(f"its heads are read by {names or 'nothing'}, not by one matrix product alone")
        return readers[0]

    def _columns(self, node: Node, axis: int) -> dict[int, Entries]:
        """Return the columns that read each head of a product (heads, ., .)."""
        reader = self._reader(node)
        edge, out = reader.next_functions[-2], (node, 0)
        if self.graph.origins(edge).single != out:
            raise NotUnderstood("what reads its heads reads other features, too")
        weights = self.weights.of(reader)
        heads: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
        for c, back in unit_vectors(edge, out):
            mine = (back.abs() > rounding(out) * back.abs().max()).flatten(1).any(1).nonzero()[:, 0]
            whole = back[mine[0]].movedim(axis - 1, 0)  # (h, t)
            heads.setdefault(tuple(mine.tolist()), []).append((c, whole[:, int(whole.abs().sum(0).argmax())]))
        found: dict[int, Entries] = {}
        for members, columns in heads.items():
            basis = torch.stack([row for _, row in columns])
            if basis.shape[0] != basis.shape[1] or shape_of(out)[axis] != len(basis) or _singular(basis):
                raise NotUnderstood("one of the features that read its heads mixes several")
            entries = weights.columns(torch.tensor([c for c, _ in columns]), basis.T.contiguous())
            found |= dict.fromkeys(members, entries)
        return found


def _nodes(sides: list[HeadSide]) -> frozenset[Node]:
    return frozenset(node for side in sides for node in side.weights.nodes)


def _named(first: str, second: str, what: str) -> str:
    return f"{first}: {what}" if first == second else f"{first}, {second}: {what}"


def _singular(matrix: Tensor) -> bool:
    return bool(float(torch.linalg.cond(matrix)) > 1e6)


_NORMS = ("NativeLayerNormBackward0", "FusedRmsNormBackward0")


@dataclass(frozen=True, eq=False)
class NormScale(WeightPair):
    """A norm's scale, perhaps with its shift, on the left, and the columns of the weights that read its features."""

    readers: tuple[tuple[Entries, Entries | None], ...]  #: (columns, the bias that may take the shift) of each reader

    @property
    def scale(self) -> Entries:
        """The norm's scale."""
        return self.left[0]

    @property
    def shift(self) -> Entries | None:
        """The norm's shift."""
        return self.left[1] if len(self.left) > 1 else None


class ScaleFinder:
    """A search for norms and gates in the graph of one forward pass."""

    def __init__(self, heads: HeadFinder) -> None:
        self.graph, self.heads = heads.graph, heads
        self.norms: list[NormScale] = []
        self.gates: list[WeightPair] = []
        self.refused_norms: dict[str, str] = {}  #: norms whose scale cannot move, with the reason
        self.refused_gates: dict[str, str] = {}

    def run(self) -> ScaleFinder:
        """Find the norms and the gates."""
        read: dict[GraphEdge, list[Node]] = {}
        for node in self.graph.nodes:
            if self.graph.is_product(node) and node.next_functions[-2][0] is not None:
                origin = self.graph.origins(node.next_functions[-2]).single
                if origin is not None:
                    read.setdefault(origin, []).append(node)
        for node in self.graph.nodes:
            affine = self._affine(node)
            if affine is not None:
                self._read_norm((node, 0), *affine, read.get((node, 0), []))
        for origin, readers in read.items():
            if origin[0].name() == "MulBackward0" and self._affine(origin[0]) is None:
                self._read_gate(origin, readers)
        return self

    def _vector(self, node: Node, operand: int) -> Entries | None:
        """Return the entries of an operand that is a vector: a parameter, perhaps with a constant added."""
        edge = node.next_functions[operand]
        if edge[0] is None or edge[0] not in self.graph.fixed or len(shape_of(edge)) != 1:
            return None
        known = self.graph.leaf_of(edge)
        if known is not None:
            return Entries(known[0], known[1][:, None])
        # what the operand was in the forward pass, if autograd kept it
        names = ("self", "other") if node.name() == "MulBackward0" else ("input", "weight", "bias")
        used: Tensor | None = getattr(node, f"_saved_{names[operand]}", None)
        known = self.graph.leaf_of(edge, shifted=True)
        if known is None or used is None:
            return None
        entries = Entries(known[0], known[1][:, None])
        return replace(entries, added=used.detach()[:, None] - entries.of(self.graph.parameters))

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
                if vector is not None and other[0] is not None and other[0] not in self.graph.fixed:
                    adds = [reader for reader, _ in self.graph.readers[node] if self._shifts(reader, node)]
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
        self, out: GraphEdge, scale: Entries, shift: Entries | None, nodes: frozenset[Node], readers: list[Node]
    ) -> None:
        name, reading = scale.parameter, self.graph.readers_of(out)
        try:
            others = sorted({node.name().partition("Backward")[0] for node in reading if node not in readers})
            if others or not reading:
                raise NotUnderstood(
                    f"its features are read by {', '.join(others) or 'nothing'}, too, directly or over a skip"
                )
            read = tuple(self._columns(out, reader) for reader in readers)
            nodes = nodes.union(*(self.heads.weights.of(reader).nodes for reader in readers))
        except NotUnderstood as why:
            self.refused_norms[name] = str(why)
            return
        read = tuple({columns.key: (columns, bias) for columns, bias in read}.values())
        told = f"{name} -> {', '.join(columns.parameter for columns, _ in read)}"
        left, right = (scale,) if shift is None else (scale, shift), tuple(columns for columns, _ in read)
        self.norms.append(NormScale(told, left, right, None, (), nodes, read))

    def _columns(self, out: GraphEdge, reader: Node) -> tuple[Entries, Entries | None]:
        """Return the columns of a product in the order of the features that it reads, and its bias."""
        weights = self.heads.weights.of(reader)
        # the feature, on the last axis of `out`, that each column of (rows, columns) is
        why = "an input {} of what reads them is several features, or none"
        read = unit_vectors(reader.next_functions[-2], out)
        owner = [_only(back.abs().flatten(0, -2).sum(0), why.format(c)) for c, back in read]
        if sorted(owner) != list(range(len(owner))) or len(owner) != shape_of(out)[-1]:
            raise NotUnderstood(f"{weights.parameter} reads some of its features several times, or not at all")
        bias = None
        if weights.bias is not None and weights.bias_at is not None:
            bias = Entries(weights.bias, weights.bias_at[:, None])
        return weights.columns(torch.tensor(owner).argsort()), bias

    def _read_gate(self, out: GraphEdge, readers: list[Node]) -> None:
        """Read the factors of a product, entry by entry, that come straight from a matrix product."""
        for edge in out[0].next_functions:
            origin = None if edge[0] is None else self.graph.origins(edge).single
            if origin is None or not self.graph.is_product(origin[0]):
                continue
            name = ""
            try:
                weights = self.heads.weights.of(origin[0])
                name = weights.parameter
                if set(self.graph.readers_of(out)) != set(readers) or len(readers) != 1:
                    raise NotUnderstood("not one matrix product alone reads the gated features")
                columns, _ = self._columns(out, readers[0])
                rows = weights.rows(torch.tensor(_output_of(edge, origin)))
                told, nodes = f"{name} -> {columns.parameter}", weights.nodes | {readers[0]}
                self.gates.append(WeightPair(told, rows, (columns,), None, (), nodes))
            except NotUnderstood as why:
                self.refused_gates[name] = str(why)


def _output_of(edge: GraphEdge, origin: GraphEdge) -> list[int]:
    """The output of a matrix product that each feature on the last axis of a tensor is."""
    shape = shape_of(edge)
    found = []
    for f in range(shape[-1]):
        u = torch.zeros(1, *shape, dtype=dtype_of(origin))
        u[..., f] = 1
        sizes = taken_back(edge, origin, u).abs().sum((0, 1))
        found.append(_only(sizes, "a gated feature is several outputs of its weight, or none"))
    return found


def _only(sizes: Tensor, why: str) -> int:
    """The only entry that is not rounding; raises NotUnderstood with the reason if there is another."""
    if int((sizes > 1e-9 * sizes.max()).sum()) != 1:
        raise NotUnderstood(why)
    return int(sizes.argmax())
