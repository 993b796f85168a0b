"""The covering radius of given points, from below."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatlens.distributions import Cube, GaussianMixture, Sphere, covering_radius_of
from flatlens.errors import BadInput


@settings(max_examples=30, deadline=None)
@given(places=st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_on_an_interval_it_is_at_most_the_largest_gap(places):
    x = torch.tensor(sorted(places), dtype=torch.float64)
    inner = float(x.diff().max()) / 2 if len(x) > 1 else 0.0
    truth = max(float(x[0]), 1 - float(x[-1]), inner)
    found = covering_radius_of(x[:, None], Cube(1), probes=3000)
    assert found.kind == "lower bound"
    assert truth - 0.01 < found.value <= truth + 1e-15


def test_one_point_of_a_sphere_leaves_its_antipode():
    pole = torch.tensor([[0.0, 0.0, 1.0]])
    found = covering_radius_of(pole, Sphere(2))
    assert 1.999 < found.value <= 2
    assert torch.allclose(found.arrays["furthest"], -pole[0].double(), atol=0.1)


def test_a_grid_of_the_square_leaves_the_middles_of_its_cells():
    line = torch.linspace(0, 1, 11)
    found = covering_radius_of(torch.cartesian_prod(line, line), Cube(2), probes=20_000)
    assert found.value == pytest.approx(math.sqrt(2) / 20, rel=0.05)
    assert found.value <= math.sqrt(2) / 20 + 1e-7


def test_many_points_are_taken_in_parts():
    x = Cube(40).sample(3000, torch.Generator().manual_seed(1))
    found = covering_radius_of(x, Cube(40), probes=200, generator=torch.Generator().manual_seed(2))
    y = found.arrays["furthest"]
    assert found.value == pytest.approx(float((x - y).norm(dim=1).min()), rel=1e-12)


def test_probes_come_from_the_generator():
    before = torch.get_rng_state()
    x = torch.full((1, 3), 0.5)
    first, again, other = (
        covering_radius_of(x, Sphere(2), generator=torch.Generator().manual_seed(seed)).value for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unbounded_support_can_be_probed():
    normal = GaussianMixture(torch.zeros(1, 2), torch.eye(2)[None], torch.ones(1))
    assert covering_radius_of(torch.zeros(1, 2), normal).value > 3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: covering_radius_of(torch.zeros(2, 3), Cube(2)), r"shape \(n, 2\)"),
        (lambda: covering_radius_of(torch.zeros(0, 2), Cube(2)), "number of points=0"),
        (lambda: covering_radius_of(torch.zeros(1, 2), Cube(2), probes=0), "probes=0"),
    ],
)
def test_bad_input_is_named(wrong, told):
    with pytest.raises(BadInput, match=told):
        wrong()
