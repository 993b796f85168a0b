"""Every law on layers large enough to show it."""

import math

import pytest
import torch
from torch import nn

from flatlens.models.building_blocks import LAWS, built

LINEAR_IN, LINEAR_OUT, CONV_IN, CONV_OUT = 300, 500, 20, 200
FANS = {"linear": (LINEAR_IN, LINEAR_OUT), "conv": (CONV_IN * 9, CONV_OUT * 9)}
UNIFORM = {
    "torch": lambda fan_in, _: 1 / math.sqrt(fan_in),
    "xavier_uniform": lambda fan_in, fan_out: math.sqrt(6 / (fan_in + fan_out)),
    "kaiming_uniform": lambda fan_in, _: math.sqrt(6 / fan_in),
    "uniform": lambda *_: 0.1,
}
NORMAL = {
    "xavier_normal": lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)),
    "normal": lambda *_: math.sqrt(0.1),
    "normal_sd": lambda *_: 0.1,
}


def both():
    conv, norm = nn.Conv2d(CONV_IN, CONV_OUT, 3), nn.BatchNorm2d(CONV_OUT)
    plain, linear = nn.Conv2d(2, 2, 3, bias=False), nn.Linear(LINEAR_IN, LINEAR_OUT)
    return nn.ModuleDict({"conv": conv, "bn": norm, "plain": plain, "linear": linear})


def drawn(init, seed=0):
    return built(both, init, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", FANS)
@pytest.mark.parametrize("init", UNIFORM)
def test_uniform_laws_fill_their_interval_evenly(init, kind):
    weight = drawn(init).get_submodule(kind).weight.detach()
    bound = UNIFORM[init](*FANS[kind])
    assert 0.999 * bound < weight.abs().max() <= bound * (1 + 1e-6)
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert abs(weight.mean().item()) < 5 * bound / math.sqrt(3 * weight.numel())


@pytest.mark.parametrize("kind", FANS)
@pytest.mark.parametrize("init", NORMAL)
def test_normal_laws_have_their_moments(init, kind):
    z = drawn(init).get_submodule(kind).weight.detach() / NORMAL[init](*FANS[kind])
    assert z.square().mean().item() == pytest.approx(1, rel=0.05)
    assert z.pow(4).mean().item() == pytest.approx(3, rel=0.15)  # a uniform's would be 1.8
    assert abs(z.mean().item()) < 5 / math.sqrt(z.numel())


def test_the_vgg_law_is_hes_by_fan_out_in_convolutions_and_pytorchs_in_linear_layers():
    net = drawn("vgg")
    z = net.conv.weight.detach() * math.sqrt(CONV_OUT * 9 / 2)
    assert z.square().mean().item() == pytest.approx(1, rel=0.05)
    assert z.pow(4).mean().item() == pytest.approx(3, rel=0.15)
    assert not net.conv.bias.any()
    for parameter in (net.linear.weight, net.linear.bias):
        assert 0.95 / math.sqrt(LINEAR_IN) < parameter.abs().max() <= 1 / math.sqrt(LINEAR_IN)


@pytest.mark.parametrize("init", LAWS)
def test_biases_are_zero_or_drawn_like_the_weights(init):
    for layer, fan_in in ((drawn(init).linear, LINEAR_IN), (drawn(init).conv, CONV_IN * 9)):
        std = {"torch": 1 / math.sqrt(3 * fan_in), "uniform": 0.1 / math.sqrt(3), "normal": math.sqrt(0.1)}
        std["normal_sd"] = 0.1
        if init in std:
            assert layer.bias.std().item() == pytest.approx(std[init], rel=0.2)
        elif init != "vgg":
            assert not layer.bias.any()


def test_pytorchs_law_is_what_pytorch_draws():
    torch_own, ours = (
        torch.cat([net.conv.weight.detach().flatten() for net in nets]).sort().values
        for nets in ([_fresh(seed) for seed in range(3)], [drawn("torch", seed) for seed in range(3)])
    )
    assert (torch_own - ours).abs().max() < 0.02 * ours.max()  # quantile by quantile


def _fresh(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return both()


@pytest.mark.parametrize("init", LAWS)
def test_batchnorm_starts_as_the_identity_whatever_the_law(init):
    bn = drawn(init).bn
    assert (bn.weight == 1).all()
    assert not bn.bias.any()
    assert (bn.running_var == 1).all()
    assert not bn.running_mean.any()
    assert bn.num_batches_tracked == 0


@pytest.mark.parametrize("init", LAWS)
def test_one_seed_draws_one_network_and_nothing_global(init):
    before = torch.get_rng_state()
    first, again, other = (drawn(init, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in ("conv.weight", "linear.weight", "plain.weight"))


def test_float32_on_the_cpu_and_trainable_whatever_the_defaults():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            net = drawn("torch")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(p.dtype, p.device.type, p.requires_grad) for p in net.parameters()} == {(torch.float32, "cpu", True)}
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), drawn("torch").parameters(), strict=True))


def test_a_module_that_no_law_knows_is_not_left_as_the_memory_was():
    with pytest.raises(AssertionError, match="LayerNorm"):
        built(lambda: nn.LayerNorm(3), "torch", torch.Generator())
