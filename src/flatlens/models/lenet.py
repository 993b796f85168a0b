"""LeNet-5: LeCun et al. 1998, as reparam2019 and relative2021 train it on CIFAR-10."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from flatlens.models.activations import ACTIVATIONS, Activation
from flatlens.models.checks import require_known, require_sizes
from flatlens.models.initialisation import LAWS, Init, built

Pooling: TypeAlias = Literal["max", "average"]
_POOLINGS: dict[Pooling, type[nn.Module]] = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}


@dataclass(frozen=True)
class LeNet5:
    """Convolutions of 6 and 16 kernels of 5 x 5, each pooled by 2, then linear layers 120, 84, `classes`.

    The papers name the network and no more. What is common today is taken: ReLU, max pooling, every kernel of conv2 on
    all six maps, a linear output. In LeCun's own, poolings are averages with trained coefficients (here
    `pooling="average"` has none), the activation is a scaled tanh and the outputs are distances to stored patterns.
    Images of 28 x 28 are padded by 2, as LeCun's digits are, so that either size has the same layers.

    >>> net = LeNet5(channels=3, image=32).build()
    >>> sum(p.numel() for p in net.parameters())
    62006
    >>> [name for name, _ in net.named_children() if not name.startswith("act")]
    ['conv1', 'pool1', 'conv2', 'pool2', 'flatten', 'fc1', 'fc2', 'fc3']
    """

    channels: int = 3
    image: Literal[28, 32] = 32
    classes: int = 10
    activation: Activation = "relu"
    pooling: Pooling = "max"
    seed: int = 0
    init: Init = "torch"

    def __post_init__(self) -> None:
        require_sizes("LeNet5(channels=..., classes=...)", (self.channels, self.classes))
        require_known("LeNet5(image=...)", self.image, (28, 32))
        require_known("LeNet5(activation=...)", self.activation, ACTIVATIONS)
        require_known("LeNet5(pooling=...)", self.pooling, _POOLINGS)
        require_known("LeNet5(init=...)", self.init, LAWS)

    def build(self) -> nn.Sequential:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        return built(self._design, self.init, torch.Generator().manual_seed(self.seed))

    def _design(self) -> nn.Sequential:
        activation, pool = ACTIVATIONS[self.activation], _POOLINGS[self.pooling]
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["conv1"] = nn.Conv2d(self.channels, 6, 5, padding=(32 - self.image) // 2)
        parts["act1"], parts["pool1"] = activation(), pool(2)
        parts["conv2"] = nn.Conv2d(6, 16, 5)
        parts["act2"], parts["pool2"] = activation(), pool(2)
        parts["flatten"] = nn.Flatten()
        parts["fc1"], parts["act3"] = nn.Linear(16 * 5 * 5, 120), activation()
        parts["fc2"], parts["act4"] = nn.Linear(120, 84), activation()
        parts["fc3"] = nn.Linear(84, self.classes)
        return nn.Sequential(parts)
