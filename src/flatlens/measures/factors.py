"""Factors of the Gauss-Newton matrix, layer by layer."""

from __future__ import annotations

from contextlib import closing

import torch

from flatlens.curvature import GaussNewton
from flatlens.curvature.blocks import dense_blocks
from flatlens.curvature.features import feature_norms
from flatlens.estimate import Estimate, undefined
from flatlens.grams import one_pass
from flatlens.grams.contractions import gram
from flatlens.measures.card import PERMUTATION, Parts, Run, on_lens
from flatlens.measures.hessian import (
    NO_MEASURED_LAYER,
    as_estimate,
    closed_form,
    require_tolerance,
    top_of,
    whole_weights,
)
from flatlens.measures.left_out import left_out
from flatlens.measures.lens import Lens


@on_lens(
    id="M17",
    family="hessian",
    symbol=r"\lambda_{max}(C\,Jf\,Df_l\,Df_l^T Jf^T C^T)",
    source="sharpening Eq. 4, App. C",
    unit="loss / parameter^2",
    cost="one pass; Lanczos: some 10 Gauss-Newton products a layer that is not dense",
    invariant_under={PERMUTATION},
    on_request=True,
)
def layer_factors(lens: Lens, run: Run, *, rtol: float = 1e-3) -> Parts:
    """The summands of the Gauss-Newton matrix's conjugate, one a layer: lmax of each, and of its factors; summed.

    A row is lmax of the layer's Gauss-Newton block, in its weight alone: it couples the samples, so it is matrix-free.
    The sum is an upper bound of lmax over these weights together (biases, norms and weights that are no layer's apart).
    `.loss_curvature` is ||C^(1/2)||, its C divided by the number of samples; `.features` the spectral norm of the
    features f_{l-1}(X); `.jacobian` the norm of the Jacobian from the layer's output up, the largest over samples.
    For an unshared layer the block is at most the product of the squares of the three; a layer with shared weights has
    no such bound.
    """
    require_tolerance(rtol)
    weights = whole_weights(lens, run)
    if not weights:
        return {("", None): undefined(NO_MEASURED_LAYER)}
    if lens.probes is not None:
        return {("", None): undefined(f"it needs all {lens.problem.outputs} outputs: Lens(problem, outputs='exact')")}
    parts: dict[tuple[str, str | None], Estimate] = {}
    curvature, above = 0.0, dict.fromkeys(weights, 0.0)
    with closing(one_pass(lens.problem, lens.model, lens.layout, None, run.progress, {"K"})) as chunks:
        for chunk in chunks:
            for name, weight in weights.items():
                g = chunk.layers[name]
                curvature = max(curvature, float(torch.linalg.eigvalsh(g.C)[:, -1].max()))
                if weight.explained:
                    JJ = gram(g.linear.J)
                    above[name] = max(above[name], float(torch.linalg.eigvalsh(JJ)[:, -1].max()))
    features = feature_norms(lens.problem, lens.model, lens.layout)
    closed = closed_form(lens, weights)
    blocks = dense_blocks(lens.problem, lens.model, lens.layout, closed, run.progress) if closed else {}
    for name, weight in weights.items():
        if name in blocks:
            parts["", name] = as_estimate(blocks[name].largest(rtol, run.progress), 0)
        else:
            assert weight.parameter is not None
            operator = GaussNewton(lens.problem, [weight.parameter], model=lens.model)
            parts["", name] = top_of(lens, run, f"layer_factors {name}", operator, rtol)
        elsewhere = undefined("the weight acts by more than products in the layer's calls")
        parts["features", name] = Estimate(features[name], unit="feature") if name in features else elsewhere
        root = Estimate(max(0.0, above[name]) ** 0.5, unit="output / feature")
        parts["jacobian", name] = root if weight.explained else elsewhere
    kinds = {parts["", name].kind for name in weights}
    said = ("" if kinds == {"exact"} else f"each to a residual of {rtol:g} of its size", left_out(lens, weights))
    parts["", None] = Estimate(
        sum(parts["", name].value for name in weights),
        kind="exact" if kinds == {"exact"} else "lower bound",
        note="; ".join(part for part in said if part),
        products=sum(parts["", name].products for name in weights),
    )
    bend = (max(0.0, curvature) / lens.problem.n) ** 0.5
    parts["loss_curvature", None] = Estimate(bend, unit="sqrt loss / output")
    return parts
