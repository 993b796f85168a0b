"""The uniform distribution on a sphere."""

import math

import pytest
import torch

from flatlens.distributions import Sphere
from flatlens.distributions.sphere import log_cap_measure
from flatlens.errors import BadInput


def printed(d, samples, failure, gamma):
    return 2 ** (1 + 1 / d) * (1 - gamma) ** -0.5 * (math.log(samples / failure) / samples) ** (1 / d)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_equation_7_as_printed(d):
    samples = 10**6
    given = Sphere(d).covering_radius(samples, 0.05, rule="published", gamma=0.3)
    assert given.value == pytest.approx(printed(d, samples, 0.05, 0.3), rel=1e-12)
    chosen = Sphere(d).covering_radius(samples, 0.05, rule="published").value
    least = (2 * math.log(samples / 0.05) / samples) ** (2 / d)
    gamma = next(
        g for k in range(1, 5 * 10**5) if (g := k * 1e-6) - g * g > least
    )  # the smallest admissible, by search
    assert chosen == pytest.approx(printed(d, samples, 0.05, gamma), rel=2e-6)
    assert chosen <= printed(d, samples, 0.05, gamma)
    assert chosen**2 / 4 < gamma  # the condition as the proof states it


def test_equation_7_is_refused_where_its_condition_fails():
    few = Sphere(5).covering_radius(100, 0.05, rule="published")
    assert few.kind == "undefined"
    assert "use more samples" in few.note
    assert Sphere(2).covering_radius(1000, 0.05, rule="published", gamma=1e-3).kind == "undefined"
    assert Sphere(2).covering_radius(1000, 0.05, rule="published", gamma=0.5).kind == "upper bound"


@pytest.mark.parametrize("d", [1, 2, 3, 6])
def test_equation_7_falls_short_of_equation_19(d):
    """By the factor in its cap measure, to the power 1/d, for N so large that gamma is small."""
    samples = 10 ** (3 * d + 6)
    published, exact, tight = (
        Sphere(d).covering_radius(samples, 0.01, rule=rule) for rule in ("published", "exact", "tight")
    )
    factor = math.sqrt(math.pi) * math.gamma(d / 2 + 1) / math.gamma((d + 1) / 2)
    assert exact.value / published.value == pytest.approx(factor ** (1 / d), rel=1e-3)
    assert tight.value < published.value  # but covers all the same
    assert f"would need {exact.value:.6g}" in published.note


def test_equation_7_is_refused_where_nothing_proves_it():
    refused = Sphere(1).covering_radius(1, 0.9, rule="published")
    assert refused.kind == "undefined"
    assert "too small to be proven" in refused.note


def test_on_the_sphere_in_space_equation_19_is_plain():
    """Phi = r^2/4 exactly, also beyond the half sphere."""
    for samples in (20, 100, 10**6):
        plain = 4 * math.sqrt(math.log(samples / 0.1) / samples)
        assert Sphere(2).covering_radius(samples, 0.1).value == pytest.approx(min(plain, 2.0), rel=1e-10)
    assert log_cap_measure(2, 1.9) == pytest.approx(math.log(1.9**2 / 4))


def test_samples_are_uniform_and_repeat_with_the_seed():
    before = torch.get_rng_state()
    x = Sphere(3).sample(20_000, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, Sphere(3).sample(20_000, torch.Generator().manual_seed(1)))
    assert x.shape == (20_000, 4)
    assert x.dtype == torch.float64
    assert (x.square().sum(1) - 1).abs().max() < 1e-14
    assert (x.mean(0)).abs().max() < 4 / math.sqrt(4 * 20_000)
    assert (x.T @ x / 20_000 - torch.eye(4) / 4).abs().max() < 4 * 0.25 / math.sqrt(20_000)


def test_the_density_is_that_of_the_area():
    angle = torch.tensor([0.3, 2.0], dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    assert Sphere(1).log_density(circle).exp().tolist() == pytest.approx([1 / (2 * math.pi)] * 2)
    assert Sphere(1).log_density(circle.float()).exp().tolist() == pytest.approx([1 / (2 * math.pi)] * 2)
    assert Sphere(1).log_density(1.1 * circle).tolist() == [-math.inf] * 2


def test_what_it_is():
    sphere = Sphere(4)
    assert (sphere.dimension, sphere.intrinsic, sphere.diameter, sphere.support_is_convex) == (5, 4, 2.0, False)
    assert sphere.extreme_points(7, torch.Generator()).shape == (0, 5)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: Sphere(0), r"Sphere\(d=0\)"),
        (lambda: Sphere(2).sample(-1, torch.Generator()), r"n=-1"),
        (lambda: Sphere(2).log_density(torch.zeros(3, 2)), r"shape \(n, 3\)"),
        (lambda: Sphere(2).covering_radius(10, 0.1, rule="published", gamma=1.0), "gamma=1.0"),
        (lambda: Sphere(2).covering_radius(10, 0.1, gamma=0.5), "published"),
    ],
)
def test_bad_input_is_named(wrong, told):
    with pytest.raises(BadInput, match=told):
        wrong()
