"""Random rotations, the laws of their radius, and the nearest rotation to a matrix."""

from __future__ import annotations

import torch
from scipy import linalg, stats
from torch import Tensor

from flatlens.grams import row_factor

ROTATION_LAWS = ("rotations", "ball", "truncated_normal")
UNDERFLOW = 1e-250


def rotated(W: Tensor, generator: torch.Generator) -> Tensor:
    """Return W A, A a Haar-distributed orthogonal m x m matrix; W of shape (d, m), float64.

    A itself is never drawn. With W^T = Q R, W A = R^T (Q^T A), and Q^T A is r uniformly distributed orthonormal rows.
    """
    m = W.shape[1]
    R = row_factor(W)
    return R.mT @ orthonormal_rows(R.shape[0], m, generator).to(W)


def orthonormal_rows(r: int, m: int, generator: torch.Generator) -> Tensor:
    """Return r <= m uniformly distributed orthonormal rows, (r, m) float64; for r = m, a Haar-distributed rotation.

    They are the QR factor of a Gaussian matrix, with the signs for which the factorisation is unique (other signs would
    not give a uniform law).

    >>> rows = orthonormal_rows(2, 3, torch.Generator().manual_seed(0))
    >>> bool(torch.allclose(rows @ rows.T, torch.eye(2, dtype=torch.float64)))
    True
    """
    Q, R = torch.linalg.qr(torch.randn(m, r, dtype=torch.float64, generator=generator))
    rows: Tensor = (Q * R.diagonal().sign()).mT
    return rows


def balanced_rows(g: int, r: int, m: int, generator: torch.Generator) -> Tensor:
    """Return k sets of g times r <= m orthonormal rows with exactly Haar's second moments, (k, g, r, m) float64.

    Each set is uniformly distributed, and the mean over the k sets of every product of two entries is Haar's, with no
    error. The rows are those of one Haar rotation per block, shifted through all m places, with signs from a Hadamard
    matrix: k = m times the least power of 2 that is at least g r. No fewer than m g r sets can do it.

    >>> rows = balanced_rows(1, 2, 3, torch.Generator().manual_seed(0))[:, 0].flatten(1)
    >>> bool(torch.allclose(rows.T @ rows / len(rows), torch.eye(6, dtype=torch.float64) / 3))
    True
    """
    signs = torch.as_tensor(linalg.hadamard(balanced_count(g, r, 1)), dtype=torch.float64)[:, : g * r]
    Q = torch.stack([orthonormal_rows(m, m, generator) for _ in range(g)])
    places = (torch.arange(r) + torch.arange(m)[:, None]) % m  # (shifts, r)
    rows = Q[:, places].transpose(0, 1)  # (shifts, g, r, m)
    return (signs.reshape(-1, 1, g, r, 1) * rows).flatten(0, 1)


def balanced_count(g: int, r: int, m: int) -> int:
    """Return how many sets `balanced_rows` gives."""
    return m * (1 << (g * r - 1).bit_length())


def on_sphere(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return uniformly distributed points on the unit sphere, one per row of shape (n, M), float64."""
    directions = torch.randn(shape, dtype=torch.float64, generator=generator)
    lengths: Tensor = directions.norm(dim=1, keepdim=True)
    return directions / lengths


def radii(n: int, law: str, m: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Return n draws of the radius r in Proposition 2's A = r O, in units of delta.

    The density of r is k(r) r^(m-1) on (0, 1].

    `rotations`: always 1. `ball`: k constant, so that A phi is uniform in the ball of radius ||phi||.
    `truncated_normal`: k the normal density of standard deviation `sigma`, cut off at 1.
    """
    u = torch.rand(n, dtype=torch.float64, generator=generator)
    if law == "rotations":
        return torch.ones_like(u)
    if law == "ball":
        return u.pow(1 / m)
    inside = float(stats.chi2.cdf(1 / sigma**2, m))
    if inside > UNDERFLOW:
        return (sigma * torch.as_tensor(stats.chi2.ppf(u.numpy() * inside, m)).sqrt()).clamp(max=1)
    r, k = _rim(m, sigma)
    return r[torch.searchsorted(k.cumsum(0) / k.sum(), u).clamp(max=len(r) - 1)]


def _rim(m: int, sigma: float) -> tuple[Tensor, Tensor]:
    """Return (r, weights) at 4000 midpoints of u = r^m, which is uniform under the ball's law.

    If sigma is far larger than the ball, nearly all mass is at the rim, where the density is almost constant.
    """
    r = ((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000) ** (1 / m)
    return r, torch.exp(-0.5 * (r.square() - 1) / sigma**2)


def mean_square_radius(law: str, m: int, sigma: float) -> float:
    """Return E[r^2] of the law, which multiplies delta^2 kappa / (2 m).

    >>> round(mean_square_radius("ball", 4, 1.0), 6)  # m / (m + 2)
    0.666667
    """
    if law == "rotations":
        return 1.0
    if law == "ball":
        return m / (m + 2)
    inside = float(stats.chi2.cdf(1 / sigma**2, m))
    if inside > UNDERFLOW:
        return float(sigma**2 * m * stats.chi2.cdf(1 / sigma**2, m + 2) / inside)
    r, k = _rim(m, sigma)
    return float((k * r.square()).sum() / k.sum())


def polar(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest partial isometry to left @ right, (m, d) @ (d, m): A = U V^T, as (U, V^T).

    Among all ||A|| <= 1 it has the largest inner product with the matrix.
    """
    Q1, R1 = torch.linalg.qr(left)
    Q2, R2 = torch.linalg.qr(right.mT)
    U, _, Vh = torch.linalg.svd(R1 @ R2.mT)
    return Q1 @ U, Vh @ Q2.mT
