"""Mixtures of Gaussians, against torch.distributions, quadrature and moments."""

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from flatlens.distributions import GaussianMixture
from flatlens.errors import BadInput

MEANS = torch.tensor([[0.0, 0.0], [2.0, -1.0], [-1.0, 3.0]], dtype=torch.float64)
COVARIANCES = torch.tensor(
    [[[1.0, 0.5], [0.5, 0.8]], [[0.3, 0.0], [0.0, 2.0]], [[0.5, -0.4], [-0.4, 0.6]]], dtype=torch.float64
)
WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
MIXTURE = GaussianMixture(MEANS, COVARIANCES, WEIGHTS)


def seeded(n, seed=0):
    return MIXTURE.sample_labelled(n, torch.Generator().manual_seed(seed))


def test_the_density_is_pytorchs():
    x = 3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = MixtureSameFamily(Categorical(WEIGHTS), MultivariateNormal(MEANS, COVARIANCES)).log_prob(x)
    assert torch.allclose(MIXTURE.log_density(x), theirs, rtol=1e-12, atol=1e-12)


def test_the_density_has_integral_one():
    line = torch.linspace(-12, 12, 601, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    area = float(line[1] - line[0]) ** 2  # the trapezoid rule is exact to rounding for smooth, fast decaying functions
    assert float(MIXTURE.log_density(grid).exp().sum()) * area == pytest.approx(1, abs=1e-10)


def test_far_away_the_log_density_neither_overflows_nor_vanishes():
    log_p = float(MIXTURE.log_density(torch.tensor([[1e6, -1e6]])))
    assert -math.inf < log_p < -1e10


def test_it_is_differentiable_twice():
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(MIXTURE.log_density, x)
    assert torch.autograd.gradgradcheck(MIXTURE.log_density, x)
    single = GaussianMixture(MEANS[:1], COVARIANCES[:1], torch.ones(1))
    (score,) = torch.autograd.grad(single.log_density(x).sum(), x)
    assert torch.allclose(score, -(x - MEANS[0]) @ torch.linalg.inv(COVARIANCES[0]))


def test_samples_have_the_moments_of_their_component():
    n = 40_000
    x, labels = seeded(n)
    assert x.shape == (n, 2)
    assert x.dtype == torch.float64
    for k, (mean, covariance, weight) in enumerate(zip(MEANS, COVARIANCES, WEIGHTS, strict=True)):
        mine = x[labels == k]
        assert abs(len(mine) / n - float(weight)) < 4 * math.sqrt(float(weight * (1 - weight)) / n)
        spread = covariance.diagonal().sqrt() / math.sqrt(len(mine))
        assert bool(((mine.mean(0) - mean).abs() < 4 * spread).all())
        variance_error = math.sqrt(2 / len(mine)) * torch.outer(
            covariance.diagonal().sqrt(), covariance.diagonal().sqrt()
        )
        assert bool(((mine.T.cov() - covariance).abs() < 4 * variance_error).all())


def test_samples_repeat_with_the_seed_alone():
    before = torch.get_rng_state()
    x, _ = seeded(10, seed=5)
    assert torch.equal(x, MIXTURE.sample(10, torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_component_of_weight_none_is_never_drawn_and_harms_no_gradient():
    one = GaussianMixture(MEANS[:2], COVARIANCES[:2], torch.tensor([1.0, 0.0]))
    _, labels = one.sample_labelled(1000, torch.Generator().manual_seed(0))
    assert not bool(labels.any())
    x = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (score,) = torch.autograd.grad(one.log_density(x).sum(), x)
    assert bool(torch.isfinite(score).all())


def test_no_sample_covers_it():
    bound = MIXTURE.covering_radius(1000, 0.05)
    assert bound.kind == "undefined"
    assert "unbounded" in bound.note
    assert math.isinf(MIXTURE.diameter)
    assert (MIXTURE.dimension, MIXTURE.intrinsic, MIXTURE.support_is_convex) == (2, 2, True)
    assert MIXTURE.extreme_points(3, torch.Generator()).shape == (0, 2)
    with pytest.raises(BadInput, match="samples=0"):
        MIXTURE.covering_radius(0, 0.05)


def test_it_keeps_its_own_copy():
    means = MEANS.clone()
    mixture = GaussianMixture(means, COVARIANCES, WEIGHTS)
    means.zero_()
    assert torch.equal(mixture.means, MEANS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"means": torch.zeros(3)}, r"means=...\): expected a tensor of shape \(k, m\), got \(3,\)"),
        ({"means": MEANS[:2]}, r"covariances=...\): expected a tensor of shape \(2, 2, 2\)"),
        ({"weights": torch.ones(2) / 2}, r"weights=...\): expected a tensor of shape \(3,\)"),
        ({"weights": torch.ones(3)}, "must sum to 1, not 3"),
        ({"weights": torch.tensor([1.5, -0.25, -0.25])}, "negative"),
        ({"means": MEANS * math.nan}, "means=.*finite"),
        ({"covariances": COVARIANCES / 0}, "covariances=.*finite"),
        ({"weights": [0.5, 0.2, 0.3]}, "weights=.*real tensor"),
        ({"covariances": COVARIANCES - torch.eye(2)}, "matrix 0 has the eigenvalue -0.61"),
        ({"covariances": torch.zeros(3, 2, 2)}, "matrix 0 has the eigenvalue 0"),
        ({"covariances": COVARIANCES + torch.tensor([[0.0, 0.1], [0.0, 0.0]])}, "matrix 0 is not symmetric"),
    ],
)
def test_bad_input_is_named(change, told):
    settings = {"means": MEANS, "covariances": COVARIANCES, "weights": WEIGHTS} | change
    with pytest.raises(BadInput, match=told) as error:
        GaussianMixture(**settings)
    assert "\n" not in str(error.value)
