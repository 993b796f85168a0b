"""ResNet-18 for small images (He et al. 2016; sharpening B.2 and B.3)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.models.checks import require_known, require_sizes, scaled
from flatlens.models.initialisation import LAWS, Init, built

STAGES = (64, 128, 256, 512)


@dataclass(frozen=True)
class ResNet18:
    """A 3 x 3 convolution, then four stages of two residual blocks, the mean over positions, a linear layer.

    The form for CIFAR that sharpening B.2 cites: stride 1 and no pooling at the entrance, so that 32 x 32 images
    keep their size through the first stage; an image may have any size. The initial weights are PyTorch's, as there.
    The text leaves open what B.3's networks without BatchNorm have in its place: here nothing, and the convolutions
    get the bias that BatchNorm's shift made idle.
    Names are torchvision's, for the weights of others: conv1, layer2.0.bn1, layer2.0.downsample.0, fc.

    >>> sum(p.numel() for p in ResNet18().build().parameters())
    11173962
    """

    classes: int = 10
    channels: int = 3
    batchnorm: bool = True
    width: float = 1.0  #: multiplies the channels
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        require_sizes("ResNet18(classes=..., channels=...)", (self.classes, self.channels))
        require_known("ResNet18(init=...)", self.init, LAWS)
        scaled("ResNet18", STAGES, self.width)

    def build(self) -> nn.Sequential:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        return built(self._design, self.init, torch.Generator().manual_seed(self.seed))

    def _design(self) -> nn.Sequential:
        stages = scaled("ResNet18", STAGES, self.width)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        into = stages[0]
        parts["conv1"] = _conv(self.channels, into, 3, 1, self.batchnorm)
        if self.batchnorm:
            parts["bn1"] = nn.BatchNorm2d(into)
        parts["relu1"] = nn.ReLU()
        for number, out in enumerate(stages, start=1):
            first = Block(into, out, 1 if number == 1 else 2, batchnorm=self.batchnorm)
            parts[f"layer{number}"] = nn.Sequential(first, Block(out, out, 1, batchnorm=self.batchnorm))
            into = out
        parts |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(into, self.classes)}
        return nn.Sequential(parts)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a skip, which is projected by a 1 x 1 convolution where the shape changes."""

    def __init__(self, into: int, out: int, stride: int, *, batchnorm: bool) -> None:
        super().__init__()
        self.conv1 = _conv(into, out, 3, stride, batchnorm)
        self.bn1 = _norm(out, batchnorm)
        self.relu1 = nn.ReLU()
        self.conv2 = _conv(out, out, 3, 1, batchnorm)
        self.bn2 = _norm(out, batchnorm)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(_conv(into, out, 1, stride, batchnorm), _norm(out, batchnorm))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, into, height, width) to (n, out, height/stride, width/stride)."""
        inner = self.relu1(self.bn1(self.conv1(x)))
        out: Tensor = self.relu2(self.bn2(self.conv2(inner)) + self.downsample(x))
        return out


def _conv(into: int, out: int, kernel: int, stride: int, batchnorm: bool) -> nn.Conv2d:
    return nn.Conv2d(into, out, kernel, stride, padding=kernel // 2, bias=not batchnorm)


def _norm(channels: int, batchnorm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if batchnorm else nn.Identity()
