"""Petzka, Kamp et al.: the flatness of a linear head under a squared error is the penalty of ridge regression."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from flatlens.bounds.context import Assumption, Claim, Context, input_norm2
from flatlens.bounds.definition import bound
from flatlens.grams import LayerGrams, one_pass
from flatlens.grams.weight_jacobians import DenseJacobian
from flatlens.measures.definition import per_sample
from flatlens.measures.flatness import relative_flatness_ggn


@bound(id="B16", symbol=r"\kappa_{Tr}^\phi = c \|W\|_F^2 \overline{\|\phi(x)\|^2}",
       source="reparam2019 section 2; relative2021 section 4 (i)", cost="two passes", on_request=True)  # fmt: skip
def ridge_reduction(context: Context) -> Iterator[Claim]:
    r"""Flatness of a linear head under a squared error is the ridge penalty: kappa_Tr = c ||W||_F^2 mean ||phi(x)||^2.

    An equality, for the layer whose result W phi(x) + b is the output, and a loss with the second derivative c I at
    every sample: c = 1 for the half squared error, 2 / N for torch's mean over N outputs. With phi = id this is the
    papers' linear regression; phi may be any network below. The undotted row is per sample, and `.least` has its sides
    exchanged: both hold only where they are equal.

    `.eigenvalue` and `.eigenvalue.least` are the measure of 2019: ||W||_F^2 lmax(H) = c ||W||_F^2 lmax(mean phi phi^T).

    The papers print the constants with sums over the samples, sum_x 2 Tr(x x^T) and 2 lmax(sum_x x x^T). The Hessian is
    that of a mean over samples, so these constants are |S| times too large.
    """
    for layer, weight in context.readable.items():
        if weight.dense and bool((context.each(distance_from_output, layer) <= context.rounding).all()):
            break
    else:
        yield Claim(math.nan, math.nan, assumptions=(Assumption("linear_head", False, "no dense layer's result is f"),))
        return
    c, same, top = _curvature(context, layer)
    W2, premises = float(weight.matrix.W.square().sum()), (same, context.unshared(layer), context.counted([layer]))
    kappa, penalty = context.each(relative_flatness_ggn, layer), c * W2 * context.each(input_norm2, layer)
    yield Claim(kappa, penalty, layer, "", premises)
    yield Claim(penalty, kappa, layer, "least", premises)
    if same.holds:
        largest = context.measured("layer_sharpness(rtol=1e-09)", layer, "kappa").value
        yield Claim(largest, c * W2 * top, layer, "eigenvalue", premises)
        yield Claim(c * W2 * top, largest, layer, "eigenvalue.least", premises)


def _curvature(context: Context, layer: str) -> tuple[float, Assumption, float]:
    """The c of the loss's second derivative c I, whether it is that at every sample, and lmax(mean phi phi^T)."""
    lens, least, most, apart, moment = context.lens, math.inf, -math.inf, 0.0, torch.zeros(())
    walk = one_pass(lens.problem, lens.model, lens.plan, needs={"C", "G"}, progress=context.progress)
    with closing(walk) as chunks:
        for chunk in chunks:
            g = chunk.layers[layer]
            assert g.x is not None
            traces = g.C.diagonal(dim1=1, dim2=2).mean(1)
            least, most = min(least, float(traces.min())), max(most, float(traces.max()))
            apart = max(apart, float((g.C - torch.diag_embed(traces[:, None].expand_as(g.f))).abs().max()))
            phi = g.x.flatten(1).double().cpu()
            moment = moment + phi.mT @ phi / context.n
    constant = max(apart, most - least) <= context.rounding * most
    same = Assumption("squared_error", constant, "the loss's second derivative is not c I")
    return most, same, float(torch.linalg.eigvalsh(moment)[-1])


@per_sample(id="", family="", symbol="", source="", unit="", place="weight", needs={"K"})
def distance_from_output(g: LayerGrams) -> Tensor:
    """Return max |J - I| of the layer's J = df/dz; infinite where its result is not an output's size."""
    if not isinstance(g.weight, DenseJacobian) or g.weight.J.shape[1] != g.weight.J.shape[2]:
        return torch.full((len(g.C),), math.inf, dtype=torch.float64, device=g.C.device)
    J = g.weight.J.double()
    return (J - torch.eye(J.shape[1], dtype=J.dtype, device=J.device)).abs().amax((1, 2))
