"""Ascent on a ball, and the first crossing of a level, on functions whose answers are known."""

from __future__ import annotations

import math

import pytest
import torch
from literal_perturbation import on_the_ball
from torch import Tensor

from flatlens.perturbation.searches import climb, first_crossing, onto_ball


@pytest.mark.parametrize("seed", range(5))
def test_ascent_finds_the_top_of_a_convex_quadratic(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    R = torch.randn(6, 6, generator=generator).double()
    H, g, rho = R @ R.T, torch.randn(6, generator=generator).double(), 0.3
    starts = iter([onto_ball(torch.randn(6, generator=generator).double(), rho) for _ in range(3)])
    peak = climb(lambda e: (float(g @ e + e @ H @ e / 2), g + H @ e), starts, rho, 60)
    truth = on_the_ball(H, g, rho)
    assert truth * (1 - 1e-4) <= peak.value <= truth * (1 + 1e-9)
    assert len(peak.restarts) == 3
    assert float(peak.where.norm()) <= rho * (1 + 1e-12)


def test_ascent_never_ends_below_where_it_is() -> None:
    peak = climb(lambda e: (-float(e @ e), -2 * e), iter([torch.tensor([0.5])]), 1.0, 5)
    assert peak.value == 0.0


def test_a_flat_place_stops_the_search() -> None:
    looks = []
    climb(lambda e: (looks.append(1) or 0.0, torch.zeros(2)), iter([torch.ones(2)]), 1.0, 50)
    assert len(looks) == 1


@pytest.mark.parametrize("start", [1e-6, 0.3, 1e5])
def test_the_crossing_of_a_quadratic(start: float) -> None:
    factors = torch.tensor([1.0, 2.0, 3.0, 2.0], dtype=torch.float64)
    crossing = first_crossing(lambda sigma: factors * sigma**2, 0.5, start)
    assert crossing is not None
    assert math.exp(crossing.log_sigma) == pytest.approx(0.5, rel=1e-4)
    reach = float(factors.std() / 2 / factors.mean()) * 3.182  # of the mean: Student's with 3 degrees of freedom
    assert crossing.stderr == pytest.approx(math.log((1 + reach) / (1 - reach)) / 4 / 1.96, rel=0.02)


def test_the_first_crossing_counts() -> None:
    """0 up to 1, a hump up to 2, 0 again, high beyond 8."""
    crossing = first_crossing(
        lambda s: torch.full((3,), 1.0 if 1 < s < 2 or s > 8 else 0.0, dtype=torch.float64), 0.5, 0.01
    )
    assert crossing is not None
    assert math.exp(crossing.log_sigma) == pytest.approx(1, rel=0.01)


def test_a_level_never_reached_is_no_crossing() -> None:
    assert first_crossing(lambda sigma: torch.zeros(3, dtype=torch.float64), 0.5, 1.0) is None


def test_a_search_ends_where_only_noise_is_left() -> None:
    """Errors of guessing no longer change: not once more for each of 60 doublings. What changes late is waited for."""
    tried: list[float] = []

    def guessing(sigma: float) -> Tensor:
        tried.append(sigma)
        return torch.full((3,), 0.05 * min(sigma, 1.0), dtype=torch.float64)

    assert first_crossing(guessing, 0.5, 1e-3) is None
    assert len(tried) == 25
    late = first_crossing(lambda sigma: torch.full((3,), 1.0 if sigma > 2.0**18 else 0.0).double(), 0.5, 1.0)
    assert late is not None
    assert late.log_sigma == pytest.approx(18 * math.log(2), abs=0.01)


def test_overflow_is_no_crossing() -> None:
    def change(sigma: float) -> Tensor:
        return torch.full((3,), math.inf if sigma > 2 else 0.0, dtype=torch.float64)

    assert first_crossing(change, 0.5, 0.1) is None


def test_a_search_that_meets_nothing_finite_says_so() -> None:
    peak = climb(lambda e: (math.nan, torch.ones(2)), iter([torch.ones(2)]), 1.0, 5)
    assert math.isnan(peak.value)
    beyond = climb(lambda e: (1.0 if float(e[0]) < 0.9 else math.inf, torch.ones(2)), iter([torch.zeros(2)]), 2.0, 5)
    assert beyond.value == 1.0
