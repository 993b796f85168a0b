"""Stochastic gradient descent: its settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from flatlens.errors import BadInput


@dataclass(frozen=True)
class SGD:
    """Settings of a training run; `seed` draws the order of the batches.

    Training stops at the first check point (every `check_every` steps) where all training samples are classified
    correctly and the loss over the whole training set is below `loss_below`; or after `max_steps`.
    """

    lr: float
    batch_size: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0
    loss_below: float = 2e-3
    max_steps: int = 40_000
    check_every: int = 10

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise BadInput(f"SGD(lr={self.lr}): the learning rate must be positive")
        if min(self.batch_size, self.max_steps, self.check_every) < 1:
            raise BadInput("SGD: batch_size, max_steps and check_every must be at least 1")
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise BadInput("SGD: momentum must be in [0, 1) and weight_decay not negative")

    def optimiser(self, model: nn.Module) -> torch.optim.SGD:
        """The optimiser of the model's trainable parameters."""
        return torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            foreach=True,  # for small networks the loop over parameters is what costs
        )
