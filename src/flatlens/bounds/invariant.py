"""Chen et al., Appendix E, and flatlens: sensitivities and sharpness that are invariant to rescaled weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.quantities import adaptive_slope2, adaptive_weight_slope2, input_norm2, weight_slope2
from flatlens.grams import LayerGrams, one_pass, quadratic
from flatlens.measures.flatness import relative_flatness_ggn
from flatlens.measures.normalised import normalized_sharpness
from flatlens.measures.sensitivity import input_invariant_mls, mls, normalized_mls
from flatlens.problem.outcomes import forwards


@bound(
    id="B6",
    symbol=r"\sum_l \bar x^l \mathrm{MLS}^l \leq \sum_l \|W_l\|_2 \sqrt{\overline{\|\partial f/\partial W_l\|_F^2}}",
    source="compression Eq. 35, 37",
    cost="two passes, a convex minimisation per layer",
)
def matrix_normalized_bound(context: Context) -> Iterator[Claim]:
    r"""Matrix-normalised sharpness bounds the layers' MLS in units of their inputs; so does normalised sharpness.

    Eq. 35 with xbar^l = (mean_i 1/||x_i^l||^2)^(-1/2) from Eq. 34: one row per layer (Eq. 31), and the sum over layers.
    `.frobenius` has ||W||_F in place of ||W||_2. The paper goes on to replace the right side, "approximately", by
    Hessian traces; that is exact at interpolation with C = I.

    `.inner` is Eq. 37, one row per layer, with the sides exchanged so that the smaller one is on the left:

        sqrt(mean_i ||C_i^(1/2) df_i/dx diag(1/s')||_F^2 ||diag(s') x_i||^2) <= sum_jk H_jk (s_j s'_k)^2 + ...

    The right side is the objective of Eq. 36, at the scales s and s' that minimise it, with lambda = 1: another lambda
    divides both sides by the same number. The root mean square over samples is what Eq. 37's second line sums to. H is
    the diagonal of the Gauss-Newton matrix, so that C_i enters both sides; the paper prints C = I.
    """
    rows = {layer: _matrix_normalized(context, layer) for layer in context.readable}
    for layer, (left, *rights) in rows.items():
        premises = (context.unshared(layer), context.nonzero(layer, context.each(input_norm2, layer)))
        yield Claim(left, rights[0], layer, "", (*premises, context.norm_found(layer)))
        yield Claim(left, rights[1], layer, "frobenius", premises)
    nonzero = [context.nonzero(layer, context.each(input_norm2, layer)) for layer in rows]
    together = (context.all_unshared(), *nonzero)
    if context.layers:
        left, *rights = (sum(side, 0.0) for side in zip(*rows.values(), strict=True)) if rows else [math.nan] * 3
        yield Claim(left, rights[0], None, "", (*together, *map(context.norm_found, rows)))
        yield Claim(left, rights[1], None, "frobenius", together)
    yield from _inner(context)


def _matrix_normalized(context: Context, layer: str) -> tuple[float, float, float]:
    """Return three numbers of one layer: xbar times MLS; ||W||_2 and ||W||_F times the rms of ||df/dW||."""
    weight = context.layers[layer]
    mean_bar = (1 / context.each(input_norm2, layer)).mean().rsqrt()
    slope = float(context.each(weight_slope2, layer).mean().sqrt())
    frobenius = float(weight.matrix.W.square().sum().sqrt())
    return float(mean_bar * context.each(mls, layer).mean()), weight.spectral_norm * slope, frobenius * slope


def _inner(context: Context) -> Iterator[Claim]:
    """Yield Eq. 37 for each layer applied once."""
    H = {layer: _diagonal(context, layer) for layer in context.readable}
    convex = context.once(_convex)
    balanced = {layer: Balanced(context, layer, H[layer]) for layer in H if context.layers[layer].dense and convex}
    sides = _scaled_sensitivity(context, balanced)
    for layer in H:
        premises = (
            context.unshared(layer),
            Assumption("convex_loss", convex, "" if convex else "the loss curves downwards at an output"),
        )
        if layer in balanced:
            yield Claim(sides[layer], balanced[layer].objective, layer, "inner", premises)
        else:
            yield Claim(math.nan, math.nan, layer, "inner", premises)


def _convex(context: Context) -> bool:
    """Return whether the loss's second derivative C_i has no negative eigenvalue at any sample."""
    problem = context.lens.problem
    if problem.loss.convex:
        return True
    with closing(forwards(problem, context.lens.model)) as found:
        for f, y in found:
            eigenvalues = torch.linalg.eigvalsh(problem.loss.output_hessian(f, y))
            if bool((eigenvalues[:, 0] < -context.rounding * eigenvalues[:, -1].abs()).any()):
                return False
    return True


def _diagonal(context: Context, layer: str) -> Tensor:
    """Return the Gauss-Newton diagonal of a layer's weight, (d, m)."""
    return context.each(normalized_sharpness, layer)


class Balanced:
    """The minimum of Eq. 36 for one layer, with its scales, over live rows and columns.

    If the feature of a column is always 0, its scale can grow (or shrink, if its weights are 0) until it adds nothing
    to either side; the same holds for rows. These rows and columns are left out.
    """

    def __init__(self, context: Context, layer: str, H: Tensor) -> None:
        found = context.measured(normalized_sharpness.key, layer)
        s2, t2 = found.arrays["sigma"].square(), found.arrays["sigma_prime"].square()
        quarter = context.layers[layer].matrix.W.cpu().reshape(H.shape).square() / 4
        rows, columns = _alive(H.cpu(), quarter)
        scale = s2[:, None] * t2
        terms = torch.where(rows[:, None] & columns, H.cpu() * scale + quarter / scale, 0.0)
        self.objective = float(terms.sum())
        self.columns, self.scale = columns, t2


def _alive(H: Tensor, W2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and columns with entries in both matrices, after the others are removed."""
    rows, columns = torch.ones(len(H), dtype=torch.bool), torch.ones(H.shape[1], dtype=torch.bool)
    while True:
        h, w = (torch.where(rows[:, None] & columns, x, 0.0) for x in (H, W2))
        left = h.any(1) & w.any(1), h.any(0) & w.any(0)
        if bool((left[0] == rows).all() and (left[1] == columns).all()):
            return left
        rows, columns = left


def _scaled_sensitivity(context: Context, balanced: dict[str, Balanced]) -> dict[str, float]:
    """Return sqrt(mean_i ||C^(1/2) df/dx diag(1/s')||_F^2 ||diag(s') x||^2) of each layer; this takes a pass."""
    lens, total = context.lens, dict.fromkeys(balanced, 0.0)
    if balanced:
        walk = one_pass(lens.problem, lens.model, lens.layout, needs={"C", "G"}, progress=context.progress)
        with closing(walk) as chunks:
            for chunk in chunks:
                for layer, scales in balanced.items():
                    total[layer] += float(_product(chunk.layers[layer], scales).sum())
    return {layer: math.sqrt(max(found, 0.0) / context.n) for layer, found in total.items()}


def _product(g: LayerGrams, scales: Balanced) -> Tensor:
    """Return ||C^(1/2) df/dx diag(1/s')||_F^2 ||diag(s') x||^2 per sample."""
    assert g.x is not None
    kept = scales.columns.to(g.x.device)
    t2 = scales.scale.to(g.x.device)[kept]
    slopes = quadratic(g.C, g.linear.Jx[:, :, kept]) / t2  # type: ignore[union-attr]  # of a dense layer
    return slopes.sum(1) * (g.x.to(torch.float64).square()[:, kept] * t2).sum(1)


@bound(
    id="B7",
    symbol=r"\sum_p x_p^2 \|\partial f/\partial x_p\|^2 / d \leq \sum_j \theta_j^2 \|\partial f/\partial\theta_j\|^2",
    source="compression Prop. E.4",
    cost="one pass, per-sample gradients of shared weights",
)
def adaptive_bound(context: Context) -> Iterator[Claim]:
    """Adaptive sharpness bounds the sensitivity to each input, in units of that input: Proposition E.4.

    The claim is made per sample and layer, with the layer's own weight on the right. Its proof, Eq. 45, uses
    (sum_k J_ok W_kp)^2 <= d sum_k (J_ok W_kp)^2, with d the number of rows of W. (The proposition does not define d;
    with the number of columns or of outputs the inequality is false. Eq. 45 prints x_p and means x_i.) `.mean` is
    Eq. 44: the mean over samples, for the layer that reads the network's input, with all measured parameters on the
    right. C = I in both.
    """
    context.ask(adaptive_weight_slope2, adaptive_slope2)
    for name, weight in context.readable.items():
        left = context.each(input_invariant_mls, name) / weight.neurons
        yield Claim(left, context.each(adaptive_weight_slope2, name), name, "", (context.unshared(name),))
    layer = context.first
    if layer is None or layer not in context.readable:
        yield context.unread("mean")
        return
    left = context.each(input_invariant_mls, layer).mean() / context.layers[layer].neurons
    premises = (context.unshared(layer), context.counted([layer]))
    yield Claim(left, context.total(adaptive_slope2).mean(), layer, "mean", premises)


@bound(
    id="B8",
    symbol=r"\overline{\|x\|^2 \|\partial f/\partial x\|_2^2} \leq \kappa_{Tr}^1",
    source="flatlens",
)
def normalized_mls_bound(context: Context) -> Iterator[Claim]:
    """Relative flatness of the first layer bounds normalised MLS, for the half squared error.

    Per sample, ||x||^2 lmax(G) <= ||x||^2 tr(G) = tr(C R) if C = I and the layer is applied once. The sides are equal
    for one output. The right side is the Gauss-Newton part of relative flatness, which is all of it if the network
    above the layer is piecewise linear. `.sample` is the same per sample, through any layer.
    """
    loss = context.half_squared_error
    for name in context.readable:
        sides = context.each(normalized_mls, name), context.each(relative_flatness_ggn, name)
        yield Claim(*sides, name, "sample", (context.unshared(name), loss))
    layer = context.first
    if layer is None or layer not in context.readable:
        yield context.unread()
        return
    left, right = context.each(normalized_mls, layer).mean(), context.each(relative_flatness_ggn, layer).mean()
    yield Claim(left, right, layer, "", (context.unshared(layer), loss))
