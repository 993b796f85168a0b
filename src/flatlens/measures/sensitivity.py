"""Sensitivity of the outputs to the input: norms of df/dx."""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.grams import LayerGrams
from flatlens.measures.card import FUNCTION, PERMUTATION, per_sample
from flatlens.measures.reduce import largest, mean


def spectral_norm(g: LayerGrams) -> Tensor:
    """Return ||df/dx||_2 per sample, (n,)."""
    return g.eigenvalues[:, -1].sqrt()


def softmax_norm(g: LayerGrams) -> Tensor:
    """Return ||d softmax(f)/dx||_2 per sample, (n,)."""
    return g.softmax_eigenvalues[:, -1].sqrt()


@per_sample(
    id="M3",
    family="sensitivity",
    symbol=r"\mathrm{MLS}",
    source="compression Def. 3.7",
    unit="output / input",
    reduce=mean,
    place="input",
    needs={"G"},
    sketched="top",
    answer="input",
    cost="one pass, eigenvalues",
    invariant_under=FUNCTION,
)
def mls(g: LayerGrams, *, softmax: bool = False) -> Tensor:
    """Maximum local sensitivity: mean_i ||df/dx_i||_2, to the network's input, or through one layer.

    `softmax=True` takes the derivatives of softmax(f) in place of f; `jacobian_norm(softmax=True)` is the maximum of
    the same norms.
    """
    return softmax_norm(g) if softmax else spectral_norm(g)


@per_sample(
    id="M3",
    family="sensitivity",
    symbol=r"\mathrm{NMLS}",
    source="compression Def. 3.9",
    unit="output / feature",
    reduce=mean,
    place="input",
    needs={"G"},
    sketched="top",
    answer="sum",
    cost="one pass, eigenvalues",
    invariant_under={PERMUTATION},
)
def nmls(g: LayerGrams) -> Tensor:
    """Network MLS: the sum over linear layers of mean_i ||df/dx^l_i||_2, each through its layer (rows of `mls`)."""
    return spectral_norm(g)


@per_sample(
    id="M4",
    family="sensitivity",
    symbol=r"\max_i \|Jf(x_i)\|_2",
    source="sharpening section 4, A.1, B.1",
    unit="output / input",
    reduce=largest,
    place="input",
    needs={"G"},
    sketched="top",
    answer="input",
    cost="one pass, eigenvalues",
    invariant_under=FUNCTION,
)
def jacobian_norm(g: LayerGrams, *, softmax: bool = False) -> Tensor:
    """Largest sensitivity over the samples: max_i ||df/dx_i||_2 of the logits, or of softmax(f).

    `softmax=True` takes the derivatives of p = softmax(f). Their Gram matrix is P G P, with P = diag(p) - p p^T.
    """
    return softmax_norm(g) if softmax else spectral_norm(g)


@per_sample(
    id="M7",
    family="sensitivity",
    symbol=r"\overline{\|x\|^2 \|Jf\|_2^2}",
    source="compression Def. F.1",
    unit="output^2",
    reduce=mean,
    place="input",
    needs={"G"},
    sketched="top",
    answer="input",
    cost="one pass, eigenvalues",
    invariant_under=FUNCTION,
)
def normalized_mls(g: LayerGrams) -> Tensor:
    """Sensitivity in units of the input's size: mean_i ||x_i||^2 ||df/dx_i||_2^2.

    For C = I, and where one linear layer with unshared weights alone reads the input, it is at most that layer's
    `relative_flatness_ggn`.
    """
    assert g.x_norm2 is not None
    return g.x_norm2 * g.eigenvalues[:, -1]


@per_sample(
    id="M8",
    family="sensitivity",
    symbol=r"\overline{\sum_p x_p^2 \|\partial f/\partial x_p\|^2}",
    source="compression Def. E.3",
    unit="output^2",
    reduce=mean,
    place="input",
    needs={"G", "squares"},
    sketched="probes",
    answer="input",
    invariant_under=FUNCTION,
)
def input_invariant_mls(g: LayerGrams) -> Tensor:
    """Sensitivity that a rescaling of single inputs cannot change: mean_i sum_p x_ip^2 ||df/dx_ip||^2.

    For C = I, and where one linear layer with unshared weights alone reads the input, it is that layer's
    `neuron_flatness_ggn`.
    """
    assert g.x is not None
    return (g.input_squares * g.x.to(torch.float64).square()).sum(1)


@per_sample(
    id="M18",
    family="sensitivity",
    symbol=r"\overline{\|Jf\|_F^2}",
    source="sharpening App. D",
    unit="output^2 / input^2",
    reduce=mean,
    place="input",
    needs={"G"},
    sketched="probes",
    answer="input",
    invariant_under=FUNCTION,
)
def jacobian_frobenius(g: LayerGrams) -> Tensor:
    """Squared Frobenius norm of the input-output Jacobian: mean_i ||df/dx_i||_F^2 = mean_i tr G_i."""
    return g.G.diagonal(dim1=1, dim2=2).sum(1)
