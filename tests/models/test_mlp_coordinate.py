import math

import pytest
import torch
from torch import nn

from flatlens.errors import BadInput
from flatlens.models import CoordinateNet, GaussianActivation
from flatlens.models.mlp import midpoints, sine

GRID = midpoints(2000)  # finer than what is pre-trained on


def first_norms(activation, start, trials=10):
    """Mean over as many trials as the paper's."""
    nets = [CoordinateNet(activation, start, seed=seed, steps=1).build() for seed in range(trials)]
    return torch.stack([net.fc1.weight.detach().norm() for net in nets])


def turning_points(net) -> int:
    with torch.no_grad():
        slopes = torch.diff(net(GRID).squeeze())
    return int((slopes[1:] * slopes[:-1] < 0).sum())


def test_first_layers_have_the_norms_that_the_paper_prints():
    high, low, relu = first_norms("gaussian", "high"), first_norms("gaussian", "low"), first_norms("relu", "low")
    assert high.mean().item() == pytest.approx(9.09, abs=0.34)
    assert low.mean().item() == pytest.approx(0.56, abs=0.02)
    assert low.std().item() == pytest.approx(0.02, abs=0.015)
    assert relu.mean().item() == pytest.approx(9.56, abs=3 * 0.16)
    assert high.mean().item() == pytest.approx(math.sqrt(256 / 3), rel=0.02)


def test_four_layers_from_one_number_to_one_number():
    net = CoordinateNet("gaussian", "low", width=5, spread=0.2).build()
    assert [tuple(m.weight.shape) for m in net if isinstance(m, nn.Linear)] == [(5, 1), (5, 5), (5, 5), (1, 5)]
    assert [m.spread for m in net if isinstance(m, GaussianActivation)] == [0.2] * 3
    assert net(torch.zeros(7, 1)).shape == (7, 1)


def test_a_low_start_alters_the_weights_alone():
    high, low = (CoordinateNet("gaussian", start, seed=3).build() for start in ("high", "low"))
    assert torch.equal(high.fc1.bias, low.fc1.bias)
    weights = torch.cat([m.weight.detach().flatten() for m in low if isinstance(m, nn.Linear)]) / 0.035
    assert weights.square().mean().item() == pytest.approx(1, rel=0.02)
    assert weights.pow(4).mean().item() == pytest.approx(3, rel=0.05)


def test_gaussian_networks_turn_often_from_a_high_start_and_rarely_from_a_low_one():
    for seed in range(3):
        high, low = (turning_points(CoordinateNet("gaussian", s, seed=seed).build()) for s in ("high", "low"))
        assert high > 20 > 10 > low


def test_relus_high_start_fits_the_sine():
    error = CoordinateNet("relu", "high", width=128, lr=5e-4, steps=500, points=128).build()(GRID).detach() - sine(GRID)
    assert error.square().mean().sqrt() < 0.15  # the sine's own is 0.71


@pytest.mark.slow
def test_relus_high_start_as_it_is_by_default_fits_the_sine_closely_and_has_the_norm_that_the_paper_prints():
    nets = [CoordinateNet("relu", "high", seed=seed).build() for seed in range(5)]
    for net in nets:
        error = net(GRID).detach() - sine(GRID)
        assert error.square().mean().sqrt() < 0.03
        assert error.abs().max() < 0.15
    assert torch.stack([net.fc1.weight.detach().norm() for net in nets]).mean().item() == pytest.approx(9.61, abs=0.28)


def test_relus_low_start_is_pytorchs_law_and_nearly_flat():
    for seed in range(3):
        net = CoordinateNet("relu", "low", seed=seed).build()
        assert net.fc2.weight.abs().max() <= 1 / math.sqrt(256)
        assert torch.diff(net(GRID).detach().squeeze()).abs().max() * len(GRID) < 1  # the sine's steepest slope is 18.8


def test_the_sine_has_three_periods():
    assert sine(torch.tensor([0.0, 1 / 12, 1 / 6, 0.25])).tolist() == pytest.approx([0, 1, 0, -1], abs=1e-6)


def test_the_pre_training_is_adam_with_pytorchs_defaults_also_where_gradients_are_off():
    x = midpoints(8)
    with torch.no_grad():
        net = CoordinateNet("relu", "high", width=8, points=8, steps=3, lr=0.01).build()
    literal = CoordinateNet("relu", "low", width=8).build()
    adam = torch.optim.Adam(literal.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(3):
        adam.zero_grad()
        (literal(x) - sine(x)).square().mean().backward()
        adam.step()
    for p, q in zip(net.parameters(), literal.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    "wrong", [{"activation": "tanh"}, {"start": "middle"}, {"width": 0}, {"spread": 0.0}, {"lr": -1.0}, {"steps": 0}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(BadInput, match=f"CoordinateNet.*{next(iter(wrong))}"):
        CoordinateNet(**({"activation": "relu", "start": "high"} | wrong))
