"""MacDonald et al.: bounds by the samples' Jacobians and their variation around each sample.

The data are points that cover a support. Bounded are the Lipschitz norm, the test error, and the loss, which grows
with the distance from its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatlens.bounds.context import Assumption, Claim, Context, Inapplicable, Target
from flatlens.bounds.definition import bound
from flatlens.distributions import Distribution, PushForward, Sphere, empirical_covering_radius
from flatlens.errors import BadInput
from flatlens.measures.sensitivity import jacobian_norm
from flatlens.perturbation.inputs import Inputs, Refused, in_float64
from flatlens.perturbation.variation import certified_variation, found_variation, unit
from flatlens.problem.forward import forwards
from flatlens.problem.loss import Loss
from flatlens.problem.losses import CrossEntropy, SquaredError

FAILURE = 0.05  #: eps of Def. 4.1: probability with which the covering may fail
AT_ONCE = 4096  #: largest number of points in one call of the network
DETOUR = math.pi / 2  #: largest ratio of the path along a sphere to the straight line between its ends
_ROUNDING = 1e-13  #: rounding error in float64, relative to the size of the outputs


@final
@dataclass(frozen=True, eq=False)
class Covered:
    """The common part of Theorems 4.3, 5.1 and 6.1 of sharpening."""

    network: Inputs  #: the data, (n, M), and the outputs as a function of any points, in float64
    shape: tuple[int, ...]  #: shape of one input of the network
    delta: float  #: NaN if not known
    variation: Tensor  #: upper bounds of V_{B(x_i, delta)}(Jf), (n,); NaN if not certified
    premises: tuple[Assumption, ...]
    certified: Assumption
    note: str

    def told(self, target: Target, points: Tensor) -> Tensor:
        """Return f* at points (k, M), (k, N) float64."""
        y = target(points.reshape(-1, *self.shape))
        with torch.no_grad():
            N = self.network.outputs(self.x[:1]).shape[1]
        if y.shape[1] != N or not bool(torch.isfinite(y).all()):
            got = f"{y.shape[1]} values" if y.shape[1] != N else "NaN or inf"
            needed = f"the target must return {N} finite values for each input, got {got}"
            raise BadInput(needed, argument="target", call="check_bounds")
        return y

    @property
    def x(self) -> Tensor:
        """Return the data, (n, M) float64."""
        return self.network.x


def covered(context: Context) -> Covered:
    """Return the data as a cover of its support, with a float64 copy of the network as a function of flat points."""
    problem = context.lens.problem
    try:
        exact, first = in_float64(problem, context.lens.model, "a covering bound")
    except Refused as why:
        raise Inapplicable(Assumption("one_floating_input", False, str(why))) from why
    shape = tuple(first.shape[1:])

    def outputs(points: Tensor) -> Tensor:
        parts = torch.split(points.to(torch.float64), AT_ONCE)
        return torch.cat([problem.run(exact, (part.reshape(-1, *shape).clone(), None))[0] for part in parts])

    chunks = problem.data.chunks(AT_ONCE)
    x = torch.cat([problem.place(raw)[0].to(torch.float64).flatten(1) for raw in chunks])
    premises, delta, note = _radius(context, x)
    variation, certified = _certified(context, delta, x)
    return Covered(Inputs(x, outputs), shape, delta, variation, premises, certified, note)


def _radius(context: Context, x: Tensor) -> tuple[tuple[Assumption, ...], float, str]:
    """The assumptions that the balls cover the support, their radius, and how it is known."""
    law = context.distribution
    inside = () if law is None else (in_support(law, x),)
    if context.delta is not None:
        return (*inside, Assumption("covering_radius", True, declared=True)), context.delta, ""
    if law is None:
        why = "give distribution= (the distribution of the data) or delta= (its covering radius)"
        return (Assumption("covering_radius", None, why),), math.nan, ""
    radius = law.covering_radius(context.n, FAILURE, rule=context.rule)
    if radius.kind == "undefined":
        return (*inside, Assumption("covering_radius", False, radius.note)), math.nan, ""
    note = f"delta = {radius.value:.4g}, with probability {1 - FAILURE:g} over the samples"
    return (*inside, Assumption("covering_radius", True), context.declare("iid_samples")), radius.value, note


def in_support(law: Distribution, x: Tensor) -> Assumption:
    """Return the assumption that all samples lie in the distribution's support."""
    if x.shape[1] != law.dimension:
        sizes = f"its samples have {law.dimension} entries, the data's {x.shape[1]}"
        raise BadInput(sizes, argument="distribution", value=law, call="check_bounds")
    if isinstance(law, PushForward):
        return Assumption("samples_in_support", True)  # no sample is known to lie outside the image
    outside = int(torch.isinf(law.log_density(x)).sum())
    return Assumption("samples_in_support", outside == 0, f"{outside} of {len(x)} lie outside")


def convex_support(context: Context) -> Assumption:
    """Return whether the support is convex: known from the distribution, or else declared; a sphere never is."""
    law = context.distribution
    if law is not None and law.support_is_convex:
        return Assumption("convex_support", True)
    if isinstance(law, Sphere):
        return Assumption("convex_support", False, "a sphere is not convex")
    return context.declare("convex_support")


def _certified(context: Context, delta: float, x: Tensor) -> tuple[Tensor, Assumption]:
    """Upper bounds of V_{B(x_i, delta)}(Jf)."""
    why = "no radius"
    if not math.isnan(delta):
        try:
            lens = context.lens
            bound = certified_variation(lens.problem, lens.model, delta, progress=context.progress)
            return bound, Assumption("certified_variation", True)
        except Refused as refusal:
            why = str(refusal)
    return torch.full((len(x),), math.nan, dtype=torch.float64), Assumption("certified_variation", False, why)


def steepest(x: Tensor, y: Tensor, less: float = 0.0) -> float:
    """Return max over pairs of (||y_i - y_j|| - less) / ||x_i - x_j||, without equal points; -inf if there are none.

    >>> x = torch.tensor([[0.0], [1.0], [3.0], [3.0]])
    >>> steepest(x, torch.tensor([[0.0], [1.0], [7.0], [7.0]])), steepest(x[2:], x[2:])
    (3.0, -inf)
    """
    best = -math.inf
    for rows in torch.split(torch.arange(len(x)), 512):
        apart, rise = (torch.cdist(t[rows], t, compute_mode="donot_use_mm_for_euclid_dist") for t in (x, y))
        best = max(best, float(torch.where(apart > 0, (rise - less) / apart, -math.inf).max()))
    return best


def spread(x: Tensor, most: int) -> Tensor:
    """Return indices of at most `most` samples, evenly spaced."""
    return torch.linspace(0, len(x) - 1, min(len(x), most)).round().long()


_PAIRED = 2048  #: points of which all pairs are compared
ALIGNED = 16  #: samples from which secants along the steepest direction start
LENGTHS = 12  #: number of lengths of those secants, each half the one before
OPPOSITE = 8  #: number of random diameters of each ball, in addition to the steepest one
LOOKED_AT = 512  #: number of samples around which the variation of the outputs is searched
DRAWN = 4096  #: number of new samples that estimate an expectation


@bound(id="B9", symbol=r"\|f\|_{Lip} \leq \max_i (\|Jf(x_i)\|_2 + V_{B(x_i, \delta)}(Jf))",
       source="sharpening Thm 4.3, Eq. 8", cost="one pass, secants, variation by intervals and by search",
       on_request=True)  # fmt: skip
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
    slopes, premises = context.each(jacobian_norm), (*seen.premises, seen.certified)
    # The theorem, and its two forms for supports that are not convex
    left, right = _steepest_secant(context, seen), float((slopes + seen.variation).max())
    convex = convex_support(context)
    yield Claim(left, right, None, "", (*premises, convex), note=seen.note)
    if isinstance(context.distribution, Sphere):
        yield Claim(left, DETOUR * right, None, "geodesic", premises, note="pi/2 of the right side")
    if isinstance(context.distribution, PushForward):
        # ||f o g||_{Lip} <= Lip(g) max_i(...): a straight line in the base maps into the support
        law, state = context.distribution, context.generator.get_state()
        z = law.base.sample(_PAIRED // 4, context.generator)
        context.generator.set_state(state)
        x = law.sample(_PAIRED // 4, context.generator).to(seen.x)  # from the same z
        with torch.no_grad():
            f = seen.network.outputs(x)
        steep = steepest(z.to(f), f, 1e-6 * float(f.norm(dim=1).max()))  # the generator may be in float32
        straight, lipschitz = law.base.support_is_convex, law.lipschitz
        base = Assumption("convex_base", straight or None, "" if straight else "the base may not be convex")
        note = f"Lip(g) = {lipschitz:.4g}"
        yield Claim(steep, lipschitz * right, None, "latent", (*premises, base), note=note)
    # With the variation that a search finds: undecided at best
    lens, found, assumed = context.lens, None, (*seen.premises, convex)
    if not math.isnan(seen.delta):
        try:
            rng = context.generator
            found = found_variation(lens.problem, lens.model, seen.delta, restarts=2, steps=10, generator=rng)
        except Refused as why:
            assumed = (Assumption("one_floating_input", False, str(why)),)
    if found is None:
        yield Claim(left, math.nan, None, "searched", assumed)
    else:
        below = "a search found the variation, which may be below the supremum"
        note, high = f"{below}: a larger left side may still obey the theorem", float((slopes + found).max())
        yield Claim(left, high, None, "searched", assumed, stderr=math.inf, note=note)
    # V_S(f) <= 2 delta ||f|S||_Lip for each ball S, by a lower bound of V and an upper of the norm. A ball is convex
    if math.isnan(seen.delta):
        yield Claim(math.nan, math.nan, None, "remark", premises)
        return
    at = spread(seen.x, LOOKED_AT)
    varied: list[Tensor] = []
    for x in torch.split(seen.x[at], 64):
        # max ||f(x + delta w) - f(x - delta w)|| over a few unit vectors w, which include the steepest
        drawn = torch.randn(len(x), OPPOSITE, x.shape[1], generator=context.generator, dtype=torch.float64).to(x)
        w = seen.delta * torch.cat([_directions(seen, x)[:, None], unit(drawn)[1]], 1)
        with torch.no_grad():
            ahead, behind = (seen.network.outputs((x[:, None] + s * w).flatten(0, 1)) for s in (1, -1))
        varied.append((ahead - behind).norm(dim=1).reshape(len(x), -1).max(1).values)
    upper = 2 * seen.delta * (slopes + seen.variation)[at]
    note = f"of {len(at)} samples" if len(at) < context.n else ""
    yield Claim(torch.cat(varied).cpu(), upper, None, "remark", (seen.certified,), note=note)


def _steepest_secant(context: Context, seen: Covered) -> float:
    # Between data and new samples, less the possible rounding error
    law, x = context.distribution, seen.x[spread(seen.x, _PAIRED)]
    if law is not None:
        fresh = [law.extreme_points(_PAIRED // 4, context.generator), law.sample(_PAIRED // 4, context.generator)]
        x = torch.cat([x, *(points.to(x) for points in fresh)])
    with torch.no_grad():
        f = seen.network.outputs(x)
    found = max(0.0, steepest(x, f, _ROUNDING * float(f.norm(dim=1).max())))
    if law is not None and law.support_is_convex and math.isfinite(law.diameter):
        found = max(found, _aligned(context, law, seen))
    return found


def _aligned(context: Context, law: Distribution, seen: Covered) -> float:
    # From the samples with the largest Jacobians along their top direction; both ends lie in the support
    x = seen.x[context.each(jacobian_norm).topk(min(ALIGNED, context.n)).indices.to(seen.x.device)]
    v = _directions(seen, x)
    found = 0.0
    for step in (law.diameter * 0.5**k * sign for k in range(LENGTHS) for sign in (1, -1)):
        ends = x + step * v
        inside = torch.isfinite(law.log_density(ends)) & torch.isfinite(law.log_density(x))
        if bool(inside.any()):
            with torch.no_grad():
                f, g = seen.network.outputs(x[inside]), seen.network.outputs(ends[inside])
            rise = (f - g).norm(dim=1) - _ROUNDING * (f.norm(dim=1) + g.norm(dim=1))
            found = max(found, float((rise / (x[inside] - ends[inside]).norm(dim=1)).max()))
    return found


def _directions(seen: Covered, x: Tensor) -> Tensor:
    """The first right singular vector of Jf at each point, (n, M)."""
    V: Tensor = torch.linalg.svd(seen.network.jacobians(x), full_matrices=False)[2]
    return V[:, 0]


@bound(id="B11",
       symbol=r"E \|f - f^*\|_2 \leq \delta (\|f^*\|_{Lip} + \max_i (\|Jf(x_i)\|_2 + V_{B(x_i, \delta)}(Jf)))",
       source="sharpening Thm 6.1, Eq. 10", cost="one pass, variation by intervals, forward passes of fresh samples",
       on_request=True)  # fmt: skip
def jacobian_generalisation(context: Context) -> Iterator[Claim]:
    """Test error between samples is bounded by how steep the network is: Theorem 6.1.

    E ||f - f*|| <= delta (||f*||_Lip + max_i (||Jf(x_i)||_2 + V_{B(x_i, delta)}(Jf))) for a network that equals f* on
    the samples. The expectation is over fresh samples of the known distribution. No convexity is needed: each x is
    within delta of a sample, and the ball contains the segment between the two. `.corrected` adds max_i ||f(x_i) -
    f*(x_i)|| on the right, the middle term of the proof's Eq. 24, and needs no interpolation. The note calls the bound
    vacuous if the right side is not below the diameter of the values of f*: some constant function has no larger error.

    `.empirical` is an approximation for an unknown distribution, from held-out data (`Problem(..., test=...)`) and a
    squared error: delta is `empirical_covering_radius`, f* the labels, ||f*||_Lip the steepest secant of the labels
    (or that of `target`), and the left side the mean error on the held-out data. The right side has the middle term of
    `.corrected`. It is never called a bound.
    """
    seen = context.once(covered)
    law, target = context.distribution, context.target
    if law is None and context.lens.problem.test is not None:
        yield _empirical(context, seen)
    if law is None or target is None:
        which = "distribution= (that of the data)" if law is None else "target=Target(function, lipschitz)"
        raise Inapplicable(Assumption("known_target", None, f"give {which}"))
    L, slopes = target.steepness(seen.shape), context.each(jacobian_norm)
    right = seen.delta * (L + float((slopes + seen.variation).max()))
    # How far f is from f* on the samples, and on fresh ones; how far apart values of f* are
    off, size = float(_missed(seen, target, seen.x).max()), float(seen.told(target, seen.x).norm(dim=1).max())
    fresh = law.sample(DRAWN, context.generator).to(seen.x)
    error = _missed(seen, target, fresh)
    expected, stderr = float(error.mean()), float(error.std()) / math.sqrt(DRAWN)
    values = seen.told(target, torch.cat([seen.x[spread(seen.x, 512)], fresh[:512]]))
    wide = float(torch.cdist(values, values).max())
    # f and f* agree on the samples up to rounding, and no secant of f* exceeds its declared constant
    agrees = off <= max(1e-6, context.rounding) * (1 + size)
    fits = Assumption("interpolation", agrees, f"the outputs are up to {off:.3g} from the target's")
    x = seen.x[spread(seen.x, _PAIRED)]
    y = seen.told(target, x)
    met = steepest(x, y, 1e-6 * float(y.norm(dim=1).max()))
    why = f"it is at least {met:.4g}, but {L:.4g} was declared"
    steep = Assumption("target_lipschitz", not met > L, why, declared=target.lipschitz is not None)
    premises = (*seen.premises, seen.certified, steep)
    for part, rhs, assumed in (("", right, (*premises, fits)), ("corrected", right + off, premises)):
        vacuous = "" if rhs < wide else f"vacuous: the values of f* differ by at most {wide:.4g}"
        note = "; ".join(filter(None, (seen.note, vacuous)))
        yield Claim(expected, rhs, None, part, assumed, stderr, note=note)


def _empirical(context: Context, seen: Covered) -> Claim:
    """Theorem 6.1 where the distribution is not known: its terms from the samples and the held-out ones."""
    lens, loss = context.lens, context.lens.problem.loss
    unknown = "delta and the Lipschitz constant of the labels come from samples: an approximation, no bound"
    premises = [Assumption("known_distribution", False, unknown)]
    if not isinstance(loss, SquaredError):
        premises.insert(0, Assumption("squared_error", False, f"the loss is {loss.name}"))
        return Claim(math.nan, math.nan, None, "empirical", tuple(premises))
    # Inputs, labels and errors of the samples, and of the held-out ones
    assert lens.problem.test is not None
    sets = []
    for data in (lens.problem.data, lens.problem.test):
        parts = []
        for raw in data.chunks(AT_ONCE):
            batch = lens.problem.place(raw)
            x = batch[0].to(torch.float64).flatten(1)
            with torch.no_grad():
                f = seen.network.outputs(x)
            goal, _, _ = _targets(loss, f, batch[1])
            parts.append((x, goal, (f.detach() - goal).norm(dim=1)))
        sets.append([torch.cat(part) for part in zip(*parts, strict=True)])
    (x, y, missed), (fresh, labels, error) = sets
    # Their radius, the steepest secant of the labels, and the variation within the radius
    try:
        cover = empirical_covering_radius(x, fresh, FAILURE)
    except BadInput as few:
        return Claim(math.nan, math.nan, None, "empirical", (Assumption("held_out", False, str(few)), *premises))
    delta, note = (context.delta, "") if context.delta is not None else (cover.value, cover.note)
    every, told = torch.cat([x, fresh]), torch.cat([y, labels])
    at = spread(every, _PAIRED)
    L = steepest(every[at], told[at]) if context.target is None else context.target.steepness(seen.shape)
    variation, certified = _certified(context, delta, x)
    searched = ""
    if not certified.holds:
        try:
            found = found_variation(lens.problem, lens.model, delta, restarts=2, steps=10, generator=context.generator)
        except Refused as why:
            return Claim(math.nan, math.nan, None, "empirical", (Assumption("variation", False, str(why)), *premises))
        variation, searched = found, "the variation is from a search"
    right = delta * (L + float((context.each(jacobian_norm) + variation).max())) + float(missed.max())
    wide = float(torch.cdist(told[at], told[at]).max())
    vacuous = "" if right < wide else f"vacuous: labels differ by at most {wide:.4g}"
    told_of = f"delta = {delta:.4g}, the labels' Lipschitz constant {L:.4g}"
    note = "; ".join(filter(None, (note or "an approximation", told_of, searched, vacuous)))
    stderr = float(error.std()) / math.sqrt(len(error))
    return Claim(float(error.mean()), right, None, "empirical", tuple(premises), stderr, note=note)


def _missed(seen: Covered, target: Target, x: Tensor) -> Tensor:
    with torch.no_grad():  # ||f(x) - f*(x)||, (n,)
        found: Tensor = (seen.network.outputs(x) - seen.told(target, x)).norm(dim=1)
    return found


_PAIRED_TARGETS = 4096  #: samples of which all pairs are compared
BENT = math.sqrt(2) / (3 * math.sqrt(3))
"""Upper bound of the third derivatives of log-sum-exp along unit vectors. Each is the third central moment of numbers
whose range is at most sqrt(2), and a third central moment is at most range^3 / (6 sqrt 3)."""


@bound(
    id="B10",
    symbol=r"\max_i \|Jf(x_i)\|_2 \geq \max_{i \neq j} \frac{\|f^*_i - f^*_j\|_2 - 2\ell}{\|x_i - x_j\|_2}"
    r" - \max_i V_{B(x_i, \delta)}(Jf)",
    source="sharpening Thm 5.1, Eq. 9",
    cost="one pass, variation by intervals",
    on_request=True,
)
def jacobian_growth(context: Context) -> Iterator[Claim]:
    """Lower loss needs a network that is steeper somewhere: Theorem 5.1, lower bound on the left.

    max_{i != j} (||f*_i - f*_j|| - 2 l) / ||x_i - x_j|| - max_i V_{B(x_i, delta)}(Jf) <= max_i ||Jf(x_i)||_2, with
    l^2 = max_i c(f(x_i), f*_i) / alpha. The theorem fixes l beforehand. Here l comes from the trained network, which is
    allowed: the theorem's probability is only that of the balls covering the support, and that does not depend on l.

    For squared losses alpha = 1/2, and 1/N for "mse". For cross-entropy f is the network with softmax, f* the
    distribution of the label, c the loss minus the label's entropy, and alpha = 1/2 by Pinsker's inequality. `.sharp`
    has alpha = 1, the largest valid one: ||p - q||_1^2 >= 2 ||p - q||_2^2, because the entries of p - q sum to 0.

    The proof needs straight lines between samples, so a convex support. `.geodesic`, for spheres, takes the path along
    the sphere: the quotient is divided by pi/2, with the largest alpha.

    A left side below 0 says nothing about the network; the note then calls the bound vacuous.
    """
    # c(f, f*) >= alpha ||f - f*||^2, where f are the outputs, or the probabilities for cross-entropy
    seen, problem, loss = context.once(covered), context.lens.problem, context.lens.problem.loss
    if not isinstance(loss, SquaredError | CrossEntropy):
        raise Inapplicable(Assumption("quadratic_growth", False, f"no alpha is known for the loss {loss.name}"))
    if isinstance(loss, CrossEntropy) and loss.weight is not None:
        raise Inapplicable(Assumption("quadratic_growth", False, "with class weights the loss is not a divergence"))
    parts: list[tuple[Tensor, ...]] = []
    with closing(forwards(problem, context.lens.model)) as found:
        for f, y in found:
            if bool((loss.mass(f, y) == 0).any()):
                raise Inapplicable(Assumption("all_labelled", False, "some samples' labels are ignored"))
            parts.append(_targets(loss, f.to(torch.float64), y))
    target, cost, outputs = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    alphas = [("", 0.5 if loss.name == "half_squared_error" else 1 / problem.outputs)]
    softmaxed = isinstance(loss, CrossEntropy)
    if softmaxed:
        apart = float((target.sum(1) - 1).abs().max()) + float(target.clamp(max=0).abs().max())
        if apart > 1e-6:
            why = f"a label is not a distribution: it is off by {apart:.2g}"
            raise Inapplicable(Assumption("labels_are_distributions", False, why))
        alphas = [("", 0.5), ("sharp", 1.0)]
    # The right side, and how much it varies within the balls
    slopes = context.each(jacobian_norm(softmax=softmaxed))
    V = seen.variation
    if softmaxed:
        V = of_softmax(outputs, context.each(jacobian_norm), V, seen.delta)
    premises, convex = (*seen.premises, seen.certified), convex_support(context)
    at = spread(seen.x, _PAIRED_TARGETS)

    def claim(part: str, quotient: float, reach: float, *shape: Assumption) -> Claim:
        left = quotient - float(V.max())
        vacuous = "vacuous: below 0" if left <= 0 else ""
        note = "; ".join(told for told in (seen.note, f"l = {reach:.4g}", vacuous) if told)
        return Claim(left, float(slopes.max()), None, part, (*premises, *shape), note=note)

    for part, alpha in alphas:  # the last is the largest
        reach = math.sqrt(float(cost.max()) / alpha)
        quotient = steepest(seen.x[at], target[at].to(seen.x), 2 * reach)
        yield claim(part, quotient, reach, convex)
    if isinstance(context.distribution, Sphere):
        yield claim("geodesic", quotient / DETOUR, reach)


def _targets(loss: Loss, f: Tensor, y: object) -> tuple[Tensor, Tensor, Tensor]:
    """(f*, c, f) of one chunk. The target comes from the gradient: f - C^-1 dl/df, or softmax(f) - dl/df."""
    leaf = f.requires_grad_()
    values = loss.values(leaf, y)
    (slope,) = torch.autograd.grad(values.sum(), leaf)
    f, values = f.detach(), values.detach()
    if isinstance(loss, CrossEntropy):
        return f.softmax(1) - slope, (values - loss.least(f, y)).clamp(min=0), f
    return f - slope / loss.output_hessian(f[:1], y[:1] if isinstance(y, Tensor) else y)[0, 0, 0], values, f


def of_softmax(f: Tensor, slopes: Tensor, variation: Tensor, delta: float) -> Tensor:
    """Return upper bounds of V_{B(x_i, delta)}(J softmax(f)), (n,), from the variation of f, its slopes and outputs.

    J softmax(f) = P Jf with P = diag(p) - p p^T. In the ball, ||Jf|| <= S = ||Jf(x_i)|| + V. So the outputs differ from
    those at the centre by at most delta S, and P by at most BENT delta S. Hence ||P|| <= a, where a is the smaller of
    ||P(x_i)|| + BENT delta S and 1/2. This gives

        ||P(u) Jf(u) - P(v) Jf(v)|| <= a V + min(2 delta S BENT, a) S,    and <= 2 a S.

    The minimum holds because the difference of two positive semidefinite matrices has at most the norm of the larger.
    """
    p = f.softmax(1)
    S = slopes + variation
    a = ((2 * p * (1 - p)).max(1).values + BENT * delta * S).clamp(max=0.5)  # Gershgorin: row sums of |P|
    return torch.minimum(a * variation + torch.minimum(2 * delta * S * BENT, a) * S, 2 * a * S)
