"""Largest eigenvalues as estimates, and the layers and the data that they are taken of.

Also where parameters are spread over processes, and the eigenpairs that one measurement leaves for the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Context
from functools import partial
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor

from flatlens.curvature import Eigenpairs, Operator, eigenpairs, lanczos
from flatlens.curvature.krylov import CHANCE, Remembered, relative_residual
from flatlens.curvature.optimiser_geometry import Preconditioner
from flatlens.curvature.spectral_norms import JacobianNorm
from flatlens.curvature.spectrum import WARMING, DenseBlock, dense_blocks
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, Key, Kind, with_note
from flatlens.grams import Weight
from flatlens.measures.definition import PERMUTATION, Run, on_lens, require_count, require_tolerance
from flatlens.measures.lens import Lens
from flatlens.measures.notes import STOPPED
from flatlens.operations.operator_norm import SearchedNorm
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.perturbation.weights import Landscape, ShardedHessian
from flatlens.problem import Problem
from flatlens.problem.ranks import in_one_piece
from flatlens.progress import count_of
from flatlens.result import Result

of_hessian = partial(
    on_lens, family="hessian", unit="loss / parameter^2", invariant_under={PERMUTATION}, on_request=True
)

_MOST = 300  #: products of a search
ENOUGH = 16  #: products with which most searches converge
LEAST = 4  #: products on all samples of a search that is limited
OF_THE_START, LEAST_OF_THE_START = 16, 32
"""A limited search starts on every 16th sample, and on 32 samples at least."""

REMEMBERED = 10  #: Ritz pairs that a search keeps for the next moment's search


def top_of(
    lens: Lens, run: Run, key: str, operator: Operator, rtol: float, top_k: int = 1, bottom_k: int = 0
) -> Estimate:
    """Return the ends of an operator's spectrum; the search starts from the earlier lens's eigenpairs."""
    require_tolerance(rtol)
    earlier = lens.remembered.get((key, None))
    # how many products the budget allows
    affordable = _MOST if run.budget == math.inf else int(run.budget / lens.product_size)
    most, share = max(min(affordable, _MOST), LEAST), None
    if affordable < ENOUGH:  # the start decides: it comes from a part of the samples, on whatever number of them
        share = max(1, min(OF_THE_START, lens.samples // LEAST_OF_THE_START))
    # a trial of a limited search: one product, the vectors it holds, and its number of products
    if lens.rehearses and share is not None:
        held = torch.ones(WARMING, operator.size, dtype=operator.dtype, device=operator.space.device)
        size, products = float(operator(held[0]).norm() / held[0].norm()), most - (-WARMING // share)
        lens.count(products)
        return Estimate(size, products=products)
    pairs = eigenpairs(
        operator,
        top_k=top_k,
        bottom_k=bottom_k,
        rtol=rtol,
        most=most,
        share=share,
        start=earlier if earlier is not None and earlier.vectors.shape[1] == operator.size else None,
        keep=max(REMEMBERED, top_k + bottom_k),
        generator=run.generator,
        progress=run.progress,
    )
    lens.count(operator.products)
    if pairs.remembered is not None:
        lens.remember((key, None), pairs.remembered)
    # operations inside a network may be coarser than it
    inside = coarsest_inside(lens.problem, lens.model)
    rounding = 0.0 if inside == lens.problem.dtype else 10 * torch.finfo(inside).eps
    found = as_estimate(pairs, operator.products, rounding)
    stopped = most < _MOST and not (pairs.converged or pairs.exact)
    return with_note(found, "by name, the search runs to its tolerance" if stopped else "")


def as_estimate(pairs: Eigenpairs, products: int, rounding: float = 0.0) -> Estimate:
    """Return a Ritz value as a lower bound; `rounding`: the relative error of products that residuals do not show."""
    value = float(pairs.values[0])
    residuals = pairs.residuals.clamp(min=rounding * abs(value))
    tiny = torch.finfo(pairs.vectors.dtype).tiny
    underflows = not pairs.exact and 0 < abs(value) < tiny
    if underflows:  # products round by an absolute amount there, which the residual does not show
        value, residuals = value - tiny, residuals + 2 * tiny
    note = "" if pairs.exact else proven_by(float(residuals[0]), value + pairs.above)
    if underflows:
        note += f"; products underflow {pairs.vectors.dtype}"
    if not pairs.converged and not pairs.exact:
        note += f"; stopped after {count_of(products, 'product')}, before the tolerance was reached"
    kind: Kind = "exact" if pairs.exact else "lower bound"
    arrays = {"eigenvalues": pairs.values, "residuals": residuals}
    return Estimate(value, kind=kind, note=note, products=products, arrays=arrays)


def proven_by(residual: float, highest: float) -> str:
    """Return the note on what a residual proves and what it does not."""
    chance = f", but one above {highest:.3g} has a probability of at most {CHANCE:.0%}" if highest < math.inf else ""
    return f"an eigenvalue lies within {rounded_up(residual)}; a larger eigenvalue may exist{chance}"


def largest_residual(rows: Iterable[Estimate]) -> float:
    """Return the largest residual of some Ritz values, as a share of its value's size."""
    return max((relative_residual(float(row.arrays["residuals"][0]), row.value) for row in rows), default=0.0)


def within_share(share: float) -> str:
    """Return the note on several Ritz values, each with a residual of at most this share of its size."""
    return f"each to a residual of {rounded_up(share)} of its size; a larger eigenvalue may exist"


def rounded_up(value: float) -> str:
    """Return a number with one digit, not below the number itself: '0.002' for 0.00141."""
    return f"{float(Context(prec=1, rounding=ROUND_CEILING).create_decimal(repr(value))):.1g}"


def of_norm(found: SearchedNorm, note: str = "", unit: str = "") -> Estimate:
    """Return a spectral norm as an estimate: a lower bound if its search stopped early."""
    if found.converged:
        return Estimate(found.value, note=note, unit=unit)
    return with_note(Estimate(found.value, kind="lower bound", note=STOPPED, unit=unit), note)


def of_jacobian(norm: JacobianNorm) -> Estimate:
    """Return the norm of a batch's Jacobian as an estimate: a lower bound unless it is exact."""
    note = "" if norm.exact else f"a singular value lies within {rounded_up(norm.residual)}; a larger one may exist"
    return Estimate(norm.value, kind="exact" if norm.exact else "lower bound", note=note, products=norm.products)


def whole_weights(lens: Lens, run: Run) -> dict[str, Weight]:
    """Return the layers whose weight is a measured parameter."""
    every = lens.plan.weights.items()
    known = {name: w for name, w in every if w.parameter is not None and w.has_derivative and run.chosen(name)}
    return {name: w for name, w in known.items() if w.measured or run.frozen}


def closed_form(lens: Lens, run: Run, layers: Iterable[str]) -> dict[str, DenseBlock]:
    """Return the Gauss-Newton blocks of those layers where one pass over every output gives them."""
    return dense_blocks(lens.problem, lens.model, lens.plan, layers if lens.probes is None else (), run.progress)


def in_batches(lens: Lens, batch_statistics: int | None) -> Problem:
    """Return the lens's problem; in eval mode, with BatchNorm's statistics of the number of samples given."""
    if batch_statistics is None or lens.problem.coupled:
        return lens.problem
    require_count(2, batch_statistics=batch_statistics)
    return lens.problem.in_ghost_batches(batch_statistics)


def sharded_top(
    lens: Lens, run: Run, key: str, rtol: float, *,
    top_k: int = 1, bottom_k: int = 0, P: Preconditioner | None = None,
) -> Estimate:  # fmt: skip
    """Return the ends of the spectrum of H, or of P^-1/2 (H + D) P^-1/2, as every process finds them."""
    H = ShardedHessian(Landscape(lens.problem, model=lens.model))
    if P is not None:  # over the measured parameters that the optimiser moves
        divisor = {name: in_one_piece(part) for name, part in P.divisor.items()}
        root = H.flat({name: part.rsqrt() for name, part in divisor.items()})
        if not root.any():
            raise BadInput("the optimiser moves none of the measured parameters")
        shift = H.flat({name: P.decay[name] / part for name, part in divisor.items()})
        H = ShardedHessian(H.landscape, root, shift, by=H.by)
    fresh = torch.randn(H.size, generator=run.generator, dtype=torch.float64).to(H.landscape.space.device)
    earlier = lens.remembered.get((key, None))
    start = fresh
    if earlier is not None and earlier.vectors.shape[1] == H.size:
        start = earlier.vectors[0] * 10.0 + fresh / fresh.norm()  # the random vector has a weight of 1
    room = max(2 * (top_k + bottom_k) + 8, lens.problem.memory // (32 * H.size))
    pairs = lanczos(H, start, top_k=top_k, bottom_k=bottom_k, rtol=rtol, room=min(room, 300), keep=1,
                    random=1.0 if start is fresh else 0.0, generator=run.generator, progress=run.progress)  # fmt: skip
    vector = pairs.vectors[0]
    product, error = H.with_error(vector)
    value = float(vector @ product)
    residual = float((product - value * vector).norm() + error.norm())
    lens.remember((key, None), Remembered(pairs.values[:1], pairs.vectors[:1]))
    stopped = "" if pairs.converged or pairs.exact else "; stopped before the tolerance was reached"
    note = f"by {H.by}; an eigenvalue lies within {rounded_up(residual)}; a larger eigenvalue may exist{stopped}"
    arrays = {"eigenvalues": pairs.values, "residuals": pairs.residuals}
    stderr = abs(float(vector @ error)) / 1.96  # of differences, along the first eigenvector; the residual has it, too
    return Estimate(value, stderr, "lower bound" if H.exact else "estimate", note=note, arrays=arrays)


class Searches(Result):
    """Leading eigenpairs by search and layer, from which `Lens(after=searches.pairs)` starts its searches."""

    _KIND = "warm start"

    def __init__(self, pairs: Mapping[Key, Remembered], about: Mapping[str, Any]) -> None:
        self.pairs = dict(pairs)
        self.about = dict(about)

    def frame(self) -> pd.DataFrame:
        """Return one row for each search: its measure, its layer, how many pairs it left, the first eigenvalue."""
        rows = [
            (search, layer or "", len(found.values), float(found.values[0]))
            for (search, layer), found in self.pairs.items()
        ]
        return pd.DataFrame(rows, columns=["measure", "layer", "pairs", "value"])

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {
            f"{number}/{name}": tensor.detach().cpu().contiguous()
            for number, found in enumerate(self.pairs.values())
            for name, tensor in (("values", found.values), ("vectors", found.vectors))
        }
        return {"searches": list(self.pairs)}, tensors

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        pairs = {
            (search, layer): Remembered(tensors[f"{number}/values"], tensors[f"{number}/vectors"])
            for number, (search, layer) in enumerate(content["searches"])
        }
        return cls(pairs, content["about"])
