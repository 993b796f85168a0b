"""Searches around each sample: for the variation of the input-output Jacobian, and for the steepest secant."""

from __future__ import annotations

from flatlens.estimate import Estimate, undefined
from flatlens.measures.card import FUNCTION, Parts, Run, on_lens
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_count, require_positive
from flatlens.measures.reduce import mean_of_finite
from flatlens.perturbation.certified import certified_variation
from flatlens.perturbation.inputs import Refused
from flatlens.perturbation.secants import steepest_secants
from flatlens.perturbation.variation import found_variation


@on_lens(
    id="P5",
    family="perturbation",
    symbol=r"\max_i V_{B(x_i, \delta)}(Jf)",
    source="sharpening Eq. 5",
    unit="output / input",
    cost="N backwards at 128 points of each ball (512 up to 3 dimensions, 16 above 256), at 2 x restarts x steps more",
    invariant_under=FUNCTION,
    of_parameters=False,
    on_request=True,
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
    return {
        ("", None): Estimate(float(found.max()), kind="lower bound", samples=found),
        ("upper", None): _certified(lens, run, delta),
    }


def _certified(lens: Lens, run: Run, delta: float) -> Estimate:
    try:
        bound = certified_variation(lens.problem, lens.model, delta, progress=run.progress)
    except Refused as why:
        return undefined(str(why))
    return Estimate(float(bound.max()), kind="upper bound", samples=bound)


@on_lens(
    id="P6",
    family="perturbation",
    symbol=r"\overline{\max_d \|f(x + d) - f(x)\| / \|d\|}",
    source="compression Eq. 47, App. F",
    unit="output / input",
    cost="restarts x steps forwards and backwards",
    invariant_under=FUNCTION,
    of_parameters=False,
    on_request=True,
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
    notes = ["mean over the steepest secants of that length, not over slopes"] if reduced.kind == "exact" else []
    notes += [reduced.note] if reduced.note else []
    if coarse:
        notes.append(f"{coarse} of {len(slopes)} differences are mostly rounding: try a larger delta, or float64")
    kind = "lower bound" if reduced.kind == "exact" else reduced.kind
    return Estimate(reduced.value, kind=kind, note="; ".join(notes), samples=reduced.samples)
