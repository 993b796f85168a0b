"""The measure of a spherical cap, against closed forms and counting."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatlens.distributions import Sphere
from flatlens.distributions.sphere import _log_small, log_cap_measure

CLOSED = {
    1: lambda angle: angle / math.pi,
    2: lambda angle: math.sin(angle / 2) ** 2,
    3: lambda angle: (2 * angle - math.sin(2 * angle)) / (2 * math.pi),
}


def log_leading(d):
    """log of Gamma((d+1)/2) / (2 sqrt(pi) Gamma(d/2+1)): a cap's measure is this times r^d, as r -> 0."""
    return math.lgamma((d + 1) / 2) - math.lgamma(d / 2 + 1) - math.log(4 * math.pi) / 2


@given(d=st.sampled_from(sorted(CLOSED)), angle=st.floats(0.01, math.pi - 1e-6))
def test_low_dimensions_have_closed_forms(d, angle):
    assert math.exp(log_cap_measure(d, 2 * math.sin(angle / 2))) == pytest.approx(CLOSED[d](angle), rel=1e-8)


@pytest.mark.parametrize("d", [1, 2, 5, 20])
@pytest.mark.parametrize("r", [0.9, 1.3, 1.5, 1.8])
def test_it_is_the_share_of_samples(d, r):
    n = 100_000
    samples = Sphere(d).sample(n, torch.Generator().manual_seed(d))
    pole = torch.eye(d + 1, dtype=torch.float64)[0]
    near = ((samples - pole).square().sum(1) <= r * r).double().mean()
    p = math.exp(log_cap_measure(d, r))
    assert abs(float(near) - p) < 4 * math.sqrt(p * (1 - p) / n) + 1e-12


@pytest.mark.parametrize("d", [1, 3, 50, 1000])
def test_two_opposite_caps_make_the_sphere(d):
    r = 1.7
    parts = math.exp(log_cap_measure(d, r)) + math.exp(log_cap_measure(d, math.sqrt(4 - r * r)))
    assert parts == pytest.approx(1, abs=1e-12)
    assert math.exp(log_cap_measure(d, math.sqrt(2))) == pytest.approx(0.5, rel=1e-7)


@pytest.mark.parametrize(("d", "r"), [(1, 1e-250), (10, 1e-30), (2000, 0.5), (10**6, 1.2)])
def test_it_never_underflows(d, r):
    log_p = log_cap_measure(d, r)
    assert -math.inf < log_p < -400
    assert log_p >= log_leading(d) + d * math.log(r) + d / 2 * math.log1p(-r * r / 4) - 1e-9 * abs(log_p)


@pytest.mark.parametrize(("d", "r"), [(400, 0.4), (2000, 0.95), (30_000, 1.3)])
def test_the_logarithm_found_directly_agrees_before_underflow(d, r):
    assert -460 < log_cap_measure(d, r) < -200
    assert _log_small(d / 2, r) - math.log(2) == pytest.approx(log_cap_measure(d, r), abs=1e-10)


@given(d=st.integers(1, 60), r=st.floats(1e-4, 1e-3))
def test_small_caps_are_balls(d, r):
    assert log_cap_measure(d, r) == pytest.approx(log_leading(d) + d * math.log(r), abs=d * r * r)


@pytest.mark.parametrize("d", [1, 2, 3, 10, 100])
def test_the_published_cap_measure_is_too_large_by_a_known_factor(d):
    """r^d / 2, from dividing by the area of S^{d-1} and dropping 2/d of the integral of t^{d/2-1}."""
    area = [2 * math.pi ** (k / 2) / math.gamma(k / 2) for k in (d, d + 1)]  # of S^{d-1} and S^d
    factor = math.sqrt(math.pi) * math.exp(math.lgamma(d / 2 + 1) - math.lgamma((d + 1) / 2))
    assert 0.5 / math.exp(log_leading(d)) == pytest.approx(factor, rel=1e-12)
    assert factor == pytest.approx(area[1] / area[0] * d / 2, rel=1e-12)
    counted = math.exp(log_cap_measure(d, 0.01) - d * math.log(0.01))
    assert 0.5 / counted == pytest.approx(factor, rel=d * 1e-4)
