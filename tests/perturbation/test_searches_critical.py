"""The largest step that does not raise a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch

from flatlens.perturbation.searches import critical_step


@pytest.mark.parametrize("first", [1e-6, 1e-3, 0.3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("slope", [None, -2.0])
def test_on_a_parabola_it_is_exact(first: float, slope: float | None) -> None:
    looks = []

    def change(step: float) -> float:
        looks.append(step)
        return -2 * step + 3 * step**2

    found = critical_step(change, first, slope=slope)
    assert found.step == pytest.approx(2 / 3, rel=0.01)
    assert found.error <= 0.02 * found.step
    assert len(looks) == len(found.steps) <= 7


CURVES = {
    "quartic": (lambda s: -s + s**4, 1.0),
    "cosh": (lambda s: math.cosh(min(s, 700)) - 1 - 0.5 * s, None),
    "exploding": (lambda s: -s + s**2 if s < 5 else math.inf, 1.0),
    "not a number": (lambda s: -s + s**2 if s < 5 else math.nan, 1.0),
    "concave at first": (lambda s: -s - s**2 + s**3, (1 + 5**0.5) / 2),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("first", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("known", [True, False])
def test_other_curves_within_the_error(name: str, first: float, known: bool) -> None:
    curve, truth = CURVES[name]
    if truth is None:
        low, high = 0.1, 10.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if curve(middle) < 0 else (low, middle)
        truth = low
    slope = (curve(1e-7) / 1e-7) if known else None
    found = critical_step(curve, first, slope=slope)
    assert len(found.steps) <= 7
    assert found.step == pytest.approx(truth, rel=max(0.03, 2 * found.error / found.step))


def test_a_function_that_never_rises_or_always_does() -> None:
    assert critical_step(lambda s: -s, 1.0).step == math.inf
    assert critical_step(lambda s: -s, 1.0, slope=-1.0).step == math.inf
    rising = critical_step(lambda s: s, 1.0)
    assert rising.step == 0
    assert float(rising.steps[0]) < 1e-4


def _between(seen: Iterable[tuple[float, float]]) -> tuple[Callable[[float], float], float, float]:
    """(straight lines between (step, change), their slope at 0, the step from which on they are above 0)."""
    places, heights = (row.contiguous() for row in torch.tensor([(0.0, 0.0), *seen], dtype=torch.float64).T)

    def change(step: float) -> float:
        at = max(1, min(int(torch.searchsorted(places, step)), len(places) - 1))
        low, high = float(heights[at - 1]), float(heights[at])
        return low + (high - low) * (step - float(places[at - 1])) / float(places[at] - places[at - 1])

    rises = int((heights > 0).nonzero()[0])
    low, high = float(heights[rises - 1]), float(heights[rises])
    truth = float(places[rises - 1]) - low * float(places[rises] - places[rises - 1]) / (high - low)
    return change, float(heights[1] / places[1]), truth


def test_a_look_far_from_the_zero_does_not_confirm_it() -> None:
    """A risk that falls, is flat, and rises at 0.0237: a look at 0.0127 moves a guess of 0.053 by 1% only."""
    places = 0.002, 0.003, 0.005, 0.0177, 0.024, 0.0544, 0.1, 1.0
    heights = -8.17, -10.94, -14.5, -15.54, 0.6, 35.5, 200.0, 6.27e6
    change, _, truth = _between(zip(places, heights, strict=True))
    found = critical_step(change, 1.0, slope=-1.243e4, rtol=0.05)
    assert abs(found.step - truth) <= found.error + 0.02 * truth


SEEN = {
    "a look at half the guess": [
        (0.01667, -0.0022), (0.3146, -0.0366), (1.3668, -0.0858), (2.3927, -0.03425), (2.6846, -0.00034),
        (5.938, 1.723),
    ],
    "small steps from below": [
        (0.002, -4.9328e-4), (0.063246, -0.015912), (0.11158, -0.029262), (0.16513, -0.040831), (0.21023, -0.050982),
        (0.25675, -0.057574), (0.33677, -0.06157), (0.4176, -0.05237), (0.48976, -0.02533), (0.51865, -0.01106),
        (1.30126, 8.105), (2.0, 366.05),
    ],
}  # fmt: skip
"""(step, change) of the risks of a small network in training, along its optimiser's update."""


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("first", [1.0, 0.1, 1 / 60, 0.0091, 0.0046, 0.002])
def test_the_interval_covers_the_zero_of_a_risk_seen_in_training(name: str, first: float) -> None:
    change, slope, truth = _between(SEEN[name])
    found = critical_step(change, first, slope=slope, rtol=0.05)
    assert abs(1 / found.step - 1 / truth) <= max(found.error / found.step, 0.05 / 3) / found.step


def test_a_search_that_ends_early_names_the_interval_that_has_the_zero() -> None:
    found = critical_step(lambda s: -s + s**40, 1e-3, slope=-1.0, rtol=1e-9)
    looks = list(zip(found.steps.tolist(), found.changes.tolist(), strict=True))
    share = found.error / found.step
    assert (1 - share) / found.step == pytest.approx(1 / min(s for s, value in looks if value > 0))
    assert (1 + share) / found.step == pytest.approx(1 / max(s for s, value in looks if value <= 0))
