"""Settings of the optimisers that experiments train with, and the torch optimisers that they build."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flatlens.errors import BadInput
from flatlens.training.ridge import Ridge


@dataclass(frozen=True)
class SGD:
    """(Stochastic) gradient descent with heavy-ball momentum; weight decay adds decay * w to the gradient.

    >>> SGD(lr=0.1).build([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    0.1
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=self.lr, weight_decay=self.weight_decay, rates={"momentum": self.momentum})
        if self.nesterov and self.momentum == 0:
            raise BadInput("SGD(nesterov=True): it needs a momentum")

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser."""
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            foreach=True,  # for small networks the loop over parameters is what costs
        )


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba); with `decoupled` AdamW, whose weight decay is not scaled as the gradient is."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=self.lr, weight_decay=self.weight_decay, rates={"beta1": self.beta1, "beta2": self.beta2})

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser."""
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            parameters,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=True,
        )


@dataclass(frozen=True)
class RMSProp:
    """RMSProp (Hinton), as in torch; `alpha` is the decay rate of the mean square."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self, lr=self.lr, weight_decay=self.weight_decay, rates={"alpha": self.alpha, "momentum": self.momentum}
        )

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser."""
        return torch.optim.RMSprop(
            parameters,
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            foreach=True,
        )


Stepping: TypeAlias = SGD | Adam | RMSProp
Optimiser: TypeAlias = Stepping | Ridge


def _require(settings: Stepping, *, lr: float, weight_decay: float, rates: dict[str, float]) -> None:
    """Refuse learning rates, decays and rates outside their ranges."""
    name = type(settings).__name__
    if not (lr > 0 and math.isfinite(lr)):
        raise BadInput(f"{name}(lr={lr}): the learning rate must be positive")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise BadInput(f"{name}(weight_decay={weight_decay}): it must not be negative")
    for rate, value in rates.items():
        if not 0 <= value < 1:
            raise BadInput(f"{name}({rate}={value}): it must be at least 0 and below 1")
