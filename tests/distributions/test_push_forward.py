"""What a generator makes of a known distribution."""

import math

import pytest
import torch
from torch import nn

from flatlens.distributions import Cube, GaussianMixture, PushForward, Sphere, covering_radius_of
from flatlens.errors import BadInput
from flatlens.models import MLP


def generator(inputs=2, outputs=3, seed=0):
    return MLP(inputs=inputs, widths=(8,), outputs=outputs, activation="tanh", seed=seed).build()


@pytest.mark.parametrize("base", [Cube(2), Sphere(1)], ids=str)
def test_images_are_covered_as_promised(base):
    image = PushForward(base, generator())
    samples, failure = 60, 0.1
    g = torch.Generator().manual_seed(0)
    for rule in ("exact", "tight", "published"):
        promised = image.covering_radius(samples, failure, rule=rule)
        on_base = base.covering_radius(samples, failure, rule=rule)
        assert promised.kind == "upper bound"
        assert promised.value == pytest.approx(image.lipschitz * on_base.value)
        assert "product of the layers' norms" in promised.note
        reached = [covering_radius_of(image.sample(samples, g), image, probes=500).value for _ in range(20)]
        assert max(reached) <= promised.value <= image.diameter


def test_a_declared_constant_is_used():
    image = PushForward(Cube(2), nn.Sequential(nn.Linear(2, 2), nn.GELU()), lipschitz=3)
    assert image.lipschitz == 3
    assert image.covering_radius(100, 0.1).value == 3 * Cube(2).covering_radius(100, 0.1).value
    assert "declared" in image.covering_radius(100, 0.1).note


def test_the_constant_follows_the_weights():
    net = nn.Linear(2, 2)
    image = PushForward(Cube(2), net)
    before = image.lipschitz
    with torch.no_grad():
        net.weight *= 2
    assert image.lipschitz == pytest.approx(2 * before)


def test_samples_are_images_of_the_bases():
    net = generator()
    image = PushForward(Cube(2), net)
    x = image.sample(5000, torch.Generator().manual_seed(3))
    z = Cube(2).sample(5000, torch.Generator().manual_seed(3))
    assert x.shape == (5000, 3)
    assert x.dtype == torch.float64
    assert torch.allclose(x, net(z.float()).double(), atol=1e-6)
    assert (image.dimension, image.intrinsic, image.support_is_convex) == (3, 2, False)
    corners = image.extreme_points(4, torch.Generator())
    assert torch.allclose(corners[0], net(torch.zeros(1, 2)).double()[0], atol=1e-6)
    assert PushForward(Sphere(1), net).extreme_points(4, torch.Generator()).shape == (0, 3)


def test_the_network_is_left_as_it_was():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    before = torch.get_rng_state()
    image = PushForward(Cube(2), net, lipschitz=100.0)
    x = image.sample(10, torch.Generator().manual_seed(0))
    assert torch.equal(x, image.sample(10, torch.Generator().manual_seed(0)))  # no dropout
    assert net.training
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def test_where_the_base_is_not_covered_its_image_is_not():
    normal = GaussianMixture(torch.zeros(1, 2), torch.eye(2)[None], torch.ones(1))
    bound = PushForward(normal, generator()).covering_radius(100, 0.1)
    assert bound.kind == "undefined"
    assert "unbounded" in bound.note
    assert PushForward(Cube(8), generator(8)).covering_radius(10, 0.1, rule="published").kind == "undefined"
    assert math.isinf(PushForward(normal, generator()).diameter)


def test_generators_can_follow_one_another():
    first = PushForward(Cube(2), generator(2, 3, seed=1))
    second = PushForward(first, generator(3, 4, seed=2))
    assert second.dimension == 4
    assert second.intrinsic == 2
    both = second.lipschitz * first.lipschitz * Cube(2).covering_radius(50, 0.1).value
    assert second.covering_radius(50, 0.1).value == pytest.approx(both)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: PushForward(Cube(2), nn.GELU("tanh")), r"GELU.*lipschitz="),
        (lambda: PushForward(Cube(2), nn.Linear(3, 2), lipschitz=1.0), r"fails on inputs of shape \(2, 2\)"),
        (lambda: PushForward(Cube(2), nn.Identity(), lipschitz=-1.0), "lipschitz=-1.0"),
        (lambda: PushForward(Cube(2), nn.Identity(), lipschitz=math.nan), "lipschitz=nan"),
        (lambda: PushForward(Cube(2), nn.Flatten(0), lipschitz=1.0), "a tensor with . rows"),
        (lambda: PushForward(torch.zeros(3, 2), nn.Identity()), "got Tensor and Identity"),
        (
            lambda: PushForward(Cube(2), nn.Identity()).log_density(torch.zeros(1, 2)),
            "the density of a push-forward is not known",
        ),
        (lambda: PushForward(Cube(2), nn.Identity()).sample(0, torch.Generator()), "n=0"),
    ],
)
def test_bad_input_is_named(wrong, told):
    with pytest.raises(BadInput, match=told) as error:
        wrong()
    assert "\n" not in str(error.value)
