"""The parameter Jacobian of a weight used at many positions: convolution pixels, tokens, several calls.

df_k/dW = M_k = sum_p J_kp (x) phi_p sums BEFORE it squares. Two exact roads to K_kk' = <M_k, M_k'>, the cheaper
taken per layer:

    form M              N d m P + N^2 d m        multiplications per sample
    position Gram       P^2 m + N P^2 d + N^2 P d,  K_kk' = sum_{p,q} <phi_p, phi_q> <J_kp, J_k'q>

A grouped convolution is a block-diagonal matrix: its groups' Grams add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.contract import gram, joined, pieces, quadratic


def row_factor(W: Tensor) -> Tensor:
    """T with T^T T = W W^T, (..., min(d, m), d)."""
    T: Tensor = torch.linalg.qr(W.mT, mode="r").R
    return T


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A layer's weight as g diagonal blocks, and their row factor, computed once for all chunks."""

    W: Tensor  #: (g, d, m) float64

    @cached_property
    def row_factor(self) -> Tensor:
        """T with T^T T = W W^T, (g, min(d, m), d)."""
        return row_factor(self.W)


@dataclass(frozen=True, eq=False)
class SharedJacobian:
    """A weight applied at positions p (or called more than once: its calls' positions one after another)."""

    J: Tensor  #: df/dz, (n, N, g, d, P)
    phi: Tensor  #: what the weight multiplies, (n, g, m, P)
    weight: WeightMatrix

    @cached_property
    def _forms_M(self) -> bool:
        _, N, _, d, P = self.J.shape
        m = self.phi.shape[2]
        # the position road runs in float64, at half the speed of float32
        return N * d * m * (P + N) <= 2 * (P * P * m + N * P * P * d + N * N * P * d)

    @cached_property
    def _cuts(self) -> list[slice]:
        n, N, g, d, P = self.J.shape
        return list(pieces(n, N * g * d * (self.phi.shape[2] + P) * self.J.element_size()))

    @cached_property
    def _whole_M(self) -> Tensor:
        return self._form_M(slice(None))

    def _form_M(self, piece: slice) -> Tensor:
        """Per-sample gradients (n', N, g, d, m)."""
        _, N, g, d, P = self.J.shape
        J = self.J[piece].transpose(1, 2).reshape(-1, N * d, P)
        M = J @ self.phi[piece].flatten(0, 1).mT
        return M.reshape(-1, g, N, d, M.shape[-1]).transpose(1, 2)

    def _M(self) -> Iterator[tuple[slice, Tensor]]:
        """The gradients a piece of the chunk at a time; kept for the next contraction where one piece is all."""
        if len(self._cuts) == 1:
            yield self._cuts[0], self._whole_M
            return
        for piece in self._cuts:
            yield piece, self._form_M(piece)

    def _gram(self, T: Tensor | None, scale: Tensor | None = None) -> Tensor:
        """Gram of T M (T of shape (g, r, d), I if None), phi divided by `scale` (g, m)."""
        if not self._forms_M:
            J = self.J if T is None else torch.einsum("grd,nkgdp->nkgrp", T, self.J)
            return self._position_gram(J, self.phi if scale is None else self.phi / scale[..., None])
        grams = []
        for _, M in self._M():
            M = M if scale is None else M / scale[:, None]
            grams.append(gram(M if T is None else T @ M))
        return joined(grams, 0)

    def _position_gram(self, J: Tensor, phi: Tensor) -> Tensor:
        n, N, g, r, P = J.shape
        K = J.new_zeros(n, N, N, dtype=torch.float64)
        for piece in pieces(n, 8 * g * (P * P + 2 * N * r * P + phi.shape[2] * P)):
            wide = phi[piece].to(torch.float64)
            A = wide.mT @ wide  # (n', g, P, P)
            rows = J[piece].to(torch.float64).transpose(1, 2).reshape(-1, g, N * r, P)
            AJ = (rows @ A).reshape(-1, g, N, r * P)
            K[piece] = (AJ @ rows.reshape(-1, g, N, r * P).mT).sum(1)
        return K

    def gram(self) -> Tensor:
        """K of the weight, (n, N, N)."""
        return self._gram(None)

    def bias_gram(self) -> Tensor:
        """K of the bias: (sum_p J_p)(sum_p J_p)^T."""
        return gram(self.J.sum(4))

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R_kk' = <W^T M_k, W^T M_k'>, (n, N, N).

        With W^T = Q T (QR), W^T M = Q (T M) and Q drops out: T is min(d, m) x d. With `scale` (g, m), of W * scale
        reading phi / scale.
        """
        if scale is None:
            return self._gram(self.weight.row_factor.to(self.J.dtype))
        T = row_factor(self.weight.W * scale[:, None])
        return self._gram(T.to(self.J.dtype), scale.to(self.J.dtype))

    def diagonal(self, C: Tensor | None) -> Tensor:
        """sum_i diag(M_i^T C_i M_i), (g d, m): the Gauss-Newton diagonal of the weight, summed over the chunk; C = I
        if None."""
        total = sum(quadratic(None if C is None else C[p], M.to(torch.float64)).sum(0) for p, M in self._M())
        assert isinstance(total, Tensor)
        return total.flatten(0, 1)

    def column_sums(self, C: Tensor | None) -> Tensor:
        """||C^(1/2) sum_p phi_pj J_p w_j||^2, (n, g m)."""
        W = self.weight.W.to(self.J.dtype)
        columns = [
            quadratic(None if C is None else C[p], (M * W).sum(3).to(torch.float64)).flatten(1) for p, M in self._M()
        ]
        return joined(columns, 0)


@dataclass(frozen=True, eq=False)
class ExplicitJacobian:
    """A parameter whose per-sample gradients are held as they are: a norm's affine entries, or anything no layer
    explains."""

    M: Tensor  #: df/dtheta, (n, N, size)

    def gram(self) -> Tensor:
        """K, (n, N, N)."""
        return gram(self.M)

    def diagonal(self, C: Tensor | None) -> Tensor:
        """sum_i diag(M_i^T C_i M_i), (size,)."""
        return quadratic(C, self.M.to(torch.float64)).sum(0)
