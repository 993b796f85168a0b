import math

import pytest
import torch

from flatlens.errors import BadInput
from flatlens.models import MLP, GaussianActivation
from flatlens.models.building_blocks import ACTIVATIONS

Z = torch.tensor([[-3.0, -0.5, 0.0, 0.2, 4.0]], dtype=torch.float64)
LITERAL = {
    "relu": Z.clamp(min=0),
    "tanh": torch.tanh(Z),
    "gelu": Z * torch.erfc(-Z / math.sqrt(2)) / 2,
    "sigmoid": 1 / (1 + torch.exp(-Z)),
    "silu": Z / (1 + torch.exp(-Z)),
    "gaussian": torch.exp(-(Z**2) / 2),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_name_gives_its_function(name):
    torch.testing.assert_close(ACTIVATIONS[name]()(Z), LITERAL[name])
    assert isinstance(MLP(2, (3,), 1, name).build().act1, ACTIVATIONS[name])


def test_the_gaussian_falls_to_a_half_where_it_must():
    half = 0.3 * math.sqrt(2 * math.log(2))  # half the width at half the height
    values = GaussianActivation(0.3)(torch.tensor([0.0, half, -half], dtype=torch.float64))
    assert values.tolist() == pytest.approx([1, 0.5, 0.5])


def test_a_gaussian_that_vanishes_is_0_and_as_good_as_exact():
    z = torch.linspace(0, 3, 3001, dtype=torch.float64, requires_grad=True)
    values = GaussianActivation(0.1)(z)
    (slope,) = torch.autograd.grad(values.sum(), z)
    literal = torch.exp(-(z.detach() ** 2) / 0.02)
    vanished = literal < 1e-30
    assert 0 < int(vanished.sum()) < 3001
    assert (values[vanished] == 0).all()
    assert (slope[vanished] == 0).all()
    torch.testing.assert_close(values[~vanished].detach(), literal[~vanished], rtol=1e-12, atol=0)
    torch.testing.assert_close(slope, -z.detach() / 0.01 * literal, rtol=1e-12, atol=1e-26)


@pytest.mark.parametrize("spread", [0.0, -1.0, math.inf, math.nan])
def test_a_gaussian_without_width_is_refused(spread):
    with pytest.raises(BadInput, match="spread"):
        GaussianActivation(spread)
