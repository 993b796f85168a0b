"""The trace of the functional Hessian H - GGN by probes: the part of Tr H that the Gauss-Newton trace leaves out.

A probe v of the parameters gives v^T (H - GGN) v, whose noise comes from all off-diagonal entries of H - GGN. If one
call uses a weight, z = W phi + b, each sample i can have its own perturbation V_i of the weight, because the network
sees only U_i = V_i phi_i. One double backward then averages n independent probes. Other parameters (of norms, not in a
layer, weights of several calls) have one probe for each block of samples. Neither depends on the chunk's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.curvature.directions import Directions, EntryDirections, RowDirections, ShiftDirections, factor
from flatlens.curvature.functional_hessian import PRODUCT_OUTPUTS, RecordedWeight, functional_hessian_along, tell
from flatlens.curvature.operators import Operator, Residual
from flatlens.curvature.symmetry import SymmetryCheck
from flatlens.estimate import Progress
from flatlens.grams import Layout, Weight, agreed
from flatlens.grams.contractions import pieces
from flatlens.grams.record import run_recorded
from flatlens.grams.second_derivative import require_second_derivative
from flatlens.grams.sketch import SampleStream, random_signs
from flatlens.grams.unexplained import ignore_slow_batching_warning
from flatlens.operations.graph import Place
from flatlens.problem import Batch, Problem
from flatlens.problem.outcomes import slopes
from flatlens.problem.samples import size
from flatlens.problem.state import differentiable
from flatlens.progress import PRODUCTS

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


def curved_parameters(problem: Problem, layout: Layout) -> CurvedParameters:
    """Return the parameters in which the network is not piecewise affine; for the others H = GGN."""
    curved = problem.parameters & layout.structure.curved
    once = {layer: weight for layer, weight in layout.weights.items() if len(weight.products) == 1}
    weights = {layer: w.parameter for layer, w in once.items() if w.parameter is not None and w.parameter in curved}
    biases = {layer: w.bias for layer, w in once.items() if w.bias is not None and w.bias in curved}
    return CurvedParameters(weights, biases, tuple(sorted(curved - {*weights.values(), *biases.values()})))


def functional_hessian_trace(
    problem: Problem,
    model: nn.Module,
    layout: Layout,
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
        layout: Layout,
        curved: CurvedParameters,
        batch: Batch,
        parameters: dict[str, Tensor],
        weighted: bool,
        check: SymmetryCheck,
    ) -> None:
        tape, inputs, f, y = run_recorded(problem, model, batch)
        layout.require_same(tape, inputs, model, batch)
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
    layout: Layout,
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


def exact_products(layout: Layout, curved: CurvedParameters, sizes: dict[str, int]) -> int:
    """Return the number of products that `exact_functional_hessian_trace` takes."""
    weights = 0
    for layer in curved.weights:
        weight = layout.weights[layer]
        weights += EntryDirections().count(weight.matrix.W, weight.positions)
    return weights + sum(sizes[name] for name in (*curved.biases.values(), *curved.others))
