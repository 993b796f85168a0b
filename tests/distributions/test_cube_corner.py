"""The measure of a ball about a corner of a cube, against closed forms, quadrature and counting."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from flatlens.distributions import Cube
from flatlens.distributions.cube import _by_laplace, _by_recursion, log_corner_measure


def in_the_square(x):
    """P(u^2 + v^2 <= x): a quarter of a disc without what is beyond the square's sides."""
    if x <= 1:
        return math.pi * x / 4
    side = math.sqrt(x - 1)
    return side + x / 2 * (math.asin(1 / math.sqrt(x)) - math.asin(side / math.sqrt(x)))


@given(x=st.floats(1e-6, 2))
def test_the_square_has_a_closed_form(x):
    assert math.exp(log_corner_measure(2, math.sqrt(x))) == pytest.approx(in_the_square(x), rel=1e-12)


@pytest.mark.parametrize("x", [0.3, 1.0, 1.2, 1.999, 2.0, 2.4, 2.99])
def test_the_volume_is_an_integral_of_the_square(x):
    kinks = [math.sqrt(x - k) for k in range(3) if 0 < x - k < 1]
    volume, error = quad(
        lambda u: in_the_square(min(max(x - u * u, 0.0), 2.0)), 0, 1, points=kinks or None, epsabs=1e-12
    )
    assert math.exp(log_corner_measure(3, math.sqrt(x))) == pytest.approx(volume, abs=10 * error + 1e-12)


@pytest.mark.parametrize("d", [1, 2, 5, 20, 21, 100])
def test_up_to_radius_one_it_is_an_orthant(d):
    r = 0.7
    ball = d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1) + d * math.log(r)
    assert log_corner_measure(d, r) == pytest.approx(ball - d * math.log(2), rel=1e-13)


@pytest.mark.parametrize("d", [8, 12, 20, 26])
def test_recursion_and_inversion_agree_to_twelve_digits(d):
    for step in range(1, 30):
        x = 1 + (0.98 * d - 1) * step / 30
        assert _by_recursion(d, x) == pytest.approx(_by_laplace(d, x), abs=2e-12)


@pytest.mark.parametrize("d", [21, 50, 784])
def test_the_inversion_meets_the_orthant_at_radius_one(d):
    assert _by_laplace(d, 1.0) == pytest.approx(log_corner_measure(d, 1.0), rel=1e-13)


@pytest.mark.parametrize(("d", "x"), [(3, 0.5), (4, 1.3), (6, 2.2), (10, 2.5), (30, 8.0), (60, 19.0)])
def test_it_is_the_share_of_samples(d, x):
    n = 100_000
    samples = Cube(d).sample(n, torch.Generator().manual_seed(d))
    p = math.exp(log_corner_measure(d, math.sqrt(x)))
    assert abs(float((samples.square().sum(1) <= x).double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("r", [0.4, 1.1])
def test_a_ball_about_any_other_point_holds_more(d, r):
    g = torch.Generator().manual_seed(0)
    samples, centres = Cube(d).sample(20_000, g), Cube(d).sample(30, g)
    share = (torch.cdist(centres, samples) <= r).double().mean(1)
    p = math.exp(log_corner_measure(d, r))
    assert float(share.min()) > p - 4 * math.sqrt(p * (1 - p) / 20_000)


@given(d=st.integers(1, 40), low=st.floats(1e-3, 7), high=st.floats(1e-3, 7))
def test_a_larger_ball_holds_more(d, low, high):
    low, high = min(low, high), max(low, high)
    assert log_corner_measure(d, low) <= log_corner_measure(d, high) + 1e-12
    assert log_corner_measure(d, high) <= 1e-15
