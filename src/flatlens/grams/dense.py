"""The parameter Jacobian of a dense layer, never formed: df_k/dW = J_k (x) phi is two short vectors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flatlens.grams.contract import gram, quadratic


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """A layer applied once per sample: K = ||phi||^2 J J^T."""

    J: Tensor  #: df/dz, (n, N, d) float64
    Jx: Tensor  #: df/dx through the layer, J W, (n, N, m) float64
    phi: Tensor  #: the layer's input, (n, m) float64

    def _size(self, phi: Tensor) -> Tensor:
        return phi.square().sum(1)[:, None, None]

    def gram(self) -> Tensor:
        """K of the weight, (n, N, N)."""
        return self._size(self.phi) * gram(self.J)

    def bias_gram(self) -> Tensor:
        """K of the bias, (n, N, N)."""
        return gram(self.J)

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R = ||phi||^2 J W (J W)^T, (n, N, N); with `scale` (m,), of the layer reading phi / scale with weight W *
        scale."""
        if scale is None:
            return self._size(self.phi) * gram(self.Jx)
        return self._size(self.phi / scale) * gram(self.Jx * scale)

    def diagonal(self, C: Tensor | None) -> Tensor:
        """sum_i diag(M_i^T C_i M_i), (d, m): the Gauss-Newton diagonal of the weight, summed over the chunk; C = I
        if None."""
        return quadratic(C, self.J).T @ self.phi.square()

    def column_sums(self, C: Tensor | None) -> Tensor:
        """phi_ij^2 ||C^(1/2) df/dx_j||^2, (n, m)."""
        return self.phi.square() * quadratic(C, self.Jx)
