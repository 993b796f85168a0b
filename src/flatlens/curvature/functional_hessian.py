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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from flatlens.curvature.operators import Operator, Residual
from flatlens.curvature.symmetry import SymmetryCheck, random_like
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
from flatlens.grams.contractions import pieces
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.sketch import SampleStream, random_signs
from flatlens.operations.graph import Place
from flatlens.operations.operator_norm import power_of_two
from flatlens.operations.parameter_uses import Product
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import has_lists, is_list, select, size
from flatlens.problem.eval_context import differentiable
from flatlens.problem.forward import slopes
from flatlens.problem.ranks import ChunkBuffer
from flatlens.progress import PRODUCTS


class Directions(ABC):
    """A family of perturbations of a layer with weight W (g, d, m)."""

    @abstractmethod
    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield the changes U of the pre-activation, (n, g, d, P) each, from phi (n, g, m, P)."""

    @abstractmethod
    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations of a weight that acts at P positions; None: those of the weight itself."""


class WeightDirections(Directions):
    """A family of perturbations of the weight itself."""

    @abstractmethod
    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield the changes V of the weight, (g, d, m) each."""


def factor(phi: Tensor) -> Tensor:
    """Return E with E^T E = phi^T phi, (n, g, min(m, P), P)."""
    one_position = phi.shape[3] == 1
    E: Tensor = torch.linalg.vector_norm(phi, dim=2, keepdim=True) if one_position else torch.linalg.qr(phi, mode="r").R
    return E


def _columns(W: Tensor, positions: int | None) -> int:
    """Return the rows of the factor of phi; m where the weight itself is perturbed."""
    return W.shape[2] if positions is None else min(W.shape[2], positions)


def _put(like: Tensor, group: int, row: int | slice, value: Tensor) -> Tensor:
    U = torch.zeros_like(like)
    U[..., group, row, :] = value
    return U


@final
@dataclass(frozen=True, eq=False)
class RowDirections(WeightDirections):
    """The perturbations T_r (x) e_t / scale_t; T is (g, rows, d), scale (g, m)."""

    T: Tensor
    scale: Tensor | None = None

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return self.T.shape[0] * self.T.shape[1] * _columns(W, positions)

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield the outer product of each T_r with each row of the factor of phi / scale."""
        E = factor(phi if self.scale is None else phi / self.scale[..., None].to(phi.dtype))
        T = self.T.to(phi)
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for row in T[group]:
                for e in E[:, group].unbind(1):
                    yield _put(like, group, slice(None), row[:, None] * e[:, None])

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield T_r (x) e_t / scale_t for each r and t."""
        T, columns = self.T.to(W), torch.ones_like(W[:, 0]) if self.scale is None else 1 / self.scale.to(W)
        for group in range(len(W)):
            for row in T[group]:
                for t in range(W.shape[2]):
                    V = torch.zeros_like(W)
                    V[group, :, t] = row * columns[group, t]
                    yield V


@final
class EntryDirections(WeightDirections):
    """The perturbations W_st e_s (x) e_t: each entry along its own value."""

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.shape[0] * W.shape[1] * _columns(W, positions)

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield changes of row s alone, along each row of the factor of (W_st phi_t)_t."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for s, row in enumerate(W[group].to(phi)):
                for e in factor(phi[:, group : group + 1] * row[:, None])[:, 0].unbind(1):
                    yield _put(like, group, s, e)

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield W_st in entry (s, t), 0 elsewhere."""
        for V, w in zip(UnitDirections().of_weight(W), W.flatten(), strict=True):
            yield V * w


@final
class ColumnDirections(WeightDirections):
    """The perturbations w_j (x) e_j: each column along itself."""

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.shape[0] * W.shape[2]

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield w_j phi_j for each column j."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for j, w in enumerate(W[group].T.to(phi)):
                yield _put(like, group, slice(None), w[:, None] * phi[:, group, j, None])

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield each column of W with zeros elsewhere."""
        for group in range(len(W)):
            for j in range(W.shape[2]):
                V = torch.zeros_like(W)
                V[group, :, j] = W[group, :, j]
                yield V


@final
class UnitDirections(WeightDirections):
    """The perturbations e_s (x) e_t: one entry by 1."""

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.numel()

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield changes of row s alone, by phi_t."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for s in range(W.shape[1]):
                for t in range(W.shape[2]):
                    yield _put(like, group, s, phi[:, group, t])

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield 1 in one entry, 0 elsewhere."""
        for entry in range(W.numel()):
            V = torch.zeros_like(W)
            V.view(-1)[entry] = 1
            yield V


@final
@dataclass(frozen=True, eq=False)
class ShiftDirections(Directions):
    """The perturbations z_s + b_s, the same at every position; b is (g, d), 1 if None."""

    b: Tensor | None = None

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.shape[0] * W.shape[1]

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield changes of row s alone, by b_s at all positions."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for s in range(W.shape[1]):
                value = like.new_ones(()) if self.b is None else self.b[group, s].to(like)
                yield _put(like, group, s, value)


_TOGETHER = 16  #: directions differentiated in one batched call
PRODUCT_OUTPUTS = 10  #: outputs of a pass that needs about as much memory as a product


def functional_hessian_along(
    problem: Problem,
    model: nn.Module,
    layout: Plan,
    layer: str,
    directions: Directions,
    of_chunk: Callable[[Tensor], Tensor],
    progress: Progress | None = None,
) -> tuple[Tensor, int]:
    """Return (the rows that `of_chunk` computes for each chunk, in the data's order; the number of directions).

    `of_chunk` gets n sum_k (dl_i/df_k) d2 f_ik/dV2 / mass of each sample and direction V, (samples of the chunk,
    directions) float64. Their mean over all samples is the quadratic form of the risk.
    """
    problem, weight = problem.as_asked(), layout.weight(layer)
    most = max(1, min(64, problem.memory // (_TOGETHER * layout.bytes_per_sample(PRODUCT_OUTPUTS))))
    kept: ChunkBuffer[str] = ChunkBuffer()
    count, check = 0, SymmetryCheck(problem, model)
    in_all = directions.count(weight.matrix.W, weight.positions if len(weight.products) == 1 else None)
    with agreed(problem.ranks), problem.measuring(model), differentiable(model.parameters()):
        seen = 0
        for number, raw in problem.shared(most):
            told = partial(tell, problem, progress, in_all, seen, size(raw))
            problem.require_as_seen(model, problem.place(raw), number)
            with ignore_slow_batching_warning():
                if len(weight.products) == 1:
                    batch = problem.place(raw)
                    forms = _along_preactivation(problem, model, layout, weight, batch, directions, check, told)
                else:
                    assert isinstance(directions, WeightDirections)
                    forms = _along_weight(problem, model, weight, problem.place(raw), directions, check, told)
            kept.add(number, {"forms": of_chunk(forms.detach().to(torch.float64) * problem.n)})
            count, seen = forms.shape[1], seen + size(raw)
    return kept.joined(problem.ranks)["forms"], max(problem.ranks.together(count))


def tell(problem: Problem, progress: Progress | None, products: int, seen: int, more: int, done: int) -> None:
    """Report products: each of `seen` samples has had all of them, `more` further samples have had `done`."""
    if progress is not None:
        had = (seen * products + more * done) * problem.ranks.size // problem.n
        progress(PRODUCTS, min(products, had), products)


class RecordedWeight:
    """A weight that acts through one product, with that product's tensors in one forward pass."""

    def __init__(self, tape: Tape, layout: Plan, weight: Weight, n: int) -> None:
        (slot,) = weight.products
        product = layout.operations(tape)[slot]
        assert isinstance(product, Product)
        self.n, self.edge, self.shape = n, product.edge, product.shape
        self._rows, self._weight = layout.rows[slot], weight
        phi = weight.adapter.patches(self._rows.in_front(product.kept(), n), n)
        self.phi = phi if weight.columns is None else phi[:, :, weight.columns.to(phi.device)]
        """The weight's input, (n, g, m, P)."""

    def by_position(self, z: Tensor) -> Tensor:
        """Return a tensor of the product's shape as (n, g, d, P); of a part's rows alone."""
        placed = self._weight.adapter.by_position(self._rows.in_front(z, self.n), self.n)
        return placed if self._weight.rows is None else placed[:, :, self._weight.rows.to(placed.device)]

    def as_output(self, U: Tensor) -> Tensor:
        """Return U (n, g, d, P) in the product's shape.

        This is the transpose of `by_position`: its inverse, with zeros in the rows that are not the part's.
        """
        leaf = U.new_zeros(self.shape).requires_grad_()
        with torch.enable_grad():
            (shaped,) = torch.autograd.grad(self.by_position(leaf), leaf, U)
        return shaped


def _blocks(directions: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the directions stacked, a few at a time."""
    block: list[Tensor] = []
    for direction in directions:
        block.append(direction)
        if len(block) == _TOGETHER:
            yield torch.stack(block)
            block = []
    if block:
        yield torch.stack(block)


def _scaled(U: Tensor) -> tuple[Tensor, Tensor]:
    """Return the directions divided by powers of two near their size, and these squared: forms do not underflow."""
    size = power_of_two(U.flatten(1), 1)
    return U / size.reshape(-1, *[1] * (U.ndim - 1)), size[:, 0].to(torch.float64).square()


def _along_preactivation(
    problem: Problem,
    model: nn.Module,
    layout: Plan,
    weight: Weight,
    batch: Batch,
    directions: Directions,
    check: SymmetryCheck,
    told: Callable[[int], None],
) -> Tensor:
    tape, inputs, f, y = run_recorded(problem, model, batch)
    layout.require_same(tape, inputs, batch)
    n, seen = len(f), RecordedWeight(tape, layout, weight, len(f))
    W = weight.cut(weight.adapter.matrix(weight.value))
    phi = seen.phi
    of = (slopes(problem, f, y) * f).sum()
    (slope,) = torch.autograd.grad(of, [seen.edge], create_graph=True)
    require_second_derivative([slope])
    check.require_symmetric(batch, of, [slope], [seen.edge])
    affine = not slope.requires_grad
    product, forms = _HessianProducts(seen, seen.by_position(slope), problem.precision**0.5), []
    for U in _blocks(directions.at_preactivation(W, phi)):
        unit, squared = _scaled(U)
        of_units = f.new_zeros(len(U), n) if affine else (unit * product.along(unit)).sum((2, 3, 4))
        forms.append(of_units.to(torch.float64) * squared[:, None])
        told(sum(map(len, forms)))
    return torch.cat(forms).T


class _HessianProducts:
    """Second derivatives of one graph in a pre-activation, times several directions at once.

    Torch differentiates some operations wrongly when several backward passes are batched, or refuses to: in 2.13 the
    second derivative of a group norm. So the first block of each size in a chunk is compared with a pass of its own,
    along a random combination of the block; where the two differ, every direction takes its own pass.
    """

    def __init__(self, seen: RecordedWeight, slope: Tensor, tolerance: float) -> None:
        self._seen, self._slope, self._tolerance = seen, slope, tolerance
        self._sizes: set[int] = set()  #: numbers of directions whose batched pass is right
        self._batched = True

    def along(self, U: Tensor) -> Tensor:
        """Return H U for directions U (b, n, g, d, P), in their shape."""
        if self._batched and len(U) > 1:
            found = self._together(U)
            if found is not None:
                return found
            self._batched = False
        return torch.stack([self._once(u) for u in U])

    def _together(self, U: Tensor) -> Tensor | None:
        """Return H U from one batched pass; None where torch refuses it or gets it wrong."""
        try:
            (HU,) = self._pass(U, batched=True)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            return None
        rows = torch.zeros_like(U) if HU is None else torch.stack([self._seen.by_position(h) for h in HU])
        if len(U) not in self._sizes:
            (r,) = random_like([U[:, 0, 0, 0, 0]])
            alone, mixed = self._once(torch.tensordot(r, U, 1)), torch.tensordot(r, rows.to(r), 1)
            if not float((alone - mixed).norm()) <= self._tolerance * float(rows.norm() * r.norm()):
                return None
            self._sizes.add(len(U))
        return rows

    def _once(self, u: Tensor) -> Tensor:
        (Hu,) = self._pass(u, batched=False)
        return torch.zeros_like(u) if Hu is None else self._seen.by_position(Hu)

    def _pass(self, U: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        # None: a later gate gives the slope a graph, on which the pre-activation has no part
        return torch.autograd.grad(
            self._slope, [self._seen.edge], U, retain_graph=True, is_grads_batched=batched, allow_unused=True
        )


def _along_weight(
    problem: Problem,
    model: nn.Module,
    weight: Weight,
    batch: Batch,
    directions: WeightDirections,
    check: SymmetryCheck,
    told: Callable[[int], None],
) -> Tensor:
    if weight.parameter is None:
        raise RuntimeError("the weight is computed from other parameters again in each of several calls")
    f, y = problem.run(model, batch)
    slope = slopes(problem, f, y)
    live, of = dict(model.named_parameters())[weight.parameter], (slope * f).sum()
    rows: list[Tensor | None] = list(torch.autograd.grad(of, [live], create_graph=True, allow_unused=True))
    check.require_symmetric(batch, of, rows, [live])
    W = weight.value
    runner = Runner(problem, model)
    batch = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)
    axes = sample_axes(batch, len(f))
    along = vmap(_sample_product(runner, weight.parameter, W), in_dims=(None, None, 0))
    over_samples = vmap(along, in_dims=(axes, 0, None))
    alone = _plain_product(runner, weight.parameter, W)

    def each() -> Iterator[tuple[Batch, Tensor]]:
        return ((_sample(batch, axes, i), slope[i]) for i in range(len(f)))

    ways: list[Callable[[Tensor], Tensor]] = [
        lambda V: over_samples(batch, slope, V),
        # a forward() that branches on its data: one sample at a time
        lambda V: torch.stack([along(sample, own, V) for sample, own in each()]),
        # writes in place, an autograd.Function: one direction at a time
        lambda V: torch.stack([torch.stack([alone(sample, own, v) for v in V]) for sample, own in each()]),
    ]

    if has_lists(batch):  # torch.vmap cannot take their items apart
        del ways[0]

    def forms(V: Tensor) -> Tensor:
        while len(ways) > 1:
            try:
                return ways[0](V).detach()
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                ways.pop(0)
        return ways[0](V).detach()

    found: list[Tensor] = []
    for V in _blocks(directions.of_weight(weight.cut(weight.adapter.matrix(W)))):
        unit, squared = _scaled(V)
        found.append(forms(weight.adapter.as_stored(weight.embedded(unit), W.shape)).to(torch.float64) * squared)
        told(sum(part.shape[1] for part in found))
    return torch.cat(found, 1)


def _sample(batch: Batch, axes: Batch, i: int) -> Batch:
    """Return what belongs to one sample, without the sample axis; of a list of samples a list of one."""
    rest = select(batch, slice(i, i + 1))
    return tree_map(lambda part, axis: part if axis is None else part[0], rest, axes, is_leaf=is_list)


def _plain_product(runner: Runner, name: str, W: Tensor) -> Callable[[Batch, Tensor, Tensor], Tensor]:
    """Return the same as `_sample_product`, by two backward passes without torch.func."""

    def product(sample: Batch, slope: Tensor, V: Tensor) -> Tensor:
        single = as_batch(sample)
        eps = W.new_zeros(()).requires_grad_()
        outputs = runner.at({name: W.detach() + eps * V}, single)[0][0]
        of = (slope.detach() * outputs).sum()
        (first,) = torch.autograd.grad(of, [eps], create_graph=True, materialize_grads=True)
        if not first.requires_grad:
            return torch.zeros_like(first)
        (second,) = torch.autograd.grad(first, [eps], materialize_grads=True)
        return second

    return product


def _sample_product(runner: Runner, name: str, W: Tensor) -> Callable[[Batch, Tensor, Tensor], Tensor]:
    """Return the function (sample, slope of its loss in the outputs, V) -> <slope, d2 f / dV2>."""

    def product(sample: Batch, slope: Tensor, V: Tensor) -> Tensor:
        single = as_batch(sample)

        def along(eps: Tensor) -> Tensor:
            outputs = runner.at({name: W + eps * V}, single)[0][0]
            return (slope * outputs).sum()

        result: Tensor = grad(grad(along))(W.new_zeros(()))
        return result

    return product


_BLOCK = 128  #: number of samples, by position in the data, that share the probes of some parameters


@dataclass(frozen=True, eq=False)
class CurvedParameters:
    """The measured parameters in which the network may have second derivatives."""

    weights: dict[str, str]  #: layer -> name of its weight, if one call uses it
    biases: dict[str, str]  #: layer -> name of its bias, if one call uses it
    others: tuple[str, ...]  #: names of all others

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all these parameters."""
        return (*self.weights.values(), *self.biases.values(), *self.others)


def curved_parameters(problem: Problem, layout: Plan) -> CurvedParameters:
    """Return the parameters in which the network is not piecewise affine; for the others H = GGN."""
    curved = problem.parameters & layout.structure.curved
    once = {layer: weight for layer, weight in layout.weights.items() if len(weight.products) == 1}
    weights = {layer: w.parameter for layer, w in once.items() if w.parameter is not None and w.parameter in curved}
    biases = {layer: w.bias for layer, w in once.items() if w.bias is not None and w.bias in curved}
    return CurvedParameters(weights, biases, tuple(sorted(curved - {*weights.values(), *biases.values()})))


def functional_hessian_trace(
    problem: Problem,
    model: nn.Module,
    layout: Plan,
    curved: CurvedParameters,
    *,
    probes: int,
    weighted: bool,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Return unbiased estimates of each curved parameter's part of the trace, (probes,) float64 each.

    The part is sum_j (H - GGN)_jj, or sum_j theta_j^2 (H - GGN)_jj if `weighted`.
    """
    if not curved.names:
        return {}
    problem = problem.as_asked()
    fitting = max(1, min(_BLOCK, problem.memory // (4 * layout.bytes_per_sample(PRODUCT_OUTPUTS))))
    most = 1 << fitting.bit_length() - 1  # a power of two: no chunk has samples of two blocks
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    totals = next(iter(parameters.values())).new_zeros(len(curved.names), probes, dtype=torch.float64)
    seed = int(torch.randint(2**62, (), generator=generator))
    check = SymmetryCheck(problem, model)
    with (
        agreed(problem.ranks),
        problem.measuring(model),
        differentiable(parameters.values()),
        ignore_slow_batching_warning(),
    ):
        seen = 0
        for first, raw in problem.shared(most):
            problem.require_as_seen(model, problem.place(raw), first)
            chunk = _Chunk(problem, model, layout, curved, problem.place(raw), parameters, weighted, check)
            of_block = torch.Generator().manual_seed(seed + first // _BLOCK)
            for probe in range(probes):
                totals[:, probe] += chunk.probe(_Signs(curved.names, seed, probe, first), of_block)
                tell(problem, progress, probes, seen, size(raw), probe + 1)
            seen += size(raw)
    return dict(zip(curved.names, problem.ranks.total(totals).cpu(), strict=True))


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
        self,
        problem: Problem,
        model: nn.Module,
        layout: Plan,
        curved: CurvedParameters,
        batch: Batch,
        parameters: dict[str, Tensor],
        weighted: bool,
        check: SymmetryCheck,
    ) -> None:
        tape, inputs, f, y = run_recorded(problem, model, batch)
        layout.require_same(tape, inputs, batch)
        self.curved, self.weighted, self.dtype, self.device = curved, weighted, f.dtype, f.device
        self.layers = {layer: layout.weights[layer] for layer in {**curved.weights, **curved.biases}}
        self.others = {name: parameters[name] for name in curved.others}
        self.seen = {layer: RecordedWeight(tape, layout, weight, len(f)) for layer, weight in self.layers.items()}
        self.phi = self._inputs()
        self.at: list[Place] = [*(seen.edge for seen in self.seen.values()), *self.others.values()]
        of = (slopes(problem, f, y) * f).sum()
        rows = list(torch.autograd.grad(of, self.at, create_graph=True, allow_unused=True))
        require_second_derivative(rows)
        check.require_symmetric(batch, of, [*rows], self.at)
        self.slopes = rows

    def _inputs(self) -> dict[str, Tensor]:
        """Return phi of each layer with a curved weight, or its factor if that needs far fewer random numbers."""
        found = {}
        for layer in self.curved.weights:
            phi = self.seen[layer].phi
            found[layer] = factor(phi) if not self.weighted and phi.shape[2] > 4 * phi.shape[3] else phi
        return found

    def probe(self, signs: _Signs, of_block: torch.Generator) -> Tensor:
        """Return one estimate of the part of each of `curved.names`, float64, by one double backward."""
        moves = {layer: self._move(layer, weight, signs) for layer, weight in self.layers.items()}
        steps = {name: random_signs(p.shape, p, of_block) for name, p in self.others.items()}
        if self.weighted:
            steps = {name: step * self.others[name].detach() for name, step in steps.items()}
        onto = [self.seen[layer].as_output(_added(parts)) for layer, parts in moves.items()] + list(steps.values())
        live = [(slope, step) for slope, step in zip(self.slopes, onto, strict=True) if _is_curved(slope)]
        Hv: tuple[Tensor | None, ...] = (None,) * len(self.at)
        if live:
            Hv = torch.autograd.grad(
                [slope for slope, _ in live], self.at, [step for _, step in live], retain_graph=True, allow_unused=True
            )
        shares = {}
        for (layer, parts), row in zip(moves.items(), Hv, strict=False):
            for name, U in parts.items():
                shares[name] = _overlap(U, None if row is None else self.seen[layer].by_position(row))
        for (name, step), row in zip(steps.items(), Hv[len(moves) :], strict=True):
            shares[name] = _overlap(step, row)
        return torch.stack([shares[name] for name in self.curved.names])

    def _move(self, layer: str, weight: Weight, signs: _Signs) -> dict[str, Tensor]:
        """Return random changes of the pre-activation by weight and bias, (n, g, d, P), another for each sample."""
        z = self._like(layer)
        parts = {}
        if layer in self.curved.weights:
            name = self.curved.weights[layer]
            parts[name] = self._weight_move(name, weight, self.phi[layer], z, signs)
        if layer in self.curved.biases:
            b = signs.of(self.curved.biases[layer], (*z.shape[:3], 1), z)
            if self.weighted:
                assert weight.bias_value is not None
                b = b * weight.bias_value.reshape(z.shape[1], z.shape[2], 1)
            parts[self.curved.biases[layer]] = b.expand_as(z)
        return parts

    def _weight_move(self, name: str, weight: Weight, phi: Tensor, z: Tensor, signs: _Signs) -> Tensor:
        W = weight.adapter.matrix(weight.value)
        n, g, m, P = phi.shape
        d = W.shape[1]
        if self.weighted and P == 1:  # one sign times this has the second moments of sum_t v_st W_st phi_t
            size = (W.square() @ phi.square()).sqrt()
            return signs.of(name, (n, g, d, 1), phi) * size
        U = torch.empty_like(z)
        for piece in pieces(n, g * d * m * phi.element_size()):
            V = signs.of(name, (len(phi[piece]), g, d, m), phi, piece.start)
            U[piece] = (V * W if self.weighted else V) @ phi[piece]
        return U

    def _like(self, layer: str) -> Tensor:
        """Return an uninitialised tensor of the product's shape, by position."""
        return self.seen[layer].by_position(torch.empty(self.seen[layer].shape, dtype=self.dtype, device=self.device))


def _added(parts: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(parts.values())).sum(0) if len(parts) > 1 else next(iter(parts.values()))


def _overlap(move: Tensor, Hv: Tensor | None) -> Tensor:
    return move.new_zeros((), dtype=torch.float64) if Hv is None else (move * Hv).sum(dtype=torch.float64)


def _is_curved(slope: Tensor | None) -> bool:
    return slope is not None and slope.requires_grad


def exact_functional_hessian_trace(
    problem: Problem,
    model: nn.Module,
    layout: Plan,
    curved: CurvedParameters,
    *,
    weighted: bool,
    progress: Progress | None = None,
) -> tuple[dict[str, float], int]:
    """Return (each curved parameter's part of the trace, exactly, from every direction in turn; the products used)."""
    found: dict[str, float] = {}
    products = 0

    def total(layer: str, directions: Directions) -> float:
        nonlocal products
        sums, count = functional_hessian_along(
            problem, model, layout, layer, directions, lambda forms: forms.sum(1), progress
        )
        products += count
        return float(sums.sum()) / problem.n

    for layer, name in curved.weights.items():
        W = layout.weights[layer].matrix.W
        found[name] = total(
            layer, EntryDirections() if weighted else RowDirections(torch.eye(W.shape[1]).expand(len(W), -1, -1))
        )
    for layer, name in curved.biases.items():
        matrix = layout.weights[layer].matrix
        assert matrix.b is not None
        found[name] = total(layer, ShiftDirections(matrix.b.reshape(matrix.W.shape[:2]) if weighted else None))
    if curved.others:
        residual = Residual(problem, curved.others, model=model)
        point, where = residual.space.point(), residual.space.slices()
        entries = diagonal(residual, progress)
        products += residual.size
        scaled = entries * point.to(entries).square() if weighted else entries
        found |= {name: float(scaled[where[name]].sum()) for name in curved.others}
    return found, products


def diagonal(operator: Operator, progress: Progress | None = None) -> Tensor:
    """Return the diagonal of the matrix, (P,) float64, by products with unit vectors, a few at a time."""
    entries = torch.empty(operator.size, dtype=torch.float64)
    for start in range(0, operator.size, 16):
        stop = min(start + 16, operator.size)
        units = torch.zeros(stop - start, operator.size, dtype=operator.dtype)
        units[range(stop - start), range(start, stop)] = 1
        entries[start:stop] = operator(units)[range(stop - start), range(start, stop)].to("cpu", torch.float64)
        if progress is not None:
            progress(PRODUCTS, stop, operator.size)
    return entries


def exact_products(layout: Plan, curved: CurvedParameters, sizes: dict[str, int]) -> int:
    """Return the number of products that `exact_functional_hessian_trace` takes."""
    weights = 0
    for layer in curved.weights:
        weight = layout.weights[layer]
        weights += EntryDirections().count(weight.matrix.W, weight.positions)
    return weights + sum(sizes[name] for name in (*curved.biases.values(), *curved.others))
