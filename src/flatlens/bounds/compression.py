"""Chen et al.: sharpness bounds the sensitivity of the outputs to inputs and features, and the local volume."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.quantities import input_norm2, log_positive_volume, output_slope2, rank, weight_slope2
from flatlens.grams import Weight
from flatlens.measures.gauss_newton import interpolation_sharpness
from flatlens.measures.sensitivity import jacobian_frobenius, mls
from flatlens.measures.volume import log_volume


@bound(
    id="B1",
    symbol=r"\|\partial f/\partial x\|_2 \leq \|W\|_2 \|\partial f/\partial W\|_F / \|x\|",
    source="compression Eq. 5, 6",
)
def linear_stability(context: Context) -> Iterator[Claim]:
    r"""The outputs follow a layer's input no more than its weight: ||df/dx||_2 <= ||W||_2 ||df/dW||_F / ||x||.

    Per sample, from ||df/dW||_F = ||J||_F ||x||, an identity of layers applied once per sample. `.frobenius` has
    ||df/dx||_F on the left. Of shared weights `.published` is the same with a convolution's kernel as the matrix, a
    heuristic, and `.sound` says ||df/dx||_2 <= ||T||_2 ||J||_F, T the layer's operator: it holds for all, and no
    sharpness bounds it. Eq. 5 as printed goes by way of ||df/dW||_F alone, which is no link of the chain: `.middle` is
    ||df/dx||_2 <= ||df/dW||_F, true where ||W||_2 <= ||x||. `.mean` is Eq. 6 without that link: the squares' mean
    against S, of the layer that reads the network's input.
    """
    for layer, weight in context.layers.items():
        if layer not in context.readable:
            yield Claim(math.nan, math.nan, layer, assumptions=(context.unshared(layer),))
            continue
        spectral, frobenius2 = context.each(mls, layer), context.each(jacobian_frobenius, layer)
        x2, slope2 = context.each(input_norm2, layer), context.each(weight_slope2, layer)
        premises = (context.unshared(layer), context.nonzero(layer, x2))
        right = weight.spectral_norm * (slope2 / x2).sqrt()
        yield Claim(spectral, right, layer, "", premises)
        yield Claim(frobenius2.sqrt(), right, layer, "frobenius", premises)
        yield Claim(spectral, slope2.sqrt(), layer, "middle", (*premises, _small(weight, x2)))
        if not weight.dense:
            norm = weight.spectral_norm if weight.adapter.token_wise else weight.kernel_norm
            yield Claim(spectral, norm * (slope2 / x2).sqrt(), layer, "published", premises)
        yield Claim(spectral, weight.spectral_norm * context.each(output_slope2, layer).sqrt(), layer, "sound")
    yield _of_the_mean(context)


def _small(weight: Weight, x2: Tensor) -> Assumption:
    """Return the assumption ||W||_2 <= ||x|| for all samples."""
    large = int((weight.spectral_norm > x2.sqrt()).sum())
    return Assumption("weight_below_input", large == 0, f"||W||_2 > ||x|| for {large} of {len(x2)} samples")


def _of_the_mean(context: Context) -> Claim:
    """Return the claim of Eq. 6 with k = 2."""
    layer = context.first
    if layer is None or layer not in context.readable:
        return context.unread("mean")
    x2, weight = context.each(input_norm2, layer), context.layers[layer]
    right = weight.spectral_norm**2 / x2.min() * context.total(interpolation_sharpness).mean()
    premises = (context.unshared(layer), context.nonzero(layer, x2), context.counted([layer]))
    return Claim(context.each(mls, layer).square().mean(), right, layer, "mean", premises)


@bound(
    id="B2",
    symbol=r"dV_f \leq \frac{1}{n} \sqrt{\sum_i (\|W\|_2/\|x_i\|)^{2N}} (nS/N)^{N/2}",
    source="compression Lemma 3.2, Prop. 3.4",
)
def volume_bound(context: Context) -> Iterator[Claim]:
    """Sharpness bounds the local volumes: Proposition 3.4, and Lemma 3.2 per sample.

    In logarithms. `.lemma` is Lemma 3.2, dVol <= (||df/dx||_F^2 / N)^(N/2), and `.mean` the proposition's first link,
    both for dVol = sqrt det(df/dx df/dx^T): the order in print, df^T df, makes it 0 wherever there are fewer outputs
    than inputs. The text also calls dVol the root of the product of all positive eigenvalues; so read, the lemma fails
    where the rank is below N: `.published`.
    """
    layer = context.first
    if layer is None or layer not in context.readable:
        yield context.unread()
        return
    N = context.outputs
    volumes, frobenius2 = context.each(log_volume, layer), context.each(jacobian_frobenius, layer)
    middle = N / 2 * (frobenius2 / N).log()
    yield Claim(volumes, middle, layer, "lemma", logs=True)
    yield Claim(_log_mean(volumes), _log_mean(middle), layer, "mean", logs=True)
    lower = int((context.each(rank, layer) < N).sum())
    full = Assumption("full_rank", lower == 0, f"the rank is below {N} for {lower} of {context.n} samples")
    yield Claim(context.each(log_positive_volume, layer), middle, layer, "published", (full,), logs=True)
    yield _volume_claim(context, {layer: volumes}, layer, (context.unshared(layer),))


@bound(
    id="B2",
    symbol=r"dV_{net} \leq \frac{1}{n} \sqrt{\sum_{l,i} (\|W_l\|_2/\|x_i^l\|)^{2N}} (nS/N)^{N/2}",
    source="compression Prop. 3.6",
)
def network_volume_bound(context: Context) -> Iterator[Claim]:
    """Sharpness bounds the network's volumes, summed over layers: Proposition 3.6. In logarithms."""
    volumes = {layer: context.each(log_volume, layer) for layer in context.readable}
    if volumes:
        yield _volume_claim(context, volumes, None, (context.all_unshared(),))
    elif context.layers:
        yield Claim(math.nan, math.nan, assumptions=(context.all_unshared(),))


def _volume_claim(
    context: Context, volumes: dict[str, Tensor], layer: str | None, premises: tuple[Assumption, ...]
) -> Claim:
    """Return sum_l mean_i dVol <= (1/n) sqrt(sum_{l,i} (||W_l|| / ||x_i^l||)^{2N}) (n S / N)^{N/2}, as logarithms."""
    N, n = context.outputs, context.n
    ratios, nonzero = [], []
    for name in volumes:
        x2 = context.each(input_norm2, name)
        nonzero.append(context.nonzero(name, x2))
        ratios.append(N * (context.layers[name].spectral_norm ** 2 / x2).log())
    S = context.total(interpolation_sharpness).mean()
    right = 0.5 * torch.cat(ratios).logsumexp(0) - math.log(n) + N / 2 * (n * S / N).log()
    left = torch.stack([_log_mean(v) for v in volumes.values()]).logsumexp(0)
    return Claim(left, right, layer, "", (context.counted(list(volumes)), *premises, *nonzero), logs=True)


def _log_mean(logs: Tensor) -> Tensor:
    return logs.logsumexp(0) - math.log(len(logs))


@bound(id="B3", symbol=r"A \leq B \leq C \leq D", source="compression Eq. 48, Prop. 3.8")
def mls_chain(context: Context) -> Iterator[Claim]:
    """The steps from MLS to sharpness, each with its own tightness: A <= B <= C <= D.

    A = MLS, B = ||W||_2 mean_i ||df_i/dW||_F / ||x_i||, C = ||W||_2 sqrt(mean 1/||x_i||^2) sqrt(mean ||df_i/dW||_F^2),
    D the same with S in the last place. The undotted row is A <= D, Proposition 3.8, as its proof has it (Eq. 31): in
    print the root of Eq. 11 reaches over S^(1/2).
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
    yield Claim(A, D, layer, "", (once, nonzero, all_of_it))
    yield Claim(A, B, layer, "A_B", (once, nonzero))
    yield Claim(B, C, layer, "B_C", (nonzero,))
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
    yield Claim(left, (inside * context.total(interpolation_sharpness).mean()).sqrt(), assumptions=tuple(premises))
