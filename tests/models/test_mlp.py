import math

import pytest
import torch
from torch import nn

from flatlens.errors import BadInput
from flatlens.models import MLP


def test_layers_are_named_in_order_and_have_the_sizes_asked_for():
    model = MLP(inputs=5, widths=(4, 3), outputs=2, activation="tanh").build()
    assert [name for name, _ in model.named_children()] == ["fc1", "act1", "fc2", "act2", "fc3"]
    assert [tuple(m.weight.shape) for m in model if isinstance(m, nn.Linear)] == [(4, 5), (3, 4), (2, 3)]
    assert isinstance(model.act2, nn.Tanh)
    assert model(torch.zeros(7, 5)).shape == (7, 2)


def test_weights_follow_pytorchs_own_law():
    weight = MLP(inputs=400, widths=(300,), outputs=2).build().fc1.weight
    assert weight.abs().max() <= 1 / math.sqrt(400)
    assert weight.std().item() == pytest.approx(1 / math.sqrt(3 * 400), rel=0.02)


def test_the_seed_decides_the_weights_and_the_global_state_is_left_alone():
    before = torch.get_rng_state()
    a, b, c = (MLP(3, (4,), 2, seed=seed).build().fc1.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_no_hidden_layer_is_a_linear_model():
    assert [name for name, _ in MLP(3, (), 2).build().named_children()] == ["fc1"]


@pytest.mark.parametrize("wrong", [{"widths": (0,)}, {"outputs": 0}, {"activation": "sine"}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(BadInput, match="MLP"):
        MLP(**({"inputs": 3, "widths": (4,), "outputs": 2} | wrong))
