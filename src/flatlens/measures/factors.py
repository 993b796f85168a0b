"""Factors of the Gauss-Newton matrix, layer by layer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TypeAlias

import torch

from flatlens.curvature import GaussNewton
from flatlens.curvature.batch_jacobians import JacobianNorm, batch_jacobians
from flatlens.curvature.blocks import dense_blocks
from flatlens.curvature.features import feature_norms
from flatlens.estimate import Estimate, undefined
from flatlens.grams import Weight, one_pass
from flatlens.grams.contractions import gram
from flatlens.measures.card import FUNCTION, PERMUTATION, Parts, Run, on_lens
from flatlens.measures.hessian import (
    NO_MEASURED_LAYER,
    as_estimate,
    closed_form,
    in_batches,
    require_tolerance,
    top_of,
    whole_weights,
)
from flatlens.measures.left_out import left_out
from flatlens.measures.lens import Lens
from flatlens.problem import Problem


@on_lens(
    id="M4",
    family="sensitivity",
    symbol=r"\|Jf(X)\|_2",
    source="sharpening A.1, B.3",
    unit="output / input",
    cost="Lanczos: about 10 products with each batch's Jacobian",
    invariant_under=FUNCTION,
    works_coupled=True,
    of_parameters=False,
    on_request=True,
)
def batch_jacobian_norm(
    lens: Lens, run: Run, *, softmax: bool = False, rtol: float = 1e-3, batch_statistics: int | None = None
) -> Estimate:
    """Norm of the Jacobian of whole batches, ||df(X)/dX||_2, BatchNorm as in training; the largest over ghost batches.

    Where BatchNorm couples the samples of a batch its Jacobian is one matrix; in eval mode it has a block for each
    sample, and the norm is `jacobian_norm`. `batch_statistics` and `rtol` are those of `sharpness`, `softmax` that of
    `jacobian_norm`.
    """
    require_tolerance(rtol)
    problem = in_batches(lens, batch_statistics)
    found = batch_jacobians(
        problem, lens.model, [None], softmax=softmax, rtol=rtol, generator=run.generator, progress=run.progress
    )
    return _found(found[None])


def _found(norm: JacobianNorm) -> Estimate:
    note = "" if norm.exact else f"a singular value lies within {norm.residual:.1g}; a larger one can be missed"
    return Estimate(norm.value, kind="exact" if norm.exact else "lower bound", note=note, products=norm.products)


@on_lens(
    id="M17",
    family="hessian",
    symbol=r"\lambda_{max}(C\,Jf\,Df_l\,Df_l^T Jf^T C^T)",
    source="sharpening Eq. 4, App. C",
    unit="loss / parameter^2",
    cost="one pass; Lanczos: about 10 Gauss-Newton products per layer that is not dense",
    invariant_under={PERMUTATION},
    works_coupled=True,
    on_request=True,
)
def layer_factors(lens: Lens, run: Run, *, rtol: float = 1e-3, batch_statistics: int | None = None) -> Parts:
    """Largest eigenvalue of each layer's Gauss-Newton block, summed over layers, and of the factors of the block.

    The value of a layer is the largest eigenvalue of its Gauss-Newton block, in the layer's weight alone. The block
    couples all samples, so it is used by products only. The sum over layers is an upper bound of the largest eigenvalue
    for all these weights together, without biases, norms and weights outside layers. The factors are `.loss_curvature`,
    ||C^(1/2)|| with C divided by the number of samples; `.features`, the spectral norm of the layer's features
    f_{l-1}(X); and `.jacobian`, the largest norm over samples of the derivative of the outputs with respect to the
    layer's output. If the layer's weight is used once per sample, the block is at most the product of the squares of
    the three. For shared weights there is no such bound.

    With BatchNorm in train mode (`batch_statistics`, as in `sharpness`), all numbers are those of the network in that
    mode, and `.jacobian` is the norm of the Jacobian of a whole ghost batch.
    """
    require_tolerance(rtol)
    weights = whole_weights(lens, run)
    if not weights:
        return {("", None): undefined(NO_MEASURED_LAYER)}
    problem = in_batches(lens, batch_statistics)
    if lens.probes is not None and not problem.coupled:
        return {("", None): undefined(f"it needs all {lens.problem.outputs} outputs: Lens(problem, outputs='exact')")}
    curvature, jacobians, rows = (_of_batches if problem.coupled else _of_samples)(lens, problem, run, weights, rtol)
    features = feature_norms(problem, lens.model, lens.layout)
    elsewhere = undefined("the weight also acts in other ways than by products in the layer's calls")
    parts: dict[tuple[str, str | None], Estimate] = {}
    for name in weights:
        parts["", name] = rows[name]
        parts["features", name] = Estimate(features[name], unit="feature") if name in features else elsewhere
        parts["jacobian", name] = replace(jacobians.get(name, elsewhere), unit="output / feature")
    kinds = {parts["", name].kind for name in weights}
    said = ("" if kinds == {"exact"} else f"each to a residual of {rtol:g} of its size", left_out(lens, weights))
    parts["", None] = Estimate(
        sum(parts["", name].value for name in weights),
        kind="exact" if kinds == {"exact"} else "lower bound",
        note="; ".join(part for part in said if part),
        products=sum(parts["", name].products for name in weights),
    )
    loss_curvature = (max(0.0, curvature) / lens.problem.n) ** 0.5
    parts["loss_curvature", None] = Estimate(loss_curvature, unit="sqrt loss / output")
    return parts


_Factors: TypeAlias = tuple[float, dict[str, Estimate], dict[str, Estimate]]
"""The largest eigenvalue of C over samples; by layer, the Jacobian from its output up, and the block's eigenvalue."""


def _of_samples(lens: Lens, problem: Problem, run: Run, weights: dict[str, Weight], rtol: float) -> _Factors:
    """Return the factors where samples are apart: from one pass, and Lanczos for layers that are not dense."""
    curvature, above = 0.0, dict.fromkeys((name for name, weight in weights.items() if weight.explained), 0.0)
    with closing(one_pass(problem, lens.model, lens.layout, None, run.progress, {"K"})) as chunks:
        for chunk in chunks:
            for name in weights:
                g = chunk.layers[name]
                curvature = max(curvature, float(torch.linalg.eigvalsh(g.C)[:, -1].max()))
                if name in above:
                    JJ = gram(g.linear.J)
                    above[name] = max(above[name], float(torch.linalg.eigvalsh(JJ)[:, -1].max()))
    closed = closed_form(lens, weights)
    blocks = dense_blocks(problem, lens.model, lens.layout, closed, run.progress) if closed else {}
    rows = {name: as_estimate(blocks[name].largest(rtol, run.progress), 0) for name in blocks}
    rows |= {name: _block(lens, problem, run, name, weights[name], rtol) for name in weights if name not in blocks}
    return curvature, {name: Estimate(max(0.0, value) ** 0.5) for name, value in above.items()}, rows


def _of_batches(lens: Lens, problem: Problem, run: Run, weights: dict[str, Weight], rtol: float) -> _Factors:
    """Return the factors where BatchNorm couples the samples of a batch: by Lanczos alone."""
    curvature = 0.0
    with problem.measuring(lens.model), torch.no_grad():
        for raw in problem.batches(problem.n):
            f, y = problem.run(lens.model, problem.place(raw))
            C = problem.loss.output_hessian(f.to(torch.float64), y)
            curvature = max(curvature, float(torch.linalg.eigvalsh(C)[:, -1].max()))
    calls = {name: weight.calls[0] for name, weight in weights.items() if weight.explained and len(weight.calls) == 1}
    norms = batch_jacobians(
        problem, lens.model, list(calls.values()), softmax=False, rtol=rtol, generator=run.generator,
        progress=run.progress,
    )  # fmt: skip
    rows = {name: _block(lens, problem, run, name, weight, rtol) for name, weight in weights.items()}
    return curvature, {name: _found(norms[call]) for name, call in calls.items()}, rows


def _block(lens: Lens, problem: Problem, run: Run, name: str, weight: Weight, rtol: float) -> Estimate:
    """Return lmax of the Gauss-Newton block of a layer's weight."""
    assert weight.parameter is not None
    key = f"layer_factors {name}" + (" in ghost batches" if problem.coupled else "")
    return top_of(lens, run, key, GaussNewton(problem, [weight.parameter], model=lens.model), rtol)
