"""Convolutional networks: sizes against the literature, names, and that flatlens can measure and transform them."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.models import MLP, VGG11, CoordinateNet, LeNet5, ResNet18, SmallVGG
from flatlens.models.image_networks import Block
from flatlens.transforms.wiring import read_wiring

NARROW = {
    "LeNet5": (LeNet5(channels=1, image=28, activation="tanh", pooling="average"), (1, 28, 28)),
    "VGG11": (VGG11(width=0.125), (3, 32, 32)),
    "VGG11 without": (VGG11(width=0.125, batchnorm=False, hidden=()), (3, 32, 32)),
    "SmallVGG": (SmallVGG(), (3, 32, 32)),
    "ResNet18": (ResNet18(width=0.125), (3, 8, 8)),
    "ResNet18 without": (ResNet18(width=0.125, batchnorm=False), (3, 8, 8)),
    "MLP": (MLP(6, (5,), 10, "gaussian", init="normal", last_activation=True), (6,)),
}
ALL = [*(settings for settings, _ in NARROW.values()), CoordinateNet("relu", "high", width=4, steps=2)]
EVERY = pytest.mark.parametrize("name", NARROW)


def count(settings) -> int:
    return sum(p.numel() for p in settings.build().parameters())


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        (LeNet5(), 62_006),  # CIFAR-10's usual
        (LeNet5(channels=1, image=28), 61_706),  # LeCun's, all maps connected, no coefficients in the poolings
        (LeNet5(channels=1, image=32), 61_706),
        (VGG11(batchnorm=False, hidden=()), 9_220_480 + 5_130),  # torchvision's vgg11().features, and Linear(512, 10)
        (VGG11(batchnorm=False), 9_750_922),
        (VGG11(), 9_756_426),  # twice 2,752 channels more
        (VGG11(classes=100), 9_802_596),
        (SmallVGG(), 97_018),
        (ResNet18(), 11_173_962),
        (ResNet18(classes=100), 11_220_132),
        (ResNet18(batchnorm=False), 11_173_962 - 9_600 + 4_800),  # 4,800 channels: scales and shifts out, biases in
    ],
    ids=str,
)
def test_the_parameters_are_as_many_as_the_literature_counts(settings, parameters):
    assert count(settings) == parameters


def test_a_small_vgg_has_62832_parameters_in_its_convolutions():
    net = SmallVGG().build()
    assert sum(p.numel() for m in net if isinstance(m, nn.Conv2d) for p in m.parameters()) == 62_832
    assert [tuple(m.weight.shape) for m in net if isinstance(m, nn.Linear)] == [(128, 256), (10, 128)]

    assert plan(net) == [16, "M", 16, "M", 32, "M", 64, 64, "M"]


def plan(net) -> list[int | str]:
    return [m.out_channels if isinstance(m, nn.Conv2d) else "M" for m in net if isinstance(m, nn.Conv2d | nn.MaxPool2d)]


@pytest.mark.parametrize(("pooling", "value"), [("max", 4.0), ("average", 2.5)])
def test_lenet_pools_as_it_is_told(pooling, value):
    net = LeNet5(pooling=pooling).build()
    quarter = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert [pool(quarter).item() for pool in (net.pool1, net.pool2)] == [value, value]


def test_vgg11_is_configuration_a():
    net = VGG11().build()
    assert plan(net) == [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]
    assert [name for name, _ in net.named_children()][-6:] == ["flatten", "fc1", "relu9", "fc2", "relu10", "fc3"]


def test_resnet18_keeps_the_size_of_small_images_through_its_first_stage():
    net = ResNet18(width=0.125).build()
    sides, x = [], torch.zeros(1, 3, 32, 32)
    for name, module in net.named_children():
        x = module(x)
        if name.startswith(("conv", "layer")):
            sides.append((name, x.shape[1], x.shape[-1]))
    assert sides == [("conv1", 8, 32), ("layer1", 8, 32), ("layer2", 16, 16), ("layer3", 32, 8), ("layer4", 64, 4)]


def test_a_block_adds_its_skip_before_the_last_relu():
    block = Block(2, 2, 1, batchnorm=False)
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.tensor([-1.0, 2.0]).reshape(1, 2, 1, 1).expand(1, 2, 3, 3)
    assert torch.equal(block(x), x.clamp(min=0))


@EVERY
def test_outputs_have_one_number_per_class(name):
    settings, shape = NARROW[name]
    assert settings.build()(torch.zeros(3, *shape)).shape == (3, 10)


@EVERY
def test_every_module_is_used_once_and_none_in_place(name):
    settings, shape = NARROW[name]
    net, used = settings.build(), []
    for module in net.modules():
        if not any(module.children()):
            module.register_forward_hook(lambda module, *_: used.append(module))
    net(torch.zeros(2, *shape))
    assert used == [module for module in net.modules() if not any(module.children())]  # and in the order of names
    assert not any(getattr(module, "inplace", False) for module in used)


def test_without_batchnorm_there_is_none():
    for settings, there in ((VGG11(width=0.125), 8), (ResNet18(width=0.125), 20)):
        for batchnorm in (True, False):
            net = dataclasses.replace(settings, batchnorm=batchnorm).build()
            assert sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) == (there if batchnorm else 0)
            assert all(m.bias is not None for m in net.modules() if isinstance(m, nn.Conv2d) and not batchnorm)


@EVERY
def test_flatlens_measures_them_in_execution_order_and_finds_their_wiring(name):
    settings, shape = NARROW[name]
    net, generator = settings.build(), torch.Generator().manual_seed(0)
    x = torch.randn(4, *shape, generator=generator)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, torch.arange(4))))
    frame = fl.measure(lens, ["mls", "parameter_jacobian_frobenius"]).frame()
    layers = [n for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    mls = frame[frame["measure"] == "mls"]
    assert [layer for layer in mls["layer"] if layer in layers] == layers
    assert frame["value"].gt(0).all()
    moved = fl.check_invariance(lens, ["weight_norm", "kappa_trace"]).frame()
    assert len(moved) > 0
    assert False not in moved["agrees"].tolist()  # None is: nothing to compare
    assert read_wiring(lens.problem, net).unreadable == ""


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_settings_are_hashable_survive_json_and_decide_every_bit(settings):
    back = type(settings)(**json.loads(json.dumps(dataclasses.asdict(settings))))
    assert back == settings
    assert hash(back) == hash(settings)
    before = torch.get_rng_state()
    first, again = settings.build().state_dict(), back.build().state_dict()
    other = dataclasses.replace(settings, seed=settings.seed + 1).build().state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (LeNet5, {"image": 30}, "image=30"),
        (LeNet5, {"channels": 0}, "channels"),
        (LeNet5, {"pooling": "median"}, "median"),
        (LeNet5, {"activation": "sine"}, "sine"),
        (LeNet5, {"init": "zeros"}, "zeros"),
        (VGG11, {"image": 31}, "at least 32 pixels"),
        (VGG11, {"width": 0.0}, "width=0.0"),
        (VGG11, {"width": 0.001}, "no channel"),
        (VGG11, {"hidden": (0,)}, "hidden"),
        (VGG11, {"classes": 2.5}, "whole number"),
        (VGG11, {"init": "zeros"}, "zeros"),
        (SmallVGG, {"image": 15}, "at least 16 pixels"),
        (SmallVGG, {"classes": 0}, "classes"),
        (ResNet18, {"channels": 0}, "channels"),
        (ResNet18, {"width": float("nan")}, "width=nan"),
        (ResNet18, {"init": "zeros"}, "zeros"),
    ],
)
def test_impossible_settings_are_refused_in_a_line(kind, wrong, named):
    with pytest.raises(BadInput, match=kind.__name__) as refusal:
        kind(**wrong)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_images_that_do_not_halve_evenly_are_rounded_down():
    assert VGG11(width=0.125, image=40).build()(torch.zeros(1, 3, 40, 40)).shape == (1, 10)
    assert SmallVGG(image=28, channels=1).build()(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
