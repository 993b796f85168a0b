"""The uniform distribution on a cube."""

import math

import pytest
import torch

from flatlens.distributions import Cube
from flatlens.errors import BadInput


@pytest.mark.parametrize(("d", "samples"), [(1, 50), (2, 100), (3, 1000), (7, 10**5)])
def test_equation_6_as_printed(d, samples):
    printed = (
        4 * math.gamma(d / 2 + 1) ** (1 / d) / math.sqrt(math.pi) * (math.log(samples / 0.05) / samples) ** (1 / d)
    )
    for rule in ("published", "exact"):
        assert Cube(d).covering_radius(samples, 0.05, rule=rule).value == pytest.approx(printed, rel=1e-10)


def test_equation_6_is_refused_where_the_ball_sticks_out():
    d = 5
    orthant = math.pi ** (d / 2) / 2**d / math.gamma(d / 2 + 1)
    fits = next(n for n in range(2, 10**4) if math.log(n / 0.05) / n < orthant)
    assert Cube(d).covering_radius(fits, 0.05, rule="published").value == pytest.approx(2, rel=0.01)
    refused = Cube(d).covering_radius(fits - 1, 0.05, rule="published")
    assert refused.kind == "undefined"
    assert "Eq. 6 holds up to delta/2 = 1" in refused.note
    assert Cube(d).covering_radius(fits - 1, 0.05).value > 2  # the exact measure goes on
    assert Cube(10**6).covering_radius(10, 0.05, rule="published").kind == "undefined"


def test_beyond_equation_6_the_exact_radius_is_larger_than_what_it_would_say():
    d, samples = 10, 1000
    printed = (
        4 * math.gamma(d / 2 + 1) ** (1 / d) / math.sqrt(math.pi) * (math.log(samples / 0.05) / samples) ** (1 / d)
    )
    assert 2 < printed < Cube(d).covering_radius(samples, 0.05).value < math.sqrt(d)


def test_samples_are_uniform_and_repeat_with_the_seed():
    before = torch.get_rng_state()
    x = Cube(3).sample(20_000, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, Cube(3).sample(20_000, torch.Generator().manual_seed(1)))
    assert x.shape == (20_000, 3)
    assert x.dtype == torch.float64
    assert bool(((x >= 0) & (x <= 1)).all())
    assert (x.mean(0) - 0.5).abs().max() < 4 / math.sqrt(12 * 20_000)


def test_the_density_is_one_inside_and_none_outside():
    x = torch.tensor([[0.5, 0.2], [0.0, 1.0], [1.1, 0.5], [0.5, -0.1]])
    log_p = Cube(2).log_density(x)
    assert log_p.dtype == torch.float64
    assert log_p.tolist() == [0, 0, -math.inf, -math.inf]


def test_what_it_is():
    cube = Cube(4)
    assert (cube.dimension, cube.intrinsic, cube.diameter, cube.support_is_convex) == (4, 4, 2.0, True)
    g = torch.Generator().manual_seed(0)
    assert len({tuple(row) for row in cube.extreme_points(16, g).tolist()}) == 16
    assert cube.extreme_points(5, g).shape == (5, 4)
    assert Cube(100).extreme_points(5, g).shape == (5, 100)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: Cube(0), r"Cube\(d=0\)"),
        (lambda: Cube(1.5), r"Cube\(d=1.5\)"),
        (lambda: Cube(2).sample(0, torch.Generator()), r"Cube.sample\(n=0\)"),
        (lambda: Cube(2).log_density(torch.zeros(3)), r"shape \(n, 2\), got \(3,\)"),
        (lambda: Cube(2).log_density([[0.0, 0.0]]), "got list"),
        (lambda: Cube(1).log_density(torch.tensor([[math.nan]])), "NaN or inf"),
    ],
)
def test_bad_input_is_named(wrong, told):
    with pytest.raises(BadInput, match=told):
        wrong()
