"""The parameter Jacobian of a dense layer, never formed: df_k/dW = J_k (x) phi is two short vectors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.contract import gram, norm2, quadratic
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

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R = ||phi||^2 J W (J W)^T, (n, N, N); with `scale` (m,), of the layer reading phi / scale with W * scale."""
        if scale is None:
            return self.phi_norm2[:, None, None] * gram(self.Jx)
        return norm2(self.phi.to(torch.float64) / scale)[:, None, None] * gram(self.Jx * scale)

    def diagonal(self, C: Tensor | None) -> Tensor:
        """sum_i diag(M_i^T C_i M_i), (d, m): the Gauss-Newton diagonal of the weight, summed over the chunk.

        C = I if None.
        """
        return quadratic(C, self.J).T @ self.phi.to(torch.float64).square()

    def column_sums(self, C: Tensor | None) -> Tensor:
        """phi_ij^2 ||C^(1/2) df/dx_j||^2, (n, m)."""
        return self.phi.to(torch.float64).square() * quadratic(C, self.Jx)
