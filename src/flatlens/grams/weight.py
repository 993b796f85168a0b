"""A layer's weight as a matrix, and its row factor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def row_factor(W: Tensor) -> Tensor:
    """T with T^T T = W W^T, (..., min(d, m), d), zero below the diagonal."""
    T: Tensor = torch.linalg.qr(W.mT, mode="r").R
    return T


def times_factor(J: Tensor, T: Tensor) -> Tensor:
    """J T^T, (n, N, r), for slopes J (n, N, d) and a row factor T (r, d), half of whose zeros are not multiplied.

    >>> W = torch.randn(300, 700, dtype=torch.float64)
    >>> J, T = torch.randn(2, 5, 300, dtype=torch.float64), row_factor(W)
    >>> torch.allclose(times_factor(J, T), J @ T.mT)
    True
    """
    outputs_first = J.stride(0) < J.stride(1)
    rows = (J.transpose(0, 1) if outputs_first else J).reshape(-1, J.shape[2])
    T = T.to(J.dtype)
    out = rows.new_empty(len(rows), len(T))
    half = len(T) // 2  # more blocks leave out more, and gain nothing
    torch.mm(rows, T[:half].T, out=out[:, :half])
    torch.mm(rows[:, half:], T[half:, half:].T, out=out[:, half:])
    if outputs_first:
        return out.reshape(J.shape[1], J.shape[0], -1).transpose(0, 1)
    return out.reshape(*J.shape[:2], -1)


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A layer's weight as g diagonal blocks, and their row factor, computed once for all chunks."""

    W: Tensor  #: (g, d, m) float64
    b: Tensor | None = None  #: the bias, (g d,) float64

    @cached_property
    def row_factor(self) -> Tensor:
        """T with T^T T = W W^T, (g, min(d, m), d)."""
        return row_factor(self.W)
