"""A layer's weight as a matrix, and its row factor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def row_factor(W: Tensor) -> Tensor:
    """T with T^T T = W W^T, (..., min(d, m), d)."""
    T: Tensor = torch.linalg.qr(W.mT, mode="r").R
    return T


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A layer's weight as g diagonal blocks, and their row factor, computed once for all chunks."""

    W: Tensor  #: (g, d, m) float64
    b: Tensor | None = None  #: the bias, (g d,) float64

    @cached_property
    def row_factor(self) -> Tensor:
        """T with T^T T = W W^T, (g, min(d, m), d)."""
        return row_factor(self.W)
