"""VGG networks for small images: VGG-11 of the sharpening paper, and the small VGG of the compression authors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import nn

from flatlens.models.checks import pooled, require_known, require_sizes, scaled
from flatlens.models.initialisation import LAWS, Init, built

Plan: TypeAlias = Sequence[int | Literal["M"]]
VGG11_PLAN: Plan = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
SMALL_PLAN: Plan = (16, "M", 16, "M", 32, "M", 64, 64, "M")


@dataclass(frozen=True)
class VGG11:
    """Configuration A of Simonyan and Zisserman 2015: eight 3 x 3 convolutions in five stages, then linear layers.

    The form for CIFAR that sharpening B.2 cites: 512-512-`classes` behind the last pooling, where the original has
    4096-4096; its two dropouts are removed, its BatchNorm kept (B.3 trains without it as well). Convolutions have a
    bias beside BatchNorm, as there. Left open by the text: the law of the initial weights, the cited code modified
    "superficially". The default is PyTorch's; `init="vgg"` is the cited code's. Many write a single linear layer,
    which is `hidden=()`.

    >>> sum(p.numel() for p in VGG11().build().parameters())
    9756426
    >>> [name for name, _ in VGG11(width=0.125).build().named_children()][:5]
    ['conv1', 'bn1', 'relu1', 'pool1', 'conv2']
    """

    classes: int = 10
    channels: int = 3
    image: int = 32
    batchnorm: bool = True
    width: float = 1.0  #: multiplies the sizes of all hidden layers
    hidden: tuple[int, ...] = (512, 512)  #: linear layers before the last
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))  # a list, when it comes from JSON
        _check("VGG11", self.classes, self.channels, self.image, self.hidden, self.init, VGG11_PLAN)
        scaled("VGG11", [*_channels(VGG11_PLAN), *self.hidden], self.width)

    def build(self) -> nn.Sequential:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        sizes = iter(scaled("VGG11", _channels(VGG11_PLAN), self.width))
        plan: Plan = [next(sizes) if isinstance(step, int) else step for step in VGG11_PLAN]
        hidden = scaled("VGG11", self.hidden, self.width)
        return built(
            lambda: _vgg(plan, self.channels, self.image, (*hidden, self.classes), self.batchnorm),
            self.init,
            torch.Generator().manual_seed(self.seed),
        )


@dataclass(frozen=True)
class SmallVGG:
    """Five 3 x 3 convolutions 16-16-32-64-64, then linear layers 128-`classes`; no BatchNorm.

    The compression paper calls its network VGG-11; the one its authors train has these layers and 97,018 parameters
    at 3 x 32 x 32 and 10 classes. That count asks for four poolings (256 inputs of the first linear layer), and leaves
    open where: here as in VGG-11, after each stage, the last stage of two convolutions.

    >>> sum(p.numel() for p in SmallVGG().build().parameters())
    97018
    """

    classes: int = 10
    channels: int = 3
    image: int = 32
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        _check("SmallVGG", self.classes, self.channels, self.image, (), self.init, SMALL_PLAN)

    def build(self) -> nn.Sequential:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        return built(
            lambda: _vgg(SMALL_PLAN, self.channels, self.image, (128, self.classes), batchnorm=False),
            self.init,
            torch.Generator().manual_seed(self.seed),
        )


def _vgg(plan: Plan, channels: int, image: int, linear: Sequence[int], batchnorm: bool) -> nn.Sequential:
    """Return conv1, bn1, relu1, pool1, ..., flatten, fc1, relu9, ..., fc3; poolings do not count in the numbers."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    conv = pool = 0
    for step in plan:
        if not isinstance(step, int):
            pool += 1
            parts[f"pool{pool}"] = nn.MaxPool2d(2)
            continue
        conv += 1
        parts[f"conv{conv}"] = nn.Conv2d(channels, step, 3, padding=1)
        if batchnorm:
            parts[f"bn{conv}"] = nn.BatchNorm2d(step)
        parts[f"relu{conv}"] = nn.ReLU()
        channels = step
    parts["flatten"] = nn.Flatten()
    features = channels * pooled("VGG", image, pool) ** 2
    for number, (fan_in, fan_out) in enumerate(pairwise((features, *linear)), start=1):
        parts[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        if number < len(linear):
            parts[f"relu{conv + number}"] = nn.ReLU()
    return nn.Sequential(parts)


def _channels(plan: Plan) -> list[int]:
    return [step for step in plan if isinstance(step, int)]


def _check(owner: str, classes: int, channels: int, image: int, hidden: Sequence[int], init: str, plan: Plan) -> None:
    require_sizes(f"{owner}(classes=..., channels=..., image=...)", (classes, channels, image))
    require_sizes(f"{owner}(hidden=...)", hidden)
    require_known(f"{owner}(init=...)", init, LAWS)
    pooled(owner, image, list(plan).count("M"))
