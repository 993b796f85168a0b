"""The parameter Jacobian of a weight used at many positions: convolution pixels, tokens, several calls.

df_k/dW = M_k = sum_p J_kp (x) phi_p sums BEFORE it squares. Two exact roads to K_kk' = <M_k, M_k'>, the cheaper
taken per layer:

    form M              N d m P + N^2 d m        multiplications per sample
    position Gram       P^2 m + N P^2 d + N^2 P d,  K_kk' = sum_{p,q} <phi_p, phi_q> <J_kp, J_k'q>

A grouped convolution is a block-diagonal matrix: its groups' Grams add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.contract import Diagonals, gram, pieces, quadratic
from flatlens.grams.weight import WeightMatrix, row_factor


@dataclass(frozen=True, eq=False)
class SharedJacobian:
    """A weight applied at positions p (or called more than once: its calls' positions one after another)."""

    J: Tensor  #: df/dz, (n, N, g, d, P)
    phi: Callable[[slice], Tensor]  #: what the weight multiplies, of some samples, (n', g, m, P): made piece by piece
    weight: WeightMatrix

    @cached_property
    def _m(self) -> int:
        return self.weight.W.shape[2]

    @cached_property
    def _forms_M(self) -> bool:
        _, N, _, d, P = self.J.shape
        m = self._m
        # the position road runs in float64, at half the speed of float32
        return N * d * m * (P + N) <= 2 * (P * P * m + N * P * P * d + N * N * P * d)

    def _pieces(self) -> Iterator[slice]:
        _, N, g, d, P = self.J.shape
        held = N * d * (self._m + P) + self._m * P if self._forms_M else P * P + 2 * N * d * P + self._m * P
        return pieces(len(self.J), held * g * 8)

    def _M(self, piece: slice, phi: Tensor) -> Tensor:
        """Per-sample gradients of some samples, (n', N, g, d, m)."""
        _, N, g, d, P = self.J.shape
        J = self.J[piece].transpose(1, 2).reshape(-1, N * d, P)
        M = J @ phi.flatten(0, 1).mT
        return M.reshape(-1, g, N, d, self._m).transpose(1, 2)

    @cached_property
    def _both(self) -> tuple[Tensor, Tensor]:
        """K and R, which share all the work on the way to them."""
        K, R = self._grams((None, self.weight.row_factor), None)
        return K, R

    def _grams(self, factors: tuple[Tensor | None, ...], scale: Tensor | None) -> tuple[Tensor, ...]:
        """Grams of T M for each T of shape (g, r, d) (I where None), phi divided by `scale` (g, m)."""
        n, N = self.J.shape[:2]
        grams = tuple(self.J.new_empty(n, N, N, dtype=torch.float64) for _ in factors)
        for piece in self._pieces():
            phi = self.phi(piece)
            phi = phi if scale is None else phi / scale[..., None].to(phi.dtype)
            if self._forms_M:
                M = self._M(piece, phi)
                for K, T in zip(grams, factors, strict=True):
                    K[piece] = gram(M if T is None else T.to(M.dtype) @ M)
            else:
                wide = phi.to(torch.float64)
                A = wide.mT @ wide  # (n', g, P, P)
                for K, T in zip(grams, factors, strict=True):
                    K[piece] = _position_gram(A, self.J[piece].to(torch.float64), T)
        return grams

    def gram(self) -> Tensor:
        """K of the weight, (n, N, N)."""
        return self._both[0]

    def bias_gram(self) -> Tensor:
        """K of the bias: (sum_p J_p)(sum_p J_p)^T."""
        return gram(self.J.sum(4))

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R_kk' = <W^T M_k, W^T M_k'>, (n, N, N).

        With W^T = Q T (QR), W^T M = Q (T M) and Q drops out: T is min(d, m) x d. With `scale` (g, m), of W * scale
        reading phi / scale.
        """
        if scale is None:
            return self._both[1]
        return self._grams((row_factor(self.weight.W * scale[:, None]),), scale)[0]

    def diagonals(self, C: Tensor) -> Diagonals:
        """The Gauss-Newton diagonal and the column sums, with C and with I: all from gradients formed once."""
        n, W = len(self.J), self.weight.W
        ggn, ggn_plain = torch.zeros_like(W), torch.zeros_like(W)
        columns, columns_plain = (W.new_empty(n, W.shape[0] * W.shape[2]) for _ in range(2))
        for piece in self._pieces():
            M = self._M(piece, self.phi(piece))
            column = (M * W.to(M.dtype)).sum(3).to(torch.float64)
            M = M.to(torch.float64)
            ggn += quadratic(C[piece], M).sum(0)
            ggn_plain += quadratic(None, M).sum(0)
            columns[piece] = quadratic(C[piece], column).flatten(1)
            columns_plain[piece] = quadratic(None, column).flatten(1)
        return Diagonals(ggn.flatten(0, 1), ggn_plain.flatten(0, 1), columns, columns_plain)


def _position_gram(A: Tensor, J: Tensor, T: Tensor | None) -> Tensor:
    """sum_{p,q} <phi_p, phi_q> <T J_kp, T J_k'q> of some samples, from A (n', g, P, P) and J (n', N, g, d, P)."""
    J = J.transpose(1, 2)
    rows = (J if T is None else T[:, None] @ J).flatten(2, 3)  # (n', g, N r, P)
    shape = (*rows.shape[:2], J.shape[2], -1)
    return ((rows @ A).reshape(shape) @ rows.reshape(shape).mT).sum(1)


@dataclass(frozen=True, eq=False)
class ExplicitJacobian:
    """A parameter whose per-sample gradients are held as they are: a norm's affine entries, or anything no layer
    explains."""

    M: Tensor  #: df/dtheta, (n, N, size)

    def gram(self) -> Tensor:
        """K, (n, N, N)."""
        return gram(self.M)

    def diagonals(self, C: Tensor) -> Diagonals:
        """The Gauss-Newton diagonal, (size,), with C and with I; there are no columns."""
        M = self.M.to(torch.float64)
        none = M.new_zeros(len(M), 0)
        return Diagonals(quadratic(C, M).sum(0), quadratic(None, M).sum(0), none, none)
