"""Chen et al.: sharpness bounds the sensitivity of the outputs to inputs and features, and the local volume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.quantities import (
    input_norm2,
    log_positive_volume,
    output_slope2,
    rank,
    weight_slope2,
    weight_spectral2,
)
from flatlens.grams import Weight
from flatlens.measures.gauss_newton import interpolation_sharpness
from flatlens.measures.sensitivity import jacobian_frobenius, mls
from flatlens.measures.volume import log_volume

POWERS = {1: "mean_1", 2: "mean", 4: "mean_4"}
"""The powers k of Eq. 6 that are checked, and their rows."""


@bound(
    id="B1",
    symbol=r"\|\partial f/\partial x\|_2 \leq \|W\|_2 \|\partial f/\partial W\|_F / \|x\|",
    source="compression Eq. 5, 6",
)
def linear_stability(context: Context) -> Iterator[Claim]:
    r"""Sensitivity to a layer's input is bounded by that to its weight: ||df/dx||_2 <= ||W||_2 ||df/dW||_F / ||x||.

    The claim holds for each sample, by the identity ||df/dW||_F = ||J||_F ||x|| of layers applied once per sample.
    `.frobenius` has ||df/dx||_F on the left. For shared weights, `.published` is the same inequality with the kernel of
    a convolution as the matrix, a heuristic; `.sound` is ||df/dx||_2 <= ||T||_2 ||J||_F with the layer's operator T,
    which holds for all layers, but which no sharpness bounds. Eq. 5 as printed has ||df/dW||_F alone in the middle:
    this is `.middle`, ||df/dx||_2 <= ||df/dW||_F, which is true only if ||W||_2 <= ||x||. `.mean` is Eq. 6 without that
    step: the mean of the squares against S, for the layer that reads the network's input. `.mean_1` and `.mean_4` are
    Eq. 6 for k = 1 and 4, the mean of ||df/dx||_2^k against that of ||df/dtheta||_F^k; `.mean` has k = 2.
    """
    for layer, weight in context.layers.items():
        if layer not in context.readable:
            yield Claim(math.nan, math.nan, layer, assumptions=(context.unshared(layer),))
            continue
        spectral, frobenius2 = context.each(mls, layer), context.each(jacobian_frobenius, layer)
        x2, slope2 = context.each(input_norm2, layer), context.each(weight_slope2, layer)
        premises, found = (context.unshared(layer), context.nonzero(layer, x2)), context.norm_found(layer)
        right = weight.spectral_norm * (slope2 / x2).sqrt()
        yield Claim(spectral, right, layer, "", (*premises, found))
        yield Claim(frobenius2.sqrt(), right, layer, "frobenius", (*premises, found))
        yield Claim(spectral, slope2.sqrt(), layer, "middle", (*premises, _small(weight, x2), found))
        if not weight.dense:
            norm = weight.spectral_norm if weight.adapter.token_wise else weight.kernel_norm
            yield Claim(spectral, norm * (slope2 / x2).sqrt(), layer, "published", premises)
        sound = weight.spectral_norm * context.each(output_slope2, layer).sqrt()
        yield Claim(spectral, sound, layer, "sound", (found,))
    for k, part in POWERS.items():
        yield of_the_mean(context, k, part)


def _small(weight: Weight, x2: Tensor) -> Assumption:
    """Return the assumption ||W||_2 <= ||x|| for all samples."""
    large = int((weight.spectral_norm > x2.sqrt()).sum())
    return Assumption("weight_below_input", large == 0, f"||W||_2 > ||x|| for {large} of {len(x2)} samples")


def of_the_mean(context: Context, k: float, part: str) -> Claim:
    """Return the claim of Eq. 6 for a power k > 0, without its wrong link."""
    layer = context.first
    if layer is None or layer not in context.readable:
        return context.unread(part)
    x2, weight = context.each(input_norm2, layer), context.layers[layer]
    right = (weight.spectral_norm / x2.min().sqrt()) ** k * context.total(interpolation_sharpness).pow(k / 2).mean()
    premises = context.unshared(layer), context.nonzero(layer, x2), context.counted([layer]), context.norm_found(layer)
    return Claim(context.each(mls, layer).pow(k).mean(), right, layer, part, premises)


@bound(
    id="B2",
    symbol=r"dV_f \leq \frac{1}{n} \sqrt{\sum_i (\|W\|_2/\|x_i\|)^{2N}} (nS/N)^{N/2}",
    source="compression Lemma 3.2, Prop. 3.4",
)
def volume_bound(context: Context) -> Iterator[Claim]:
    """Sharpness bounds the local volumes: Proposition 3.4, and Lemma 3.2 per sample.

    Both sides are logarithms. `.lemma` is Lemma 3.2, dVol <= (||df/dx||_F^2 / N)^(N/2). `.mean` is the first step of
    the proposition, and `.second` the second step, which starts from the mean of (||df/dx||_F^2 / N)^(N/2). Here dVol =
    sqrt det(df/dx df/dx^T); the printed order, df^T df, gives 0 if there are fewer outputs than inputs. The text also
    defines dVol as the root of the product of all positive eigenvalues. With that definition the lemma fails if the
    rank is below N: `.published`.
    """
    layer = context.first
    if layer is None or layer not in context.readable:
        yield context.unread()
        return
    N = context.outputs
    volumes, frobenius2 = context.each(log_volume, layer), context.each(jacobian_frobenius, layer)
    middle = _lemma(frobenius2, N)
    yield Claim(volumes, middle, layer, "lemma", logs=True)
    lower = int((context.each(rank, layer) < N).sum())
    full = Assumption("full_rank", lower == 0, f"the rank is below {N} for {lower} of {context.n} samples")
    yield Claim(context.each(log_positive_volume, layer), middle, layer, "published", (full,), logs=True)
    yield from _volume_claims(context, {layer: volumes}, layer, (context.unshared(layer),))


@bound(
    id="B2",
    symbol=r"dV_{net} \leq \frac{1}{n} \sqrt{\sum_{l,i} (\|W_l\|_2/\|x_i^l\|)^{2N}} (nS/N)^{N/2}",
    source="compression Prop. 3.6",
)
def network_volume_bound(context: Context) -> Iterator[Claim]:
    """Sharpness bounds the network's volumes, summed over layers: Proposition 3.6.

    Both sides are logarithms. `.mean` and `.second` are its two steps, with Lemma 3.2 at every layer: the middle is
    N^(-N/2) / n times sum_{l,i} ||df/dx_i^l||_F^N.
    """
    volumes = {layer: context.each(log_volume, layer) for layer in context.readable}
    if volumes:
        yield from _volume_claims(context, volumes, None, (context.all_unshared(),))
    elif context.layers:
        yield Claim(math.nan, math.nan, assumptions=(context.all_unshared(),))


def _lemma(frobenius2: Tensor, N: int) -> Tensor:
    """Return the logarithm of Lemma 3.2's right side, (||df/dx||_F^2 / N)^(N/2)."""
    return N / 2 * (frobenius2 / N).log()


def _volume_claims(
    context: Context, volumes: dict[str, Tensor], layer: str | None, premises: tuple[Assumption, ...]
) -> Iterator[Claim]:
    """Yield sum_l mean_i dVol <= (1/n) sqrt(sum_{l,i} (||W_l|| / ||x_i^l||)^{2N}) (n S / N)^{N/2}, and its links.

    Both sides are logarithms.
    """
    N, n = context.outputs, context.n
    ratios, nonzero = [], []
    for name in volumes:
        x2 = context.each(input_norm2, name)
        nonzero.append(context.nonzero(name, x2))
        ratios.append(N * (context.layers[name].spectral_norm ** 2 / x2).log())
    S = context.total(interpolation_sharpness).mean()
    right = 0.5 * torch.cat(ratios).logsumexp(0) - math.log(n) + N / 2 * (n * S / N).log()
    left = _log_sum(volumes.values())
    middle = _log_sum(_lemma(context.each(jacobian_frobenius, name), N) for name in volumes)
    premises = (context.counted(list(volumes)), *premises, *nonzero, *map(context.norm_found, volumes))
    yield Claim(left, right, layer, "", premises, logs=True)
    yield Claim(left, middle, layer, "mean", logs=True)
    yield Claim(middle, right, layer, "second", premises, logs=True)


def _log_sum(layers: Iterable[Tensor]) -> Tensor:
    """Return the logarithm of the sum over layers of the mean over samples."""
    return torch.stack([_log_mean(values) for values in layers]).logsumexp(0)


def _log_mean(logs: Tensor) -> Tensor:
    return logs.logsumexp(0) - math.log(len(logs))


@bound(id="B3", symbol=r"A \leq B \leq C \leq D", source="compression Eq. 48, Prop. 3.8")
def mls_chain(context: Context) -> Iterator[Claim]:
    """Chain of steps from MLS to sharpness, each with its own tightness: A <= B <= C <= D.

    A = MLS, B = ||W||_2 mean_i ||df_i/dW||_F / ||x_i||, C = ||W||_2 sqrt(mean 1/||x_i||^2) sqrt(mean ||df_i/dW||_F^2),
    and D is C with S in the last place. The undotted row is A <= D, Proposition 3.8 in the form of its proof (Eq. 31).
    The printed Eq. 11 has S^(1/2) under the root.

    `.A_B.aligned` and `.A_B.rank` separate the two causes of slack in A <= B (App. G.1), with ||W||_2 mean_i ||J_i||_2
    in the middle. The first is tight if W and J stretch the same direction most, the second if J has rank one. The
    product of their tightnesses is that of A <= B. The tightness of B <= C is the cosine between 1/||x_i|| and
    ||df_i/dW||_F over the samples: it is 1 if ||x_i|| ||df_i/dW||_F is the same for all i. `.B_C.variation` is the
    inequality that the condition of App. G.1 makes tight, B <= ||W||_2 sqrt(mean (||df_i/dW||_F / ||x_i||)^2).
    """
    layer = context.first
    if layer is None or layer not in context.readable:
        yield context.unread()
        return
    x2, slope2 = context.each(input_norm2, layer), context.each(weight_slope2, layer)
    W = context.layers[layer].spectral_norm
    A, B = context.each(mls, layer).mean(), W * (slope2 / x2).sqrt().mean()
    inverse = W * (1 / x2).mean().sqrt()
    C, D = inverse * slope2.mean().sqrt(), inverse * context.total(interpolation_sharpness).mean().sqrt()
    once, nonzero, all_of_it = context.unshared(layer), context.nonzero(layer, x2), context.counted([layer])
    found = context.norm_found(layer)  # not needed where ||W||_2 is on both sides
    yield Claim(A, D, layer, "", (once, nonzero, all_of_it, found))
    yield Claim(A, B, layer, "A_B", (once, nonzero, found))
    between = W * (context.each(weight_spectral2, layer) / x2).sqrt().mean()
    yield Claim(A, between, layer, "A_B.aligned", (once, nonzero, found))
    yield Claim(between, B, layer, "A_B.rank", (once, nonzero))
    yield Claim(B, C, layer, "B_C", (nonzero,))
    yield Claim(B, W * (slope2 / x2).mean().sqrt(), layer, "B_C.variation", (nonzero,))
    yield Claim(C, D, layer, "C_D", (nonzero, all_of_it))


@bound(
    id="B4",
    symbol=r"\mathrm{NMLS} \leq \sqrt{\frac{1}{n} \sum_{i,l} \|W_l\|_2^2/\|x_i^l\|^2} S^{1/2}",
    source="compression Prop. 3.10",
)
def nmls_bound(context: Context) -> Iterator[Claim]:
    """Sharpness bounds the sensitivity to every layer's features together: Proposition 3.10."""
    layers = context.readable
    if not layers:
        if context.layers:
            yield Claim(math.nan, math.nan, assumptions=(context.all_unshared(),))
        return
    left, inside = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    premises: list[Assumption] = [context.counted(list(layers)), context.all_unshared()]
    for name, weight in layers.items():
        x2 = context.each(input_norm2, name)
        premises.append(context.nonzero(name, x2))
        left = left + context.each(mls, name).mean()
        inside = inside + (weight.spectral_norm**2 / x2).mean()
    premises += map(context.norm_found, layers)
    yield Claim(left, (inside * context.total(interpolation_sharpness).mean()).sqrt(), assumptions=tuple(premises))
