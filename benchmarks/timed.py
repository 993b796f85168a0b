"""The networks that are timed, with initial weights and noise as input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks.resnet import resnet18
from flatlens.models import VGG11, ViT

OUTPUTS = 10


@dataclass(frozen=True)
class Timed:
    """A network, the number of samples it is timed on, and their shape."""

    build: Callable[[], nn.Module]
    n: int
    shape: tuple[int, ...]
    outputs: int = OUTPUTS

    def case(self, n: int | None = None, device: str = "cpu", **options: Any) -> tuple[fl.Problem, Tensor]:
        """Return (cross-entropy of the network on its samples, the samples), equal at each call."""
        torch.manual_seed(0)
        net, x = self.build().eval().to(device), torch.randn(n or self.n, *self.shape).to(device)
        y = torch.randint(self.outputs, (len(x),)).to(device)
        return fl.Problem(net, "cross_entropy", (x, y), **options), x


def mlp(*widths: int, seed: int | None = None) -> nn.Sequential:
    """Return dense layers with ReLU between them; with a seed, equal at each call."""
    if seed is not None:
        torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for into, out in pairwise(widths):
        parts += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def lenet() -> nn.Sequential:
    """Return LeNet-5 on three colours, with ReLU and 2 x 2 max pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, OUTPUTS),
    )  # fmt: skip


COLOURS = (3, 32, 32)
NETWORKS = {
    "MLP 784-512-512-10": Timed(lambda: mlp(784, 512, 512, OUTPUTS), 2000, (784,)),
    "MLP 784-512-512-512-10": Timed(lambda: mlp(784, 512, 512, 512, OUTPUTS), 2000, (784,)),
    "LeNet 3x32x32": Timed(lenet, 2000, COLOURS),
    "VGG-11 3x32x32": Timed(lambda: VGG11(batchnorm=False).build(), 64, COLOURS),
    "ResNet-18 3x32x32": Timed(lambda: resnet18(OUTPUTS), 64, COLOURS),
}
"""Networks that a processor measures in seconds."""

VIT_B16 = Timed(ViT(image=224, patch=16, width=768, depth=12, heads=12).build, 1024, (3, 224, 224))
"""A network that needs a GPU."""
