"""A layer's weight as a matrix W, and its row factor T, a triangular matrix with T^T T = W W^T."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.contractions import gram


def row_factor(W: Tensor) -> Tensor:
    """Return T with T^T T = W W^T, (..., min(d, m), d), zero below the diagonal."""
    T: Tensor = torch.linalg.qr(W.mT, mode="r").R
    return T


def _by_rows(J: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `multiply` of all rows of J (n, N, d) in one call, (n, N, m), whichever of n and N is stored first."""
    held = J.transpose(0, 1) if J.stride(0) < J.stride(1) else J
    out = multiply(held.reshape(-1, J.shape[2])).reshape(*held.shape[:2], -1)
    return out if held is J else out.transpose(0, 1)


def times_triangle(rows: Tensor, T: Tensor) -> Tensor:
    """Return `rows` times T^T, without half of the products with T's zeros."""
    out = rows.new_empty(len(rows), len(T))
    half = len(T) // 2  # more blocks leave out more products, but are not faster
    torch.mm(rows, T[:half].T, out=out[:, :half])
    torch.mm(rows[:, half:], T[half:, half:].T, out=out[:, half:])
    return out


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A layer's weight as g diagonal blocks, and their row factor, which is computed once for all chunks."""

    W: Tensor  #: (g, d, m) float64
    b: Tensor | None = None  #: bias, (g d,) float64
    rounded: bool = False  #: whether Jacobians have fewer digits than float64

    @cached_property
    def row_factor(self) -> Tensor:
        """Return T with T^T T = W W^T, (g, min(d, m), d).

        Where the Jacobians' own rounding is larger than that of W W^T, T is its Cholesky factor: a third of the time.
        """
        if self.rounded and self.W.shape[1] <= self.W.shape[2]:
            lower, failed = torch.linalg.cholesky_ex(self.W @ self.W.mT)
            if not failed.any():
                factor: Tensor = lower.mT
                return factor
        return row_factor(self.W)

    @cached_property
    def squares(self) -> Tensor:
        """Return the squares of the weight's entries, (g, d, m)."""
        return self.W.square()

    def at_input(self, J: Tensor) -> Tensor:
        """Return J W: a dense layer's output Jacobian at its input, (n, N, m), from that at its output, (n, N, d)."""
        W = self.W[0].to(J.dtype)  # the network's own arithmetic, as autograd would use
        return _by_rows(J, lambda rows: rows @ W)

    def gram_at_input(self, J: Tensor) -> Tensor:
        """Return (J W)(J W)^T, (n, N, N), as (J T^T)(J T^T)^T, with min(d, m) columns.

        >>> W, J = torch.randn(1, 3, 7, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
        >>> torch.allclose(WeightMatrix(W).gram_at_input(J), (J @ W) @ (J @ W).mT)
        True
        """
        T = self.row_factor[0].to(J.dtype)
        return gram(_by_rows(J, lambda rows: times_triangle(rows, T)))
