"""Chen et al.'s bounds for other losses than the half squared error, such as cross-entropy with smoothed labels.

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
from collections.abc import Iterator

import torch
from torch import Tensor

from flatlens.bounds.context import Assumption, Claim, Context, input_norm2, quantity
from flatlens.bounds.definition import bound
from flatlens.grams import LayerGrams
from flatlens.measures.traces import ggn_trace
from flatlens.problem.losses import CrossEntropy, Logistic


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
