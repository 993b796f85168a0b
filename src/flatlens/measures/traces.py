"""Traces of the Hessian: the exact Gauss-Newton part from the pass, and the functional Hessian, exact or by probes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature import Hessian
from flatlens.curvature.directions import Directions, RowDirections, ShiftDirections, UnitDirections
from flatlens.curvature.functional_hessian import functional_hessian_along
from flatlens.curvature.trace import curved_parameters, diagonal
from flatlens.estimate import Estimate, undefined
from flatlens.grams.sketch import random_signs
from flatlens.measures.card import PERMUTATION, UNITS_AND_ORDER, Parts, Run, on_lens
from flatlens.measures.gauss_newton import ggn_trace, interpolation_sharpness
from flatlens.measures.lens import Lens
from flatlens.measures.normalised import adaptive_sharpness_ggn
from flatlens.measures.trace_parts import Effort, mean_over_samples, of_probes, passed, plus, sampled, traced
from flatlens.progress import PRODUCTS


@on_lens(
    id="H3",
    family="hessian",
    symbol=r"\mathrm{Tr}\,H",
    source="compression Eq. 2",
    unit="loss / parameter^2",
    cost="one pass; nothing more on piecewise-linear networks, else probes of one Hessian product each",
    invariant_under={PERMUTATION},
    works_coupled=True,
    on_request=True,
)
def hessian_trace(lens: Lens, run: Run, *, rtol: float = 0.01, probes: int | None = None, exact: bool = False) -> Parts:
    """Trace of the risk's Hessian in the measured parameters, also of each layer's block.

    The value is the exact Gauss-Newton trace plus the trace of H - GGN. In piecewise-linear networks that use each
    weight once, the latter is 0. In other networks, random probes estimate it: as many as bring the standard error
    below `rtol` times the value (at most 4,096), or `probes` of them (16 if fewer agree). It is exact if every
    direction in turn takes at most 64 products (with `probes`: 16), or no more than the probes, or with `exact=True`.
    `.gauss_newton` and `.functional_hessian` are the two parts. With `batchnorm="train"`, probes estimate all of Tr H,
    and there are neither parts nor layers.
    """
    effort = Effort(rtol, probes, exact)
    if lens.problem.coupled:
        return {("", None): _hutchinson(lens, run, effort)}
    return traced(lens, run, ggn_trace, effort, weighted=False)


def _hutchinson(lens: Lens, run: Run, effort: Effort) -> Estimate:
    """Return the trace where samples are coupled and there is no pass: from random probes, or from unit vectors."""
    operator = Hessian(lens.problem, model=lens.model)
    like = torch.empty(0, dtype=operator.dtype, device=operator.space.device)

    def draw(probes: int) -> Tensor:
        rows = []
        for number in range(probes):
            v = random_signs((operator.size,), like, run.generator)
            rows.append((v * operator(v)).sum(dtype=torch.float64).cpu())
            if run.progress is not None:
                run.progress(PRODUCTS, number + 1, probes)
        return torch.stack(rows)[:, None]

    found = sampled(draw, effort, 0.0, operator.size, run)
    if found is None:
        total = float(diagonal(operator, run.progress).sum())
        lens.count(operator.products)
        return Estimate(total, products=operator.products)
    lens.count(operator.products)
    return of_probes(found[0][:, 0], found[1])


@on_lens(
    id="M12",
    family="normalised",
    symbol=r"S_{adaptive}",
    source="compression Def. E.1",
    unit="loss",
    cost="one pass; nothing more on piecewise-linear networks, else probes of one Hessian product each",
    invariant_under=UNITS_AND_ORDER,
    on_request=True,
)
def adaptive_sharpness(
    lens: Lens, run: Run, *, rtol: float = 0.01, probes: int | None = None, exact: bool = False
) -> Parts:
    """Elementwise-adaptive sharpness: sum_j theta_j^2 d2L/dtheta_j^2, the limit of the average-case one as rho -> 0.

    It is `adaptive_sharpness_ggn` plus the same sum for the functional Hessian. Options and parts are those of
    `hessian_trace`.
    """
    return traced(lens, run, adaptive_sharpness_ggn, Effort(rtol, probes, exact), weighted=True)


@on_lens(
    id="H7",
    family="hessian",
    symbol=r"\mathrm{Tr}\,H - S",
    source="compression Lemma B.1",
    unit="loss / parameter^2",
    cost="as hessian_trace; with bound=True a Hessian product for every direction",
    invariant_under={PERMUTATION},
    on_request=True,
)
def interpolation_gap(
    lens: Lens,
    run: Run,
    *,
    rtol: float = 0.01,
    probes: int | None = None,
    exact: bool = False,
    adaptive: bool = False,
    bound: bool = False,
) -> Parts:
    """Difference between the Hessian's trace and `interpolation_sharpness`: Tr H - S, which vanishes at interpolation.

    The lemma is about the half squared error; under other losses the difference also contains C. `adaptive=True` is the
    version of Lemma E.2, with theta_j^2 before every term. `bound=True` adds `.bound`, the middle term of the lemma,
    mean_i sum_j |<f_i - y_i, d2f_i/dtheta_j2>|. It is never above the lemma's m M epsilon.
    """
    if adaptive and not _is_half_square(lens):
        return {("", None): undefined("Lemma E.2 is about the half squared error")}
    gauss_newton = adaptive_sharpness_ggn if adaptive else ggn_trace
    parts = traced(lens, run, gauss_newton, Effort(rtol, probes, exact), adaptive)
    if parts["", None].kind == "undefined":
        return {("", None): parts["", None]}
    apart = Estimate(0.0)  # C = I: the Gauss-Newton trace is S
    if not _is_half_square(lens):
        plain = mean_over_samples(lens, sum(passed(lens, run, interpolation_sharpness).values()))
        apart = plus(parts["gauss_newton", None], replace(plain, value=-plain.value))
    beyond = parts["functional_hessian", None]
    found: dict[tuple[str, str | None], Estimate] = {("", None): plus(apart, beyond)}
    if bound:
        found["bound", None] = _lemma_bound(lens, run, adaptive)
    return found


def _is_half_square(lens: Lens) -> bool:
    return lens.problem.loss.half_square


def _lemma_bound(lens: Lens, run: Run, adaptive: bool) -> Estimate:
    """Return mean_i sum_j |<dl_i/df, d2 f_i/dtheta_j2>|, parameter by parameter.

    A dense layer takes one direction per row.
    """
    if not _is_half_square(lens):
        return undefined("Lemma B.1 is about the half squared error")
    curved = curved_parameters(lens.problem, lens.layout)
    if curved.others:
        return undefined(f"{curved.others[0]!r} and others act outside one call of a linear layer")
    total, products = 0.0, 0
    for layer in {**curved.weights, **curved.biases}:
        weight = lens.layout.weights[layer]
        W = weight.matrix.W
        families: list[tuple[Directions, Tensor | None]] = []
        if layer in curved.weights:
            rows = weight.dense and not adaptive
            family: Directions = RowDirections(torch.eye(W.shape[1]).expand(1, -1, -1)) if rows else UnitDirections()
            families.append((family, W.flatten().square() if adaptive else None))
        if layer in curved.biases:
            assert weight.matrix.b is not None
            families.append((ShiftDirections(), weight.matrix.b.square() if adaptive else None))
        for family, scale in families:
            weigh = partial(_weighed, scale=scale)
            sums, count = functional_hessian_along(
                lens.problem, lens.model, lens.layout, layer, family, weigh, run.progress
            )
            total += float(sums.sum()) / lens.problem.n
            products += count
    lens.count(products)
    return Estimate(total, products=products)


def _weighed(forms: Tensor, scale: Tensor | None) -> Tensor:
    """Return each sample's sum of absolute values, each times its direction's scale."""
    return (forms.abs() if scale is None else forms.abs() * scale).sum(1)
