"""Chen et al.: sharpness bounds the sensitivity of the outputs to inputs and features, and the local volume.

Appendix E has sensitivities and sharpness that are invariant to rescaled weights, Lemma B.1 the difference of the
Hessian's trace from the sharpness in the bounds. Residual networks are in `residual`.

Section 2 says that the results extend to the logistic loss with label smoothing (Lemma A.13 of Wen et al.). A loss with
the second derivative C_i in the outputs has the Gauss-Newton trace Tr GN = mean_i tr(C_i K_i), and Tr H = Tr GN where
dl_i/df_i = 0. Let P be the projection off the direction in which the loss does not change: the same number added to all
logits of a softmax; none for other losses. If C_i >= c P for every sample,

    mean_i ||P df_i/dtheta||_F^2 <= Tr GN / c

and the right side takes the place of S in Propositions 3.4, 3.8 and 3.10, whose left sides are then those of P f.
Without smoothing c falls to 0 with the loss. With labels smoothed by a, c at the minimum is a (2 - a) / 4 for the
logistic loss, a (2 - a) / 2 for two classes, and a / N for N > 2 classes: the smallest eigenvalue of diag(q) - q q^T on
the range of P, q the smoothed label. For one output Tr H = c S there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from flatlens.bounds.context import (
    Assumption,
    Claim,
    Context,
    Inapplicable,
    adaptive_slope2,
    adaptive_weight_slope2,
    input_norm2,
    log_positive_volume,
    output_slope2,
    quantity,
    rank,
    weight_slope2,
    weight_spectral2,
)
from flatlens.bounds.definition import bound
from flatlens.errors import BadOption
from flatlens.grams import LayerGrams, Weight, one_pass, quadratic
from flatlens.grams.weight_jacobians import DenseJacobian
from flatlens.measures.definition import require_one_of, require_positive
from flatlens.measures.flatness import relative_flatness_ggn
from flatlens.measures.normalised import normalized_sharpness
from flatlens.measures.sensitivity import input_invariant_mls, jacobian_frobenius, log_volume, mls, normalized_mls
from flatlens.measures.traces import ggn_trace, interpolation_sharpness
from flatlens.problem.forward import forwards
from flatlens.problem.losses import CrossEntropy, Logistic

WEIGHT_NORMS = ("spectral", "frobenius")  #: of weights in D and in the bound of NMLS
POWERS = {1: "mean_1", 2: "mean", 4: "mean_4"}  #: the powers k of Eq. 6 that are checked, and their rows


@bound(id="B1", symbol=r"\|\partial f/\partial x\|_2 \leq \|W\|_2 \|\partial f/\partial W\|_F / \|x\|",
       source="compression Eq. 5, 6")  # fmt: skip
def linear_stability(context: Context, *, k: float | None = None) -> Iterator[Claim]:
    r"""Sensitivity to a layer's input is bounded by that to its weight: ||df/dx||_2 <= ||W||_2 ||df/dW||_F / ||x||.

    The claim holds for each sample, by the identity ||df/dW||_F = ||J||_F ||x|| of layers applied once per sample.
    `.frobenius` has ||df/dx||_F on the left. For shared weights, `.published` is the same inequality with the kernel of
    a convolution as the matrix, a heuristic; `.sound` is ||df/dx||_2 <= ||T||_2 ||J||_F with the layer's operator T,
    which holds for all layers, but which no sharpness bounds. Eq. 5 as printed has ||df/dW||_F alone in the middle:
    this is `.middle`, ||df/dx||_2 <= ||df/dW||_F, which is true only if ||W||_2 <= ||x||. `.mean` is Eq. 6 without that
    step: the mean of the squares against S, for the layer that reads the network's input. `.mean_1` and `.mean_4` are
    Eq. 6 for k = 1 and 4, the mean of ||df/dx||_2^k against that of ||df/dtheta||_F^k; `.mean` has k = 2. The option
    `k` adds another power above 0, as `.mean_k`.
    """
    if k is not None:
        require_positive(k=k)
    for layer, weight in context.layers.items():
        if layer not in context.readable:
            yield Claim(math.nan, math.nan, layer, assumptions=(context.unshared(layer),))
            continue
        spectral, frobenius2 = context.each(mls, layer), context.each(jacobian_frobenius, layer)
        x2, slope2 = context.each(input_norm2, layer), context.each(weight_slope2, layer)
        premises, found = (context.unshared(layer), context.nonzero(layer, x2)), context.norm_found(layer)
        large = int((weight.spectral_norm > x2.sqrt()).sum())
        small = Assumption("weight_below_input", large == 0, f"||W||_2 > ||x|| for {large} of {len(x2)} samples")
        right = weight.spectral_norm * (slope2 / x2).sqrt()
        yield Claim(spectral, right, layer, "", (*premises, found))
        yield Claim(frobenius2.sqrt(), right, layer, "frobenius", (*premises, found))
        yield Claim(spectral, slope2.sqrt(), layer, "middle", (*premises, small, found))
        if not weight.dense:
            norm = weight.spectral_norm if weight.adapter.token_wise else weight.searched_kernel_norm.value
            yield Claim(spectral, norm * (slope2 / x2).sqrt(), layer, "published", premises)
        sound = weight.spectral_norm * context.each(output_slope2, layer).sqrt()
        yield Claim(spectral, sound, layer, "sound", (found,))
    for power, part in [*POWERS.items(), *([] if k is None else [(k, "mean_k")])]:
        try:
            yield of_the_mean(context, power, part)
        except Inapplicable as stopped:  # of each power, a row
            yield stopped.claim


def of_the_mean(context: Context, k: float, part: str) -> Claim:
    """Return the claim of Eq. 6 for a power k > 0, without its wrong link."""
    layer = context.input_layer(part)
    x2, weight = context.each(input_norm2, layer), context.layers[layer]
    right = (weight.spectral_norm / x2.min().sqrt()) ** k * context.total(interpolation_sharpness).pow(k / 2).mean()
    premises = context.unshared(layer), context.nonzero(layer, x2), context.counted([layer]), context.norm_found(layer)
    return Claim(context.each(mls, layer).pow(k).mean(), right, layer, part, premises)


@bound(id="B2", symbol=r"dV_f \leq \frac{1}{n} \sqrt{\sum_i (\|W\|_2/\|x_i\|)^{2N}} (nS/N)^{N/2}",
       source="compression Lemma 3.2, Prop. 3.4")  # fmt: skip
def volume_bound(context: Context, *, k: float | None = None) -> Iterator[Claim]:
    """Sharpness bounds the local volumes: Proposition 3.4, and Lemma 3.2 per sample.

    Both sides are logarithms. `.lemma` is Lemma 3.2, dVol <= (||df/dx||_F^2 / N)^(N/2). `.mean` is the first step of
    the proposition, and `.second` the second step, which starts from the mean of (||df/dx||_F^2 / N)^(N/2). Here dVol =
    sqrt det(df/dx df/dx^T); the printed order, df^T df, gives 0 if there are fewer outputs than inputs. The text also
    defines dVol as the root of the product of all positive eigenvalues. With that definition the lemma fails if the
    rank is below N: `.published`.
    """
    layer = context.input_layer()
    N = context.outputs
    volumes, frobenius2 = context.each(log_volume, layer), context.each(jacobian_frobenius, layer)
    middle = _lemma(frobenius2, N)
    yield Claim(volumes, middle, layer, "lemma", logs=True)
    lower = int((context.each(rank, layer) < N).sum())
    full = Assumption("full_rank", lower == 0, f"the rank is below {N} for {lower} of {context.n} samples")
    yield Claim(context.each(log_positive_volume, layer), middle, layer, "published", (full,), logs=True)
    yield from _volume_claims(context, {layer: volumes}, layer, (context.unshared(layer),))
    if k is not None:
        yield from _power_claims(context, [layer], layer, k)


@bound(id="B2", symbol=r"dV_{net} \leq \frac{1}{n} \sqrt{\sum_{l,i} (\|W_l\|_2/\|x_i^l\|)^{2N}} (nS/N)^{N/2}",
       source="compression Prop. 3.6")  # fmt: skip
def network_volume_bound(context: Context, *, k: float | None = None) -> Iterator[Claim]:
    """Sharpness bounds the network's volumes, summed over layers: Proposition 3.6.

    Both sides are logarithms. `.mean` and `.second` are its two steps, with Lemma 3.2 at every layer: the middle is
    N^(-N/2) / n times sum_{l,i} ||df/dx_i^l||_F^N. The option `k` adds `.power`, Eq. 25 to 27 for the power k, and its
    steps, as in `volume_bound`; all are summed over layers.
    """
    volumes = {layer: context.each(log_volume, layer) for layer in context.readable}
    if volumes:
        yield from _volume_claims(context, volumes, None, (context.all_unshared(),))
        if k is not None:
            yield from _power_claims(context, list(volumes), None, k)
    elif context.layers:
        yield Claim(math.nan, math.nan, assumptions=(context.all_unshared(),))


def _lemma(frobenius2: Tensor, N: int) -> Tensor:
    # The logarithm of Lemma 3.2's right side, (||df/dx||_F^2 / N)^(N/2)
    return N / 2 * (frobenius2 / N).log()


def _volume_claims(
    context: Context, volumes: dict[str, Tensor], layer: str | None, premises: tuple[Assumption, ...]
) -> Iterator[Claim]:
    """sum_l mean_i dVol <= (1/n) sqrt(sum_{l,i} (||W_l|| / ||x_i^l||)^{2N}) (n S / N)^{N/2} in logs, and its links."""
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


def _power_claims(context: Context, layers: list[str], layer: str | None, k: float) -> Iterator[Claim]:
    """Eq. 20 to 23 for one layer, Eq. 25 to 27 for several: mean ||df/dx||_F^k against S^(k/2), in logs."""
    if isinstance(k, bool) or not (isinstance(k, int | float) and 1 <= k < math.inf):
        raise BadOption(f"option k={k!r}: expected a finite number of at least 1")
    n, lefts, ratios, slopes, nonzero = context.n, [], [], [], []
    for name in layers:
        x2 = context.each(input_norm2, name)
        nonzero.append(context.nonzero(name, x2))
        lefts.append(k / 2 * context.each(jacobian_frobenius, name).log())
        ratios.append(k * (context.layers[name].spectral_norm ** 2 / x2).log() / 2)  # of (||W|| / ||x||)^k
        slopes.append(k / 2 * context.each(weight_slope2, name).log())  # of ||df/dW||_F^k
    # Each side, from ||df/dx||_F^k by the steps of the proof to S^(k/2)
    left, stable = _log_sum(lefts), _log_sum(r + s for r, s in zip(ratios, slopes, strict=True))
    ratio, slope = ((2 * torch.cat(logs)).logsumexp(0) / 2 for logs in (ratios, slopes))
    S = context.total(interpolation_sharpness).mean()
    cauchy, right = ratio + slope - math.log(n), ratio - math.log(n) + k / 2 * (n * S).log()
    unshared = context.all_unshared() if layer is None else context.unshared(layer)
    found, counted = tuple(map(context.norm_found, layers)), context.counted(layers)
    yield Claim(left, right, layer, "power", (unshared, *nonzero, counted, *found), logs=True)
    yield Claim(left, stable, layer, "power.stability", (unshared, *nonzero, *found), logs=True)
    yield Claim(stable, cauchy, layer, "power.cauchy", tuple(nonzero), logs=True)
    yield Claim(cauchy, right, layer, "power.norms", (*nonzero, counted), logs=True)


def _log_sum(layers: Iterable[Tensor]) -> Tensor:
    # The logarithm of the sum over layers of the mean over samples
    return torch.stack([logs.logsumexp(0) - math.log(len(logs)) for logs in layers]).logsumexp(0)


def _norm(weight: Weight, norm: str) -> float:
    """||W||_2 of a layer's map; or ||W||_F, of a convolution sqrt(P) ||K||_F, which is no smaller."""
    require_one_of(WEIGHT_NORMS, norm=norm)
    if norm == "spectral":
        return weight.spectral_norm
    return float(weight.matrix.W.norm()) * math.sqrt(weight.positions)


@bound(id="B3", symbol=r"A \leq B \leq C \leq D", source="compression Eq. 48, Prop. 3.8")
def mls_chain(context: Context, *, norm: str = "spectral") -> Iterator[Claim]:
    """Chain of steps from MLS to sharpness, each with its own tightness: A <= B <= C <= D.

    A = MLS, B = ||W||_2 mean_i ||df_i/dW||_F / ||x_i||, C = ||W||_2 sqrt(mean 1/||x_i||^2) sqrt(mean ||df_i/dW||_F^2),
    and D is C with S in the last place. The undotted row is A <= D, Proposition 3.8 in the form of its proof (Eq. 31).
    The printed Eq. 11 has S^(1/2) under the root.

    `.A_B.aligned` and `.A_B.rank` separate the two causes of slack in A <= B (App. G.1), with ||W||_2 mean_i ||J_i||_2
    in the middle. The first is tight if W and J stretch the same direction most, the second if J has rank one. The
    product of their tightnesses is that of A <= B. The tightness of B <= C is the cosine between 1/||x_i|| and
    ||df_i/dW||_F over the samples: it is 1 if ||x_i|| ||df_i/dW||_F is the same for all i. `.B_C.variation` is the
    inequality that the condition of App. G.1 makes tight, B <= ||W||_2 sqrt(mean (||df_i/dW||_F / ||x_i||)^2).

    `norm="frobenius"` takes ||W||_F in place of ||W||_2, and for a convolution ||K||_F times the root of the number of
    its positions, as the authors' code does for networks with convolutions.
    """
    layer = context.input_layer()
    x2, slope2 = context.each(input_norm2, layer), context.each(weight_slope2, layer)
    W = _norm(context.layers[layer], norm)
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


@bound(id="B4", symbol=r"\mathrm{NMLS} \leq \sqrt{\frac{1}{n} \sum_{i,l} \|W_l\|_2^2/\|x_i^l\|^2} S^{1/2}",
       source="compression Prop. 3.10")  # fmt: skip
def nmls_bound(context: Context, *, norm: str = "spectral") -> Iterator[Claim]:
    """Sharpness bounds the sensitivity to every layer's features together: Proposition 3.10.

    `norm="frobenius"` takes the norms of the authors' code, as in `mls_chain`.
    """
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
        inside = inside + (_norm(weight, norm) ** 2 / x2).mean()
    premises += map(context.norm_found, layers)
    yield Claim(left, (inside * context.total(interpolation_sharpness).mean()).sqrt(), assumptions=tuple(premises))


@bound(id="B6",
       symbol=r"\sum_l \bar x^l \mathrm{MLS}^l \leq \sum_l \|W_l\|_2 \sqrt{\overline{\|\partial f/\partial W_l\|_F^2}}",
       source="compression Eq. 35, 37", cost="two passes, a convex minimisation per layer")  # fmt: skip
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
    # Eq. 35 of each layer: xbar times MLS; ||W||_2 and ||W||_F times the rms of ||df/dW||
    rows: dict[str, tuple[float, float, float]] = {}
    nonzero = {layer: context.nonzero(layer, context.each(input_norm2, layer)) for layer in context.readable}
    for layer, weight in context.readable.items():
        mean_bar = (1 / context.each(input_norm2, layer)).mean().rsqrt()
        slope = float(context.each(weight_slope2, layer).mean().sqrt())
        frobenius = float(weight.matrix.W.square().sum().sqrt())
        left = float(mean_bar * context.each(mls, layer).mean())
        rows[layer] = left, weight.spectral_norm * slope, frobenius * slope
        premises = (context.unshared(layer), nonzero[layer])
        yield Claim(left, rows[layer][1], layer, "", (*premises, context.norm_found(layer)))
        yield Claim(left, rows[layer][2], layer, "frobenius", premises)
    # The sum over layers
    together = (context.all_unshared(), *nonzero.values())
    if context.layers:
        left, *rights = (sum(side, 0.0) for side in zip(*rows.values(), strict=True)) if rows else [math.nan] * 3
        yield Claim(left, rights[0], None, "", (*together, *map(context.norm_found, rows)))
        yield Claim(left, rights[1], None, "frobenius", together)
    # Eq. 37 of each layer applied once
    H = {layer: context.each(normalized_sharpness, layer) for layer in context.readable}
    convex = _convex(context)
    minima = {layer: _balanced(context, layer, H[layer]) for layer in H if context.layers[layer].dense and convex}
    sides = _scaled_sensitivity(context, minima)
    for layer in H:
        curved = Assumption("convex_loss", convex, "the loss curves downwards at an output")
        left, right = (sides[layer], minima[layer][0]) if layer in minima else (math.nan, math.nan)
        yield Claim(left, right, layer, "inner", (context.unshared(layer), curved))


def _convex(context: Context) -> bool:
    # Whether the loss's second derivative C_i has no negative eigenvalue at any sample
    problem = context.lens.problem
    if problem.loss.convex:
        return True
    with closing(forwards(problem, context.lens.model)) as found:
        for f, y in found:
            eigenvalues = torch.linalg.eigvalsh(problem.loss.output_hessian(f, y))
            if bool((eigenvalues[:, 0] < -context.rounding * eigenvalues[:, -1].abs()).any()):
                return False
    return True


def _balanced(context: Context, layer: str, H: Tensor) -> tuple[float, Tensor, Tensor]:
    """The minimum of Eq. 36 for one layer over live rows and columns, the live columns, and the scales s'^2."""
    found = context.measured(normalized_sharpness.key, layer)
    s2, t2 = found.arrays["sigma"].square(), found.arrays["sigma_prime"].square()
    H, quarter = H.cpu(), context.layers[layer].matrix.W.cpu().reshape(H.shape).square() / 4
    # Rows and columns with entries in both matrices, until no other one is left. If the feature of a column is always
    # 0, its scale can grow (or shrink, if its weights are 0) until it adds nothing to either side; so for rows
    live, before = torch.ones_like(H, dtype=torch.bool), -1
    while int(live.sum()) != before:
        before = int(live.sum())
        h, w = (torch.where(live, x, 0.0) for x in (H, quarter))
        live = (h.any(1) & w.any(1))[:, None] & h.any(0) & w.any(0)
    scale = s2[:, None] * t2
    return float(torch.where(live, H * scale + quarter / scale, 0.0).sum()), live.any(0), t2


def _scaled_sensitivity(context: Context, minima: dict[str, tuple[float, Tensor, Tensor]]) -> dict[str, float]:
    """sqrt(mean_i ||C^(1/2) df/dx diag(1/s')||_F^2 ||diag(s') x||^2) of each layer; this takes a pass."""
    lens, total = context.lens, dict.fromkeys(minima, 0.0)
    if minima:
        walk = one_pass(lens.problem, lens.model, lens.plan, needs={"C", "G"}, progress=context.progress)
        with closing(walk) as chunks:
            for chunk in chunks:
                for layer, (_, columns, scale) in minima.items():
                    g = chunk.layers[layer]
                    assert g.x is not None
                    assert isinstance(g.weight, DenseJacobian)
                    kept = columns.to(g.x.device)
                    t2 = scale.to(g.x.device)[kept]
                    slopes = quadratic(g.C, g.weight.Jx[:, :, kept]) / t2
                    x2 = g.x.to(torch.float64).square()[:, kept] * t2
                    total[layer] += float((slopes.sum(1) * x2.sum(1)).sum())
    return {layer: math.sqrt(max(found, 0.0) / context.n) for layer, found in total.items()}


@bound(
    id="B7", source="compression Prop. E.4", cost="one pass, per-sample gradients of shared weights",
    symbol=r"\sum_p x_p^2 \|\partial f/\partial x_p\|^2 / d \leq \sum_j \theta_j^2 \|\partial f/\partial\theta_j\|^2",
)  # fmt: skip
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
    layer = context.input_layer("mean")
    left = context.each(input_invariant_mls, layer).mean() / context.layers[layer].neurons
    premises = (context.unshared(layer), context.counted([layer]))
    yield Claim(left, context.total(adaptive_slope2).mean(), layer, "mean", premises)


@bound(id="B8", symbol=r"\overline{\|x\|^2 \|\partial f/\partial x\|_2^2} \leq \kappa_{Tr}^1",
       source="flatlens")  # fmt: skip
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
    layer = context.input_layer()
    left, right = context.each(normalized_mls, layer).mean(), context.each(relative_flatness_ggn, layer).mean()
    yield Claim(left, right, layer, "", (context.unshared(layer), loss))


@bound(id="H7",
       symbol=r"|\mathrm{Tr}\,H - S| \leq \overline{\sum_j |\langle f - y, \partial^2 f/\partial\theta_j^2 \rangle|}",
       source="compression Lemma B.1", cost="a Hessian product for every direction of curved parameters",
       on_request=True)  # fmt: skip
def interpolation_bound(context: Context) -> Iterator[Claim]:
    """Interpolation sharpness is near tr H if f nearly interpolates or its second derivatives are small: Lemma B.1.

    The row is the lemma's middle term, |Tr H - S| <= mean_i sum_j |<f_i - y_i, d2f_i/dtheta_j2>|. It needs bounded
    second derivatives, and no interpolation. The note says how large the right side is relative to Tr H: if it is
    small, S can replace the trace in the other bounds.
    """
    if not context.half_squared_error.holds:
        raise Inapplicable(context.half_squared_error)
    key = "interpolation_gap(exact=True, bound=True)"
    gap, middle = context.measured(key), context.measured(key, part="bound")
    finite = math.isfinite(middle.value)
    bounded = Assumption("bounded_second_derivatives", finite, middle.note or "they are not finite")
    trace = abs(context.measured("hessian_trace(exact=True)").value)
    note = f"{middle.value / trace:.2g} of Tr H" if finite and trace > 0 else ""
    premises = (context.half_squared_error, bounded)
    yield Claim(abs(gap.value), middle.value, None, "", premises, stderr=gap.stderr, note=note)


@bound(id="B17",
       symbol=r"\mathrm{MLS}_P \leq \|W\|_2 \sqrt{\overline{\|x\|^{-2}}} (\mathrm{Tr}\,GN / c)^{1/2}",
       source="compression section 2, Prop. 3.4, 3.8, 3.10", on_request=True)  # fmt: skip
def curved_loss_bound(context: Context) -> Iterator[Claim]:
    r"""Curvature bounds the sensitivity for any loss with C_i >= c P, such as cross-entropy with smoothed labels.

    The undotted row is Proposition 3.8 with Tr GN / c in place of S: mean_i ||P df_i/dx||_2 <= ||W||_2 sqrt(mean
    1/||x_i||^2) sqrt(Tr GN / c). `.sharpness` is the step that is new, mean_i ||P df_i/dtheta||_F^2 <= Tr GN / c;
    `.nmls` is Proposition 3.10 and `.volume`, in logarithms, Proposition 3.4, with the N - 1 dimensions in which P f
    moves. P takes the mean off the outputs of a softmax and changes no others; c is the smallest curvature of the loss
    over samples and directions of P. The note says it, and which it is at the minimum of smoothed labels.
    """
    layer = context.input_layer()
    centred = bool((context.each(slope_along_ones, layer) <= 1e-9).all()) and context.outputs > 1
    c = float(context.each(least_curvature(centred=centred), layer).min())
    curved = Assumption("curved_loss", c > 0, "the loss has no curvature at an output")
    S = context.total(ggn_trace).mean() / c if c > 0 else torch.tensor(math.nan, dtype=torch.float64)
    # The note: c, and which it is where every prediction is the smoothed label
    note, loss, N = f"c = {c:.3g}", context.lens.problem.loss, context.outputs
    a = loss.label_smoothing if isinstance(loss, CrossEntropy | Logistic) else 0.0
    if a and not (isinstance(loss, CrossEntropy) and (loss.weight is not None or not centred)):
        least = a * (2 - a) / 4 / N if isinstance(loss, Logistic) else a * (2 - a) / 2 if N == 2 else a / N
        note = f"{note}, {least:.3g} at the minimum"
    all_of_it = context.counted(list(context.readable))
    slopes = context.total(projected_slope2(centred=centred)).mean()
    yield Claim(slopes, S, None, "sharpness", (curved,), note=note)
    # Proposition 3.8 at the input, 3.10 at all layers
    nonzero = {name: context.nonzero(name, context.each(input_norm2, name)) for name in context.readable}
    spectral = {name: context.each(projected_spectral(centred=centred), name).mean() for name in nonzero}
    ratios = {name: context.layers[name].spectral_norm ** 2 / context.each(input_norm2, name) for name in nonzero}
    first = (curved, context.unshared(layer), nonzero[layer], context.counted([layer]), context.norm_found(layer))
    yield Claim(spectral[layer], (ratios[layer].mean() * S).sqrt(), layer, "", first, note=note)
    every = (curved, context.all_unshared(), *nonzero.values(), all_of_it, *map(context.norm_found, nonzero))
    inside = torch.stack([ratio.mean() for ratio in ratios.values()]).sum()
    yield Claim(torch.stack([*spectral.values()]).sum(), (inside * S).sqrt(), None, "nmls", every, note=note)
    # Proposition 3.4 in the r dimensions of P
    r, n = N - centred, context.n
    volumes = context.each(projected_log_volume(centred=centred), layer)
    left = volumes.logsumexp(0) - math.log(n)
    right = 0.5 * (r * ratios[layer].log()).logsumexp(0) - math.log(n) + r / 2 * (n * S / r).log()
    yield Claim(left, right, layer, "volume", first, logs=True, note=note)


def _projected(A: Tensor, centred: bool) -> Tensor:  # P A P
    if not centred:
        return A
    A = A - A.mean(1, keepdim=True)
    return A - A.mean(2, keepdim=True)


@quantity(place="weight", needs={"C", "K"})
def slope_along_ones(g: LayerGrams) -> Tensor:
    """Return |C 1| over the trace of C: 0 if the loss does not change with a number added to all outputs."""
    return (g.C.sum(2).abs().amax(1) / g.C.diagonal(dim1=1, dim2=2).sum(1)).nan_to_num(0.0)


@quantity(place="weight", needs={"C", "K"})
def least_curvature(g: LayerGrams, *, centred: bool = False) -> Tensor:
    """Return the smallest eigenvalue of C on the range of P."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(g.C)
    return eigenvalues[:, 1 if centred else 0]


@quantity(place="parameters", needs={"K"})
def projected_slope2(g: LayerGrams, *, centred: bool = False) -> Tensor:
    """Return ||P df/dtheta||_F^2 of the parameters measured here."""
    return _projected(g.K, centred).diagonal(dim1=1, dim2=2).sum(1)


@quantity(place="input", needs={"G"})
def projected_spectral(g: LayerGrams, *, centred: bool = False) -> Tensor:
    """Return ||P df/dx||_2."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(_projected(g.G, centred))
    return eigenvalues[:, -1].clamp(min=0).sqrt()


@quantity(place="input", needs={"G"})
def projected_log_volume(g: LayerGrams, *, centred: bool = False) -> Tensor:
    """Return the logarithm of the volume of the image of a ball under P df/dx, in the dimensions of P."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(_projected(g.G, centred))
    return 0.5 * eigenvalues[:, int(centred) :].clamp(min=0).log().sum(1)
