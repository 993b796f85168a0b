"""Reductions of numbers per sample, and the jackknife over probes."""

from __future__ import annotations

import math

import pytest
import torch
from builders import normal

from flatlens.measures.definition import Reduced, by_probes, largest, mean, mean_of_finite
from flatlens.measures.sensitivity import mean_of_logs, mean_of_volumes


def test_mean_and_maximum() -> None:
    values = torch.tensor([1.0, 4.0, 1.0]).double()
    assert (mean(values).value, largest(values).value) == (2.0, 4.0)
    assert mean(values).samples is values


def test_the_mean_of_exponentials_of_numbers_beyond_float64() -> None:
    """exp(-800) is 0 in float64, and so would be a mean taken after the exponential, times exp(800)."""
    assert volumes([math.log(2.0), math.log(4.0)]).value == pytest.approx(3.0)
    half = volumes([0.0, -math.inf], [0.0, math.inf])
    assert half.value == pytest.approx(0.5)
    assert half.kind == "lower bound"
    assert half.note == "1 of 2 samples rank-deficient within rounding, their volume counted as 0"
    assert volumes([709.0, 709.0]).value == pytest.approx(math.exp(709.0))
    assert volumes([0.0, -1000.0]).kind == "exact"
    below, above = volumes([-800.0, -900.0]), volumes([800.0, 0.0])
    assert (below.value, below.kind) == (0.0, "lower bound")
    assert below.note == "below float64, its logarithm is -800.693: see log_volume"
    assert above.kind == "undefined"
    assert above.note == "above float64, its logarithm is 799.307: see log_volume"
    assert math.isnan(volumes([math.nan, 0.0], [0.0, 0.0]).value)  # an overflow, which the rows tell


def volumes(logs: list[float], moved: list[float] | None = None) -> Reduced:
    return mean_of_volumes(torch.tensor(logs).double(), torch.tensor(moved or [0.0] * len(logs)).double())


def test_rounding_is_an_error_of_a_volume_or_taken_off_a_bound() -> None:
    """Of volumes 1 and 3, moved by 10% and 2%: (0.1 + 0.06) / 4 of the mean; of their logarithms 6%."""
    logs, moved = [0.0, math.log(3.0)], [0.1, 0.02]
    mean, bound = volumes(logs, moved), volumes([*logs, -math.inf, -math.inf], [*moved, math.inf, math.inf])
    assert (mean.kind, mean.value) == ("estimate", pytest.approx(2.0))
    assert 1.96 * mean.stderr == pytest.approx(0.08)
    assert (bound.kind, bound.value, bound.stderr) == ("lower bound", pytest.approx(0.96), 0.0)
    told = mean_of_logs(*(torch.tensor(v).double() for v in ([*logs, -math.inf], [*moved, math.inf])))
    assert (told.kind, told.value) == ("estimate", pytest.approx(math.log(3.0) / 2))
    assert 1.96 * told.stderr == pytest.approx(0.06)
    assert told.note.startswith("1 of 3 samples rank-deficient within rounding, left out; its error is rounding")
    assert volumes(logs, [1e-4, 1e-4]).kind == "exact"


def test_samples_without_volume_behind_a_softmax_are_told_from_those_that_rounding_hides() -> None:
    logs, moved = [0.0, -math.inf, -math.inf, -math.inf], [0.0, 0.0, 0.0, math.inf]
    known = "2 of 4 samples with fewer directions, because the network ends in a softmax"
    mean = volumes(logs, moved)
    assert (mean.value, mean.kind) == (0.25, "lower bound")
    assert f"{known}, their volume is 0" in mean.note
    assert (volumes(logs[:3], moved[:3]).value, volumes(logs[:3], moved[:3]).kind) == (pytest.approx(1 / 3), "exact")
    log = mean_of_logs(*(torch.tensor(v).double() for v in (logs, moved)))
    assert log.note == f"1 of 4 samples rank-deficient within rounding, left out; {known}, left out"


def test_samples_without_a_value_are_left_out_and_counted() -> None:
    found = mean_of_finite(torch.tensor([1.0, math.nan, 3.0]).double(), "flat")
    assert (found.value, found.kind, found.note) == (2.0, "exact", "1 of 3 samples flat, left out")
    none = mean_of_finite(torch.tensor([math.nan]).double(), "flat")
    assert (none.kind, none.note) == ("undefined", "every sample is flat")
    assert math.isnan(none.value)


def test_what_is_linear_in_the_probes_is_their_mean() -> None:
    """Each probe's share is its own value, and the value is the mean."""
    values = normal(6, 5, seed=1)
    found = by_probes(mean, values)
    assert found.kind == "estimate"
    assert found.value == pytest.approx(float(values.mean()))
    assert found.probes is not None
    assert torch.allclose(found.probes, values.mean(1))
    assert found.stderr > 0


def test_a_root_loses_its_bias_of_first_order() -> None:
    """The jackknife of sqrt(mean of probes), written out: k sqrt(m) - (k - 1) mean_i sqrt(m without i)."""
    values = normal(5, 1, seed=2).abs()

    def root(one: torch.Tensor) -> Reduced:
        return Reduced(math.sqrt(float(one.mean())), one)

    whole = math.sqrt(float(values.mean()))
    without = [math.sqrt(float((values.sum() - v) / 4)) for v in values.flatten()]
    shares = [5 * whole - 4 * each for each in without]
    found = by_probes(root, values)
    assert found.probes is not None
    assert found.probes.tolist() == pytest.approx(shares)
    assert found.value == pytest.approx(sum(shares) / 5)
