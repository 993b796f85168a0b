"""The functional Hessian, the part of a Hessian that the Gauss-Newton matrix leaves out: quadratic forms and trace.

    H_l = GGN_l + mean_i sum_k (dl_i/df_k) d2 f_ik / dW2

Families of perturbations V of one layer's weight W (`Directions`) give quadratic forms <V, H V>. V changes the
pre-activation z = W phi + b at the positions p by U = V phi. If one call uses the weight, the pre-activation is
perturbed, separately for each sample: a direction costs one double backward for all samples. If several calls use it,
the weight itself is perturbed, because an earlier call changes what a later call sees.

The trace by probes: a probe v of the parameters gives v^T (H - GGN) v, whose noise comes from all off-diagonal
entries. If one call uses a weight, each sample i can have its own perturbation V_i of it, because the network sees
only U_i = V_i phi_i. One double backward then averages n independent probes. Other parameters (of norms, not in a
layer, weights of several calls) have one probe for each block of samples. Neither depends on the chunk's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from flatlens.curvature.operators import Operator, Residual
from flatlens.curvature.symmetry import SymmetryCheck, derivative_along, random_like
from flatlens.errors import out_of_memory
from flatlens.estimate import Progress
from flatlens.grams import Plan, Weight, agreed
from flatlens.grams.autograd import (
    Runner,
    as_batch,
    ignore_slow_batching_warning,
    require_second_derivative,
    sample_axes,
)
from flatlens.grams.data_pass import SampleStream, random_signs
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.weight_jacobians import pieces, power_of_two
from flatlens.operations.graph import Place
from flatlens.operations.parameter_uses import Product
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import has_lists, is_list, select, size
from flatlens.problem.eval_context import device_of, differentiable
from flatlens.problem.forward import slopes
from flatlens.problem.ranks import ChunkBuffer
from flatlens.progress import PRODUCTS

_Changes: TypeAlias = Iterator[tuple[int, int | slice, Tensor]]
"""Groups, rows, and their change at each position."""


@dataclass(frozen=True, eq=False)
class Directions:
    """A family of perturbations of a layer with weight W (g, d, m)."""

    count: Callable[[Tensor, int | None], int]
    """W -> the number of perturbations, at P positions; None: those of the weight itself."""
    changes: Callable[[Tensor, Tensor], _Changes]
    """W, phi (n, g, m, P) -> (group, rows, their change at each position) of the pre-activation."""

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield the changes U of the pre-activation, (n, g, d, P) each, from phi (n, g, m, P)."""
        for group, rows, change in self.changes(W, phi):
            U = phi.new_zeros(len(phi), len(W), W.shape[1], phi.shape[3])
            U[..., group, rows, :] = change
            yield U

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield the changes V of the weight itself, (g, d, m) each: U is V where phi is the identity."""
        identity = torch.eye(W.shape[2], dtype=W.dtype, device=W.device).expand(1, len(W), -1, -1)
        return (U[0] for U in self.at_preactivation(W, identity))


def factor(phi: Tensor) -> Tensor:
    """Return E with E^T E = phi^T phi, (n, g, min(m, P), P): enough where only the sum of the forms is needed."""
    one_position = phi.shape[3] == 1
    E: Tensor = torch.linalg.vector_norm(phi, dim=2, keepdim=True) if one_position else torch.linalg.qr(phi, mode="r").R
    return E


def _columns(W: Tensor, positions: int | None) -> int:
    """Return the rows of the factor of phi; m where the weight itself is perturbed."""
    return W.shape[2] if positions is None else min(W.shape[2], positions)


def row_directions(T: Tensor, scale: Tensor | None = None) -> Directions:
    """The perturbations T_r (x) e_t / scale_t, T (g, rows, d): Tr H_l for T = I, flatness for T^T T = W W^T."""

    def changes(W: Tensor, phi: Tensor) -> _Changes:
        E = factor(phi if scale is None else phi / scale[..., None].to(phi.dtype))
        for group, rows in enumerate(T.to(phi)):
            for row, e in product(rows, E[:, group].unbind(1)):
                yield group, slice(None), row[:, None] * e[:, None]

    return Directions(lambda W, positions: T.shape[0] * T.shape[1] * _columns(W, positions), changes)


def entry_directions() -> Directions:
    """The perturbations W_st e_s (x) e_t, each entry along its own value; the forms sum to adaptive sharpness."""

    def changes(W: Tensor, phi: Tensor) -> _Changes:
        for group, rows in enumerate(W.to(phi)):
            for s, row in enumerate(rows):  # row s alone, along each row of the factor of (W_st phi_t)_t
                for e in factor(phi[:, group : group + 1] * row[:, None])[:, 0].unbind(1):
                    yield group, s, e

    return Directions(lambda W, positions: W.shape[0] * W.shape[1] * _columns(W, positions), changes)


def column_directions() -> Directions:
    """The perturbations w_j (x) e_j, each column along itself: the forms are those of neuron-wise flatness."""

    def changes(W: Tensor, phi: Tensor) -> _Changes:
        for group, rows in enumerate(W.to(phi)):
            for j, w in enumerate(rows.T):
                yield group, slice(None), w[:, None] * phi[:, group, j, None]

    return Directions(lambda W, positions: W.shape[0] * W.shape[2], changes)


def unit_directions() -> Directions:
    """The perturbations e_s (x) e_t, one entry by 1: each form is H_st,st."""
    return Directions(
        lambda W, positions: W.numel(),
        lambda W, phi: ((group, s, phi[:, group, t]) for group, s, t in product(*map(range, W.shape))),
    )


def shift_directions(b: Tensor | None = None) -> Directions:
    """The perturbations z_s + b_s, the same at every position, for a bias's H_ss; b is (g, d), 1 if None."""

    def changes(W: Tensor, phi: Tensor) -> _Changes:
        for group, s in product(*map(range, W.shape[:2])):
            yield group, s, phi.new_ones(()) if b is None else b[group, s].to(phi)

    return Directions(lambda W, positions: W.shape[0] * W.shape[1], changes)


_TOGETHER = 16  #: directions differentiated in one batched call
PRODUCT_OUTPUTS = 10  #: outputs of a pass that needs about as much memory as a product


def functional_hessian_along(
    problem: Problem,
    model: nn.Module,
    plan: Plan,
    layer: str,
    directions: Directions,
    of_chunk: Callable[[Tensor], Tensor],
    progress: Progress | None = None,
) -> tuple[Tensor, int]:
    """Return (the rows that `of_chunk` computes for each chunk, in the data's order; the number of directions).

    `of_chunk` gets n sum_k (dl_i/df_k) d2 f_ik/dV2 / mass of each sample and direction V, (samples of the chunk,
    directions) float64. Their mean over all samples is the quadratic form of the risk.
    """
    problem, weight = problem.as_asked(), plan.weight(layer)
    called_once = len(weight.products) == 1
    most = max(1, min(64, problem.memory // (_TOGETHER * plan.bytes_per_sample(PRODUCT_OUTPUTS))))
    kept: ChunkBuffer[str] = ChunkBuffer()
    seen, count, check = 0, 0, SymmetryCheck(problem, model)
    in_all = directions.count(weight.matrix.W, weight.positions if called_once else None)
    with agreed(problem.ranks), problem.measuring(model), differentiable(model.parameters()):
        for number, raw in problem.shared(most):
            problem.require_as_seen(model, problem.place(raw), number)
            batch, forms = problem.place(raw), []
            with ignore_slow_batching_warning():
                if called_once:
                    changes, of_units = _along_preactivation(problem, model, plan, weight, batch, directions, check)
                else:
                    changes, of_units = _along_weight(problem, model, weight, batch, directions, check)
                while block := list(islice(changes, _TOGETHER)):
                    # in units of powers of two near their size: forms do not underflow
                    U = torch.stack(block)
                    unit = power_of_two(U.flatten(1), 1)
                    of_U = of_units(U / unit.reshape(-1, *[1] * (U.ndim - 1))).to(torch.float64)
                    forms.append(of_U * unit.to(torch.float64).square())
                    tell(problem, progress, in_all, seen, size(raw), sum(map(len, forms)))
            kept.add(number, {"forms": of_chunk(torch.cat(forms).T.detach() * problem.n)})
            count, seen = sum(map(len, forms)), seen + size(raw)
    return kept.joined(problem.ranks)["forms"], max(problem.ranks.together(count))


def tell(problem: Problem, progress: Progress | None, products: int, seen: int, more: int, done: int) -> None:
    """Report products: each of `seen` samples has had all of them, `more` further samples have had `done`."""
    if progress is not None:
        had = (seen * products + more * done) * problem.ranks.size // problem.n
        progress(PRODUCTS, min(products, had), products)


class RecordedWeight:
    """A weight that acts through one product, with that product's tensors in one forward pass."""

    def __init__(self, tape: Tape, plan: Plan, weight: Weight, n: int) -> None:
        (slot,) = weight.products
        product = plan.operations(tape)[slot]
        assert isinstance(product, Product)
        self.n, self.edge, self.shape = n, product.edge, product.shape
        self._rows, self._weight = plan.rows[slot], weight
        phi = weight.adapter.patches(self._rows.by_sample(product.kept(), n).flatten(0, 1), n)
        self.phi = phi if weight.columns is None else phi[:, :, weight.columns.to(phi.device)]
        """The weight's input, (n, g, m, P)."""

    def by_position(self, z: Tensor) -> Tensor:
        """Return a tensor of the product's shape as (n, g, d, P); of a part's rows alone."""
        placed = self._weight.adapter.by_position(self._rows.by_sample(z, self.n).flatten(0, 1), self.n)
        return placed if self._weight.rows is None else placed[:, :, self._weight.rows.to(placed.device)]

    def as_output(self, U: Tensor) -> Tensor:
        """Return U (n, g, d, P) in the product's shape: `by_position` transposed, with zeros in rows of other parts."""
        leaf = U.new_zeros(self.shape).requires_grad_()
        with torch.enable_grad():
            (shaped,) = torch.autograd.grad(self.by_position(leaf), leaf, U)
        return shaped


_OfUnits = Callable[[Tensor], Tensor]
"""The quadratic forms of several directions, (b, n)."""


def _along_preactivation(
    problem: Problem,
    model: nn.Module,
    plan: Plan,
    weight: Weight,
    batch: Batch,
    directions: Directions,
    check: SymmetryCheck,
) -> tuple[Iterator[Tensor], _OfUnits]:
    tape, inputs, f, y = run_recorded(problem, model, batch)
    plan.require_same(tape, inputs, batch)
    seen = RecordedWeight(tape, plan, weight, len(f))
    of = (slopes(problem, f, y) * f).sum()
    (slope,) = torch.autograd.grad(of, [seen.edge], create_graph=True)
    require_second_derivative([slope])
    check.require_symmetric(batch, of, [slope], [seen.edge])
    products = _HessianProducts(seen, seen.by_position(slope), problem.precision**0.5)

    def of_units(U: Tensor) -> Tensor:
        return (U * products.along(U)).sum((2, 3, 4)) if slope.requires_grad else f.new_zeros(len(U), len(f))

    return directions.at_preactivation(weight.cut(weight.adapter.matrix(weight.value)), seen.phi), of_units


@dataclass(eq=False)
class _HessianProducts:
    """Second derivatives of one graph in a pre-activation, times several directions at once.

    Torch differentiates some operations wrongly when several backward passes are batched, or refuses to: in 2.13 the
    second derivative of a group norm. So the first block of each size in a chunk is compared with a pass of its own,
    along a random combination of the block; where the two differ, every direction takes its own pass.
    """

    seen: RecordedWeight
    slope: Tensor
    tolerance: float
    sizes: set[int] = field(default_factory=set)  #: numbers of directions whose batched pass is right
    batched: bool = True

    def along(self, U: Tensor) -> Tensor:
        """Return H U for directions U (b, n, g, d, P), in their shape."""
        if self.batched and len(U) > 1:
            found = self._together(U)
            if found is not None:
                return found
            self.batched = False
        return torch.stack([self._once(u) for u in U])

    def _together(self, U: Tensor) -> Tensor | None:
        """Return H U from one batched pass; None where torch refuses it or gets it wrong."""
        try:
            (HU,) = self._pass(U, batched=True)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            return None
        rows = torch.zeros_like(U) if HU is None else torch.stack([self.seen.by_position(h) for h in HU])
        if len(U) not in self.sizes:
            (r,) = random_like([U[:, 0, 0, 0, 0]])
            alone, mixed = self._once(torch.tensordot(r, U, 1)), torch.tensordot(r, rows.to(r), 1)
            if not float((alone - mixed).norm()) <= self.tolerance * float(rows.norm() * r.norm()):
                return None
            self.sizes.add(len(U))
        return rows

    def _once(self, u: Tensor) -> Tensor:
        (Hu,) = self._pass(u, batched=False)
        return torch.zeros_like(u) if Hu is None else self.seen.by_position(Hu)

    def _pass(self, U: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        # None: a later gate gives the slope a graph, on which the pre-activation has no part
        return torch.autograd.grad(
            self.slope, [self.seen.edge], U, retain_graph=True, is_grads_batched=batched, allow_unused=True
        )


def _along_weight(
    problem: Problem, model: nn.Module, weight: Weight, batch: Batch, directions: Directions, check: SymmetryCheck
) -> tuple[Iterator[Tensor], _OfUnits]:
    if weight.parameter is None:
        raise RuntimeError("the weight is computed from other parameters again in each of several calls")
    f, y = problem.run(model, batch)
    slope = slopes(problem, f, y)
    live, of = dict(model.named_parameters())[weight.parameter], (slope * f).sum()
    rows: list[Tensor | None] = list(torch.autograd.grad(of, [live], create_graph=True, allow_unused=True))
    check.require_symmetric(batch, of, rows, [live])

    # <slope, d2 f / dV2> of one sample, along W + eps V, by torch.func or without it
    W, slope = weight.value.detach(), slope.detach()
    runner, name = Runner(problem, model), weight.parameter

    def outputs(sample: Batch, own: Tensor, V: Tensor, eps: Tensor) -> Tensor:
        return (own * runner.at({name: W + eps * V}, as_batch(sample))[0][0]).sum()

    def by_functions(sample: Batch, own: Tensor, V: Tensor) -> Tensor:
        result: Tensor = grad(grad(partial(outputs, sample, own, V)))(W.new_zeros(()))
        return result

    def by_backward_passes(sample: Batch, own: Tensor, V: Tensor) -> Tensor:
        eps = W.new_zeros(()).requires_grad_()
        (first,) = torch.autograd.grad(outputs(sample, own, V, eps), [eps], create_graph=True, materialize_grads=True)
        if not first.requires_grad:
            return torch.zeros_like(first)
        (second,) = torch.autograd.grad(first, [eps], materialize_grads=True)
        return second

    # from the fastest way to the one that always works; what torch.func cannot do is an error, and the next is taken
    batch = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)
    axes = sample_axes(batch, len(f))
    along = vmap(by_functions, in_dims=(None, None, 0))
    over_samples = vmap(along, in_dims=(axes, 0, None))

    def samples() -> Iterator[tuple[Batch, Tensor]]:
        for i, own in enumerate(slope):  # without the sample axis; of a list of samples a list of one
            rest = select(batch, slice(i, i + 1))
            yield tree_map(lambda part, axis: part if axis is None else part[0], rest, axes, is_leaf=is_list), own

    ways: list[_OfUnits] = [
        lambda V: over_samples(batch, slope, V),
        # a forward() that branches on its data: one sample at a time
        lambda V: torch.stack([along(sample, own, V) for sample, own in samples()]),
        # writes in place, an autograd.Function: one direction at a time
        lambda V: torch.stack(
            [torch.stack([by_backward_passes(sample, own, v) for v in V]) for sample, own in samples()]
        ),
    ]
    if has_lists(batch):  # torch.vmap cannot take their items apart
        del ways[0]

    def of_units(V: Tensor) -> Tensor:
        V = weight.adapter.as_stored(weight.embedded(V), W.shape)
        while len(ways) > 1:
            try:
                return ways[0](V).detach().T
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                ways.pop(0)
        return ways[0](V).detach().T

    return directions.of_weight(weight.cut(weight.adapter.matrix(W))), of_units


_BLOCK = 128  #: number of samples, by position in the data, that share the probes of some parameters


@dataclass(frozen=True, eq=False)
class CurvedParameters:
    """The measured parameters in which the network may have second derivatives; for the others H = GGN."""

    problem: Problem
    plan: Plan
    weights: dict[str, str]  #: layer -> name of its weight, if one call uses it
    biases: dict[str, str]  #: layer -> name of its bias, if one call uses it
    others: tuple[str, ...]  #: names of all others

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all these parameters."""
        return (*self.weights.values(), *self.biases.values(), *self.others)

    def traces(
        self, model: nn.Module, *, probes: int, weighted: bool, generator: torch.Generator,
        progress: Progress | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return unbiased estimates of sum_j (H - GGN)_jj of each parameter, (probes,); `weighted` by theta_j^2."""
        problem = self.problem
        fitting = max(1, min(_BLOCK, problem.memory // (4 * self.plan.bytes_per_sample(PRODUCT_OUTPUTS))))
        most = 1 << fitting.bit_length() - 1  # a power of two: no chunk has samples of two blocks
        totals = torch.zeros(len(self.names), probes, dtype=torch.float64, device=device_of(model))
        seed = int(torch.randint(2**62, (), generator=generator))
        seen, check = 0, SymmetryCheck(problem, model)
        with (
            agreed(problem.ranks),
            problem.measuring(model),
            differentiable(model.parameters()),
            ignore_slow_batching_warning(),
        ):
            for first, raw in problem.shared(most):
                problem.require_as_seen(model, problem.place(raw), first)
                chunk = _Chunk(self, model, problem.place(raw), weighted, check)
                of_block = torch.Generator().manual_seed(seed + first // _BLOCK)
                for probe in range(probes):
                    totals[:, probe] += chunk.probe(_Signs(self.names, seed, probe, first), of_block)
                    tell(problem, progress, probes, seen, size(raw), probe + 1)
                seen += size(raw)
        return dict(zip(self.names, problem.ranks.total(totals).cpu(), strict=True))

    def exact_traces(
        self, model: nn.Module, *, weighted: bool, progress: Progress | None = None
    ) -> tuple[dict[str, float], int]:
        """Return (each parameter's part of the trace, exactly, from every direction in turn; the products used)."""
        families: list[tuple[str, str, Directions]] = []
        for layer, name in self.weights.items():
            groups, rows, _ = self.plan.weights[layer].matrix.W.shape
            every_row = row_directions(torch.eye(rows).expand(groups, -1, -1))
            families.append((layer, name, entry_directions() if weighted else every_row))
        for layer, name in self.biases.items():
            matrix = self.plan.weights[layer].matrix
            assert matrix.b is not None
            b = matrix.b.reshape(matrix.W.shape[:2]) if weighted else None
            families.append((layer, name, shift_directions(b)))
        found, products = dict[str, float](), 0
        for layer, name, directions in families:
            sums, count = functional_hessian_along(
                self.problem, model, self.plan, layer, directions, lambda forms: forms.sum(1), progress
            )
            found[name] = float(sums.sum()) / self.problem.n
            products += count
        if self.others:
            residual = Residual(self.problem, self.others, model=model)
            point, where = residual.space.point(), residual.space.slices()
            entries = diagonal(residual, progress)
            products += residual.size
            scaled = entries * point.to(entries).square() if weighted else entries
            found |= {name: float(scaled[where[name]].sum()) for name in self.others}
        return found, products

    def exact_products(self, model: nn.Module) -> int:
        """Return the number of products that `exact_traces` takes."""
        weights = [self.plan.weights[layer] for layer in self.weights]
        entries = sum(entry_directions().count(weight.matrix.W, weight.positions) for weight in weights)
        return entries + sum(model.get_parameter(name).numel() for name in (*self.biases.values(), *self.others))


def curved_parameters(problem: Problem, plan: Plan) -> CurvedParameters:
    """Return the parameters in which the network is not piecewise affine."""
    curved = problem.parameters & plan.structure.curved
    once = {layer: weight for layer, weight in plan.weights.items() if len(weight.products) == 1}
    weights = {layer: w.parameter for layer, w in once.items() if w.parameter is not None and w.parameter in curved}
    biases = {layer: w.bias for layer, w in once.items() if w.bias is not None and w.bias in curved}
    others = tuple(sorted(curved - {*weights.values(), *biases.values()}))
    return CurvedParameters(problem.as_asked(), plan, weights, biases, others)


@dataclass(frozen=True)
class _Signs:
    """The signs of one probe for the samples of a chunk: the same for a sample, whatever its chunk."""

    names: tuple[str, ...]
    seed: int
    probe: int
    first: int  #: number of the chunk's first sample

    def of(self, name: str, shape: tuple[int, ...], like: Tensor, start: int = 0) -> Tensor:
        """Return signs for a parameter, of this shape; the first axis is samples from the chunk's `start` on."""
        stream = SampleStream(self.seed, self.probe * len(self.names) + self.names.index(name))
        return stream.signs(self.first + start, shape[0], math.prod(shape[1:])).reshape(shape).to(like)


class _Chunk:
    """The gradient of one chunk at all places to be perturbed, with its graph."""

    def __init__(
        self, curved: CurvedParameters, model: nn.Module, batch: Batch, weighted: bool, check: SymmetryCheck
    ) -> None:
        problem, plan = curved.problem, curved.plan
        tape, inputs, f, y = run_recorded(problem, model, batch)
        plan.require_same(tape, inputs, batch)
        self.curved, self.weighted = curved, weighted
        self.layers = {layer: plan.weights[layer] for layer in {**curved.weights, **curved.biases}}
        parameters = dict(model.named_parameters())
        self.others: dict[str, Tensor] = {name: parameters[name] for name in curved.others}
        self.seen = {layer: RecordedWeight(tape, plan, weight, len(f)) for layer, weight in self.layers.items()}
        # phi of each layer with a curved weight, or its factor if that needs far fewer random numbers
        phis = {layer: self.seen[layer].phi for layer in curved.weights}
        few = {layer for layer, phi in phis.items() if not weighted and phi.shape[2] > 4 * phi.shape[3]}
        self.phi = {layer: factor(phi) if layer in few else phi for layer, phi in phis.items()}
        self.at: list[Place] = [*(seen.edge for seen in self.seen.values()), *self.others.values()]
        of = (slopes(problem, f, y) * f).sum()
        self.slopes = list(torch.autograd.grad(of, self.at, create_graph=True, allow_unused=True))
        require_second_derivative(self.slopes)
        check.require_symmetric(batch, of, [*self.slopes], self.at)
        like = f.new_empty(())
        self.like = {layer: seen.by_position(like.new_empty(seen.shape)) for layer, seen in self.seen.items()}

    def probe(self, signs: _Signs, of_block: torch.Generator) -> Tensor:
        """Return one estimate of the part of each of `curved.names`, float64, by one double backward."""
        # random changes V of the weights and biases, as changes U of the pre-activations, and of the other parameters
        moves = {layer: self._moves(layer, weight, signs) for layer, weight in self.layers.items()}
        steps = {name: random_signs(p.shape, p, of_block) for name, p in self.others.items()}
        if self.weighted:
            steps = {name: step * self.others[name].detach() for name, step in steps.items()}
        sums = (
            torch.stack([*own.values()]).sum(0) if len(own) > 1 else next(iter(own.values())) for own in moves.values()
        )
        onto = [*map(RecordedWeight.as_output, self.seen.values(), sums), *steps.values()]
        # H times all of them at once
        Hv = derivative_along(self.slopes, self.at, onto)
        # the part of each is its own change's share of the form
        parts = {name: (step, row) for (name, step), row in zip(steps.items(), Hv[len(moves) :], strict=True)}
        for (layer, own), row in zip(moves.items(), Hv, strict=False):
            placed = None if row is None else self.seen[layer].by_position(row)
            parts |= {name: (U, placed) for name, U in own.items()}
        shares = [
            move.new_zeros((), dtype=torch.float64) if row is None else (move * row).sum(dtype=torch.float64)
            for move, row in map(parts.__getitem__, self.curved.names)
        ]
        return torch.stack(shares)

    def _moves(self, layer: str, weight: Weight, signs: _Signs) -> dict[str, Tensor]:
        """Return random changes of the pre-activation by weight and bias, (n, g, d, P), another for each sample."""
        z, found = self.like[layer], {}
        if (name := self.curved.weights.get(layer)) is not None:
            W, phi = weight.adapter.matrix(weight.value), self.phi[layer]
            (n, g, m, P), d = phi.shape, W.shape[1]
            if self.weighted and P == 1:  # one sign times this has the second moments of sum_t v_st W_st phi_t
                found[name] = signs.of(name, (n, g, d, 1), phi) * (W.square() @ phi.square()).sqrt()
            else:
                U = found[name] = torch.empty_like(z)
                for piece in pieces(n, g * d * m * phi.element_size()):
                    V = signs.of(name, (len(phi[piece]), g, d, m), phi, piece.start)
                    U[piece] = (V * W if self.weighted else V) @ phi[piece]
        if (name := self.curved.biases.get(layer)) is not None:
            b = signs.of(name, (*z.shape[:3], 1), z)
            if self.weighted:
                assert weight.bias_value is not None
                b = b * weight.bias_value.reshape(z.shape[1], z.shape[2], 1)
            found[name] = b.expand_as(z)
        return found


def diagonal(operator: Operator, progress: Progress | None = None) -> Tensor:
    """Return the diagonal of the matrix, (P,) float64, by products with unit vectors, a few at a time."""
    places, entries = torch.arange(operator.size), torch.empty(operator.size, dtype=torch.float64)
    for some in torch.split(places, 16):
        products = operator((some[:, None] == places).to(operator.dtype))
        entries[some] = products[range(len(some)), some.tolist()].to("cpu", torch.float64)
        if progress is not None:
            progress(PRODUCTS, int(some[-1]) + 1, operator.size)
    return entries
