"""Sharpness in units of the weights themselves, invariant to some or all rescalings of the network."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatlens.grams import LayerGrams, Weight
from flatlens.measures.balance import balance
from flatlens.measures.card import LAYERWISE, PERMUTATION, UNITS_AND_ORDER, Measure, per_sample
from flatlens.measures.left_out import STOPPED
from flatlens.measures.options import require_positive
from flatlens.measures.reduce import Reduced


@per_sample(
    id="M12",
    family="normalised",
    symbol=r"S_{adaptive}^{GN}",
    source="compression Lemma E.2",
    unit="loss",
    place="parameters",
    needs={"C", "adaptive"},
    sketched="probes",
    cost="one pass, per-sample gradients of shared weights",
    invariant_under=UNITS_AND_ORDER,
)
def adaptive_sharpness_ggn(g: LayerGrams) -> Tensor:
    """Curvature along each parameter in units of its value, Gauss-Newton part, summed over parameters.

    It is mean_i sum_j theta_j^2 ||C_i^(1/2) df_i/dtheta_j||^2 over all measured parameters, biases and norms included.
    In the lemma C = I. An entry of a convolution's kernel is one parameter: its positions are summed before squaring.
    """
    return g.adaptive


def by_norm(traces: Tensor, weight: Weight, measure: Measure) -> Reduced:
    """Return ||W|| sqrt(mean trace)."""
    root = float(traces.mean().clamp(min=0)) ** 0.5
    if measure.option("frobenius"):
        return Reduced(float(weight.matrix.W.square().sum().sqrt()) * root, None)
    norm, converged = weight.searched_spectral_norm
    return Reduced(norm * root, None) if converged else Reduced(norm * root, None, STOPPED, "lower bound")


@per_sample(
    id="M13",
    family="normalised",
    symbol=r"\sum_l \|W_l\|_2 \sqrt{S(W_l)}",
    source="compression Eq. 35",
    unit="output",
    place="weight",
    needs={"K"},
    sketched="probes",
    finish=by_norm,
    cost="one pass, operator norms",
    invariant_under={LAYERWISE, PERMUTATION},
)
def matrix_normalized_sharpness(g: LayerGrams, *, frobenius: bool = False) -> Tensor:
    """Matrix-normalised sharpness: sum_l ||W_l||_2 sqrt(mean_i ||df_i/dW_l||_F^2), of the weights alone.

    ||W_l||_2 of a convolution is the norm of its operator, as the bounds need it. The published inequality, that the
    value bounds sum_l xbar_l MLS_l with xbar_l = (mean_i 1/||x_l,i||^2)^(-1/2), can fail for shared weights.
    `frobenius=True` takes ||W_l||_F of the stored kernel instead.
    """
    return g.K_weight.diagonal(dim1=1, dim2=2).sum(1)


def balanced(diagonal: Tensor, weight: Weight, measure: Measure) -> Reduced:
    """Return the minimum of Eq. 36, for each group's block."""
    lam = measure.option("lam")
    require_positive(lam=lam)
    assert isinstance(lam, int | float)
    if float(diagonal.min()) < 0:
        return Reduced(math.nan, None, "the loss is not convex in the outputs: entries of H are negative", "undefined")
    W = weight.matrix.W.cpu()
    blocks = diagonal.cpu().reshape(W.shape)
    found = [balance(h, w.square() / 4) for h, w in zip(blocks, W, strict=True)]  # lam only divides
    value, gap = sum(b.value for b in found) / lam, sum(b.gap for b in found) / lam
    sigma, sigma_prime = (torch.cat(parts).sqrt() for parts in ([b.u for b in found], [b.v for b in found]))
    arrays = {"sigma": sigma / math.sqrt(lam), "sigma_prime": sigma_prime}
    certified = gap <= 1e-9 * value or value == 0
    note = "" if certified else f"at most {gap:.1g} above the minimum"
    arrays["gap"] = torch.tensor([gap], dtype=torch.float64)
    return Reduced(value, None, note, "exact" if certified else "upper bound", arrays=arrays)


@per_sample(
    id="M14",
    family="normalised",
    symbol=r"S_{norm}",
    source="compression Eq. 36",
    unit="sqrt loss",
    place="weight",
    needs={"C", "diagonal"},
    sketched="probes",
    total=True,
    finish=balanced,
    cost="one pass, per-sample gradients of shared weights; a convex minimisation per layer",
    invariant_under=UNITS_AND_ORDER,
)
def normalized_sharpness(g: LayerGrams, *, lam: float = 1.0) -> Tensor:
    """Normalised sharpness: the trace in units of each row's and column's best scale, summed over layers.

    The value of a layer is the minimum of sum_ij H_ij (s_i s'_j)^2 + W_ij^2 / (4 lam^2 (s_i s'_j)^2) over positive s
    and s'. `arrays` has the minimising s and s' as `sigma` and `sigma_prime`.

    H is the diagonal of the layer's Gauss-Newton matrix. It is not negative if the loss is convex in the outputs; for
    other losses an H with a negative entry leaves the value undefined. In piecewise-linear networks it equals the
    diagonal of the Hessian. For a shared weight, positions are summed before squaring. The problem is convex in the
    logarithms of s and s'. `arrays["gap"]` is a certificate: the value is above the minimum by at most this. Dead rows
    and columns contribute 0. `lam` divides the value and `gap`, and its root divides `sigma`; nothing else changes.
    """
    return g.linear.diagonal()
