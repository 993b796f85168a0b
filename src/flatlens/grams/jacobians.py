"""Jacobians and Gram matrices of all layers and parameters, from the output Jacobians of a chunk.

A weight acts as z_p = W phi_p + b at positions p. With J = df/dz, df_k/dW = sum_p J_kp (x) phi_p, df_k/db = sum_p J_kp
and, for a dense layer, df_k/dx = W^T J_k. All follow from J and from the features phi, which autograd keeps anyway.
Small parameters and embeddings follow in the same way from the Jacobians at their operations.

Tensors derived from parameters (slices, fixed rows of a table, scaled weights): df/dtheta = df/dw dw/dtheta for every
tensor w that is derived from theta. df/dw is per sample and follows from the output Jacobians at the operations that
read w; autograd takes it back to theta, as w is the same for all samples. If theta is a table, only the rows that are
looked up are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from flatlens.grams.autograd import ignore_slow_batching_warning
from flatlens.grams.contractions import RowProduct, concatenated, norm2, row_products
from flatlens.grams.layer_grams import LayerGrams
from flatlens.grams.output_jacobians import (
    along_follows,
    follows_from_output,
    input_products,
    is_first_layer,
    same_tokens,
)
from flatlens.grams.plan import Layout, MadePlaces, Weight
from flatlens.grams.record import Tape
from flatlens.grams.trial import Rows
from flatlens.grams.weight_jacobians import DenseJacobian, ExplicitJacobian, GramKind, SharedJacobian
from flatlens.operations.graph import Place
from flatlens.operations.layers import by_sample
from flatlens.operations.parameter_uses import RESHAPING, Derived, Entrywise, GraphOperation, Lookup, Product
from flatlens.problem import Problem

Saved: TypeAlias = dict[tuple[str, int], Tensor]
"""The tensor that an operation combines with a parameter, samples in front: by (parameter or layer, k-th operation)."""


def saved_of(layout: Layout, tape: Tape, n: int) -> Saved:
    """Return the inputs of the plan's operations, from what autograd saved; the last backward pass frees them."""
    found: Saved = {}
    operations = layout.operations(tape)
    reads: dict[tuple[str, int], tuple[GraphOperation, str]] = {
        (name, k): place
        for name in (*layout.small_parameters, *layout.embeddings, *layout.made)
        for k, place in enumerate(layout.places(tape, name))
    }
    for weight in layout.weights.values():
        reads |= {(weight.layer, k): (operations[place], place) for k, place in enumerate(weight.products)}
    for at, (read, place) in reads.items():
        if (tensor := read.kept()) is not None:
            found[at] = layout.rows[place].in_front(tensor, n)
    return found


@dataclass(frozen=True, eq=False)
class ChunkJacobians:
    """The output Jacobians of a chunk, and what is made of them."""

    problem: Problem
    tape: Tape
    layout: Layout
    named: Mapping[str, Tensor]  #: the network's parameters
    output_jacobians: dict[str, Tensor]  #: df/d(place), (n, N, ...), by place
    saved: Saved
    explicit: dict[str, Tensor]  #: per-sample gradients of unexplained parameters, (n, N, size), by name
    C: Tensor  #: output Hessians, (n, N, N)
    needs: frozenset[str]  #: quantities that measures will read
    convex: bool = False  #: whether C is known to have no negative eigenvalue

    def layers(self, make_grams: Callable[..., LayerGrams], scale: Mapping[str, Tensor]) -> dict[str, LayerGrams]:
        """Return the calls of linear layers and the weights outside them; a weight belongs to its first call."""
        layers, layout = {}, self.layout
        for key in dict.fromkeys((*layout.structure.calls, *layout.weights)):
            x = x_norm2 = None
            if key in layout.batch_axis:
                call = self.tape.linear[key]
                read = layout.unpadded(by_sample(call.read, layout.batch_axis[key]), self.tape)
                x = read.reshape(len(self.C), -1)
                x_norm2 = norm2(x)
            grams = make_grams(None, x, x_norm2)
            if (weight := layout.weights.get(key)) is not None:
                self._put_weight(grams, weight, scale.get(key))
            if "G" in self.needs and x is not None:
                grams.input_side = self._input_side(key, grams.weight, x)
            layers[key] = grams
        return layers

    def parts(
        self, layers: Mapping[str, LayerGrams], make_grams: Callable[..., LayerGrams], scale: Mapping[str, Tensor]
    ) -> dict[str, LayerGrams]:
        """Return the plan's parts of weights, from the whole weights in `layers`."""
        found = {}
        for name, part in self.layout.parts.items():
            whole = layers[part.part_of]
            if not whole.has_derivative:
                continue
            found[name] = grams = make_grams()
            grams.weight = whole.linear.block(part.matrix, part.rows, part.columns)
            grams.counts_weight, spread = whole.counts_weight, scale.get(name)
            grams.feature_scale = spread.flatten() if part.dense and spread is not None else spread
        return found

    def _put_weight(self, grams: LayerGrams, weight: Weight, scale: Tensor | None) -> None:
        if not weight.products and self._whole(weight.parameter) is None:
            grams.has_derivative = False
            return
        grams.weight = self.jacobian(weight)
        grams.has_derivative, grams.pure = weight.has_derivative, weight.pure
        grams.counts_weight = weight.parameter in self.problem.parameters
        grams.counts_bias = weight.bias in self.problem.parameters
        grams.feature_scale = scale.flatten() if weight.dense and scale is not None else scale

    def _input_side(self, key: str, jacobian: object, x: Tensor) -> Callable[[], Mapping[RowProduct, Tensor]]:
        """Return a function that computes G at a call's input x, and what else measures need there."""
        wanted = input_wanted(self.needs, along=along_follows(self.layout, key))
        if isinstance(jacobian, DenseJacobian) and self.layout.weights[key].pure and "columns" in self.needs:
            return lambda: {what: jacobian.at_input(what) for what in wanted}  # its columns need df/dx, too
        if isinstance(jacobian, SharedJacobian) and follows_from_output(self.layout, key, self.needs):
            return lambda: {"gram": jacobian.gram_at_input()}
        if is_first_layer(self.layout, key):
            z = self.output_jacobians[f"z:{key}"]
            return partial(input_products, self.layout.weights[key], z, self._shape(key)[2:], wanted, x)
        return partial(row_products, self.output_jacobians[f"x:{key}"].flatten(2), wanted, x=x)

    def _shape(self, key: str) -> torch.Size:
        product = self.tape.linear[key].product
        assert product is not None
        return product.shape

    def jacobian(self, weight: Weight) -> DenseJacobian | SharedJacobian:
        """Return the Jacobian in a weight."""
        layout = self.layout
        wanted: frozenset[GramKind] = frozenset(what for what in get_args(GramKind) if what in self.needs)
        if not weight.products:
            M = self._whole(weight.parameter)
            assert M is not None
            stored = M.reshape(*M.shape[:2], *weight.value.shape)
            return SharedJacobian(
                torch.vmap(torch.vmap(weight.adapter.matrix))(stored), None, weight.matrix, self.C, wanted, self.convex
            )
        n = len(self.C)
        inputs = [self.saved[weight.layer, k] for k in range(len(weight.products))]
        if weight.dense:
            (place,) = weight.products
            Jx = self.output_jacobians.get(f"x:{weight.layer}") if weight.pure else None
            phi = layout.unpadded(inputs[0].reshape(n, -1), self.tape)
            J = self.output_jacobians[place]
            return DenseJacobian(J, weight.matrix, Jx, phi, norm2(phi), self.C, self.needs)

        def phi_of(piece: slice) -> Tensor:
            folded = [x.reshape(n, -1, *x.shape[1:])[piece] for x in inputs]
            return concatenated([weight.adapter.patches(x.flatten(0, 1), len(x)) for x in folded], 3)

        J = concatenated([self.output_jacobians[place] for place in weight.products], 4)
        return SharedJacobian(J, phi_of, weight.matrix, self.C, wanted, self.convex, self._at_tokens(weight))

    def _whole(self, parameter: str | None) -> Tensor | None:
        """Return the Jacobian in a parameter stored entry by entry, (n, N, size); None if it is not."""
        if parameter in self.layout.made:
            M, ids = self.made[parameter]
            return M if ids is None else None
        return None if parameter is None else self.explicit.get(parameter)

    def _at_tokens(self, weight: Weight) -> Tensor | None:
        """Return the Jacobian at the input of a layer's only call, (n, N, 1, m, P), if its tokens are in order."""
        place = f"x:{weight.layer}"
        Jx = self.output_jacobians.get(place)
        if Jx is None or not same_tokens(self.layout, weight):
            return None
        return Jx.view(*Jx.shape[:2], 1, -1, weight.matrix.W.shape[2]).mT

    def others(self) -> dict[str, ExplicitJacobian]:
        """Return the Jacobians in all other parameters: those that are no weight of a product."""
        layout, named, found = self.layout, self.named, dict[str, ExplicitJacobian]()
        mine = {weight.parameter for weight in layout.weights.values()}
        for name, M in self.explicit.items():
            if name not in mine:
                found[name] = ExplicitJacobian(M, named[name].detach().flatten().to(torch.float64), self.C)
        for name in layout.small_parameters:
            found[name] = self._small(name, named[name].detach())
        for name in (name for name in layout.made if name not in mine):
            found[name] = as_explicit(*self.made[name], named[name].detach(), self.C)
        for name in layout.embeddings:
            parts: list[tuple[GraphOperation | None, Tensor, Tensor]] = [
                (read, self.saved[name, k].reshape(len(self.C), -1), self.output_jacobians[place])
                for k, (read, place) in enumerate(layout.places(self.tape, name))
            ]
            found[name] = embedding_jacobian(named[name].detach(), parts, self.C)
        return found

    def _small(self, name: str, theta: Tensor) -> ExplicitJacobian:
        """Return the Jacobian in a small parameter; one column of zeros if no operation reads it."""
        M = self._entries(name, self.output_jacobians)
        if M is None:
            M, theta = self.C.new_zeros(*self.C.shape[:2], 1), theta.new_zeros(1)
        return ExplicitJacobian(M, theta.flatten().to(torch.float64), self.C)

    def _entries(self, name: str, output_jacobians: Mapping[str, Tensor]) -> Tensor | None:
        parts = [
            entrywise_jacobian(read, self.layout.rows[place], output_jacobians[place], self.saved.get((name, k)))
            for k, (read, place) in enumerate(self.layout.places(self.tape, name))
        ]
        return None if not parts else parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    @cached_property
    def made(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return (M, ids) of each parameter that other tensors are made from, see `made_jacobian`."""
        return self._made(self.output_jacobians)

    def _made(self, output_jacobians: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | None]]:
        given = self.layout, self.tape
        return {
            name: made_jacobian(*given, name, self.named[name], output_jacobians, self.saved)
            for name in self.layout.made
        }

    def combined(self, u: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the gradients of sum_ik u_ik f_ik in parameters that tensors are made from, with their terms' size."""
        found = {}
        for name, (M, ids) in self.made.items():
            gradient = torch.einsum("nk,nkp->p", u.to(M), M)
            size = (u.to(M) * torch.linalg.vector_norm(M, dim=2)).norm()
            found[name] = whole_gradient(gradient, ids, self.named[name]), size
        return found

    def rebuilt(self, totals: Mapping[str, Tensor], weights: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Return by parameter the gradient of a combination of the outputs, and the size of the terms that add to it.

        The gradient is computed as the Jacobians are, from the combination's derivatives `totals` at all places: for
        small parameters, and with `weights` also for weights and their biases.
        """
        layout, found = self.layout, dict[str, tuple[Tensor, Tensor]]()
        for name in layout.small_parameters:
            places = [place for _, place in layout.places(self.tape, name)]
            if places and all(place in totals for place in places):
                M = self._entries(name, {place: totals[place][:, None] for place in places})
                assert M is not None
                found[name] = (
                    M.sum((0, 1)),
                    norm2(torch.cat([totals[place].flatten()[None] for place in places], 1)).sqrt(),
                )
        if weights:
            made = self._made({place: total[:, None] for place, total in totals.items()})
            for name, (M, ids) in made.items():
                found[name] = whole_gradient(M.sum((0, 1)), ids, self.named[name]), M.square().sum().sqrt()
        for weight in layout.weights.values() if weights else ():
            if weight.products and all(place in totals for place in weight.products):
                found |= self._rebuilt_weight(weight, totals)
        return found

    def _rebuilt_weight(self, weight: Weight, totals: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        n, g, d = len(self.C), *weight.matrix.W.shape[:2]
        J = concatenated([totals[place].reshape(n, g, d, -1) for place in weight.products], 3).to(torch.float64)
        kept = [self.saved[weight.layer, k] for k in range(len(weight.products))]
        phi = concatenated([weight.adapter.patches(x, n) for x in kept], 3).to(torch.float64)
        found = {}
        if weight.parameter is not None:
            whole = weight.adapter.as_stored(torch.einsum("ngdp,ngmp->gdm", J, phi), weight.value.shape)
            found[weight.parameter] = whole.flatten(), (norm2(J) * norm2(phi)).sum().sqrt()
        if weight.bias is not None:
            found[weight.bias] = J.sum((0, 3)).flatten(), norm2(J).sum().sqrt()
        return found


def input_wanted(needs: Collection[str], *, along: bool = False) -> tuple[RowProduct, ...]:
    """Return what the input side of a place computes; `along`: whether df/dx x is a sum over a weight's entries."""
    read: dict[RowProduct, bool] = {"gram": True, "squares": "squares" in needs, "along": along and "along" in needs}
    return tuple(what for what, is_read in read.items() if is_read)


def network_input(
    output_jacobians: dict[str, Tensor],
    inputs: list[Tensor],
    make_grams: Callable[..., LayerGrams],
    needs: Collection[str],
) -> LayerGrams | None:
    """Return the input side of the network: all its floating inputs, flattened and concatenated; None without any."""
    if not inputs:
        return None
    Jx = concatenated([output_jacobians[f"input:{number}"] for number in range(len(inputs))], 2)
    x = concatenated([x.reshape(len(Jx), -1) for x in inputs], 1)
    return make_grams(partial(row_products, Jx.flatten(2), input_wanted(needs)), x, norm2(x))


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


def _same_entries(made: Derived, goals: list[Place]) -> int | None:
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


def embedding_jacobian(
    weight: Tensor, lookups: list[tuple[GraphOperation | None, Tensor, Tensor]], C: Tensor
) -> ExplicitJacobian:
    """Return the Jacobian in the embedding `weight` (V, D), whose theta is each sample's own rows.

    Each lookup comes with its ids (n, T) and the output Jacobian (n, N, T, D) at its output.
    """
    ids = concatenated([mine for _, mine, _ in lookups], 1)
    trained = [
        J if not isinstance(lookup, Lookup) or lookup.padding < 0
        else J * torch.ne(mine, lookup.padding)[:, None, :, None].to(J)
        for lookup, mine, J in lookups
    ]  # fmt: skip
    J = concatenated(trained, 2)
    first = (ids[:, :, None] == ids[:, None]).to(torch.uint8).argmax(2)  # first position of each id, (n, T)
    place = torch.nn.functional.one_hot(first, ids.shape[1]).to(J)  # (n, T, T)
    M = torch.einsum("nkpd,npq->nkqd", J, place)
    new = first == torch.arange(ids.shape[1], device=ids.device)
    theta = weight[ids].to(torch.float64) * new[..., None]
    return ExplicitJacobian(M.flatten(2).to(torch.float64), theta.flatten(1), C)


def entrywise_jacobian(operation: GraphOperation, rows: Rows, J: Tensor, factor: Tensor | None) -> Tensor:
    """Return df/dtheta through one operation, (n, N, size) float64, from the output Jacobian J at its output.

    J is (n, N, d) or (n, N, g, d, P) if theta is the bias of a product, else (n, N, w, other axes). `factor` is the
    factor of theta, samples in front; None for 1.
    """
    if not isinstance(operation, Entrywise):
        return (J if J.ndim == 3 else J.sum(4).flatten(2)).to(torch.float64)
    n, N = J.shape[:2]
    if factor is not None:
        J = J * factor.reshape(n, -1, *factor.shape[1:])[:, None].to(J)
    kept = [size for axis, size in enumerate(operation.broadcast) if axis != rows.axis]
    repeated = [3 + axis for axis, size in enumerate(kept) if size == 1]
    return J.sum([2, *repeated]).reshape(n, N, -1).to(torch.float64)
