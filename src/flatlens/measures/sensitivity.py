"""Sensitivity of the outputs to the input: norms of df/dx, and searches around each sample."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.spectral_norms import batch_jacobians
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.grams import LayerGrams
from flatlens.measures.definition import (
    FUNCTION,
    PERMUTATION,
    Parts,
    Run,
    largest,
    mean_of_finite,
    on_lens,
    per_sample,
    require_count,
    require_positive,
    require_tolerance,
)
from flatlens.measures.leading_eigenvalues import in_batches, of_jacobian
from flatlens.measures.lens import Lens
from flatlens.perturbation.inputs import Refused, steepest_secants
from flatlens.perturbation.variation import certified_variation, found_variation

of_input = partial(
    per_sample,
    family="sensitivity",
    unit="output / input",
    place="input",
    needs={"G"},
    answer="input",
    sketched="top",
    cost="one pass, eigenvalues",
    invariant_under=FUNCTION,
)
searched = partial(
    on_lens,
    family="perturbation",
    unit="output / input",
    invariant_under=FUNCTION,
    of_parameters=False,
    on_request=True,
)


def spectral_norm(g: LayerGrams) -> Tensor:
    """Return ||df/dx||_2 per sample, (n,)."""
    return g.eigenvalues[:, -1].sqrt()


def softmax_norm(g: LayerGrams) -> Tensor:
    """Return ||d softmax(f)/dx||_2 per sample, (n,)."""
    return g.softmax_eigenvalues[:, -1].sqrt()


@of_input(id="M3", symbol=r"\mathrm{MLS}", source="compression Def. 3.7")
def mls(g: LayerGrams, *, softmax: bool = False) -> Tensor:
    """Maximum local sensitivity: mean_i ||df/dx_i||_2, to the network's input, or through one layer.

    `softmax=True` takes the derivatives of softmax(f) in place of f; `jacobian_norm(softmax=True)` is the maximum of
    the same norms.
    """
    return softmax_norm(g) if softmax else spectral_norm(g)


@of_input(
    id="M3",
    symbol=r"\mathrm{NMLS}",
    source="compression Def. 3.9",
    unit="output / feature",
    answer="sum",
    invariant_under={PERMUTATION},
)
def nmls(g: LayerGrams) -> Tensor:
    """Network MLS: the sum over linear layers of mean_i ||df/dx^l_i||_2, each through its layer (rows of `mls`)."""
    return spectral_norm(g)


@of_input(id="M4", symbol=r"\max_i \|Jf(x_i)\|_2", source="sharpening section 4, A.1, B.1", reduce=largest)
def jacobian_norm(g: LayerGrams, *, softmax: bool = False) -> Tensor:
    """Largest sensitivity over the samples: max_i ||df/dx_i||_2 of the logits, or of softmax(f).

    `softmax=True` takes the derivatives of p = softmax(f). Their Gram matrix is P G P, with P = diag(p) - p p^T.
    """
    return softmax_norm(g) if softmax else spectral_norm(g)


@of_input(id="M7", symbol=r"\overline{\|x\|^2 \|Jf\|_2^2}", source="compression Def. F.1", unit="output^2")
def normalized_mls(g: LayerGrams) -> Tensor:
    """Sensitivity in units of the input's size: mean_i ||x_i||^2 ||df/dx_i||_2^2.

    For C = I, and where one linear layer with unshared weights alone reads the input, it is at most that layer's
    `relative_flatness_ggn`.
    """
    assert g.x_norm2 is not None
    return g.x_norm2 * g.eigenvalues[:, -1]


of_input_trace = partial(of_input, sketched="probes", cost="one pass")  # linear in G


@of_input_trace(
    id="M8",
    symbol=r"\overline{\sum_p x_p^2 \|\partial f/\partial x_p\|^2}",
    source="compression Def. E.3",
    unit="output^2",
    needs={"G", "squares"},
)
def input_invariant_mls(g: LayerGrams) -> Tensor:
    """Sensitivity that a rescaling of single inputs cannot change: mean_i sum_p x_ip^2 ||df/dx_ip||^2.

    For C = I, and where one linear layer with unshared weights alone reads the input, it is that layer's
    `neuron_flatness_ggn`.
    """
    assert g.x is not None
    return (g.input_squares * g.x.to(torch.float64).square()).sum(1)


@of_input_trace(id="M18", symbol=r"\overline{\|Jf\|_F^2}", source="sharpening App. D", unit="output^2 / input^2")
def jacobian_frobenius(g: LayerGrams) -> Tensor:
    """Squared Frobenius norm of the input-output Jacobian: mean_i ||df/dx_i||_F^2 = mean_i tr G_i."""
    return g.G.diagonal(dim1=1, dim2=2).sum(1)


@searched(
    id="M4",
    family="sensitivity",
    symbol=r"\|Jf(X)\|_2",
    source="sharpening A.1, B.3",
    cost="Lanczos: about 10 products with each batch's Jacobian",
    works_coupled=True,
)
def batch_jacobian_norm(
    lens: Lens, run: Run, *, softmax: bool = False, rtol: float = 1e-3, batch_statistics: int | None = None
) -> Estimate:
    """Norm of the Jacobian of whole batches, ||df(X)/dX||_2, BatchNorm as in training; the largest over ghost batches.

    Where BatchNorm couples the samples of a batch its Jacobian is one matrix; in eval mode it has a block for each
    sample, and the norm is `jacobian_norm`. `batch_statistics` and `rtol` are those of `sharpness`, `softmax` that of
    `jacobian_norm`.
    """
    require_tolerance(rtol)
    problem = in_batches(lens, batch_statistics)
    found = batch_jacobians(
        problem, lens.model, [None], softmax=softmax, rtol=rtol, generator=run.generator, progress=run.progress
    )
    return of_jacobian(found[None])


@searched(
    id="P5",
    symbol=r"\max_i V_{B(x_i, \delta)}(Jf)",
    source="sharpening Eq. 5",
    cost="N backwards at 128 points of each ball (512 up to 3 dimensions, 16 above 256), at 2 x restarts x steps more",
)
def local_variation(lens: Lens, run: Run, *, delta: float = 0.1, restarts: int = 4, steps: int = 20) -> Parts:
    """Local variation of the Jacobian: max_i sup ||Jf(u) - Jf(v)||_2 over u, v within delta of x_i.

    `delta` is a Euclidean distance in the input's units. The value is the result of a search, a lower bound: the
    rounding error of the Jacobians is taken off. `.upper` is a certified upper bound; it exists for chains of affine
    layers and common activations that are small enough to be written out as matrices. `samples` has each sample's own
    bound for both. For a linear network both are 0.
    """
    require_positive(delta=delta)
    require_count(1, restarts=restarts, steps=steps)
    try:
        found = found_variation(
            lens.problem, lens.model, delta, restarts=restarts, steps=steps, generator=run.generator,
            progress=run.progress,
        )  # fmt: skip
    except Refused as why:
        return {("", None): undefined(str(why)), ("upper", None): undefined(str(why))}
    value = Estimate(float(found.max()), kind="lower bound", samples=found)
    try:
        bound = certified_variation(lens.problem, lens.model, delta, progress=run.progress)
    except Refused as why:
        return {("", None): value, ("upper", None): undefined(str(why))}
    return {("", None): value, ("upper", None): Estimate(float(bound.max()), kind="upper bound", samples=bound)}


@searched(
    id="P6",
    symbol=r"\overline{\max_d \|f(x + d) - f(x)\| / \|d\|}",
    source="compression Eq. 47, App. F",
    cost="restarts x steps forwards and backwards",
    differentiates=False,
)
def mls_by_search(
    lens: Lens, run: Run, *, delta: float = 1e-3, restarts: int = 4, steps: int = 20, normalized: bool = False
) -> Estimate:
    """Maximum local sensitivity by search: mean_i max ||f(x_i + d) - f(x_i)|| / ||d|| over ||d|| = delta ||x_i||.

    `delta` is relative to the norm of each input, so that it means the same at any scale of the data. The value is a
    lower bound of the steepest secants of this length, found by gradient ascent from random starts, and evaluated in
    float64; where the network does not run in it, the rounding error is taken off. As delta shrinks, these tend to
    `mls`, which one pass gives exactly; at a kink (a ReLU whose input is exactly 0, as on dark patches without bias)
    they can stay above it. `normalized=True` is Definition F.1 with the slopes that were found, mean_i ||x_i||^2
    slope_i^2, as Appendix F approximates `normalized_mls`; its unit is output^2.
    """
    require_positive(delta=delta)
    require_count(1, restarts=restarts, steps=steps)
    try:
        slopes, coarse = steepest_secants(
            lens.problem, lens.model, delta, restarts=restarts, steps=steps, generator=run.generator,
            normalized=normalized, progress=run.progress,
        )  # fmt: skip
    except Refused as why:
        return undefined(str(why))
    if beyond := int(slopes.isinf().sum()):
        return undefined(f"the search met outputs that are not finite around {beyond} of {len(slopes)} samples")
    reduced = mean_of_finite(slopes**2 if normalized else slopes, "0, so that no relative length is defined")
    rounded = f"{coarse} of {len(slopes)} differences are mostly rounding: try a larger delta, or float64"
    found = Estimate(reduced.value, kind=reduced.kind, samples=reduced.samples)
    if reduced.kind == "exact":
        secants = "mean over the steepest secants of that length, not over slopes"
        found = replace(found, kind="lower bound", note=secants)
    return with_note(with_note(found, reduced.note), rounded if coarse else "")
