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

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from flatlens.grams.autograd import ignore_slow_batching_warning
from flatlens.grams.output_jacobians import input_products, input_route, same_tokens
from flatlens.grams.plan import Plan, Weight
from flatlens.grams.record import Tape
from flatlens.grams.weight_jacobians import (
    DenseJacobian,
    ExplicitJacobian,
    GramKind,
    Roots,
    RowProduct,
    SharedJacobian,
    WeightJacobian,
    concatenated,
    norm2,
    row_products,
    trace,
)
from flatlens.operations.graph import LEAF, Place
from flatlens.operations.parameter_uses import RESHAPING, Derived, Entrywise, GraphOperation, Lookup, Product, Read
from flatlens.problem.row_layout import onto_softmax, softmax_of


@dataclass(eq=False)
class LayerGrams:
    """The Gram matrices of one place, for the n samples of a chunk; each is computed on first use.

    A place has an input side (derivatives in its input: G), a parameter side (derivatives in its weight and bias: K,
    R), or both. The network's input has an input side only. A call of a linear layer has both, but a second call of the
    same weight has its input side only: the weight belongs to the first. A parameter outside linear layers has a
    parameter side only.

    >>> import flatlens as fl, torch
    >>> about = dict(id="own", family="compression", symbol="", source="", unit="")
    >>> @fl.measures.per_sample(**about, place="input", needs={"G"})
    ... def squares(g):
    ...     return g.G.diagonal(dim1=1, dim2=2).sum(1)  # ||df/dx_i||_F^2
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> report = fl.measure(fl.Lens(problem), [squares])
    >>> abs(report["squares"].value - net.weight.square().sum().item()) < 1e-6
    True
    """

    C: Tensor  #: output Hessians d2 l_i / df2, (n, N, N), scaled so that the risk is the mean of l_i
    f: Tensor  #: outputs, (n, N)
    precision: float  #: machine epsilon of the arithmetic that computed the Jacobians
    input_side: Callable[[], Mapping[RowProduct, Tensor]] | None = None
    """Computes "gram", which is G; and if measures need them "squares": ||df/dx_p||^2 of each input entry p, (n, M),
    and "along": df/dx x, (n, N), where it equals <df/dW, W>."""
    x: Tensor | None = None  #: input of the place, (n, M)
    x_norm2: Tensor | None = None  #: ||x_i||^2, (n,)
    weight: WeightJacobian | None = None
    counts_weight: bool = False  #: whether the weight is among the measured parameters
    counts_bias: bool = False  #: whether the bias is
    has_derivative: bool = True  #: whether the derivative in the whole weight is known, so that R is that of the weight
    pure: bool = False  #: whether the layer's calls multiply, add the bias and do nothing else
    feature_scale: Tensor | None = None  #: spread of each feature over the data, (g, m), if requested
    counted: Tensor | None = None  #: for outputs of tokens: which tokens count, (n, T)
    losses: Tensor | None = None  #: losses, (n,), scaled as C, if they are read
    slope: Tensor | None = None
    """dl_i/df_i, (n, N), scaled so that mean_i slope slope^T weighs samples as the risk does."""
    softmax_size: int = 0  #: outputs that share each softmax at the network's end, 0 without: see `closing_softmax`
    rounding: Tensor | None = None
    """How far rounding moves df/dx, over its length, (n,), as the certificate shows it: its error may be larger where
    the forward pass itself cancels. None where the certificate does not test it."""
    shared: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict, init=False)
    """Numbers that several measures read, by name: each is computed for the first of them."""

    @cached_property
    def _input(self) -> Mapping[RowProduct, Tensor]:
        assert self.input_side is not None
        return self.input_side()

    @property
    def G(self) -> Tensor:
        """Return (df/dx)(df/dx)^T, (n, N, N)."""
        return self._input["gram"]

    @property
    def input_squares(self) -> Tensor:
        """Return ||df/dx_p||^2 of each input entry p, (n, M)."""
        return self._input["squares"]

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of G, (n, N), ascending and not negative."""
        return _eigenvalues(self.G)

    @cached_property
    def softmax_eigenvalues(self) -> Tensor:
        """Return those of P G P, the Gram matrix of softmax(f), with P = diag(p) - p p^T."""
        p = softmax_of(self.f, self.counted)
        half = onto_softmax(p, self.G.transpose(0, 1), self.counted)  # rows of G, (N, n, N)
        return _eigenvalues(onto_softmax(p, half.permute(2, 1, 0), self.counted).transpose(0, 1))

    @cached_property
    def outputs(self) -> Tensor:
        """Return the number of outputs of each sample, (n,): N, less the outputs of masked tokens."""
        n, N = self.f.shape
        if self.counted is None:
            return torch.full((n,), N, device=self.f.device)
        return self.counted.sum(1) * (N // self.counted.shape[1])

    @cached_property
    def K_weight(self) -> Tensor:
        """Return (df/dW)(df/dW)^T, (n, N, N)."""
        return self.linear.gram()

    @cached_property
    def K(self) -> Tensor:
        """Return K of the weight plus K of the bias, (df/db)(df/db)^T, without those that are not measured."""
        if not self.counts_bias:
            return self.K_weight if self.counts_weight else torch.zeros_like(self.C)
        return self.K_weight + self.linear.bias_gram() if self.counts_weight else self.linear.bias_gram()

    @cached_property
    def CK_weight(self) -> Tensor:
        """Return tr(C K_weight), (n,)."""
        return self.linear.trace()

    @cached_property
    def CK(self) -> Tensor:
        """Return tr(C K), (n,), without the Gram matrix where none is read."""
        total = self.CK_weight if self.counts_weight else self.C.new_zeros(len(self.C))
        return total + self.linear.bias_trace() if self.counts_bias else total

    @cached_property
    def CR(self) -> Tensor:
        """Return tr(C R), (n,), without the Gram matrix where none is read."""
        return trace(self.C, self.R) if self._R_of_G else self.linear.relative_trace()

    @property
    def _R_of_G(self) -> bool:
        """Return whether R is ||phi||^2 G."""
        return isinstance(self.weight, DenseJacobian) and self.pure and self.input_side is not None

    @cached_property
    def R(self) -> Tensor:
        """Return R_kk' = <W^T M_k, W^T M_k'> with M_k = df_k/dW, (n, N, N); for a dense layer ||phi||^2 G."""
        if self._R_of_G:
            assert isinstance(self.weight, DenseJacobian)
            return self.weight.phi_norm2[:, None, None] * self.G
        return self.linear.relative_gram()

    def relative_gram(self, scale: Tensor) -> Tensor:
        """Return R of the layer with weight W * scale and features phi / scale: the same function in other units."""
        return self.linear.relative_gram(scale)

    @property
    def linear(self) -> WeightJacobian:
        """Return the Jacobian in the place's weight or parameter, which it has."""
        assert self.weight is not None
        return self.weight

    @property
    def at_output(self) -> Tensor:
        """Return df/dz of a linear layer's output, (n, N, d); (n, N, g, d, P) if it acts at several positions."""
        assert isinstance(self.weight, DenseJacobian | SharedJacobian)
        return self.weight.J

    @property
    def diagonal(self) -> Tensor:
        """Return the Gauss-Newton diagonal of measured parameters, weight then bias, summed over samples, (size,)."""
        parts = [self.linear.diagonal().flatten()] if self.counts_weight else []
        return concatenated([*parts, self.linear.bias_diagonal()] if self.counts_bias else parts, 0)

    @cached_property
    def adaptive(self) -> Tensor:
        """Return sum_j theta_j^2 ||C^(1/2) df/dtheta_j||^2 over the place's measured parameters, (n,)."""
        total = self.C.new_zeros(len(self.C))
        if self.counts_weight:
            total = total + self.linear.adaptive()
        if self.counts_bias:
            total = total + self.linear.adaptive_bias()
        return total

    @property
    def along(self) -> Tensor:
        """Return sum_j theta_j df/dtheta_j over the place's measured parameters, (n, N)."""
        known = self._input.get("along") if self.counts_weight and self.input_side is not None else None
        rest = self.linear.along(weight=self.counts_weight and known is None, bias=self.counts_bias)
        return rest if known is None else known + rest


def _eigenvalues(grams: Tensor) -> Tensor:
    """Return the eigenvalues of positive semidefinite matrices, ascending; NaN for matrices that overflowed."""
    there = grams.isfinite().all(2).all(1)
    values: Tensor = torch.linalg.eigvalsh(grams.where(there[:, None, None], 0.0))
    return values.clamp(min=0).where(there[:, None], torch.nan)


@dataclass(eq=False)
class ChunkGrams:
    """The results of the pass for one chunk: losses, network's input, layers, parameters outside layers."""

    number: int  #: number of the chunk's first sample, unique in the data
    losses: Tensor | None  #: losses, (n,), scaled as C; None if inputs alone are read
    correct: Tensor | None  #: whether each sample is classified correctly, (n,); None if targets are not classes, too
    outputs: LayerGrams  #: the outputs alone, with neither side
    input: LayerGrams | None
    layers: dict[str, LayerGrams]  #: calls of linear layers, in execution order
    others: dict[str, LayerGrams]  #: parameters outside linear layers, by name
    parts: dict[str, LayerGrams]  #: projections and heads of attention, if they are asked for, by name


OutputJacobians: TypeAlias = Mapping[str, Tensor]
"""df/d(place), (n, N, ...), by place."""


def kept_by(plan: Plan, tape: Tape, n: int) -> dict[GraphOperation, Tensor]:
    """Return by operation what it combines with a parameter, samples in front: the last backward pass frees it."""
    operations = plan.operations(tape)
    uses: list[tuple[GraphOperation, str]] = [
        use for name in (*plan.small_parameters, *plan.embeddings, *plan.derived) for use in plan.uses(tape, name)
    ]
    uses += [(operations[place], place) for weight in plan.weights.values() for place in weight.products]
    kept = ((read, place, read.kept()) for read, place in uses)
    return {
        read: plan.rows[place].by_sample(tensor, n).flatten(0, 1) for read, place, tensor in kept if tensor is not None
    }


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """A recorded forward pass, and how its outputs' derivatives in parameters follow from those at its operations."""

    plan: Plan
    tape: Tape
    named: Mapping[str, Tensor]  #: the network's parameters
    n: int
    saved: Mapping[GraphOperation, Tensor]  #: what `kept_by` returns

    def inputs(self, weight: Weight) -> list[Tensor]:
        """Inputs of a weight's products, a sample's rows side by side."""
        operations = self.plan.operations(self.tape)
        return [self.saved[operations[place]] for place in weight.products]

    def through(
        self, read: Read, place: str, output_jacobians: OutputJacobians, shape: torch.Size | None = None
    ) -> Tensor:
        """df/dw through one operation that reads w, (n, N, size) float64; `shape` is that of a table w."""
        J, kept = output_jacobians[place], self.saved.get(read)
        n, N = J.shape[:2]
        # a product: sum_p J_p (x) phi_p, as the weight is stored
        if isinstance(read, Product):
            assert kept is not None
            phi = read.adapter.patches(kept, n)
            M = torch.einsum("nkgdp,ngmp->nkgdm", J[:, :, None, :, None] if J.ndim == 3 else J, phi.to(J))
            return read.adapter.as_stored(M, read.stored).reshape(n, N, -1).to(torch.float64)
        # a lookup: J (n, N, T, D) goes to the rows `ids` (n, T) of the table
        if isinstance(read, Lookup):
            assert kept is not None
            assert shape is not None
            ids = kept.reshape(n, J.shape[2])
            J = J.to(torch.float64) * (ids != read.padding)[:, None, :, None]
            table = J.new_zeros(n, N, shape[0], J.shape[3])
            return table.scatter_add_(2, ids[:, None, :, None].expand_as(J), J).flatten(2)
        # entry by entry: J (n, N, w, other axes) times the factor, summed over the axes along which w is repeated
        if isinstance(read, Entrywise):
            J = J if kept is None else J * kept.reshape(n, -1, *kept.shape[1:])[:, None].to(J)
            own = [size for axis, size in enumerate(read.broadcast) if axis != self.plan.rows[place].axis]
            repeated = [3 + axis for axis, size in enumerate(own) if size == 1]
            return J.sum([2, *repeated]).reshape(n, N, -1).to(torch.float64)
        return (J if J.ndim == 3 else J.sum(4).flatten(2)).to(torch.float64)  # the bias of a product

    def entries(self, name: str, output_jacobians: OutputJacobians) -> Tensor | None:
        """Jacobian in a small parameter, (n, N, size) float64; None if no operation reads it."""
        uses = self.plan.uses(self.tape, name)
        return _sum([self.through(read, place, output_jacobians) for read, place in uses]) if uses else None

    def derived(self, name: str, output_jacobians: OutputJacobians) -> tuple[Tensor, Tensor | None]:
        """(M, ids) of a parameter from which the network derives other tensors: M is df/dtheta, (n, N, size) float64.

        `ids` is None; for a table M is the part of its rows `ids` (T,) alone.
        """
        parameter, lookups = self.named[name], lookups_of(self.tape, name)
        n, N = next(iter(output_jacobians.values())).shape[:2]
        goals: list[Place] = [lookup.edge for lookup in lookups] or [parameter]
        found: list[list[Tensor]] = [[] for _ in goals]  # derivatives at each goal, which add up
        behind: list[tuple[Derived, Tensor]] = []  # derivatives that autograd takes back to the goals
        for derived, uses in self.plan.derived_uses(self.tape, name):
            M = _sum([self.through(read, place, output_jacobians, derived.shape) for read, place in uses])
            goal = _same_entries(derived, goals)
            if goal is None:
                behind.append((derived, M))
            else:
                found[goal].append(M)
        if behind:
            onto = [M.reshape(-1, *derived.shape).to(derived.dtype) for derived, M in behind]
            with ignore_slow_batching_warning():
                taken_back = torch.autograd.grad(
                    [derived.edge for derived, _ in behind], goals, onto,
                    retain_graph=True, allow_unused=True, is_grads_batched=True,
                )  # fmt: skip
            for parts, M in zip(found, taken_back, strict=True):
                parts += [] if M is None else [M.reshape(n, N, -1).to(torch.float64)]
        sizes = [lookup.shape.numel() for lookup in lookups] or [parameter.numel()]
        whole = [
            _sum(parts) if parts else torch.zeros(n, N, size, dtype=torch.float64, device=parameter.device)
            for parts, size in zip(found, sizes, strict=True)
        ]
        if not lookups:
            return whole[0], None
        M, ids = torch.cat(whole, 2), torch.cat([lookup.kept().flatten() for lookup in lookups])
        if lookups[0].padding >= 0:
            M = (M.reshape(n, N, len(ids), -1) * torch.ne(ids, lookups[0].padding)[:, None]).flatten(2)
        return M, ids

    def rebuilt(self, totals: Mapping[str, Tensor], weights: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Return by parameter the gradient of a combination of the outputs, and the size of the terms that add to it.

        The gradient is computed as the Jacobians are, from the combination's derivatives `totals` at all places: for
        small parameters, and with `weights` also for weights, their biases and what tensors are derived from.
        """
        plan, found = self.plan, dict[str, tuple[Tensor, Tensor]]()
        alone = {place: total[:, None] for place, total in totals.items()}
        for name in plan.small_parameters:
            places = [place for _, place in plan.uses(self.tape, name)]
            if all(place in totals for place in places) and (M := self.entries(name, alone)) is not None:
                size = norm2(torch.cat([totals[place].flatten()[None] for place in places], 1)).sqrt()
                found[name] = M.sum((0, 1)), size
        if not weights:
            return found
        for name in plan.derived:
            M, ids = self.derived(name, alone)
            found[name] = whole_gradient(M.sum((0, 1)), ids, self.named[name]), M.square().sum().sqrt()
        for weight in plan.weights.values():
            if not weight.products or not all(place in totals for place in weight.products):
                continue
            g, d = weight.matrix.W.shape[:2]
            J = concatenated([totals[place].reshape(self.n, g, d, -1) for place in weight.products], 3)
            J = J.to(torch.float64)
            phi = concatenated([weight.adapter.patches(x, self.n) for x in self.inputs(weight)], 3).to(torch.float64)
            if weight.parameter is not None:
                W = weight.adapter.as_stored(torch.einsum("ngdp,ngmp->gdm", J, phi), weight.value.shape)
                found[weight.parameter] = W.flatten(), (norm2(J) * norm2(phi)).sum().sqrt()
            if weight.bias is not None:
                found[weight.bias] = J.sum((0, 3)).flatten(), norm2(J).sum().sqrt()
        return found


@dataclass(frozen=True, eq=False)
class ChunkJacobians:
    """The output Jacobians of a chunk, and the Gram matrices that are made of them."""

    forward: ForwardPass
    found: OutputJacobians
    explicit: dict[str, Tensor]  #: per-sample gradients of unexplained parameters, (n, N, size), by name
    C: Tensor  #: output Hessians, (n, N, N)
    needs: frozenset[str]  #: quantities that measures will read
    convex: bool  #: whether C is known to have no negative eigenvalue
    measured: Collection[str]  #: the measured parameters
    scale: Mapping[str, Tensor]  #: spread of each layer's features, by layer
    make_grams: Callable[..., LayerGrams]
    inputs_alone: bool = False  #: whether nothing of parameters is read

    @property
    def _at_inputs(self) -> tuple[RowProduct, ...]:
        """Return what the input side of every place computes."""
        return ("gram", "squares") if "squares" in self.needs else ("gram",)

    @cached_property
    def roots(self) -> Roots:
        """The root of C, which all layers share."""
        return Roots(self.convex)

    def layers(self) -> dict[str, LayerGrams]:
        """Return the calls of linear layers and the weights outside them; a weight belongs to its first call."""
        layers, plan, tape = {}, self.forward.plan, self.forward.tape
        for key in dict.fromkeys((*plan.structure.calls, *plan.weights)):
            x = None
            if key in plan.batch_axis:
                x = tape.linear[key].read.movedim(plan.batch_axis[key], 0)
                x = plan.unpadded(x, tape).reshape(len(self.C), -1)
            layers[key] = grams = self.make_grams(None, x, None if x is None else norm2(x))
            weight = None if self.inputs_alone else plan.weights.get(key)
            if weight is not None and not weight.products and self._stored(weight.parameter) is None:
                grams.has_derivative = False
            elif weight is not None:
                grams.weight = self.jacobian(weight)
                grams.has_derivative, grams.pure = weight.has_derivative, weight.pure
                grams.counts_weight, grams.counts_bias = weight.parameter in self.measured, weight.bias in self.measured
                grams.feature_scale = self.scale.get(key)
            if "G" in self.needs and x is not None:
                grams.input_side = self._input_side(key, grams.weight, x)
        return layers

    def parts(self, layers: Mapping[str, LayerGrams]) -> dict[str, LayerGrams]:
        """Return the plan's parts of weights, from the whole weights in `layers`."""
        found = {}
        for name, part in self.forward.plan.parts.items():
            whole = layers[part.part_of]
            if whole.has_derivative:
                found[name] = grams = self.make_grams()
                grams.weight = whole.linear.block(part.matrix, part.rows, part.columns)
                grams.counts_weight, grams.feature_scale = whole.counts_weight, self.scale.get(name)
        return found

    def others(self) -> dict[str, LayerGrams]:
        """Return all other parameters: those that are not the weight of a product."""
        plan, named = self.forward.plan, self.forward.named
        mine = {weight.parameter for weight in plan.weights.values()}
        stored: dict[str, tuple[Tensor | None, Tensor | None]] = {name: (M, None) for name, M in self.explicit.items()}
        stored.update({name: (self.forward.entries(name, self.found), None) for name in plan.small_parameters})
        stored.update(self.derived)
        found = {}
        for name, (M, ids) in stored.items():
            theta = named[name].detach()
            if name in mine:
                continue
            if M is None:  # no operation reads it: one column of zeros
                M, theta = self.C.new_zeros(*self.C.shape[:2], 1), theta.new_zeros(1)
            if ids is None:
                found[name] = ExplicitJacobian(M, theta.flatten().to(torch.float64), self.C)
            else:  # rows of a table that are looked up again are added up
                rows = M.reshape(*M.shape[:2], len(ids), -1)
                found[name] = embedding_jacobian(theta, [(ids.expand(len(M), -1), rows)], self.C)
        for name in plan.embeddings:
            lookups = []
            for read, place in plan.uses(self.forward.tape, name):
                ids, J = self.forward.saved[read].reshape(len(self.C), -1), self.found[place]
                if isinstance(read, Lookup) and read.padding >= 0:
                    J = J * torch.ne(ids, read.padding)[:, None, :, None].to(J)
                lookups.append((ids, J))
            found[name] = embedding_jacobian(named[name].detach(), lookups, self.C)
        return {name: self.make_grams(weight=J, counts_weight=True) for name, J in found.items()}

    def network_input(self, inputs: list[Tensor]) -> LayerGrams | None:
        """Return the input side of the network: all its floating inputs, flattened and joined; None without any."""
        if not inputs:
            return None
        Jx = concatenated([self.found[f"input:{number}"] for number in range(len(inputs))], 2).flatten(2)
        x = concatenated([x.reshape(len(Jx), -1) for x in inputs], 1)
        return self.make_grams(partial(row_products, Jx, self._at_inputs), x, norm2(x))

    def jacobian(self, weight: Weight) -> WeightJacobian:
        """Return the Jacobian in a weight."""
        plan, n = self.forward.plan, len(self.C)
        if not weight.products:
            M = self._stored(weight.parameter)
            assert M is not None
            M = torch.vmap(torch.vmap(weight.adapter.matrix))(M.reshape(*M.shape[:2], *weight.value.shape))
            return ExplicitJacobian(M, weight.matrix.W, self.C, weight.matrix)
        Jx = self.found.get(f"x:{weight.layer}")
        if weight.dense:
            phi = plan.unpadded(self.forward.inputs(weight)[0].reshape(n, -1), self.forward.tape)
            J = self.found[weight.products[0]]
            at_x = Jx if weight.pure else None
            return DenseJacobian(J, weight.matrix, at_x, phi, norm2(phi), self.C, self.needs, self.roots)

        def phi_of(piece: slice) -> Tensor:
            folded = [x.reshape(n, -1, *x.shape[1:])[piece] for x in self.forward.inputs(weight)]
            return concatenated([weight.adapter.patches(x.flatten(0, 1), len(x)) for x in folded], 3)

        wanted: frozenset[GramKind] = frozenset(what for what in get_args(GramKind) if what in self.needs)
        J = concatenated([self.found[place] for place in weight.products], 4)
        at_tokens = None
        if Jx is not None and same_tokens(plan, weight):
            at_tokens = Jx.view(*Jx.shape[:2], 1, -1, weight.matrix.W.shape[2]).mT
        return SharedJacobian(J, phi_of, weight.matrix, self.C, wanted, self.roots, at_tokens)

    def combined(self, u: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the gradients of sum_ik u_ik f_ik in parameters with derived tensors, and the size of the terms."""
        found = {}
        for name, (M, ids) in self.derived.items():
            gradient = torch.einsum("nk,nkp->p", u.to(M), M)
            size = (u.to(M) * torch.linalg.vector_norm(M, dim=2)).norm()
            found[name] = whole_gradient(gradient, ids, self.forward.named[name]), size
        return found

    @cached_property
    def derived(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """(M, ids) of each parameter that tensors are derived from, see `ForwardPass.derived`."""
        return {name: self.forward.derived(name, self.found) for name in self.forward.plan.derived}

    def _stored(self, parameter: str | None) -> Tensor | None:
        """The Jacobian in a parameter stored entry by entry, (n, N, size); None if it is not."""
        if parameter in self.forward.plan.derived:
            M, ids = self.derived[parameter]
            return M if ids is None else None
        return None if parameter is None else self.explicit.get(parameter)

    def _input_side(
        self, key: str, jacobian: WeightJacobian | None, x: Tensor
    ) -> Callable[[], Mapping[RowProduct, Tensor]]:
        """A function that computes G at a call's input x, and what else measures need there."""
        plan, weight = self.forward.plan, self.forward.plan.weights.get(key)
        # df/dx x equals <df/dW, W> if the weight acts there alone, on the whole input
        along = weight is not None and weight.as_given and len(weight.products) == 1 and not plan.ignores_padding
        wanted = (*self._at_inputs, "along") if along and "along" in self.needs else self._at_inputs
        route = input_route(plan, key, self.needs)
        if isinstance(jacobian, DenseJacobian) and plan.weights[key].pure and "columns" in self.needs:
            return lambda: {what: jacobian.product("x", what) for what in wanted}  # its columns need df/dx, too
        if weight is not None and route == "output":
            shared = self.jacobian(weight) if jacobian is None else jacobian
            assert isinstance(shared, SharedJacobian)
            return lambda: {"gram": shared.gram_at_input()}
        if route == "first layer":
            product = self.forward.tape.linear[key].product
            assert product is not None
            return partial(input_products, plan.weights[key], self.found[f"z:{key}"], product.shape[2:], wanted, x)
        return partial(row_products, self.found[f"x:{key}"].flatten(2), wanted, x=x)


def lookups_of(tape: Tape, name: str) -> list[Lookup]:
    """Return the lookups in a table whose ids are the same for all samples; empty if it also acts otherwise."""
    reads = tape.reads[name] or ()
    lookups = [read for read in reads if isinstance(read, Lookup)]
    return lookups if len(lookups) == len(reads) else []


def whole_gradient(M: Tensor, ids: Tensor | None, parameter: Tensor) -> Tensor:
    """Return a gradient M (size,) as one of the whole parameter, (numel,)."""
    if ids is None:
        return M
    rows = M.new_zeros(len(parameter), parameter[0].numel())
    return rows.index_add_(0, ids, M.reshape(len(ids), -1)).flatten()


def embedding_jacobian(weight: Tensor, lookups: list[tuple[Tensor, Tensor]], C: Tensor) -> ExplicitJacobian:
    """Return the Jacobian in the embedding `weight` (V, D), without rows that a sample does not look up: those are 0.

        df_k/dE_v = sum over the positions p with id v of df_k/dz_p

    Each lookup has its ids (n, T) and the output Jacobian (n, N, T, D) at its output. A sample has at most T nonzero
    rows: the row of an id is kept at the position where the id comes first. theta is each sample's own rows.
    """
    ids, J = concatenated([ids for ids, _ in lookups], 1), concatenated([J for _, J in lookups], 2)
    first = (ids[:, :, None] == ids[:, None]).to(torch.uint8).argmax(2)  # first position of each id, (n, T)
    place = torch.nn.functional.one_hot(first, ids.shape[1]).to(J)  # (n, T, T)
    M = torch.einsum("nkpd,npq->nkqd", J, place)
    new = first == torch.arange(ids.shape[1], device=ids.device)
    theta = weight[ids].to(torch.float64) * new[..., None]
    return ExplicitJacobian(M.flatten(2).to(torch.float64), theta.flatten(1), C, ids=ids, table=len(weight))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, with one new one at most: each may be N times as large as a weight."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _same_entries(derived: Derived, goals: list[Place]) -> int | None:
    """The goal that a derived tensor is, perhaps in another shape; None if it is another tensor."""
    node = derived.node
    while not derived.number:
        for number, goal in enumerate(goals):
            if (node.name() == LEAF and node.variable is goal) if isinstance(goal, Tensor) else goal.node is node:
                return number
        if node.name() not in RESHAPING:
            return None
        node = node.next_functions[0][0]
    return None
