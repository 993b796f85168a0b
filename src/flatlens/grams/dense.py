"""The parameter Jacobian of a dense layer, in factors: df_k/dW = J_k (x) phi, so K = ||phi||^2 J J^T."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.contractions import RowProduct, gram, norm2, row_products
from flatlens.grams.weight import WeightMatrix


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """The Jacobian in a weight that is applied once per sample."""

    J: Tensor  #: df/dz, (n, N, d), in the network's dtype
    weight: WeightMatrix
    at_x: Tensor | None  #: df/dx through the layer, (n, N, m), if the pass has it; else it is J W
    phi: Tensor  #: the layer's input, (n, m), in the network's dtype
    phi_norm2: Tensor  #: (n,) float64
    C: Tensor  #: output Hessians, (n, N, N)
    wanted: frozenset[str] = frozenset()  #: needs of the measures: what several of them share is computed in one walk

    def block(self, weight: WeightMatrix, rows: Tensor | None, columns: Tensor | None) -> DenseJacobian:
        """Return the Jacobian in some rows and columns of the weight, given as a weight; None for all."""
        J = self.J if rows is None else self.J[..., rows.to(self.J.device)]
        phi = self.phi if columns is None else self.phi[:, columns.to(self.phi.device)]
        return replace(self, J=J, weight=weight, at_x=None, phi=phi, phi_norm2=norm2(phi))

    @cached_property
    def Jx(self) -> Tensor:
        """Return df/dx through the layer, J W, (n, N, m)."""
        if self.at_x is not None:
            return self.at_x
        return self.weight.at_input(self.J)

    @cached_property
    def _of_J(self) -> dict[RowProduct, Tensor]:
        needs: dict[RowProduct, set[str]] = {"gram": {"K"}, "weighted": {"diagonal", "adaptive"}}
        needs["along"] = set() if self.weight.b is None else {"along"}
        return self._of(self.J, self._b, needs)

    @cached_property
    def _of_Jx(self) -> dict[RowProduct, Tensor]:
        needs: dict[RowProduct, set[str]] = {"gram": {"G"}, "squares": {"squares"}, "weighted": {"columns"}}
        needs["along"] = {"along"}
        return self._of(self.Jx, self.phi, needs)

    @property
    def _b(self) -> Tensor | None:
        """Return the bias, (n, d), if there is one."""
        return None if self.weight.b is None else self.weight.b.expand(len(self.J), -1)

    def _of(self, rows: Tensor, x: Tensor | None, needs: Mapping[RowProduct, set[str]]) -> dict[RowProduct, Tensor]:
        return row_products(rows, [what for what, read in needs.items() if read & self.wanted], self.C, x)

    def _get(self, what: RowProduct, *, input: bool = False) -> Tensor:
        """Return a product of J, or with `input` of Jx."""
        found = self._of_Jx if input else self._of_J
        if what not in found:
            rows, x = (self.Jx, self.phi) if input else (self.J, self._b)
            found |= row_products(rows, (what,), self.C, x)
        return found[what]

    @property
    def _JJ(self) -> Tensor:
        return self._get("gram")

    def gram(self) -> Tensor:
        """Return K of the weight, (n, N, N)."""
        return self.phi_norm2[:, None, None] * self._JJ

    def bias_gram(self) -> Tensor:
        """Return K of the bias, (n, N, N)."""
        return self._JJ

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """Return R, (n, N, N); with `scale` (m,), R of the layer with weight W * scale and features phi / scale."""
        if scale is None:
            return self.phi_norm2[:, None, None] * self.weight.gram_at_input(self.J)
        return norm2(self.phi.to(torch.float64) / scale)[:, None, None] * gram(self.Jx * scale)

    @cached_property
    def _phi2(self) -> Tensor:
        return self.phi.to(torch.float64).square()

    @property
    def _J2(self) -> Tensor:
        """Return sum_kk' C_kk' J_k J_k', (n, d)."""
        return self._get("weighted")

    def at_input(self, what: RowProduct) -> Tensor:
        """Return G ("gram"), ||df/dx_p||^2 of each input entry p ("squares"), (n, m), or df/dx x ("along"), (n, N)."""
        return self._get(what, input=True)

    def diagonal(self) -> Tensor:
        """Return the Gauss-Newton diagonal of the weight, summed over samples, (d, m)."""
        return self._J2.T @ self._phi2

    def columns(self) -> Tensor:
        """Return ||C^(1/2) df/dx_j||^2 phi_j^2 for each column j of W, (n, m)."""
        return self._get("weighted", input=True) * self._phi2

    def along(self, *, weight: bool, bias: bool) -> Tensor:
        """Return <df_k/dW, W> + <df_k/db, b>, each if asked for: J_k times the layer's output, (n, N)."""
        total = self._get("along") if bias else self.C.new_zeros(self.C.shape[:2])
        if not weight:
            return total
        what: RowProduct = "along"
        return total + row_products(self.J, (what,), x=self.phi @ self.weight.W[0].T.to(self.phi.dtype))[what]

    def adaptive(self) -> Tensor:
        """Return sum_st W_st^2 times entry st of the sample's own Gauss-Newton diagonal, (n,)."""
        return (self._J2 * (self._phi2 @ self.weight.squares[0].T)).sum(1)

    def adaptive_bias(self) -> Tensor:
        """Return sum_s b_s^2 times entry s of the sample's own Gauss-Newton diagonal of the bias, (n,)."""
        assert self.weight.b is not None
        return self._J2 @ self.weight.b.square()
