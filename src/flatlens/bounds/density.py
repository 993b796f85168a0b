"""The constants of Proposition 12 for a known smooth density p on R^m: as printed, and as sharp as its proof allows.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.distributions import Distribution, GaussianMixture
from flatlens.errors import BadInput
from flatlens.perturbation.rotations import mean_square_radius, on_sphere

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
        """Return C_1."""
        return first_constant(self.tau, L, self.laplacian_integral, self.m if sharp else None)

    def second(self, L: float, *, sharp: bool = False) -> float:
        """Return C_2: L gamma sqrt(beta) / 2 if sharp, otherwise L sqrt(alpha beta Vol) as printed.

        The printed one is still to be divided by sqrt(Delta).
        """
        if sharp:
            return L * self.gamma * math.sqrt(self.beta) / 2
        return L * math.sqrt(self.alpha * self.beta * self.volume)


def first_constant(tau: float, L: float, laplacian_integral: float, m: int | None) -> float:
    """Return C_1 as printed, tau_2 L int |Laplacian|; for a given m the sharp one, 1 / (4 m) of it."""
    return tau * L * laplacian_integral * (1.0 if m is None else 1 / (4 * m))


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
        laplacian = torch.zeros(len(z), dtype=z.dtype)
        for j in range(z.shape[1]):
            if slope.requires_grad:
                laplacian += torch.autograd.grad(slope[:, j].sum(), z, retain_graph=True)[0][:, j]
    z, slope = z.detach(), slope.detach()
    bent = laplacian + slope.square().sum(1)
    return z.square().sum(1) * bent + 4 * (z * slope).sum(1) + 2 * z.shape[1]


def constants(distribution: Distribution, generator: torch.Generator) -> Constants:
    """Return the constants of a density that is smooth on all of R^m."""
    m = distribution.dimension
    z = distribution.sample(_DRAWS, generator)
    values = torch.cat([laplacian(distribution, z[k : k + _CHUNK]) for k in range(0, _DRAWS, _CHUNK)]).abs()
    at_zero = float(distribution.log_density(torch.zeros(1, m, dtype=torch.float64)))
    alpha = math.inf if at_zero > -math.inf else float(z.norm(dim=1).pow(-m).mean())
    volume = ball_volume(m) * (distribution.diameter / 2) ** m
    return Constants(m, *_mean(values), *_mean(_root_terms(distribution, z, generator)), alpha, volume)


def _mean(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


def _root_terms(distribution: Distribution, z: Tensor, generator: torch.Generator) -> Tensor:
    """Return terms whose mean is int sqrt(p / ||z||^m), by importance sampling from a mixture of two densities.

    Half of the samples come from p; for Gaussian mixtures, with doubled covariances, because the square root of a
    Gaussian has these. The other half lie at distances r = R u^2 from 0, u uniform in [0, 1], which removes the
    singularity at 0 from the terms.
    """
    m, n, wide = z.shape[1], len(z) // 2, distribution
    if isinstance(distribution, GaussianMixture):
        wide = GaussianMixture(distribution.means, 2 * distribution.covariances, distribution.weights)
    R = 2 * float(z.norm(dim=1).max())
    r = R * torch.rand(n, dtype=torch.float64, generator=generator).square()
    at = torch.cat([wide.sample(n, generator), r[:, None] * on_sphere(torch.Size((n, m)), generator)])
    r = at.norm(dim=1)
    area = m * ball_volume(m)
    along = torch.where(r < R, 1 / (2 * (R * r).sqrt() * area * r.pow(m - 1)), 0.0)
    proposed = (wide.log_density(at).exp() + along) / 2
    terms: Tensor = (distribution.log_density(at) / 2).exp() / r.pow(m / 2) / proposed
    return terms


def has_density(distribution: Distribution) -> bool:
    """Return whether the distribution has a density (with respect to Lebesgue's measure) that can be computed."""
    if distribution.intrinsic < distribution.dimension:
        return False
    try:
        distribution.log_density(torch.zeros(1, distribution.dimension, dtype=torch.float64))
    except BadInput:
        return False
    return True
