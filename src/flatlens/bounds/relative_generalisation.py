"""Petzka, Kamp et al.: the generalisation gap from relative flatness and the sample's representativeness.

The constants of Proposition 12 for a known smooth density p on R^m: as printed, and as sharp as its proof allows.

Let p_hat(z) = mean_i k_{delta ||x_i||}(x_i, z), with k a kernel on the unit ball. For any loss l in [0, L]:

    E_Rep = int (p - E p_hat) l  +  int (E p_hat - p_hat) l

First term: (delta^2 tau / (2 m)) int Laplacian(p ||z||^2) l + O(delta^3), with tau = int ||z||^2 k.

- Printed: C_1 = tau_2 L int |Laplacian|. It has tau in place of tau / m, the part of one coordinate, and lacks the 1/2.
  (Proposition 12 prints the absolute value around the integral; then C_1 would be 0.)
- Sharp: 1 / (4 m) of that. The integral of a Laplacian is 0, so l may be replaced by l - L/2.

Second term, with probability at least 1 - Delta:

- Printed: L sqrt(alpha beta Vol / (Delta n delta^m)), with alpha = int p / ||z||^m and beta = int k^2, by the
  Cauchy-Schwarz inequality. It also holds for losses that depend on the sample, as those of trained networks do. But
  alpha and Vol are often infinite.
- Sharp: at most L/2 times int |p_hat - E p_hat|. The mean of this integral is at most gamma sqrt(beta / (n delta^m)),
  with gamma = int sqrt(p / ||z||^m). It exceeds its mean by more than sqrt(2 log(1/Delta) / n) with probability at most
  Delta (McDiarmid's inequality: one sample changes it by at most 2/n).

Both are leading orders in 1/n. The sharp constant needs a finite gamma only: sqrt(p) must be integrable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.bounds.context import NO_INPUT_LAYER, Assumption, Claim, Context, input_norm2, quantity
from flatlens.bounds.definition import bound
from flatlens.bounds.feature_robustness import worst_of
from flatlens.curvature.probes import student
from flatlens.distributions import Cube, Distribution, GaussianMixture, TruncatedGaussian
from flatlens.errors import BadInput
from flatlens.estimate import Estimate
from flatlens.grams import LayerGrams, one_pass
from flatlens.grams.weight_jacobians import DenseJacobian
from flatlens.measures.flatness import relative_flatness_ggn
from flatlens.perturbation import moved_risk, noise
from flatlens.perturbation.features import mean_square_radius, on_sphere, unmovable

_DRAWS = 20_000  #: number of samples of the density that estimate its integrals
_CHUNK = 2_000  #: number of these samples taken together


@dataclass(frozen=True)
class Constants:
    """Integrals of the density, estimated from `_DRAWS` samples of it, and of the uniform kernel on the unit ball."""

    m: int  #: dimension of the space
    laplacian_integral: float  #: int |Laplacian(p ||z||^2)| dz
    laplacian_stderr: float
    gamma: float  #: int sqrt(p / ||z||^m) dz
    gamma_stderr: float
    alpha: float  #: int p / ||z||^m dz, infinite if p(0) > 0
    volume: float  #: volume of a ball that has the support's diameter; infinite if the support is unbounded

    @property
    def tau(self) -> float:
        """Return int ||z||^2 k dz."""
        return mean_square_radius("ball", self.m, 1.0)

    @property
    def beta(self) -> float:
        """Return int k^2 dz = 1 / Vol of the unit ball."""
        return 1 / ball_volume(self.m)

    def first(self, L: float, *, sharp: bool = False) -> float:
        """Return C_1 as printed, tau_2 L int |Laplacian|, or the sharp one, 1 / (4 m) of it."""
        return self.tau * L * self.laplacian_integral * (1 / (4 * self.m) if sharp else 1.0)

    def second(self, L: float, *, sharp: bool = False) -> float:
        """Return C_2: L gamma sqrt(beta) / 2 if sharp, otherwise L sqrt(alpha beta Vol) as printed.

        The printed one is still to be divided by sqrt(Delta).
        """
        if sharp:
            return L * self.gamma * math.sqrt(self.beta) / 2
        return L * math.sqrt(self.alpha * self.beta * self.volume)


def ball_volume(m: int) -> float:
    """Return the volume of the unit ball in R^m.

    >>> round(ball_volume(3) / math.pi, 6)
    1.333333
    """
    return math.exp(m / 2 * math.log(math.pi) - math.lgamma(m / 2 + 1))


def laplacian(distribution: Distribution, z: Tensor) -> Tensor:
    """Return Laplacian(p ||z||^2) / p at points z (n, m) of the support, (n,).

    This is ||z||^2 (Laplacian(log p) + ||grad log p||^2) + 4 <z, grad log p> + 2 m. The mean of its absolute value
    under p is int |Laplacian(p ||z||^2)|.
    """
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(distribution.log_density(z).sum(), z, create_graph=True)
        bent = torch.zeros(len(z), dtype=z.dtype)
        for j in range(z.shape[1]):
            if slope.requires_grad:
                bent += torch.autograd.grad(slope[:, j].sum(), z, retain_graph=True)[0][:, j]
    z, slope = z.detach(), slope.detach()
    bent = bent + slope.square().sum(1)
    return z.square().sum(1) * bent + 4 * (z * slope).sum(1) + 2 * z.shape[1]


def constants(distribution: Distribution, generator: torch.Generator) -> Constants:
    """Return the constants of a density that is smooth on all of R^m."""
    m = distribution.dimension
    z = distribution.sample(_DRAWS, generator)
    values = torch.cat([laplacian(distribution, z[k : k + _CHUNK]) for k in range(0, _DRAWS, _CHUNK)]).abs()
    at_zero = float(distribution.log_density(torch.zeros(1, m, dtype=torch.float64)))
    alpha = math.inf if at_zero > -math.inf else float(z.norm(dim=1).pow(-m).mean())
    volume = ball_volume(m) * (distribution.diameter / 2) ** m
    # Terms whose mean is int sqrt(p / ||z||^m), by importance sampling. Half of the samples come from p; for Gaussian
    # mixtures, with doubled covariances, because the square root of a Gaussian has these. The other half lie at
    # distances r = R u^2 from 0, u uniform in [0, 1], which removes the singularity at 0 from the terms
    n, wide = len(z) // 2, distribution
    if isinstance(distribution, GaussianMixture):
        wide = GaussianMixture(distribution.means, 2 * distribution.covariances, distribution.weights)
    R = 2 * float(z.norm(dim=1).max())
    r = R * torch.rand(n, dtype=torch.float64, generator=generator).square()
    at = torch.cat([wide.sample(n, generator), r[:, None] * on_sphere(torch.Size((n, m)), generator)])
    r = at.norm(dim=1)
    area = m * ball_volume(m)
    along = torch.where(r < R, 1 / (2 * (R * r).sqrt() * area * r.pow(m - 1)), 0.0)
    proposed = (wide.log_density(at).exp() + along) / 2
    terms = (distribution.log_density(at) / 2).exp() / r.pow(m / 2) / proposed
    return Constants(m, *_mean(values), *_mean(terms), alpha, volume)


def _mean(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


_FAILURE = 0.05  #: Delta, the share of sample sets for which the bound may fail
_MOVES = 64  #: draws of the samples' neighbours


def rate(n: int, m: int) -> float:
    """Return |S|^(-2/(4+m)) = delta^2."""
    return math.exp(-2 / (4 + m) * math.log(n))


def sharp_right(
    n: int, m: int, kappa: float, first: float, second: float, tau: float, L: float,
    delta: float | None = None, failure: float = _FAILURE,
) -> float:  # fmt: skip
    """Return the same with sharp constants, for any width delta of the kernels; None is |S|^(-1/(4+m)).

    delta^2 (tau kappa_Tr / (2 m) + C_1) + C_2 / sqrt(n delta^m) + L sqrt(log(1/Delta) / (2 n)); at |S|^(-1/(4+m)) the
    second term is delta^2 C_2.
    """
    delta = math.sqrt(rate(n, m)) if delta is None else delta
    second = second * math.exp(-(math.log(n) + m * math.log(delta)) / 2)
    return delta**2 * (tau * kappa / (2 * m) + first) + second + L * math.sqrt(math.log(1 / failure) / (2 * n))


def widths(n: int, m: int) -> list[float]:
    """Return the widths delta of kernels among which `.sharp.delta` chooses: up to 1, in ratios of 2^(1/4)."""
    theirs = math.sqrt(rate(n, m))
    return [delta for k in range(-16, 17) if (delta := theirs * 2 ** (k / 4)) <= 1]


def uniform_right(representativeness: float, term: float, repeats: int = 1) -> float:
    """Return Theorem 15's right side: inf E_Rep + (delta^2 d/2) kappa^phi, d times where its printed sum is read."""
    return representativeness + repeats * term


@bound(id="B14", symbol=r"\mathcal{E}_{gen} \lesssim |S|^{-\frac{2}{4+m}} (\kappa_{Tr}/(2m) + C_1 + C_2/\sqrt{\Delta})",
       source="relative2021 Thm 6, 11, Prop. 12, Thm 15, section 6",
       cost="draws of the density; a search of about 100 gradients; kernel densities", on_request=True)  # fmt: skip
def relative_generalisation(context: Context) -> Iterator[Claim]:
    r"""Relative flatness and representativeness bound the generalisation gap.

    The bound is |S|^(-2/(4+m)) (kappa_Tr / (2 m) + C_1 + C_2 / sqrt(Delta)), up to higher orders in 1/|S|. The left
    side is the gap on held-out data.

    The undotted row is Theorem 11 with the constants of Proposition 12 as printed, for the layer that reads the
    network's input (there, the density of the features is that of the data), with the uniform kernel and Delta = 0.05.
    alpha = int p / ||z||^m diverges logarithmically if p(0) > 0, and Vol diverges if the support is unbounded. Then the
    theorem does not apply, and its right side is infinite. `.sharp` has constants that need neither, with the same rate
    and for the same networks (`bounds.relative_generalisation` derives them). L, the largest possible loss, is taken to
    be the largest one observed, and higher orders in 1/n are dropped: declare these as bounded_loss and large_sample.
    `.sharp.delta` is the smallest right side over several widths delta of the local densities, which section 7 leaves
    to future work: delta^2 (tau kappa_Tr / (2 m) + C_1) + C_2 / sqrt(n delta^m) + L sqrt(log(K / Delta) / (2 n)), with
    Delta divided among the K widths, so that the choice may depend on kappa.

    `.representativeness` and `.representativeness.sharp` are Proposition 12 alone. Left is |E_Rep|: the risk on
    held-out data minus the risk near the samples, at x_i + xi with xi uniform in the ball of radius delta ||x_i||,
    delta = n^(-1/(4+m)). Right are the same constants without kappa_Tr. Labels near a sample are those of the target if
    it is given, else the sample's own. The tightness shows how far this sample is from the worst case.

    `.uniform` is Theorem 15 for the last linear layer, with its infimum over all laws of A at the worst A found, where
    E_Rep = gap - E_F: this is Theorem 14 in another form. `.uniform.published` adds the term d times; the printed sum
    over s is an error, since kappa^phi contains it. `.kde` is the approximation of Figure 4, kernel densities of random
    splits beside kappa_Tr of the last linear layer. It is not a bound, and is never reported to hold.
    """
    gap = context.measured("generalisation_gap")
    held_out = Assumption("held_out_data", gap.kind != "undefined", gap.note)
    yield from _known_density(context, gap, held_out)
    last = next(reversed(context.layers), None)
    if last is None:
        return
    # Theorem 15, with one sum and with two. The held-out error is in both sides, and cancels in the slack
    if not (why := unmovable(context.layers[last])):
        found = worst_of(context, last, context.layers[last])
        g, d, _ = context.layers[last].matrix.W.shape
        labels = context.declare("locally_constant_labels")
        premises = (held_out, *found.assumptions, found.semidefinite, labels)
        beyond = gap.value - found.change + found.gradient + found.dip + found.rest
        error = max(1e-6, 2 * found.expansion.error) * abs(found.change) / max(abs(gap.value), 1e-300)
        for part, repeats in (("uniform", 1), ("uniform.published", g * d)):
            right, L = uniform_right(beyond, found.uniform, repeats), _largest_loss(context)
            note = f"delta = {found.expansion.delta:.3g}; {_vacuous(right, L)}"
            yield Claim(gap.value, right, last, part, premises, rounding=min(error, 0.01), note=note)
    # Figure 4: |int (p - p_hat) l| of kernel densities + |S|^(-2/(4+m)) kappa_Tr / (2 m)
    estimated = "p and p_hat are kernel densities of random splits: an approximation, no bound"
    unknown = (Assumption("known_density", False, estimated), held_out)
    shift = context.measured("representativeness")
    if why or shift.kind == "undefined":
        yield Claim(gap.value, math.nan, last, "kde", unknown, note=why or shift.note)
        return
    linear_map = context.layers[last].linear_map
    assert linear_map is not None
    m = linear_map[1].numel()
    right = shift.value + rate(context.n, m) * context.measured("relative_flatness", last).value / (2 * m)
    error, note = math.hypot(gap.stderr, shift.stderr), f"an approximation; {_vacuous(right, _largest_loss(context))}"
    yield Claim(gap.value, right, last, "kde", unknown, error, note=note)


def _known_density(context: Context, gap: Estimate, held_out: Assumption) -> Iterator[Claim]:
    # Theorem 11 and Proposition 12 need the density, and the layer that reads the data
    layer, density, smoothly = context.first, _density(context), context.declare("smooth_density")
    if isinstance(context.distribution, GaussianMixture):
        smoothly = Assumption("smooth_density", True)
    elif isinstance(context.distribution, Cube | TruncatedGaussian):
        smoothly = Assumption("smooth_density", False, "the density jumps at the faces of its cube")
    if layer is None or not density.holds or smoothly.holds is False:
        missing = (density, smoothly) if layer else (NO_INPUT_LAYER, density)
        for part in ("", "sharp", "sharp.delta", "representativeness", "representativeness.sharp"):
            left = math.nan if part.startswith("representativeness") else gap.value
            yield Claim(left, math.nan, layer, part, missing)
        return
    assert context.distribution is not None
    found, n, L = constants(context.distribution, context.generator), context.n, _largest_loss(context)
    first, second = found.first(L, sharp=True), found.second(L, sharp=True)
    drawn = rate(n, found.m) * (
        first * found.laplacian_stderr / found.laplacian_integral + second * found.gamma_stderr / found.gamma
    )

    def claims(left: float, error: float, kappa: float, part: str, premises: tuple[Assumption, ...]) -> Iterator[Claim]:
        # Theorem 11's right side: |S|^(-2/(4+m)) (kappa_Tr / (2 m) + C_1 + C_2 / sqrt(Delta))
        terms = kappa / (2 * found.m) + found.first(L) + found.second(L) / math.sqrt(_FAILURE)
        printed = rate(n, found.m) * terms
        sharp = sharp_right(n, found.m, kappa, first, second, found.tau, L)
        infinite, note = _infinite(found), _vacuous(printed, L, _infinite(found))
        finite = Assumption("finite_constants", not infinite, infinite)
        yield Claim(left, printed, layer, part, (finite, *premises), error, note=note)
        below, error = f"{part}.sharp" if part else "sharp", math.hypot(error, drawn)
        yield Claim(left, sharp, layer, below, premises, error, note=_vacuous(sharp, L))
        # the best of several widths, each with its part of Delta
        tried = widths(n, found.m)
        failure = _FAILURE / len(tried)
        rights = [sharp_right(n, found.m, kappa, first, second, found.tau, L, delta, failure) for delta in tried]
        best, delta = min(zip(rights, tried, strict=True))
        told = f"delta = {delta:.3g}, the theorem's is {math.sqrt(rate(n, found.m)):.3g}"
        if not part:
            moved = delta**2 * first * found.laplacian_stderr / found.laplacian_integral
            moved += (
                second * math.exp(-(math.log(n) + found.m * math.log(delta)) / 2) * found.gamma_stderr / found.gamma
            )
            error = math.hypot(gap.stderr, moved)
            yield Claim(left, best, layer, "sharp.delta", premises, error, note=f"{told}; {_vacuous(best, L)}")

    kappa = context.measured("relative_flatness", layer).value
    premises = (held_out, density, smoothly, context.local_minimum, *_declared(context))
    yield from claims(gap.value, gap.stderr, kappa, "", premises)
    # |E_Rep| of Proposition 12 for the uniform kernel, with its standard error; NaN without held-out data
    risk, lens, left, spread = context.measured("test_loss"), context.lens, math.nan, 0.0
    if risk.kind != "undefined":
        near, delta = torch.empty(_MOVES, dtype=torch.float64), math.sqrt(rate(n, found.m))
        for k in range(_MOVES):
            move = noise(delta, 1.0, context.generator, "ball")
            near[k] = moved_risk(lens.problem, move, layer, labels=context.target, model=lens.model)
        mean, stderr = student(near)
        left, spread = abs(risk.value - float(mean)), math.hypot(risk.stderr, float(stderr))
    premises = (held_out, density, smoothly, *_declared(context, labels=context.target is None))
    yield from claims(left, spread, 0.0, "representativeness", premises)


def _density(context: Context) -> Assumption:
    # The data's density is known, and a layer's features are the data
    name, found, layer = "known_density", context.distribution, context.first
    if found is None:
        return Assumption(name, False, "no distribution was given: check_bounds(distribution=...)")
    # With respect to Lebesgue's measure, and by a formula
    known = found.intrinsic == found.dimension
    if known:
        try:
            found.log_density(torch.zeros(1, found.dimension, dtype=torch.float64))
        except BadInput:
            known = False
    if not known:
        return Assumption(name, False, f"no density of {type(found).__name__} on R^{found.dimension} is known")
    if layer is not None:
        weight = context.layers[layer]
        if not weight.dense or weight.matrix.W.shape[2] != found.dimension:
            return Assumption(name, False, f"{layer} does not read vectors of R^{found.dimension}")
    return Assumption(name, True)


def _infinite(found: Constants) -> str:
    # Which of the printed constants are infinite
    alpha = "int p/||z||^m diverges as p(0) > 0" if math.isinf(found.alpha) else ""
    volume = "the support's volume is infinite" if math.isinf(found.volume) else ""
    return ", ".join(filter(None, (alpha, volume)))


def _declared(context: Context, *, labels: bool = True) -> tuple[Assumption, ...]:
    names = (*(("locally_constant_labels",) if labels else ()), "iid_samples", "bounded_loss", "large_sample")
    return tuple(context.declare(name) for name in names)


def _largest_loss(context: Context) -> float:
    seen = [context.lens.outcomes("data").losses]
    if context.lens.problem.test is not None:
        seen.append(context.lens.outcomes("test").losses)
    return max(float(losses.max()) for losses in seen)


def _vacuous(right: float, L: float, why: str = "") -> str:
    if not right >= L:
        return f"the largest loss is {L:.3g}"
    return f"vacuous: no gap exceeds the largest loss, {L:.3g}" + (f"; {why}" if why else "")


@bound(id="B16", symbol=r"\kappa_{Tr}^\phi = c \|W\|_F^2 \overline{\|\phi(x)\|^2}",
       source="reparam2019 section 2; relative2021 section 4 (i)", cost="two passes", on_request=True)  # fmt: skip
def ridge_reduction(context: Context) -> Iterator[Claim]:
    r"""Flatness of a linear head under a squared error is the ridge penalty: kappa_Tr = c ||W||_F^2 mean ||phi(x)||^2.

    An equality, for the layer whose result W phi(x) + b is the output, and a loss with the second derivative c I at
    every sample: c = 1 for the half squared error, 2 / N for torch's mean over N outputs. With phi = id this is the
    papers' linear regression; phi may be any network below. The undotted row is per sample, and `.least` has its sides
    exchanged: both hold only where they are equal.

    `.eigenvalue` and `.eigenvalue.least` are the measure of 2019: ||W||_F^2 lmax(H) = c ||W||_F^2 lmax(mean phi phi^T).

    The papers print the constants with sums over the samples, sum_x 2 Tr(x x^T) and 2 lmax(sum_x x x^T). The Hessian is
    that of a mean over samples, so these constants are |S| times too large.
    """
    for layer, weight in context.readable.items():
        if weight.dense and bool((context.each(distance_from_output, layer) <= context.rounding).all()):
            break
    else:
        yield Claim(math.nan, math.nan, assumptions=(Assumption("linear_head", False, "no dense layer's result is f"),))
        return
    # The c of the loss's second derivative c I, whether it is that at every sample, and mean phi phi^T
    lens, least, c, apart, moment = context.lens, math.inf, -math.inf, 0.0, torch.zeros(())
    walk = one_pass(lens.problem, lens.model, lens.plan, needs={"C", "G"}, progress=context.progress)
    with closing(walk) as chunks:
        for chunk in chunks:
            g = chunk.layers[layer]
            assert g.x is not None
            traces = g.C.diagonal(dim1=1, dim2=2).mean(1)
            least, c = min(least, float(traces.min())), max(c, float(traces.max()))
            apart = max(apart, float((g.C - torch.diag_embed(traces[:, None].expand_as(g.f))).abs().max()))
            phi = g.x.flatten(1).double().cpu()
            moment = moment + phi.mT @ phi / context.n
    constant = max(apart, c - least) <= context.rounding * c
    same = Assumption("squared_error", constant, "the loss's second derivative is not c I")
    # The two equalities, each as two inequalities
    W2, premises = float(weight.matrix.W.square().sum()), (same, context.unshared(layer), context.counted([layer]))
    kappa, penalty = context.each(relative_flatness_ggn, layer), c * W2 * context.each(input_norm2, layer)
    yield Claim(kappa, penalty, layer, "", premises)
    yield Claim(penalty, kappa, layer, "least", premises)
    if same.holds:
        top = float(torch.linalg.eigvalsh(moment)[-1])
        largest = context.measured("layer_sharpness(rtol=1e-09)", layer, "kappa").value
        yield Claim(largest, c * W2 * top, layer, "eigenvalue", premises)
        yield Claim(c * W2 * top, largest, layer, "eigenvalue.least", premises)


@quantity(place="weight", needs={"K"})
def distance_from_output(g: LayerGrams) -> Tensor:
    """Return max |J - I| of the layer's J = df/dz; infinite where its result is not an output's size."""
    if not isinstance(g.weight, DenseJacobian) or g.weight.J.shape[1] != g.weight.J.shape[2]:
        return torch.full((len(g.C),), math.inf, dtype=torch.float64, device=g.C.device)
    J = g.weight.J.double()
    return (J - torch.eye(J.shape[1], dtype=J.dtype, device=J.device)).abs().amax((1, 2))
