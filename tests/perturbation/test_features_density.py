"""Kernel densities against scikit-learn's, and how two of them differ where that is known."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn import neighbors

from flatlens.perturbation.features import KernelDensity, kernel_density, mismatch, units


def test_one_width_for_all_is_scikit_learns_density() -> None:
    points, at = torch.randn(30, 2).double(), torch.randn(9, 2).double()
    ones = torch.ones(30, dtype=torch.float64)
    mine = KernelDensity(points, ones[:2], 0.4 * ones)
    theirs = neighbors.KernelDensity(bandwidth=0.4).fit(points.numpy())
    torch.testing.assert_close(mine.log_density(at), torch.from_numpy(theirs.score_samples(at.numpy())))


@pytest.mark.parametrize("bandwidth", ["scott", "relative"])
def test_it_integrates_to_one(bandwidth: str) -> None:
    phi = 1 + torch.randn(20, 2).double()
    density = kernel_density(phi, bandwidth, units(phi, bandwidth))
    line = torch.linspace(-12, 14, 521, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    assert float(density.log_density(grid).exp().sum()) * float(line[1] - line[0]) ** 2 == pytest.approx(1, abs=2e-3)


def test_widths_are_those_of_the_rules() -> None:
    phi = torch.randn(50, 3).double() * torch.tensor([1.0, 10.0, 0.1])
    delta = 50 ** (-1 / 7)
    torch.testing.assert_close(units(phi, "scott"), phi.std(0))
    assert float(kernel_density(phi, "scott", units(phi, "scott")).width[0]) == pytest.approx(delta)
    relative = kernel_density(phi, "relative", units(phi, "relative")).width
    torch.testing.assert_close(relative, delta * phi.norm(dim=1) / math.sqrt(3))


def test_a_feature_that_moves_in_one_part_alone_does_not_decide() -> None:
    phi = torch.randn(300, 2, generator=torch.Generator().manual_seed(0)).double()
    rare = torch.zeros(300, 1, dtype=torch.float64)
    rare[0] = 1.0
    ones = torch.ones(300, dtype=torch.float64)
    plain, with_rare = (
        mismatch(x[:150], x[150:], ones[:150], ones[150:], "scott")[0] for x in (phi, torch.cat([phi, rare], 1))
    )
    assert with_rare == pytest.approx(plain, abs=0.1)


def test_halves_of_one_sample_differ_little_and_far_ones_wholly() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 400, 1, generator=generator).double()
    ones = torch.ones(400, dtype=torch.float64)
    near, far = mismatch(a, b, ones, ones, "scott"), mismatch(a, b + 100, ones, ones, "scott")
    assert 0 <= near[0] < 0.25
    assert abs(near[1]) < 0.05  # int p - int q
    assert far[0] == pytest.approx(2)
    assert mismatch(a, b + 100, 3 * ones, ones, "scott")[1] == pytest.approx(2)  # int p l - int q l


@pytest.mark.parametrize("wide", [1.0, 1.5])
def test_the_integral_is_that_of_the_kernel_densities(wide: float) -> None:
    """By many points drawn from each density: of a smooth loss within a third of it, of a constant exactly."""
    generator = torch.Generator().manual_seed(0)
    a, b = wide * torch.randn(133, 8, generator=generator).double(), torch.randn(267, 8, generator=generator).double()
    a[:, 0] += 2
    losses = [1 + part[:, 0].clamp(min=0) for part in (a, b)]
    scale = units(torch.cat([a, b]), "scott")

    def drawn(part: torch.Tensor) -> float:
        return float((1 + kernel_density(part, "scott", scale).around(500, generator)[:, 0].clamp(min=0)).mean())

    assert mismatch(a, b, *losses, "scott")[1] == pytest.approx(drawn(a) - drawn(b), rel=1 / 3)
    constant = [torch.full_like(part, 7.0) for part in losses]
    assert mismatch(a, b, *constant, "scott")[1] == pytest.approx(0, abs=1e-12)


def test_the_shift_of_two_normals_is_their_own() -> None:
    """int |p - q| of N(0, 1) and N(1, 1) is 2 (2 Phi(1/2) - 1) = 0.766."""
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 3000, 1, generator=generator).double()
    ones = torch.ones(3000, dtype=torch.float64)
    assert mismatch(a, b + 1, ones, ones, "scott")[0] == pytest.approx(0.766, abs=0.06)
