"""Haar rotations, the laws of their radius, and the nearest partial isometry."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats

from flatlens.perturbation.features import mean_square_radius, orthonormal_rows, polar, radii, rotated

DRAWS = 4000


def test_rotated_rows_keep_their_products_and_point_anywhere() -> None:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(2, 5, generator=generator).double()
    drawn = torch.stack([rotated(W, generator) for _ in range(DRAWS)])
    torch.testing.assert_close(drawn @ drawn.mT, (W @ W.T).expand(DRAWS, 2, 2))
    second = torch.einsum("ksi,ktj->stij", drawn, drawn) / DRAWS  # <w_s, w_t> / m I (proof of Theorem 5)
    truth = (W @ W.T)[..., None, None] / 5 * torch.eye(5, dtype=torch.float64)
    assert float((second - truth).abs().max()) < 5 * float(W.square().sum()) / math.sqrt(DRAWS) / 5


@pytest.mark.parametrize("d", [2, 7])
def test_more_rows_than_columns_rotate_as_well(d: int) -> None:
    W = torch.randn(d, 3).double()
    WA = rotated(W, torch.Generator().manual_seed(0))
    A = torch.linalg.lstsq(W, WA).solution if d > 3 else None
    torch.testing.assert_close(WA @ WA.T, W @ W.T)
    if A is not None:
        torch.testing.assert_close(A @ A.T, torch.eye(3, dtype=torch.float64))


def test_the_law_is_the_same_in_every_entry() -> None:
    """An entry of a Haar rotation of size m has the law of the first coordinate of a point on the sphere."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack([orthonormal_rows(3, 3, generator) for _ in range(DRAWS)])
    for i in range(3):
        for j in range(3):  # uniform on [-1, 1] in three dimensions (Archimedes)
            assert stats.kstest(rows[:, i, j].numpy(), "uniform", args=(-1, 2)).pvalue > 1e-4


@pytest.mark.parametrize(("law", "m", "sigma"), [
    ("ball", 3, 1.0), ("truncated_normal", 3, 0.5), ("truncated_normal", 8, 2.0), ("truncated_normal", 900, 1.0),
    ("truncated_normal", 2, 0.05), ("rotations", 3, 1.0),
])  # fmt: skip
def test_radii_follow_the_density_of_proposition_2(law: str, m: int, sigma: float) -> None:
    generator = torch.Generator().manual_seed(2)
    drawn = radii(DRAWS, law, m, sigma, generator)
    assert float(drawn.max()) <= 1
    assert float(drawn.min()) > 0

    def density(r: float) -> float:
        kernel = math.exp(-0.5 * (r * r - 1) / sigma**2 + (m - 1) * math.log(r)) if r > 0 else 0.0
        return kernel if law == "truncated_normal" else r ** (m - 1)

    squared = drawn.square()
    if law == "rotations":
        assert mean_square_radius(law, m, sigma) == 1 == float(squared.mean())
        return
    points = [min(1.0, sigma * math.sqrt(m))]
    total = integrate.quad(density, 0, 1, points=points)[0]
    truth = integrate.quad(lambda r: r * r * density(r), 0, 1, points=points)[0] / total
    assert mean_square_radius(law, m, sigma) == pytest.approx(truth, rel=1e-3)
    assert float(squared.mean()) == pytest.approx(truth, abs=4 * float(squared.std()) / math.sqrt(DRAWS) + 1e-9)


def test_the_polar_factor_has_the_largest_inner_product() -> None:
    left, right = torch.randn(6, 2).double(), torch.randn(2, 6).double()
    U, Vh = polar(left, right)
    A = U @ Vh
    assert float(torch.linalg.matrix_norm(A, 2)) == pytest.approx(1)
    nuclear = float(torch.linalg.matrix_norm(left @ right, "nuc"))
    assert float((A * (left @ right)).sum()) == pytest.approx(nuclear)
