"""The losses that experiments train on: a value per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from flatlens.errors import UnknownName

PerSampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs (n, N), one-hot targets (n, N)) -> losses (n,)."""


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """0.5 ||f - y||^2.

    >>> import torch
    >>> half_squared_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([2.])
    """
    return 0.5 * (outputs - targets).square().sum(1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """-<y, log softmax(f)>.

    >>> import torch
    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])).exp()
    tensor([2.])
    """
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


LOSSES: dict[str, PerSampleLoss] = {"half_squared_error": half_squared_error, "cross_entropy": cross_entropy}


def loss_named(name: str) -> PerSampleLoss:
    """The loss called so.

    Raises:
        UnknownName: there is none.
    """
    if name not in LOSSES:
        raise UnknownName.among("loss to train on", name, LOSSES)
    return LOSSES[name]
