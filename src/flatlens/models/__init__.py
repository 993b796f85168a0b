"""Architectures that experiments train, and the loading of checkpoints."""

from flatlens.models.mlp import MLP

__all__ = ["MLP"]
