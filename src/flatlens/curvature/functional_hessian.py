"""Quadratic forms of the functional Hessian, the part of a Hessian that the Gauss-Newton matrix leaves out.

    H_l = GGN_l + mean_i sum_k (dl_i/df_k) d2 f_ik / dW2

If one call uses the weight, the pre-activation is perturbed, separately for each sample: a direction costs one double
backward for all samples. If several calls use it, the weight itself is perturbed, because an earlier call changes what
a later call sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from flatlens.curvature.directions import Directions, WeightDirections
from flatlens.curvature.symmetry import SymmetryCheck, random_like
from flatlens.errors import out_of_memory
from flatlens.estimate import Progress
from flatlens.grams import Layout, Weight, agreed
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.second_derivative import require_second_derivative
from flatlens.grams.unexplained import Runner, as_batch, ignore_slow_batching_warning, sample_axes
from flatlens.operations.operator_norm import power_of_two
from flatlens.operations.reads import Product
from flatlens.problem import Batch, Problem
from flatlens.problem.chunk_buffer import ChunkBuffer
from flatlens.problem.outcomes import slopes
from flatlens.problem.samples import has_lists, is_list, select, size
from flatlens.problem.state import differentiable
from flatlens.progress import PRODUCTS

_TOGETHER = 16  #: directions differentiated in one batched call
PRODUCT_OUTPUTS = 10  #: outputs of a pass that needs about as much memory as a product


def functional_hessian_along(
    problem: Problem,
    model: nn.Module,
    layout: Layout,
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

    def __init__(self, tape: Tape, layout: Layout, weight: Weight, n: int) -> None:
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
    layout: Layout,
    weight: Weight,
    batch: Batch,
    directions: Directions,
    check: SymmetryCheck,
    told: Callable[[int], None],
) -> Tensor:
    tape, inputs, f, y = run_recorded(problem, model, batch)
    layout.require_same(tape, inputs, model, batch)
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
