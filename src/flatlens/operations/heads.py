"""Heads of attention, found in autograd's graph: which weights make queries, keys and values, and which read a head.

An attention multiplies queries by keys, and weighs values by what comes out. Both are products of two tensors that
depend on the samples. From each factor the graph is followed back to the matrix product that made it, along operations
that only move entries (views, slices, turns by an angle); vectors taken back along it show which rows of the weight
belong to which head, and in which coordinates they are multiplied. No name is read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flatlens.operations.graph import LEAF, Node
from flatlens.operations.head_sides import HeadPairs, HeadSide, structure, together
from flatlens.operations.pairs import Entries, HeadOrder, WeightPair
from flatlens.operations.paths import GraphEdge, Origins, Paths, dtype_of, is_product, shape_of, taken_back
from flatlens.operations.product_weights import NotUnderstood, WeightReader, probe, rounding, unit_vectors

_PRODUCTS = ("BmmBackward0", "BaddbmmBackward0")  #: the second adds a mask to scores


class HeadFinder:
    """A search for the heads in the graph of one forward pass."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.found = HeadPairs()
        self.weights = WeightReader(paths)
        self._scores: dict[Node, list[tuple[HeadSide, HeadSide]]] = {}  #: by product: (query, key) of each head
        self._unread: dict[Node, str] = {}  #: products neither of whose factors comes from a weight, with the reason

    def run(self) -> HeadPairs:
        """Return the heads of every attention."""
        for node in self.paths.graph.nodes:
            if node.name() in _PRODUCTS:
                self._read(node)
        return self.found

    def _read(self, node: Node) -> None:
        left, right = node.next_functions[-2:]
        if left[0] is None or right[0] is None:
            self._unread[node] = "depend on no weight"
            return
        origins = [self.paths.origins(edge) for edge in (left, right)]
        made = [any(is_product(self.paths, one) for one, _ in origin.edges) for origin in origins]
        if not any(made):
            self._unread[node] = next(self._told(one.edges, one.joined) for one in origins)
            self._refuse_unmade(node, origins)
            return
        operand, refused = made.index(True), self.found.refused_queries
        try:
            if all(made):
                self._read_scores(node, left, right)
            elif self._sums_features(node, operand):
                told = self._told(origins[1 - operand].edges, origins[1 - operand].joined)
                raise NotUnderstood(f"what is multiplied with its features: these {told}")
            else:
                refused = self.found.refused_values
                self._read_values(node, operand)
        except NotUnderstood as why:
            refused[self._name(origins[operand].edges)] = str(why)

    def _sums_features(self, node: Node, operand: int) -> bool:
        """Return whether a product sums over the features of an operand, as that of queries and keys does."""
        try:
            self.sides(node.next_functions[operand - 2], 1 if operand else 2, "features")
        except NotUnderstood:
            return False
        return True

    def _name(self, edges: Iterable[GraphEdge]) -> str:
        """Return the name of the first weight that makes a factor, or of the parameter that this weight is made from.

        Weights of matrix products come first.
        """
        fixed = self.paths.fixed
        for node, _ in sorted(edges, key=lambda edge: not is_product(self.paths, edge[0])):
            operands = node.next_functions[-1:] if is_product(self.paths, node) else node.next_functions
            made = next((source for source, _ in operands if source in fixed), None)
            while made is not None:
                if made.name() == LEAF:
                    return self.paths.names[id(made.variable)]
                made = next((source for source, _ in made.next_functions if source in fixed), None)
        return ""

    def _refuse_unmade(self, node: Node, origins: list[Origins]) -> None:
        """Refuse an attention whose values come from no matrix product: the product that weighs them by its scores."""
        if any(source in self.paths.fixed for source, _ in node.next_functions[-2:]):
            return
        for operand, values in enumerate(origins):
            scores = self._scores_behind(node.next_functions[-1 - operand][0], past_weights=False)
            if scores is not None:
                name = self._name(values.edges)
                self.found.refused_values[name] = f"its values {self._told(values.edges, values.joined)}"
                self._refuse_unread(scores, name)

    def _refuse_unread(self, scores: Node | None, name: str) -> None:
        """Refuse the queries and keys of a product if neither comes from a matrix product."""
        if scores in self._unread:
            self.found.refused_queries[name] = f"its queries or keys {self._unread[scores]}"

    def _read_scores(self, node: Node, left: GraphEdge, right: GraphEdge) -> None:
        """Read a product of queries and keys: the last axis of the one, the middle axis of the other are summed."""
        queries, keys = self.sides(left, 2, "queries"), self.sides(right, 1, "keys")
        heads = list(zip(queries, keys, strict=True))
        self._scores[node] = heads
        for number, (some, others) in enumerate(together(heads)):
            free, turned = structure([*some, *others])
            name = _named(some[0].weights.parameter, others[0].weights.parameter, f"head {number}")
            if {one.key for side in some for one in side.entries} & {o.key for side in others for o in side.entries}:
                raise NotUnderstood("its queries and keys share a weight")
            self.found.queries.append(
                WeightPair(name, _all(some), _all(others), free, turned, _nodes([*some, *others]))
            )

    def _read_values(self, node: Node, operand: int) -> None:
        """Read a product that weighs values: the axis of features passes through, and a matrix product reads it."""
        axis = 2 if operand else 1
        edge, scores = node.next_functions[operand - 2], self._scores_behind(node.next_functions[-1 - operand][0])
        self._refuse_unread(scores, self._name(self.paths.origins(edge).edges))
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
        self.found.values += pairs
        self._read_order(node, self._scores.get(scores, []), sides, columns)

    def _read_order(
        self,
        node: Node,
        heads: list[tuple[HeadSide, HeadSide]],
        sides: list[HeadSide],
        columns: dict[int, Entries],
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
        self.found.orders.append(HeadOrder(name, tuple(shared.values()), members, nodes))

    def _scores_behind(self, node: Node | None, *, past_weights: bool = True) -> Node | None:
        """Return the nearest product of two tensors that depend on samples, from which a tensor is made.

        Without `past_weights`, one from which it comes through no product with parameters.
        """
        found, seen, waiting = [], {node}, [node]
        while waiting:
            one = waiting.pop()
            if one is None:
                continue
            factors = [source for source, _ in one.next_functions[-2:]]
            if one.name() in _PRODUCTS and not any(source in self.paths.fixed for source in factors):
                found.append(one)
                continue
            if not past_weights and self.paths.is_layer(one):
                continue
            below = {source for source, _ in one.next_functions} - seen
            seen |= below
            waiting += below
        return max(found, key=lambda one: int(one._sequence_nr()), default=None)

    def sides(self, edge: GraphEdge, axis: int, what: str) -> list[HeadSide]:
        """Return the features of every head in a factor (heads, ., .) whose axis `axis` counts coordinates."""
        origins = self.paths.origins(edge)
        if origins.single is None or not is_product(self.paths, origins.single[0]):
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
                raise NotUnderstood(f"the coordinates of its {what} do not tell its features")
            found.append(HeadSide(weights, features, maps))
        return found

    def _told(self, edges: tuple[GraphEdge, ...], joined: bool) -> str:
        names = sorted({node.name().partition("Backward")[0] for node, _ in edges if not is_product(self.paths, node)})
        if joined:
            return "are joined with a parameter"
        return f"pass through {', '.join(names)} on their way" if names else "come from several weights"

    def _reader(self, node: Node) -> Node:
        """Return the matrix product that reads what a product of values gives, and nothing else does."""
        readers = self.paths.readers((node, 0))
        if len(readers) != 1 or not is_product(self.paths, readers[0]):
            names = ", ".join(sorted({one.name().partition("Backward")[0] for one in readers}))
            raise NotUnderstood(f"its heads are read by {names or 'nothing'}, not by one matrix product alone")
        return readers[0]

    def _columns(self, node: Node, axis: int) -> dict[int, Entries]:
        """Return the columns that read each head of a product (heads, ., .)."""
        reader = self._reader(node)
        edge, out = reader.next_functions[-2], (node, 0)
        if self.paths.origins(edge).single != out:
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


def _all(sides: list[HeadSide]) -> tuple[Entries, ...]:
    return tuple(entries for side in sides for entries in side.entries)


def _nodes(sides: list[HeadSide]) -> frozenset[Node]:
    return frozenset(node for side in sides for node in side.weights.nodes)


def _named(first: str, second: str, what: str) -> str:
    """Return the name of what is found in two weights, which may be one."""
    return f"{first}: {what}" if first == second else f"{first}, {second}: {what}"


def _singular(matrix: Tensor) -> bool:
    return bool(float(torch.linalg.cond(matrix)) > 1e6)
