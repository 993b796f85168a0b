"""Representativeness of a sample, where its answer is known, and its part in the gap."""

from __future__ import annotations

import pytest
import torch
from builders import estimated
from networks import network
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput


@pytest.mark.parametrize("over", ["rotations", "ball", "truncated_normal"])
def test_eq_5_splits_the_gap(over: str) -> None:
    net, x, y = network("mlp-tanh", n=60)
    problem = fl.Problem(net, "cross_entropy", (x[:30], y[:30]), test=(x[30:], y[30:]))
    key = f"representativeness(delta=0.3, probes=200, over='{over}', sigma=0.5)"
    rep, robust = (estimated(problem, key, part) for part in ("split.representativeness", "split.robustness"))
    gap = estimated(problem, "generalisation_gap")
    within = (max(0.0, rep.stderr**2 - gap.stderr**2) + robust.stderr**2) ** 0.5  # the held-out error is in both
    assert rep.value + robust.value == pytest.approx(gap.value, abs=4 * within)
    assert within < 0.02
    assert "differs from the gap by" in rep.note


def test_a_sample_of_copies_is_representative_of_itself() -> None:
    net, x, y = network("mlp-relu", n=30)
    few = fl.Problem(net, "cross_entropy", (x, y))
    many = fl.Problem(net, "cross_entropy", (x.repeat(6, 1), y.repeat(6)))
    assert (
        estimated(many, "representativeness", "shift").value < 0.7 * estimated(few, "representativeness", "shift").value
    )


@pytest.mark.parametrize("bandwidth", ["scott", "relative"])
def test_a_constant_loss_has_a_representative_sample(bandwidth: str) -> None:
    net, x, y = network("mlp-relu", n=50)
    problem = fl.Problem(net, lambda f, y: 0 * f.sum(1) + 7, (x, y))
    found = estimated(problem, f"representativeness(bandwidth='{bandwidth}')")
    assert found.value == pytest.approx(0, abs=1e-12)
    assert "overlap" not in found.note


@pytest.mark.parametrize(("features", "apart"), [(2, False), (300, True)])
def test_a_value_that_does_not_depend_on_the_features_is_told(features: int, apart: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, features, generator=generator).double(), torch.randint(2, (60,), generator=generator)
    found = estimated(fl.Problem(nn.Linear(features, 2).double(), "cross_entropy", (x, y)), "representativeness")
    assert ("kernels hardly overlap" in found.note) is apart


def test_an_unknown_bandwidth_names_the_known_ones() -> None:
    net, x, y = network("mlp-relu", n=30)
    with pytest.raises(BadInput, match="bandwidth='best'"):
        estimated(fl.Problem(net, "cross_entropy", (x, y)), "representativeness(bandwidth='best')")


def test_negative_losses_are_bounded_by_their_size() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(40, 3), torch.randn(40, 2)
    problem = fl.Problem(net, lambda f, y: -torch.exp(-(f - y).square().sum(1)) - 0.5, (x, y))
    report = fl.measure(fl.Lens(problem), "representativeness")
    assert report["representativeness.bound"].value >= report["representativeness"].value > 0


def test_one_held_out_sample_has_no_error() -> None:
    """Nothing overflows, as the note said once; the part that needs no held-out sample stays."""
    net, x, y = network("mlp-tanh", n=31)
    problem = fl.Problem(net, "cross_entropy", (x[:30], y[:30]), test=(x[30:], y[30:]))
    found = estimated(problem, "representativeness", "split.representativeness")
    assert found.kind == "undefined"
    assert found.note.startswith("one held-out sample gives no error (the value is ")
    assert estimated(problem, "representativeness", "split.robustness").kind == "estimate"
