"""Architectures that experiments train, their initial weights, and the loading of checkpoints."""

from __future__ import annotations

from typing import TypeAlias

from flatlens.models.activations import Activation, GaussianActivation
from flatlens.models.coordinate import CoordinateNet
from flatlens.models.initialisation import Init
from flatlens.models.lenet import LeNet5
from flatlens.models.mlp import MLP
from flatlens.models.published import Published
from flatlens.models.resnet import ResNet18
from flatlens.models.user_network import UserNetwork
from flatlens.models.vgg import VGG11, SmallVGG
from flatlens.models.vit import ViT

Architecture: TypeAlias = MLP | LeNet5 | VGG11 | SmallVGG | ResNet18 | ViT | CoordinateNet | Published | UserNetwork
ARCHITECTURES: tuple[type, ...] = (MLP, LeNet5, VGG11, SmallVGG, ResNet18, ViT, CoordinateNet, Published, UserNetwork)
"""All types that a network's settings can have."""

__all__ = [
    "ARCHITECTURES", "MLP", "VGG11", "Activation", "Architecture", "CoordinateNet", "GaussianActivation", "Init",
    "LeNet5", "Published", "ResNet18", "SmallVGG", "UserNetwork", "ViT",
]  # fmt: skip
