"""The activations that networks are built with, by name."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.errors import BadInput

Activation: TypeAlias = Literal["relu", "tanh", "gelu", "sigmoid", "silu", "gaussian"]


VANISHING = 1e-30
"""Gaussian values below it become 0: subnormal numbers would make the next layers five times slower."""


class GaussianActivation(nn.Module):
    """exp(-z^2 / (2 s^2)) of each entry, s the `spread`; 0 where that is below 1e-30, beyond 11.8 s.

    >>> GaussianActivation(spread=2.0)(torch.tensor([0.0, 2.0])).tolist()  # 1 and exp(-1/2)
    [1.0, 0.6065306663513184]
    """

    def __init__(self, spread: float = 1.0) -> None:
        super().__init__()
        if not 0 < spread < float("inf"):
            raise BadInput(f"GaussianActivation(spread={spread!r}): it must be positive and finite")
        self.spread = spread

    def forward(self, z: Tensor) -> Tensor:
        """Return the activation of each entry, in z's shape."""
        return F.threshold(torch.exp(torch.square(z) * (-0.5 / self.spread**2)), VANISHING, 0.0)

    def extra_repr(self) -> str:
        """Return what `print(network)` shows."""
        return f"spread={self.spread:g}"


ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gaussian": GaussianActivation,  # of spread 1
}
