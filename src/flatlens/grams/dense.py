"""The parameter Jacobian of a dense layer, never formed: df_k/dW = J_k (x) phi is two short vectors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.contract import Diagonals, gram, norm2, quadratic
from flatlens.grams.weight import WeightMatrix


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """A layer applied once per sample: K = ||phi||^2 J J^T."""

    J: Tensor  #: df/dz, (n, N, d) float64
    weight: WeightMatrix
    below: Tensor | None  #: df/dx through the layer where autograd was asked for it, (n, N, m) float64
    phi: Tensor  #: the layer's input, (n, m), in the network's dtype
    phi_norm2: Tensor  #: (n,) float64

    @cached_property
    def Jx(self) -> Tensor:
        """df/dx through the layer, J W, (n, N, m)."""
        if self.below is not None:
            return self.below
        dtype = self.phi.dtype  # the network's own arithmetic, as autograd would use
        return (self.J.to(dtype) @ self.weight.W[0].to(dtype)).to(torch.float64)

    @cached_property
    def _JJ(self) -> Tensor:
        return gram(self.J)

    def gram(self) -> Tensor:
        """K of the weight, (n, N, N)."""
        return self.phi_norm2[:, None, None] * self._JJ

    def bias_gram(self) -> Tensor:
        """K of the bias, (n, N, N)."""
        return self._JJ

    def relative_gram(self, scale: Tensor) -> Tensor:
        """R of the layer reading phi / scale with W * scale, for `scale` of shape (m,)."""
        return norm2(self.phi.to(torch.float64) / scale)[:, None, None] * gram(self.Jx * scale)

    def diagonals(self, C: Tensor) -> Diagonals:
        """The Gauss-Newton diagonal and the column sums, with C and with I."""
        phi2 = self.phi.to(torch.float64).square()
        return Diagonals(
            quadratic(C, self.J).T @ phi2,
            quadratic(None, self.J).T @ phi2,
            quadratic(C, self.Jx) * phi2,
            quadratic(None, self.Jx) * phi2,
        )
