"""Petzka, Kamp et al.: the generalisation gap from relative flatness and the sample's representativeness."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.density import Constants, constants, has_density
from flatlens.bounds.relative import worst_of
from flatlens.curvature.probes import student
from flatlens.distributions import Cube, GaussianMixture
from flatlens.estimate import Estimate
from flatlens.perturbation import moved_risk, noise
from flatlens.perturbation.features import unmovable

_FAILURE = 0.05  #: Delta, the share of sample sets for which the bound may fail
_MOVES = 64  #: draws of the samples' neighbours


def rate(n: int, m: int) -> float:
    """Return |S|^(-2/(4+m)) = delta^2."""
    return math.exp(-2 / (4 + m) * math.log(n))


def printed_right(n: int, m: int, kappa: float, first: float, second: float) -> float:
    """Return Theorem 11's right side: |S|^(-2/(4+m)) (kappa_Tr / (2 m) + C_1 + C_2 / sqrt(Delta))."""
    return rate(n, m) * (kappa / (2 * m) + first + second / math.sqrt(_FAILURE))


def sharp_right(n: int, m: int, kappa: float, first: float, second: float, tau: float, L: float) -> float:
    """Return the same with sharp constants.

    |S|^(-2/(4+m)) (tau kappa_Tr / (2 m) + C_1 + C_2) + L sqrt(log(1/Delta) / (2 n)).
    """
    return rate(n, m) * (tau * kappa / (2 * m) + first + second) + L * math.sqrt(math.log(1 / _FAILURE) / (2 * n))


def uniform_right(representativeness: float, term: float, repeats: int = 1) -> float:
    """Return Theorem 15's right side: inf E_Rep + (delta^2 d/2) kappa^phi.

    The term is added d times where its printed sum over s is read.
    """
    return representativeness + repeats * term


@bound(
    id="B14",
    symbol=r"\mathcal{E}_{gen} \lesssim |S|^{-\frac{2}{4+m}} (\kappa_{Tr}/(2m) + C_1 + C_2/\sqrt{\Delta})",
    source="relative2021 Thm 6, 11, Prop. 12, Thm 15, section 6",
    cost="draws of the density; a search of about 100 gradients; kernel densities",
    on_request=True,
)
def relative_generalisation(context: Context) -> Iterator[Claim]:
    r"""Relative flatness and representativeness bound the generalisation gap.

    The bound is |S|^(-2/(4+m)) (kappa_Tr / (2 m) + C_1 + C_2 / sqrt(Delta)), up to higher orders in 1/|S|. The left
    side is the gap on held-out data.

    The undotted row is Theorem 11 with the constants of Proposition 12 as printed, for the layer that reads the
    network's input (there, the density of the features is that of the data), with the uniform kernel and Delta = 0.05.
    alpha = int p / ||z||^m diverges logarithmically if p(0) > 0, and Vol diverges if the support is unbounded. Then the
    theorem does not apply, and its right side is infinite. `.sharp` has constants that need neither, with the same rate
    and for the same networks (`bounds.density` derives them). L, the largest possible loss, is taken to be the largest
    one observed, and higher orders in 1/n are dropped: declare these as bounded_loss and large_sample.

    `.representativeness` and `.representativeness.sharp` are Proposition 12 alone. Left is |E_Rep|: the risk on
    held-out data minus the risk near the samples, at x_i + xi with xi uniform in the ball of radius delta ||x_i||,
    delta = n^(-1/(4+m)). Right are the same constants without kappa_Tr. Labels near a sample are those of the target if
    it is given, else the sample's own. The tightness shows how far this sample is from the worst case.

    `.uniform` is Theorem 15 for the last linear layer, with its infimum over all laws of A at the worst A found, where
    E_Rep = gap - E_F: this is Theorem 14 in another form. `.uniform.published` adds the term d times; the printed sum
    over s is an error, since kappa^phi contains it. `.kde` is the approximation of Figure 4, kernel densities of random
    splits beside kappa_Tr of the last linear layer. It is no bound, and is never reported to hold.
    """
    gap, held_out = _gap(context)
    yield from _known_density(context, gap, held_out)
    last = next(reversed(context.layers), None)
    if last is None:
        return
    if not (why := unmovable(context.layers[last])):
        yield from _uniform(context, last, gap, held_out)
    yield _kde(context, last, gap, held_out, why)


def _gap(context: Context) -> tuple[Estimate, Assumption]:
    found = context.measured("generalisation_gap")
    held = found.kind != "undefined"
    return found, Assumption("held_out_data", held, "" if held else found.note)


def _known_density(context: Context, gap: Estimate, held_out: Assumption) -> Iterator[Claim]:
    """Yield Theorem 11, as printed and sharp."""
    layer, density = context.first, _density(context)
    smoothly = _smooth_density(context)
    if layer is None or not density.holds or smoothly.holds is False:
        missing = (density, smoothly) if layer is not None else (_no_first(), density)
        for part in ("", "sharp"):
            yield Claim(gap.value, math.nan, layer, part, missing)
        for part in ("representativeness", "representativeness.sharp"):
            yield Claim(math.nan, math.nan, layer, part, missing)
        return
    assert context.distribution is not None
    found, n = constants(context.distribution, context.generator), context.n
    kappa, L = context.measured("relative_flatness", layer).value, _largest_loss(context)
    premises = (held_out, density, smoothly, context.local_minimum, *_declared(context))
    first, second = found.first(L, sharp=True), found.second(L, sharp=True)
    printed = printed_right(n, found.m, kappa, found.first(L), found.second(L))
    sharp = sharp_right(n, found.m, kappa, first, second, found.tau, L)
    drawn = rate(n, found.m) * (
        first * found.laplacian_stderr / found.laplacian_integral + second * found.gamma_stderr / found.gamma
    )
    note = _vacuous(printed, L, _infinite(found))
    yield Claim(gap.value, printed, layer, "", (_finite(found), *premises), gap.stderr, note=note)
    error = math.hypot(gap.stderr, drawn)
    yield Claim(gap.value, sharp, layer, "sharp", premises, error, note=_vacuous(sharp, L))
    left, spread = _representativeness(context, layer, found.m)
    premises = (held_out, density, smoothly, *_declared(context, labels=context.target is None))
    printed = printed_right(n, found.m, 0.0, found.first(L), found.second(L))
    sharp = sharp_right(n, found.m, 0.0, first, second, found.tau, L)
    note = _vacuous(printed, L, _infinite(found))
    yield Claim(left, printed, layer, "representativeness", (_finite(found), *premises), spread, note=note)
    error = math.hypot(spread, drawn)
    yield Claim(left, sharp, layer, "representativeness.sharp", premises, error, note=_vacuous(sharp, L))


def _representativeness(context: Context, layer: str, m: int) -> tuple[float, float]:
    """Return |E_Rep| of Proposition 12 for the uniform kernel, with its standard error; NaN without held-out data."""
    risk, delta = context.measured("test_loss"), math.sqrt(rate(context.n, m))
    if risk.kind == "undefined":
        return math.nan, 0.0
    near = [
        moved_risk(
            context.lens.problem,
            noise(delta, 1.0, context.generator, "ball"),
            layer,
            labels=context.target,
            model=context.lens.model,
        )
        for _ in range(_MOVES)
    ]
    mean, stderr = student(torch.tensor(near, dtype=torch.float64))
    return abs(risk.value - float(mean)), math.hypot(risk.stderr, float(stderr))


def _density(context: Context) -> Assumption:
    """Return the assumption that the data's density is known, and a layer's features are the data."""
    name, found, layer = "known_density", context.distribution, context.first
    if found is None:
        return Assumption(name, False, "no distribution was given: check_bounds(distribution=...)")
    if not has_density(found):
        return Assumption(name, False, f"no density of {type(found).__name__} on R^{found.dimension} is known")
    if layer is not None:
        weight = context.layers[layer]
        if not weight.dense or weight.matrix.W.shape[2] != found.dimension:
            return Assumption(name, False, f"{layer} does not read vectors of R^{found.dimension}")
    return Assumption(name, True)


def _no_first() -> Assumption:
    return Assumption("reads_the_input", False, "the network's input is not read by exactly one linear layer")


def _smooth_density(context: Context) -> Assumption:
    """Return the assumption of a smooth density: true for Gaussians, false for a cube.

    For other distributions the user declares it.
    """
    if isinstance(context.distribution, GaussianMixture):
        return Assumption("smooth_density", True)
    if isinstance(context.distribution, Cube):
        return Assumption("smooth_density", False, "the density of a cube jumps at its faces")
    return context.declare("smooth_density")


def _finite(found: Constants) -> Assumption:
    why = _infinite(found)
    return Assumption("finite_constants", not why, why)


def _infinite(found: Constants) -> str:
    """Return which of the printed constants are infinite."""
    reasons = []
    if math.isinf(found.alpha):
        reasons.append("int p/||z||^m diverges as p(0) > 0")
    if math.isinf(found.volume):
        reasons.append("the support's volume is infinite")
    return ", ".join(reasons)


def _declared(context: Context, *, labels: bool = True) -> tuple[Assumption, ...]:
    names = (*(("locally_constant_labels",) if labels else ()), "iid_samples", "bounded_loss", "large_sample")
    return tuple(context.declare(name) for name in names)


def _largest_loss(context: Context) -> float:
    seen = [context.lens.outcomes("data").losses]
    if context.lens.problem.test is not None:
        seen.append(context.lens.outcomes("test").losses)
    return max(float(losses.max()) for losses in seen)


def _vacuous(right: float, L: float, why: str = "") -> str:
    """Return a note if the bound exceeds every possible gap."""
    if not right >= L:
        return f"the largest loss is {L:.3g}"
    return f"vacuous: no gap exceeds the largest loss, {L:.3g}" + (f"; {why}" if why else "")


def _uniform(context: Context, layer: str, gap: Estimate, held_out: Assumption) -> Iterator[Claim]:
    """Yield Theorem 15, with one sum and with two. The held-out error is in both sides, and cancels in the slack."""
    found = worst_of(context, layer, context.layers[layer])
    g, d, _ = context.layers[layer].matrix.W.shape
    labels = context.declare("locally_constant_labels")
    premises = (held_out, *found.assumptions, found.semidefinite, labels)
    beyond = gap.value - found.change + found.gradient + found.dip + found.rest
    error = max(1e-6, 2 * found.expansion.error) * abs(found.change) / max(abs(gap.value), 1e-300)
    for part, repeats in (("uniform", 1), ("uniform.published", g * d)):
        right, L = uniform_right(beyond, found.uniform, repeats), _largest_loss(context)
        note = f"delta = {found.expansion.delta:.3g}; {_vacuous(right, L)}"
        yield Claim(gap.value, right, layer, part, premises, rounding=min(error, 0.01), note=note)


def _kde(context: Context, layer: str, gap: Estimate, held_out: Assumption, why: str) -> Claim:
    """Return Figure 4's claim: |int (p - p_hat) l| of kernel densities + |S|^(-2/(4+m)) kappa_Tr / (2 m)."""
    estimated = "p and p_hat are kernel densities of random splits: an approximation, no bound"
    premises = (Assumption("known_density", False, estimated), held_out)
    shift = context.measured("representativeness")
    if why or shift.kind == "undefined":
        return Claim(gap.value, math.nan, layer, "kde", premises, note=why or shift.note)
    linear_map = context.layers[layer].linear_map
    assert linear_map is not None
    m = linear_map[1].numel()
    kappa = context.measured("relative_flatness", layer).value
    right = shift.value + rate(context.n, m) * kappa / (2 * m)
    error, L = math.hypot(gap.stderr, shift.stderr), _largest_loss(context)
    return Claim(gap.value, right, layer, "kde", premises, error, note=f"an approximation; {_vacuous(right, L)}")
