"""MacDonald et al.: bounds of the Lipschitz norm and the test error by the samples' Jacobians and their variation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.covered import DETOUR, ROUNDING, Covered, convex_support, covered, spread, steepest
from flatlens.bounds.target import Target
from flatlens.distributions import Distribution, PushForward, Sphere
from flatlens.measures.sensitivity import jacobian_norm
from flatlens.perturbation.inputs import Refused
from flatlens.perturbation.variation import found_variation, unit

_PAIRED = 2048  #: points of which all pairs are compared
ALIGNED = 16  #: samples from which secants along the steepest direction start
LENGTHS = 12  #: number of lengths of those secants, each half the one before
OPPOSITE = 8  #: number of random diameters of each ball, in addition to the steepest one
LOOKED_AT = 512  #: number of samples around which the variation of the outputs is searched
DRAWN = 4096  #: number of new samples that estimate an expectation


@bound(
    id="B9",
    symbol=r"\|f\|_{Lip} \leq \max_i (\|Jf(x_i)\|_2 + V_{B(x_i, \delta)}(Jf))",
    source="sharpening Thm 4.3, Eq. 8",
    cost="one pass, secants, variation by intervals and by search",
    on_request=True,
)
def lipschitz_bound(context: Context) -> Iterator[Claim]:
    r"""No secant is steeper than a sample's Jacobian norm plus its variation around the sample: Theorem 4.3.

    ||f||_{Lip, P} <= max_i (||Jf(x_i)||_2 + V_{B(x_i, delta)}(Jf)). The left side is the steepest secant found, the
    right side has the certified variation. The radius delta comes from the distribution, or is declared. The proof
    bounds ||f||_Lip by sup ||Jf|| over the support. It needs the straight line between two points to stay in the
    support, so the support must be convex. Two parts do not assume this:

    - `.geodesic`, for spheres, takes the path along the sphere; the right side is multiplied by pi/2.
    - `.latent`, for the push-forward of a convex base by g, has ||f(g(z)) - f(g(z'))|| / ||z - z'|| on the left and
      Lip(g) times the right side.

    `.searched` has a variation found by search. It is at most the supremum, so that this part is never decided.
    `.remark` is V_S(g) <= 2 delta ||g||_{Lip}, stated below Eq. 5, for g = f on each ball. Its Lipschitz constant is
    replaced by ||Jf(x_i)||_2 + V, which no secant of the ball exceeds.
    """
    seen = context.once(covered)
    if isinstance(seen, Assumption):
        yield Claim(math.nan, math.nan, assumptions=(seen,))
        return
    slopes, premises = context.each(jacobian_norm), (*seen.premises, seen.certified)
    left, right = _steepest_secant(context, seen), float((slopes + seen.variation).max())
    convex = convex_support(context)
    yield Claim(left, right, None, "", (*premises, convex), note=seen.note)
    if isinstance(context.distribution, Sphere):
        yield Claim(left, DETOUR * right, None, "geodesic", premises, note="pi/2 of the right side")
    if isinstance(context.distribution, PushForward):
        yield _latent(context, context.distribution, seen, right)
    yield _searched(context, seen, left, slopes, convex)
    yield _remark(context, seen, slopes)


def _steepest_secant(context: Context, seen: Covered) -> float:
    """Return the slope of the steepest secant: between data, new samples, and steps along the steepest directions."""
    law, x = context.distribution, seen.x[spread(seen.x, _PAIRED)]
    if law is not None:
        fresh = [law.extreme_points(_PAIRED // 4, context.generator), law.sample(_PAIRED // 4, context.generator)]
        x = torch.cat([x, *(points.to(x) for points in fresh)])
    found = _secants(seen, x)
    if law is not None and law.support_is_convex and math.isfinite(law.diameter):
        found = max(found, _aligned(context, law, seen))
    return found


def _secants(seen: Covered, x: Tensor) -> float:
    """Return the largest slope of a secant between two of the points, minus the possible rounding error."""
    with torch.no_grad():
        f = seen.network.outputs(x)
    return max(0.0, steepest(x, f, ROUNDING * float(f.norm(dim=1).max())))


def _aligned(context: Context, law: Distribution, seen: Covered) -> float:
    """Return the largest slope of secants from the samples with the largest Jacobians along their top direction.

    Both ends lie in the support.
    """
    x = seen.x[context.each(jacobian_norm).topk(min(ALIGNED, context.n)).indices.to(seen.x.device)]
    v = _directions(seen, x)[1]
    found = 0.0
    for step in (law.diameter * 0.5**k * sign for k in range(LENGTHS) for sign in (1, -1)):
        ends = x + step * v
        inside = torch.isfinite(law.log_density(ends)) & torch.isfinite(law.log_density(x))
        if bool(inside.any()):
            found = max(found, _paired(seen, x[inside], ends[inside]))
    return found


def _paired(seen: Covered, x: Tensor, ends: Tensor) -> float:
    """Return the largest slope of the secants from x[i] to ends[i]."""
    with torch.no_grad():
        f, g = seen.network.outputs(x), seen.network.outputs(ends)
    rise = (f - g).norm(dim=1) - ROUNDING * (f.norm(dim=1) + g.norm(dim=1))
    return float((rise / (x - ends).norm(dim=1)).max())


def _directions(seen: Covered, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ||Jf||_2 at each point, (n,), and its right singular vector, (n, M)."""
    J = seen.network.jacobians(x)
    _, sigma, V = torch.linalg.svd(J, full_matrices=False)
    return sigma[:, 0], V[:, 0]


def _latent(context: Context, law: PushForward, seen: Covered, right: float) -> Claim:
    """Return the claim ||f o g||_{Lip} <= Lip(g) max_i(...): a straight line in the base maps into the support."""
    state = context.generator.get_state()
    z = law.base.sample(_PAIRED // 4, context.generator)
    context.generator.set_state(state)
    x = law.sample(_PAIRED // 4, context.generator).to(seen.x)  # from the same z
    with torch.no_grad():
        f = seen.network.outputs(x)
    left = steepest(z.to(f), f, 1e-6 * float(f.norm(dim=1).max()))  # the generator may be in float32
    straight = law.base.support_is_convex
    base = Assumption("convex_base", straight or None, "" if straight else "the base may not be convex")
    premises = (*seen.premises, seen.certified, base)
    return Claim(left, law.lipschitz * right, None, "latent", premises, note=f"Lip(g) = {law.lipschitz:.4g}")


def _searched(context: Context, seen: Covered, left: float, slopes: Tensor, convex: Assumption) -> Claim:
    """Return the claim with the variation that a search finds; undecided at best."""
    if math.isnan(seen.delta):
        return Claim(left, math.nan, None, "searched", (*seen.premises, convex))
    lens, generator = context.lens, context.generator
    try:
        found = found_variation(lens.problem, lens.model, seen.delta, restarts=2, steps=10, generator=generator)
    except Refused as why:
        return Claim(left, math.nan, None, "searched", (Assumption("one_floating_input", False, str(why)),))
    note = (
        "a search found the variation, which may be below the supremum: a larger left side may still obey the theorem"
    )
    right = float((slopes + found).max())
    return Claim(left, right, None, "searched", (*seen.premises, convex), stderr=math.inf, note=note)


def _remark(context: Context, seen: Covered, slopes: Tensor) -> Claim:
    """Return the claim V_S(f) <= 2 delta ||f|S||_Lip for each ball S, by a lower bound of V and an upper of the norm.

    A ball is convex, so no assumption on the support is needed.
    """
    at = spread(seen.x, LOOKED_AT)
    if math.isnan(seen.delta):
        return Claim(math.nan, math.nan, None, "remark", (*seen.premises, seen.certified))
    left = torch.cat([_varied(context, seen, x) for x in torch.split(seen.x[at], 64)]).cpu()
    right = 2 * seen.delta * (slopes + seen.variation)[at]
    note = f"of {len(at)} samples" if len(at) < context.n else ""
    return Claim(left, right, None, "remark", (seen.certified,), note=note)


def _varied(context: Context, seen: Covered, x: Tensor) -> Tensor:
    """Return max ||f(x + delta w) - f(x - delta w)|| over a few unit vectors w, (n,); w includes the steepest."""
    drawn = torch.randn(len(x), OPPOSITE, x.shape[1], generator=context.generator, dtype=torch.float64).to(x)
    w = seen.delta * torch.cat([_directions(seen, x)[1][:, None], unit(drawn)[1]], 1)
    with torch.no_grad():
        ahead, behind = (seen.network.outputs((x[:, None] + s * w).flatten(0, 1)) for s in (1, -1))
    found: Tensor = (ahead - behind).norm(dim=1).reshape(len(x), -1).max(1).values
    return found


@bound(
    id="B11",
    symbol=r"E \|f - f^*\|_2 \leq \delta (\|f^*\|_{Lip} + \max_i (\|Jf(x_i)\|_2 + V_{B(x_i, \delta)}(Jf)))",
    source="sharpening Thm 6.1, Eq. 10",
    cost="one pass, variation by intervals, forwards of fresh samples",
    on_request=True,
)
def jacobian_generalisation(context: Context) -> Iterator[Claim]:
    """Test error between samples is bounded by how steep the network is: Theorem 6.1.

    E ||f - f*|| <= delta (||f*||_Lip + max_i (||Jf(x_i)||_2 + V_{B(x_i, delta)}(Jf))) for a network that equals f* on
    the samples. The expectation is over fresh samples of the known distribution. No convexity is needed: each x is
    within delta of a sample, and the ball contains the segment between the two. `.corrected` adds max_i ||f(x_i) -
    f*(x_i)|| on the right, the middle term of the proof's Eq. 24, and needs no interpolation. The note calls the bound
    vacuous if the right side is not below the diameter of the values of f*: some constant function has no larger error.
    """
    seen = context.once(covered)
    if isinstance(seen, Assumption):
        yield Claim(math.nan, math.nan, assumptions=(seen,))
        return
    law, target = context.distribution, context.target
    if law is None or target is None:
        which = "distribution=, the law of the data" if law is None else "target=Target(function, lipschitz)"
        yield Claim(math.nan, math.nan, assumptions=(Assumption("known_target", None, f"give {which}"),))
        return
    L, slopes = target.steepness(seen.shape), context.each(jacobian_norm)
    right = seen.delta * (L + float((slopes + seen.variation).max()))
    missed, size = _missed(seen, target, seen.x), float(seen.told(target, seen.x).norm(dim=1).max())
    off = float(missed.max())
    fresh = law.sample(DRAWN, context.generator).to(seen.x)
    error = _missed(seen, target, fresh)
    wide = _widest(seen.told(target, torch.cat([seen.x[spread(seen.x, 512)], fresh[:512]])))
    premises = (*seen.premises, seen.certified, _steep_enough(seen, target, L))
    expected, stderr = float(error.mean()), float(error.std()) / math.sqrt(DRAWN)
    fits = (*premises, _interpolates(context, off, size))
    for part, rhs, assumed in (("", right, fits), ("corrected", right + off, premises)):
        yield Claim(expected, rhs, None, part, assumed, stderr, note=_weighed(seen, rhs, wide))


def _missed(seen: Covered, target: Target, x: Tensor) -> Tensor:
    """Return ||f(x) - f*(x)||, (n,)."""
    with torch.no_grad():
        found: Tensor = (seen.network.outputs(x) - seen.told(target, x)).norm(dim=1)
    return found


def _widest(y: Tensor) -> float:
    """Return the largest distance between two values."""
    return float(torch.cdist(y, y).max())


def _interpolates(context: Context, off: float, size: float) -> Assumption:
    """Return the assumption that f and f* agree on the samples, up to rounding."""
    agrees = off <= max(1e-6, context.rounding) * (1 + size)
    return Assumption("interpolation", agrees, "" if agrees else f"the outputs are up to {off:.3g} from the target's")


def _steep_enough(seen: Covered, target: Target, L: float) -> Assumption:
    """Return the assumption that no secant of f* between samples exceeds its declared constant."""
    x = seen.x[spread(seen.x, _PAIRED)]
    y = seen.told(target, x)
    met = steepest(x, y, 1e-6 * float(y.norm(dim=1).max()))
    why = f"it is at least {met:.4g}, but {L:.4g} was declared" if met > L else ""
    return Assumption("target_lipschitz", not why, why, declared=target.lipschitz is not None)


def _weighed(seen: Covered, right: float, wide: float) -> str:
    """Return a note on how the radius is known, and whether the bound is vacuous."""
    vacuous = "" if right < wide else f"vacuous: the values of f* differ by at most {wide:.4g}"
    return "; ".join(part for part in (seen.note, vacuous) if part)
