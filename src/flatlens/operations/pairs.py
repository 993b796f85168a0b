"""Two sets of weights of which only a product acts: A times the one and A^-T times the other leave the function alone.

Such are queries and keys of a head (their scalar products count), values and the columns that read them, a factor of a
gate and the columns that read the product, a norm's scale and the columns that read its features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.operations.graph import Node


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
            left, right = (_orthogonal(len(block), generator) for _ in range(2))
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


def _orthogonal(n: int, generator: torch.Generator) -> Tensor:
    q: Tensor = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    return q
