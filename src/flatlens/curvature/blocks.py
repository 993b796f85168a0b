"""Hessian blocks of one dense layer in closed form, from factors of one pass.

H_l V    = mean_i (J_i^T C_i J_i) V phi_i phi_i^T    the layer's block of the Gauss-Newton matrix; it equals H_l where
                                                     the network above the layer is piecewise linear
H_{s,s}  = mean_i D_i[s,s] phi_i phi_i^T             the block of row s, D_i = J_i^T C_i J_i + the functional Hessian
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.curvature.krylov import Eigenpairs, lanczos, relative_residual
from flatlens.estimate import Progress
from flatlens.grams import Layout, one_pass, quadratic
from flatlens.grams.dense import DenseJacobian
from flatlens.problem import Problem
from flatlens.progress import ROWS

SMALL_MATRIX = 200  #: up to this size all eigenvalues of a matrix are computed; beyond it Lanczos finds the largest


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """The factors of a dense layer's block: J (n, N, d), C (n, N, N), phi (n, m), in the network's dtype."""

    J: Tensor
    C: Tensor
    phi: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """Return H_l v, (d m,), for v (d m,)."""
        V = v.reshape(self.J.shape[2], self.phi.shape[1])
        u = self.J @ (self.phi @ V.T)[..., None]
        back = (self.J.mT @ (self.C @ u))[..., 0]
        return (back.T @ self.phi / len(self.phi)).reshape(-1)

    def row_curvatures(self) -> Tensor:
        """Return the Gauss-Newton part of D_i[s,s], (n, d) float64."""
        return quadratic(self.C.to(torch.float64), self.J)

    def largest(self, rtol: float, progress: Progress | None = None) -> Eigenpairs:
        """Return the largest eigenvalue of the block, and its eigenvector."""
        start = torch.randn(
            self.J.shape[2] * self.phi.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        return lanczos(self, start.to(self.phi), rtol=rtol, progress=progress)


def block_fits(problem: Problem, layout: Layout, layer: str) -> bool:
    """Return whether the layer is dense and its factors fit in half the problem's memory."""
    weight = layout.weights[layer]
    if not weight.dense:
        return False
    _, d, m = weight.matrix.W.shape
    itemsize = torch.empty(0, dtype=problem.dtype).element_size()
    return problem.n * (problem.outputs * (d + problem.outputs) + m) * itemsize <= problem.memory // 2


def dense_blocks(
    problem: Problem, model: nn.Module, layout: Layout, layers: list[str], progress: Progress | None = None
) -> dict[str, DenseBlock]:
    """Return the factors of some dense layers, from one pass."""
    gathered: dict[str, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    Cs: list[Tensor] = []
    with closing(one_pass(problem, model, layout, None, progress, {"C", "K"})) as chunks:
        for chunk in chunks:
            for layer in layers:
                jacobian = chunk.layers[layer].weight
                assert isinstance(jacobian, DenseJacobian)
                gathered[layer].append((jacobian.J.to(problem.dtype, copy=True), jacobian.phi))
            Cs.append(next(iter(chunk.layers.values())).C.to(problem.dtype))
    C = torch.cat(Cs)
    return {
        layer: DenseBlock(torch.cat([J for J, _ in parts]), C, torch.cat([phi for _, phi in parts]))
        for layer, parts in gathered.items()
    }


def row_block_maxima(D: Tensor, phi: Tensor, rtol: float, progress: Progress | None = None) -> tuple[Tensor, float]:
    """Return lmax(mean_i D_is phi_i phi_i^T) of each row s, (d,) float64, from D (n, d) and phi (n, m).

    Also return the largest residual as a share of its row's value.
    """
    phi, maxima, share = phi.to(torch.float64), [], 0.0
    for s, weight in enumerate(D.to(torch.float64).T):
        if phi.shape[1] <= SMALL_MATRIX:
            maxima.append(torch.linalg.eigvalsh((phi * weight[:, None]).T @ phi / len(phi))[-1])
        else:

            def apply(v: Tensor, weight: Tensor = weight) -> Tensor:
                return phi.T @ (weight * (phi @ v)) / len(phi)

            start = phi.T @ weight if bool(weight.any()) else torch.ones_like(phi[0])
            found = lanczos(apply, start + 1e-3 * start.norm() * torch.ones_like(start), rtol=rtol)
            maxima.append(found.values[0])
            share = max(share, relative_residual(float(found.residuals[0]), found.largest))
        if progress is not None:
            progress(ROWS, s + 1, D.shape[1])
    return torch.stack([value.cpu() for value in maxima]), share
