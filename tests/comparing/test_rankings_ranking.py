"""Ranks: shared where a tie or an interval leaves the order open, and their sum is always the same."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flatlens.comparing.rankings import larger_of, places
from flatlens.estimate import Estimate, undefined


def ranks(*estimates: Estimate, **options):
    return [place.rank for place in places({str(i): e for i, e in enumerate(estimates)}, **options).values()]


def test_exact_values_are_ranked_from_the_smallest():
    assert ranks(Estimate(3.0), Estimate(-1.0), Estimate(2.0)) == [3, 1, 2]


def test_ties_share_their_mean_rank_and_rounding_is_no_difference():
    assert ranks(Estimate(1.0), Estimate(1.0 + 1e-12), Estimate(0.5)) == [2.5, 2.5, 1]
    assert ranks(Estimate(1.0), Estimate(1.0 + 1e-5)) == [1, 2]
    assert ranks(Estimate(1.0), Estimate(1.0 + 1e-5), rounding=1e-4) == [1.5, 1.5]
    assert ranks(Estimate(0.0), Estimate(0.0)) == [1.5, 1.5]


def test_overlapping_intervals_leave_the_order_open_and_touching_ones_do_not_decide():
    apart, touching = Estimate(1.0 + 1.96 * 0.21, 0.1), Estimate(1.0 + 1.96 * 0.19, 0.1)
    assert ranks(Estimate(1.0, 0.1), apart) == [1, 2]
    assert ranks(Estimate(1.0, 0.1), touching) == [1.5, 1.5]


def test_being_open_is_not_transitive_and_the_sum_stays():
    low, middle, high = Estimate(0.0, 1.0), Estimate(3.0, 1.0), Estimate(6.0, 1.0)
    found = places({"low": low, "middle": middle, "high": high})
    assert [place.rank for place in found.values()] == [1.5, 2, 2.5]
    assert found["middle"].open == ("low", "high")
    assert found["low"].open == ("middle",)


def test_the_sum_of_ranks_is_that_of_a_ranking():
    rng = np.random.default_rng(0)
    for _ in range(50):
        estimates = [Estimate(float(v), float(s)) for v, s in zip(rng.normal(size=7), rng.random(7) / 2, strict=True)]
        assert sum(ranks(*estimates)) == pytest.approx(28)


def test_the_undefined_have_no_rank_and_are_nobodys_rival():
    found = ranks(Estimate(2.0), undefined("no linear layer"), Estimate(1.0))
    assert found[0] == 2
    assert math.isnan(found[1])
    assert found[2] == 1


def test_an_unknown_error_decides_nothing():
    assert ranks(Estimate(1.0, math.nan, "estimate"), Estimate(100.0)) == [1.5, 1.5]


def test_eigenvalues_that_a_search_found_are_open_within_their_residuals():
    arrays = {"eigenvalues": torch.tensor([1.0]), "residuals": torch.tensor([1e-3])}
    first, second = Estimate(1.0, kind="lower bound", arrays=arrays), Estimate(1.001, kind="lower bound", arrays=arrays)
    assert ranks(first, second) == [1.5, 1.5]
    assert ranks(first, replace(second, value=1.01)) == [1, 2]
    assert ranks(replace(first, kind="exact"), replace(second, kind="exact")) == [1, 2]


def test_infinite_values_are_the_largest_and_equal_each_other():
    assert ranks(Estimate(math.inf), Estimate(1.0), Estimate(math.inf), Estimate(-math.inf)) == [3.5, 2, 3.5, 1]
    signs = larger_of([Estimate(math.inf), Estimate(1.0)])
    assert signs.tolist() == [[0, 1], [-1, 0]]
