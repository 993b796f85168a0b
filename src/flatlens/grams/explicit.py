"""The parameter Jacobian stored entry by entry, for parameters that are no matrix of a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.grams.contractions import gram, quadratic


@dataclass(frozen=True, eq=False)
class ExplicitJacobian:
    """The Jacobian in a parameter, stored entry by entry: small, unexplained and embedding parameters."""

    M: Tensor  #: df/dtheta, (n, N, size)
    theta: Tensor  #: values of the parameter, (size,) float64; (n, size) if each sample has its own entries
    C: Tensor  #: output Hessians, (n, N, N)

    def gram(self) -> Tensor:
        """Return K, (n, N, N)."""
        return gram(self.M)

    def adaptive(self) -> Tensor:
        """Return sum_j theta_j^2 times entry j of the sample's own Gauss-Newton diagonal, (n,)."""
        return (quadratic(self.C, self.M) * self.theta.square()).sum(1)

    def along(self) -> Tensor:
        """Return sum_j theta_j df_k/dtheta_j, (n, N)."""
        return (self.M.to(torch.float64) @ self.theta.expand(len(self.M), -1)[..., None])[..., 0]
