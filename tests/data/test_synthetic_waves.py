"""Data of which everything is known: that what is said of it is so."""

import math

import pytest
import torch

from flatlens.data import DataSettings, waves
from flatlens.data.synthetic import RECIPES, law_of, widest
from flatlens.errors import BadInput, UnknownName

INSIDE = {"interval": 1, "square": 2, "cube": 3}


@pytest.mark.parametrize("law", RECIPES)
def test_samples_are_of_the_law_and_targets_of_the_wave(law):
    split = waves(law, n=50, test=30, seed=2)
    assert split.x.dtype == split.y.dtype == torch.float32
    assert (len(split.x), len(split.test_x), split.classes) == (50, 30, 0)
    assert torch.allclose(split.target(split.x).to(torch.float32), split.y)
    assert torch.allclose(split.target(split.test_x).to(torch.float32), split.test_y)
    assert split.x.shape[1] == split.distribution.dimension
    assert not torch.equal(split.x[:30], split.test_x)
    assert torch.equal(waves(law, n=50, seed=2).x, split.x)
    assert not torch.equal(waves(law, n=50, seed=3).x, split.x)


@pytest.mark.parametrize("law", RECIPES)
def test_no_secant_is_steeper_than_the_constant_and_one_is_nearly_as_steep(law):
    distribution, target = law_of(law)
    x = distribution.sample(1500, torch.Generator().manual_seed(0))
    apart, rise = torch.pdist(x), torch.pdist(target(x))
    steepest = float((rise / apart)[apart > 1e-6].max())
    assert steepest <= target.lipschitz * (1 + 1e-9)
    assert steepest > 0.5 * target.lipschitz


def test_waves_are_half_a_period_long():
    for law, d in INSIDE.items():
        ends = law_of(law)[1](torch.tensor([[0.0] * d, [0.5] * d, [1.0] * d]))
        assert ends.flatten().tolist() == pytest.approx([1, 0, -1], abs=1e-12)
    for law, d in {"circle": 1, "sphere": 2}.items():
        x = torch.zeros(3, d + 1, dtype=torch.float64)
        x[:2, 0] = torch.tensor([1.0, -1.0])
        x[2, 1] = 1
        assert law_of(law)[1](x).flatten().tolist() == pytest.approx([-1, 1, 0], abs=1e-12)


def test_the_sheet_is_curved_of_dimension_two_and_no_further_apart_than_the_square():
    distribution, _ = law_of("sheet")
    assert distribution.lipschitz == pytest.approx(1, rel=1e-6)
    x = distribution.sample(400, torch.Generator().manual_seed(0))
    A = distribution.network[0].weight.detach()
    z = torch.atanh(x) @ A
    assert torch.allclose(z @ A.T, torch.atanh(x), atol=1e-12)  # two numbers make all five
    assert 0 <= float(z.min()) < float(z.max()) <= 1 + 1e-12
    assert torch.linalg.svdvals(x - x.mean(0))[-1] > 1e-3  # but in no plane


def test_values_are_as_far_apart_as_said():
    assert widest("square") == 2
    for law in RECIPES:
        y = waves(law, n=5000).y
        assert float(y.max() - y.min()) <= widest(law) + 1e-2
        assert widest(law) <= 2


def test_they_come_by_name_in_a_study():
    split = DataSettings("waves_circle", train=20, test=10, seed=4).load()
    assert torch.equal(split.x, waves("circle", n=20, test=10, seed=4).x)
    assert float(split.x.norm(dim=1).mean()) == pytest.approx(1, abs=1e-6)
    with pytest.raises(UnknownName, match="square"):
        waves("squares")
    with pytest.raises(BadInput, match="n=0"):
        waves("circle", n=0)
    assert math.isclose(law_of("cube")[1].lipschitz, math.pi / math.sqrt(3))
