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


def test_the_default_draw_is_one_generator_through_weight_and_bias_of_each_layer():
    net, generator = MLP(6, (5, 4), 3, seed=7).build(), torch.Generator().manual_seed(7)
    for parameter, fan_in in zip(net.parameters(), (6, 6, 5, 5, 4, 4), strict=True):
        bound = 1 / math.sqrt(fan_in)
        assert torch.equal(parameter, torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    drawn = MLP(2, (), 1).build().fc1.weight.tolist()  # bits that studies of earlier versions rest on
    assert drawn == [[-0.005293981172144413, 0.37932288646698]]


def test_the_seed_decides_the_weights_and_the_global_state_is_left_alone():
    before = torch.get_rng_state()
    a, b, c = (MLP(3, (4,), 2, seed=seed).build().fc1.weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_no_hidden_layer_is_a_linear_model():
    assert [name for name, _ in MLP(3, (), 2).build().named_children()] == ["fc1"]


def test_the_feature_extractor_is_that_of_the_paper():
    net = MLP.feature_extractor(seed=1).build()
    layers = [m for m in net if isinstance(m, nn.Linear)]
    assert [tuple(m.weight.shape) for m in layers] == [(512, 784), (128, 512), (16, 128), (8, 16)]
    assert [type(m) for m in net][1::2] == [nn.Tanh] * 4
    assert layers[0].weight.std().item() == pytest.approx(math.sqrt(2 / (784 + 512)), rel=0.01)
    assert not any(m.bias.any() for m in layers)
    features = net(torch.randn(100, 784, generator=torch.Generator().manual_seed(0)))
    assert features.abs().max() < 1  # so that tanh^-1 of them exists
    uniform = MLP.feature_extractor(init="xavier_uniform").build().fc1.weight
    assert uniform.abs().max() <= math.sqrt(6 / (784 + 512))


@pytest.mark.parametrize(
    "wrong", [{"widths": (0,)}, {"outputs": 0}, {"activation": "sine"}, {"init": "zeros"}, {"widths": (2.5,)}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(BadInput, match="MLP"):
        MLP(**({"inputs": 3, "widths": (4,), "outputs": 2} | wrong))
