"""Proposition 12's constants against closed forms and quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor

import flatlens as fl
from flatlens.bounds import relative_generalisation
from flatlens.distributions import Distribution, GaussianMixture


def normal(m: int) -> GaussianMixture:
    return GaussianMixture(torch.zeros(1, m), torch.eye(m)[None], torch.ones(1))


def test_the_laplacian_of_a_normal_density_is_its_closed_form() -> None:
    z = torch.randn(7, 3).double()
    r2 = z.square().sum(1)
    torch.testing.assert_close(relative_generalisation.laplacian(normal(3), z), r2 * (r2 - 3) - 4 * r2 + 6)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_the_integrals_of_a_normal_density(m: int) -> None:
    """In r = ||z||: int |r^4 - (m + 4) r^2 + 2 m| p, by quadrature; int sqrt(p / r^m) by a Gamma function."""
    found = relative_generalisation.constants(normal(m), torch.Generator().manual_seed(0))
    area, scale = m * relative_generalisation.ball_volume(m), (2 * math.pi) ** (-m / 2)

    def inside(r: float) -> float:
        return abs(r**4 - (m + 4) * r**2 + 2 * m) * scale * math.exp(-(r**2) / 2) * area * r ** (m - 1)

    bend = integrate.quad(inside, 0, 12, limit=200)[0]
    gamma = math.sqrt(scale) * area * 2 ** (m / 2 - 1) * math.gamma(m / 4)
    assert found.laplacian_integral == pytest.approx(bend, abs=4 * found.laplacian_stderr)
    assert found.gamma == pytest.approx(gamma, abs=4 * found.gamma_stderr)
    assert found.laplacian_stderr < 0.03 * bend
    assert found.gamma_stderr < 0.03 * gamma
    assert found.alpha == found.volume == math.inf
    assert found.tau == pytest.approx(m / (m + 2))


class Bump(Distribution):
    """p = (8/3) sin^4(pi (x - 1)) on [1, 2]: smooth, away from 0, of bounded support."""

    dimension, intrinsic, diameter, support_is_convex = 1, 1, 1.0, True

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        x = torch.rand(8 * n, 1, generator=generator, dtype=torch.float64) + 1
        kept = torch.rand(8 * n, generator=generator, dtype=torch.float64) < (math.pi * (x[:, 0] - 1)).sin() ** 4
        return x[kept][:n]

    def log_density(self, x: Tensor) -> Tensor:
        inside = (x[:, 0] > 1) & (x[:, 0] < 2)
        at = torch.where(inside, x[:, 0], 1.5)
        return torch.where(inside, math.log(8 / 3) + 4 * (math.pi * (at - 1)).sin().log(), -math.inf)

    def covering_radius(self, samples: int, failure: float, *, rule: str = "exact") -> fl.Estimate:
        raise NotImplementedError

    def extreme_points(self, most: int, generator: torch.Generator) -> Tensor:
        return torch.zeros(0, 1).double()


def test_a_density_that_the_proposition_allows_has_finite_constants() -> None:
    found = relative_generalisation.constants(Bump(), torch.Generator().manual_seed(0))
    x = torch.linspace(1, 2, 200_001, dtype=torch.float64)
    p = 8 / 3 * (math.pi * (x - 1)).sin() ** 4
    slope = (p * x**2).diff()  # int |(p x^2)''| is the variation of (p x^2)'
    assert found.laplacian_integral == pytest.approx(float(slope.diff().abs().sum() / (x[1] - x[0])), rel=0.03)
    assert found.alpha == pytest.approx(float(torch.trapezoid(p / x, x)), rel=0.01)
    assert found.gamma == pytest.approx(float(torch.trapezoid((p / x).sqrt(), x)), rel=0.03)
    assert found.volume == pytest.approx(1.0)
    assert found.beta == pytest.approx(0.5)
    assert found.second(2.0) == pytest.approx(2 * math.sqrt(found.alpha * 0.5))


def test_the_first_constant_bounds_the_bias_and_is_reached() -> None:
    """int (p - E p_hat) l for the l that follows the Laplacian's sign: the sharp one; printed, 4 m times it."""
    delta, L = 0.05, 1.0
    found = relative_generalisation.constants(normal(1), torch.Generator().manual_seed(0))
    factors = 1 + delta * ((torch.arange(2000, dtype=torch.float64) + 0.5) / 1000 - 1)  # the uniform kernel on [-1, 1]
    a, b = (math.sqrt((5 - sign * math.sqrt(17)) / 2) for sign in (1, -1))  # z^4 - 5 z^2 + 2 < 0 between them

    def within(c: Tensor) -> float:
        """The mean of l at u (1 + delta s): P(a < c |u| < b)."""
        return L * float(2 * (torch.special.ndtr(b / c) - torch.special.ndtr(a / c)).mean())

    bias = abs(within(torch.ones(1).double()) - within(factors))
    assert bias == pytest.approx(delta**2 * found.first(L, sharp=True), rel=0.05)
    assert found.first(L) == pytest.approx(4 * found.first(L, sharp=True))
