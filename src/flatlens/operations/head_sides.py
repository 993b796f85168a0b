"""The features of attention's heads, and what couples them: heads that share features, coordinates that are turned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatlens.operations.pairs import Entries, HeadOrder, WeightPair
from flatlens.operations.product_weights import NEGLIGIBLE, NotUnderstood, ProductWeights


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


@dataclass(eq=False)
class HeadPairs:
    """What was found: pairs of queries and keys, of values and columns, and heads that may change places."""

    queries: list[WeightPair] = field(default_factory=list)
    values: list[WeightPair] = field(default_factory=list)
    orders: list[HeadOrder] = field(default_factory=list)
    refused_queries: dict[str, str] = field(default_factory=dict)  #: products not understood, with the reason
    refused_values: dict[str, str] = field(default_factory=dict)


def together(heads: list[tuple[HeadSide, HeadSide]]) -> list[tuple[list[HeadSide], list[HeadSide]]]:
    """Return the sides that meet each other, directly or through others: all queries of one key, for example."""
    lefts, rights = ({side.key: side for side in sides} for sides in zip(*heads, strict=True))
    meets = {(left.key, right.key) for left, right in heads}
    found, left_over = [], dict(lefts)
    while left_over:
        some = {next(iter(left_over))}
        while True:
            others = {right for left, right in meets if left in some}
            more = {left for left, right in meets if right in others}
            if more <= some:
                break
            some |= more
        found.append(([lefts[key] for key in lefts if key in some], [rights[key] for key in rights if key in others]))
        left_over = {key: side for key, side in left_over.items() if key not in some}
    return found


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
