"""The rules for the covering radius: what they promise is kept, and they stand in the right order."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatlens.distributions import Cube, Sphere, covering_radius_of
from flatlens.distributions.cube import log_corner_measure
from flatlens.distributions.distribution import SmallestBall
from flatlens.distributions.sphere import log_cap_measure
from flatlens.errors import BadInput

SPACES = [Cube(1), Cube(2), Cube(3), Sphere(1), Sphere(2), Sphere(3)]


def ball(space):
    measure = log_corner_measure if isinstance(space, Cube) else log_cap_measure
    return SmallestBall(lambda r: measure(space.d, r), space.diameter)


def reached(x, space):
    """The covering radius of samples: exact in one dimension, the furthest of many points else."""
    if isinstance(space, Cube) and space.d == 1:
        ends, inner = x.sort(0).values, x.sort(0).values.diff(dim=0)
        return max(float(ends[0]), 1 - float(ends[-1]), float(inner.max()) / 2)
    if isinstance(space, Sphere) and space.d == 1:
        angle = torch.atan2(x[:, 1], x[:, 0]).sort().values
        gap = max(float(angle.diff().max()), float(angle[0] - angle[-1]) + 2 * math.pi)
        return 2 * math.sin(gap / 4)
    return covering_radius_of(x, space, probes=1500).value


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize(("samples", "failure"), [(8, 0.5), (60, 0.2)])
def test_samples_cover_the_support_as_often_as_promised(space, samples, failure):
    g = torch.Generator().manual_seed(samples)
    radii = torch.tensor([reached(space.sample(samples, g), space) for _ in range(100)])
    for rule in ("exact", "tight", "published"):
        promised = space.covering_radius(samples, failure, rule=rule)
        if promised.kind == "undefined":
            assert rule == "published"
            continue
        assert promised.kind == "upper bound"
        assert float((radii > promised.value).double().mean()) <= failure
        assert promised.value < 6 * float(radii.mean())  # and it is of the right size


@settings(deadline=None, max_examples=60)
@given(
    space=st.builds(lambda kind, d: kind(d), st.sampled_from([Cube, Sphere]), st.integers(1, 25)),
    samples=st.integers(1, 10**9),
    failure=st.floats(1e-12, 0.999),
)
def test_the_rules_stand_in_order(space, samples, failure):
    exact, tight = (space.covering_radius(samples, failure, rule=rule).value for rule in ("exact", "tight"))
    assert 0 < tight <= exact <= space.diameter
    assert ball(space).log_failure(exact * (1 + 1e-9), samples) <= math.log(failure) + 1e-6  # proven
    if math.log(samples / failure) >= 1:  # what the proof of Eq. 19 needs
        assert exact == pytest.approx(min(2 * _inverse(space, math.log(samples / failure) / samples), space.diameter))
    twice = space.covering_radius(2 * samples, failure, rule="tight").value
    assert twice <= tight * (1 + 1e-6)


def _inverse(space, share):
    """Phi^-1 by bisection."""
    low, high = 0.0, space.diameter
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(ball(space).log_measure(middle)) < share else (low, middle)
    return high


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize(("samples", "failure"), [(100, 0.05), (10**6, 1e-6)])
def test_tight_is_the_least_that_any_split_gives(space, samples, failure):
    phi = ball(space)
    R = space.covering_radius(samples, failure, rule="tight").value

    def failure_at(R, s):
        return math.log1p(-math.exp(phi.log_measure(R - s))) * samples - phi.log_measure(s)

    grid = [k / 500 for k in range(1, 500)]
    assert min(failure_at(R, R * f) for f in grid) <= math.log(failure) + 0.01
    assert min(failure_at(0.995 * R, 0.995 * R * f) for f in grid) > math.log(failure)
    assert phi.log_failure(R, samples) <= math.log(failure) + 0.2  # at the coarser choice of s


def test_the_balls_of_equation_15_overlap():
    """Twelve points on a circle, t apart, none can be added; their balls of radius t hold two circles, not one."""
    t = 2 * math.sin(math.pi / 12)
    assert 12 * math.exp(log_cap_measure(1, t)) == pytest.approx(2)
    assert 12 * math.exp(log_cap_measure(1, 2 * math.sin(math.pi / 24))) == pytest.approx(1)  # those of half the angle


def test_equation_19_is_mended_below_its_range():
    """One sample of [0, 1] never covers it within 0.21 = 2 log(1/0.9); within 0.55 it does in 1 of 10 draws."""
    said = 2 * math.log(1 / 0.9)
    mended = Cube(1).covering_radius(1, 0.9)
    assert said < 0.55 < mended.value
    assert f"Eq. 19 gives {said:.6g}" in mended.note
    assert Cube(1).covering_radius(1, 0.9, rule="published").kind == "undefined"


def test_too_few_samples_say_nothing_but_the_diameter():
    for space in (Cube(5), Sphere(9)):
        bound = space.covering_radius(2, 0.05)
        assert bound.value == space.diameter
        assert "diameter" in bound.note


@pytest.mark.parametrize("space", [Cube(784), Sphere(3000)], ids=str)
def test_many_dimensions_and_samples_do_not_overflow(space):
    for samples in (1000, 10**9, 10**300):
        for rule in ("exact", "tight"):
            assert 0 < space.covering_radius(samples, 1e-12, rule=rule).value <= space.diameter


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 0.1), "samples=0"),
        ((2.5, 0.1), "samples=2.5"),
        ((True, 0.1), "samples=True"),
        ((10**400, 0.1), "from 1 to 1e300"),
        ((10, 0.0), "failure=0.0"),
        ((10, 1.0), "failure=1.0"),
        ((10, math.nan), "failure=nan"),
        ((10, 1), "failure=1)"),
    ],
)
@pytest.mark.parametrize("space", [Cube(2), Sphere(2)], ids=str)
def test_bad_input_is_named(space, arguments, told):
    with pytest.raises(BadInput) as error:
        space.covering_radius(*arguments)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_rule_is_named():
    with pytest.raises(BadInput, match="rule='best'\\): choose from exact, published, tight"):
        Cube(2).covering_radius(10, 0.1, rule="best")
