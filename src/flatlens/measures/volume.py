"""Volumes and dimension of the image of a small ball of inputs."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from flatlens.errors import BadOption
from flatlens.grams import LayerGrams
from flatlens.measures.card import FUNCTION, PERMUTATION, per_sample
from flatlens.measures.reduce import mean_of_exp, mean_of_finite


def rank_tolerance(precision: float) -> float:
    """Return the share of lmax(G) below which lmin(G) counts as zero.

    It is 100 eps of float64, in which G is accumulated, or (100 eps)^2 of the arithmetic of the derivatives where that
    is larger (G squares them: 1.4e-10 for a float32 network).
    """
    return max(100 * torch.finfo(torch.float64).eps, (100 * precision) ** 2)


def log_volumes(g: LayerGrams, top_k: int | None) -> Tensor:
    """Return log sqrt(det G_i), or of the `top_k` largest eigenvalues; -inf where the rank is lower. (n,).

    Only the sample's own rows count: rows of masked tokens have eigenvalue 0, and are left out.
    """
    N = g.eigenvalues.shape[1]
    if top_k is not None and not (isinstance(top_k, int) and 1 <= top_k <= N):
        raise BadOption(f"option top_k={top_k!r}: a whole number between 1 and the number of outputs, {N}, is needed")
    k = g.outputs.clamp(max=top_k or N)[:, None]
    kept = torch.arange(N, device=k.device) >= N - k  # ascending
    least = g.eigenvalues.gather(1, (N - k).clamp(max=N - 1))[:, 0]
    full = least > rank_tolerance(g.precision) * g.eigenvalues[:, -1]
    logs = torch.where(kept, g.eigenvalues.clamp(min=1e-300).log(), 0.0)
    return torch.where(full, 0.5 * logs.sum(1), -math.inf)


@per_sample(
    id="M5",
    family="compression",
    symbol=r"\overline{d\mathrm{Vol}}",
    source="compression Def. 3.1, 3.3",
    unit="(output / input)^N",
    reduce=mean_of_exp,
    place="input",
    needs={"G"},
    answer="input",
    cost="one pass, eigenvalues",
    invariant_under=FUNCTION,
    needs_full_precision=True,
)
def local_volume(g: LayerGrams, *, top_k: int | None = None) -> Tensor:
    """Mean local volumetric ratio: mean_i sqrt(det(df/dx df/dx^T)).

    The paper prints det(df^T df), which is 0 if there are fewer outputs than inputs. `top_k` keeps only the largest
    eigenvalues, as the authors' figures do with `top_k=3`. The product is computed in logarithms. Where the smallest
    singular value of df/dx is below 1.5e-7 of the largest (1.2e-5 in float32), rounding hides it: the sample's volume
    counts as 0, and the value is a lower bound.
    """
    return log_volumes(g, top_k)


@per_sample(
    id="M5",
    family="compression",
    symbol=r"\overline{\log d\mathrm{Vol}}",
    source="compression Fig. 1, Eq. 7",
    unit="log",
    reduce=mean_of_finite,
    place="input",
    needs={"G"},
    answer="input",
    cost="one pass, eigenvalues",
    invariant_under=FUNCTION,
    needs_full_precision=True,
)
def log_volume(g: LayerGrams, *, top_k: int | None = None) -> Tensor:
    """Mean log volume: mean_i log sqrt(det G_i) over the samples of full rank; the note counts the others."""
    return log_volumes(g, top_k)


@per_sample(
    id="M5",
    family="compression",
    symbol=r"dV_{net}",
    source="compression Def. 3.5",
    unit="(output / feature)^N",
    reduce=mean_of_exp,
    place="input",
    needs={"G"},
    answer="sum",
    cost="one pass, eigenvalues",
    invariant_under={PERMUTATION},
    needs_full_precision=True,
)
def network_volume(g: LayerGrams, *, top_k: int | None = None) -> Tensor:
    """Network volumetric ratio: the sum over linear layers of their mean local volume (rows of `local_volume`)."""
    return log_volumes(g, top_k)


@per_sample(
    id="M6",
    family="compression",
    symbol=r"D_{PR}",
    source="compression Eq. 15",
    unit="dimensions",
    reduce=partial(mean_of_finite, why="without any response (G = 0)"),
    place="input",
    needs={"G"},
    answer="input",
    invariant_under=FUNCTION,
)
def local_dimension(g: LayerGrams) -> Tensor:
    """Participation ratio of the image of a small ball: mean_i (tr G_i)^2 / tr(G_i^2), between 1 and N.

    Samples with G = 0 have no image. They are left out, and the note counts them.
    """
    total = g.G.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)[..., None]
    share = g.G / total  # NaN where G = 0
    return 1 / share.square().sum((1, 2))
