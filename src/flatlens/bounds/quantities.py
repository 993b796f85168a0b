"""Quantities of the pass that only bounds use: norms of each layer's input and Jacobian, per sample."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatlens.grams import LayerGrams
from flatlens.measures.card import per_sample
from flatlens.measures.volume import positive


@per_sample(id="", family="", symbol="", source="", unit="", place="input", needs={"G"})
def input_norm2(g: LayerGrams) -> Tensor:
    """Return ||x||^2 of the place's input."""
    assert g.x_norm2 is not None
    return g.x_norm2


@per_sample(id="", family="", symbol="", source="", unit="", place="weight", needs={"K"})
def weight_slope2(g: LayerGrams) -> Tensor:
    """Return ||df/dW||_F^2 of the layer's weight alone."""
    return g.K_weight.diagonal(dim1=1, dim2=2).sum(1)


@per_sample(id="", family="", symbol="", source="", unit="", place="weight", needs={"K"})
def weight_spectral2(g: LayerGrams) -> Tensor:
    """Return ||df/dW||_2^2 of the layer's weight alone, df/dW an N x (d m) matrix.

    It is ||J||_2^2 ||x||^2 of an unshared layer.
    """
    eigenvalues: Tensor = torch.linalg.eigvalsh(g.K_weight)
    return eigenvalues[:, -1].clamp(min=0)


@per_sample(id="", family="", symbol="", source="", unit="", place="weight", needs={"K"})
def output_slope2(g: LayerGrams) -> Tensor:
    """Return ||J||_F^2, J = df/dz of the layer's output, over all its positions."""
    return g.linear.J.flatten(1).double().square().sum(1)


@per_sample(id="", family="", symbol="", source="", unit="", place="input", needs={"G"})
def rank(g: LayerGrams) -> Tensor:
    """Return the rank of df/dx per sample."""
    return positive(g).sum(1).to(torch.float64)


@per_sample(id="", family="", symbol="", source="", unit="", place="input", needs={"G"})
def log_positive_volume(g: LayerGrams) -> Tensor:
    """Return log sqrt(product of the positive eigenvalues of G), 0 if there is none."""
    return 0.5 * torch.where(positive(g), g.eigenvalues, 1.0).log().sum(1)


@per_sample(id="", family="", symbol="", source="", unit="", place="parameters", needs={"K"})
def adaptive_slope2(g: LayerGrams) -> Tensor:
    """Return sum_j theta_j^2 ||df/dtheta_j||^2 over the parameters measured here.

    It is `adaptive_sharpness_ggn` with C = I.
    """
    assert g.weight is not None
    identity = _identity(g)
    return replace(g, C=identity, weight=replace(g.weight, C=identity)).adaptive


@per_sample(id="", family="", symbol="", source="", unit="", place="weight", needs={"K"})
def adaptive_weight_slope2(g: LayerGrams) -> Tensor:
    """Return the same sum over the layer's weight alone, measured or not."""
    return replace(g.linear, C=_identity(g)).adaptive()


def _identity(g: LayerGrams) -> Tensor:
    return torch.eye(g.C.shape[1], dtype=g.C.dtype, device=g.C.device).expand_as(g.C)


MADE_TOGETHER = (input_norm2, weight_slope2, weight_spectral2, output_slope2, rank, log_positive_volume)
"""Cheap quantities, made together in one pass with the first of them, or any measure, that a bound needs."""
