"""Architectures that experiments train, their initial weights, and the loading of checkpoints."""

from __future__ import annotations

from typing import TypeAlias

from flatlens.models.building_blocks import Activation, GaussianActivation, Init
from flatlens.models.external import Published, UserNetwork, load_model
from flatlens.models.image_networks import VGG11, LeNet5, ResNet18, SmallVGG, ViT
from flatlens.models.mlp import MLP, CoordinateNet
from flatlens.models.weights import load_weights

Architecture: TypeAlias = MLP | LeNet5 | VGG11 | SmallVGG | ResNet18 | ViT | CoordinateNet | Published | UserNetwork
ARCHITECTURES: tuple[type, ...] = (MLP, LeNet5, VGG11, SmallVGG, ResNet18, ViT, CoordinateNet, Published, UserNetwork)
"""All types that a network's settings can have."""

__all__ = [
    "ARCHITECTURES", "MLP", "VGG11", "Activation", "Architecture", "CoordinateNet", "GaussianActivation", "Init",
    "LeNet5", "Published", "ResNet18", "SmallVGG", "UserNetwork", "ViT",
    "load_model", "load_weights",
]  # fmt: skip
