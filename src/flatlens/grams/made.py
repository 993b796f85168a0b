"""Jacobians of parameters from which a network makes other tensors: slices, fixed rows of a table, scaled weights.

df/dtheta = df/dw dw/dtheta for every tensor w that is made from theta. df/dw is per sample and follows from the output
Jacobians at the operations that read w; autograd takes it back to theta, as w is the same for all samples. If theta is
a table, only the rows that are looked up are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flatlens.grams.embeddings import embedding_jacobian
from flatlens.grams.explicit import ExplicitJacobian
from flatlens.grams.layout import Layout, MadePlaces
from flatlens.grams.record import Tape
from flatlens.grams.small_parameters import entrywise_jacobian
from flatlens.grams.unexplained import ignore_slow_batching_warning
from flatlens.operations.graph import Place
from flatlens.operations.made import Made
from flatlens.operations.reads import RESHAPING, Lookup, Product

Kept = Mapping[tuple[str, int], Tensor]
"""The tensor that each operation combines with a made tensor, samples in front, by (parameter, k-th operation)."""


def made_jacobian(
    layout: Layout, tape: Tape, name: str, parameter: Tensor, output_jacobians: Mapping[str, Tensor], kept: Kept
) -> tuple[Tensor, Tensor | None]:
    """Return (M, ids): df/dtheta (n, N, size) float64, and None; for a table the part of its rows `ids` (T,) alone."""
    places = layout.made_places(tape, name)
    lookups = lookups_of(tape, name)
    goals: list[Place] = [lookup.edge for lookup in lookups] or [parameter]
    sizes = [lookup.shape for lookup in lookups] or [parameter.shape]
    found = _taken_back(goals, sizes, places, name, layout, output_jacobians, kept)
    if not lookups:
        return found[0], None
    M = torch.cat(found, 2)
    ids = torch.cat([lookup.kept().flatten() for lookup in lookups])
    padding = lookups[0].padding
    if padding >= 0:
        M = (M.reshape(*M.shape[:2], len(ids), -1) * torch.ne(ids, padding)[:, None]).flatten(2)
    return M, ids


def lookups_of(tape: Tape, name: str) -> list[Lookup]:
    """Return the lookups in a table whose ids are the same for all samples; empty if it also acts otherwise."""
    reads = tape.reads[name] or ()
    return [read for read in reads if isinstance(read, Lookup)] if all(isinstance(r, Lookup) for r in reads) else []


def as_explicit(M: Tensor, ids: Tensor | None, parameter: Tensor, C: Tensor) -> ExplicitJacobian:
    """Return the Jacobian with its parameter's values; rows of a table that are looked up again are added up."""
    if ids is None:
        return ExplicitJacobian(M, parameter.flatten().to(torch.float64), C)
    n, N = M.shape[:2]
    rows = M.reshape(n, N, len(ids), -1)
    return embedding_jacobian(parameter, [(None, ids.expand(n, -1), rows)], C)


def whole_gradient(M: Tensor, ids: Tensor | None, parameter: Tensor) -> Tensor:
    """Return a gradient M (size,) as one of the whole parameter, (numel,)."""
    if ids is None:
        return M
    rows = M.new_zeros(len(parameter), parameter[0].numel())
    return rows.index_add_(0, ids, M.reshape(len(ids), -1)).flatten()


def _taken_back(
    goals: list[Place],
    sizes: list[torch.Size],
    places: MadePlaces,
    name: str,
    layout: Layout,
    output_jacobians: Mapping[str, Tensor],
    kept: Kept,
) -> list[Tensor]:
    """Return the derivatives at the goals, (n, N, size) float64 each, from those at the made tensors."""
    found: list[Tensor | None] = [None] * len(goals)
    like = next(iter(output_jacobians.values()))
    n, N = like.shape[:2]
    at: list[Place] = []
    onto: list[Tensor] = []
    k = 0
    for made, reads in places:
        parts = []
        for read, place in reads:
            J, factor = output_jacobians[place], kept.get((name, k))
            if factor is not None and isinstance(read, Product):
                parts.append(_product_jacobian(read, J, factor))
            elif factor is not None and isinstance(read, Lookup):
                parts.append(_lookup_jacobian(read, J, factor, made.shape[0]))
            else:
                entries = entrywise_jacobian(read, layout.rows[place], J, factor)
                parts.append(entries.clone() if entries is J else entries)
            k += 1
        M = _sum(parts)
        goal = _same_entries(made, goals)
        if goal is not None:
            found[goal] = _sum([found[goal], M])
        else:
            at.append(made.edge)
            onto.append(M.reshape(-1, *made.shape).to(made.dtype))
    if at:
        with ignore_slow_batching_warning():
            rows = torch.autograd.grad(at, goals, onto, retain_graph=True, allow_unused=True, is_grads_batched=True)
        for number, row in enumerate(rows):
            if row is not None:
                found[number] = _sum([found[number], row.reshape(n, N, -1).to(torch.float64)])
    return [
        like.new_zeros(n, N, size.numel(), dtype=torch.float64) if M is None else M
        for M, size in zip(found, sizes, strict=True)
    ]


def _sum(parts: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of new tensors, in the memory of the first: each may be N times as large as a weight."""
    first, *others = [part for part in parts if part is not None]
    for part in others:
        first += part
    return first


def _product_jacobian(read: Product, J: Tensor, x: Tensor) -> Tensor:
    """Return df/dW of a product, as it is stored, (n, N, size) float64; x is its input, samples in front."""
    n = len(J)
    phi = read.adapter.patches(x, n)
    if J.ndim == 3:
        J = J[:, :, None, :, None]
    M = torch.einsum("nkgdp,ngmp->nkgdm", J, phi.to(J))
    return read.adapter.as_stored(M, read.stored).reshape(*J.shape[:2], -1).to(torch.float64)


def _lookup_jacobian(read: Lookup, J: Tensor, ids: Tensor, size: int) -> Tensor:
    """Return df/dE of a table with `size` rows, (n, N, size D) float64, from J (n, N, T, D) at its rows `ids`."""
    n, N, T, D = J.shape
    ids = ids.reshape(n, T)
    J = J.to(torch.float64) * (ids != read.padding)[:, None, :, None]
    M = J.new_zeros(n, N, size, D)
    return M.scatter_add_(2, ids[:, None, :, None].expand_as(J), J).flatten(2)


def _same_entries(made: Made, goals: list[Place]) -> int | None:
    """Return the goal that a made tensor is, perhaps in another shape; None if it is another tensor."""
    node = made.node
    if made.number:
        return None
    while True:
        for number, goal in enumerate(goals):
            same = goal.node is node if not isinstance(goal, Tensor) else getattr(node, "variable", None) is goal
            if same:
                return number
        if node.name() not in RESHAPING:
            return None
        node = node.next_functions[0][0]
