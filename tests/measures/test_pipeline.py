"""Rows of measures of the pass: the network-level value beside those of its layers, and what is left out unasked."""

from __future__ import annotations

import pytest
import torch
from builders import chain, lens_on, normal
from torch import nn

import flatlens as fl
from flatlens.estimate import Estimate
from flatlens.measures import pipeline


def test_what_is_slow_for_shared_weights_runs_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 outputs x 3 x 2 x 4 entries at 3 positions; a dense layer has none."""
    names = ["adaptive_sharpness_ggn", "normalized_sharpness", "neuron_flatness", "neuron_flatness_ggn"]
    net = nn.Sequential(nn.Conv1d(2, 3, 4), nn.Flatten(), nn.Linear(9, 4)).double()
    x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(0)).double()
    problem = fl.Problem(net, "cross_entropy", (x, torch.arange(5) % 4))
    assert fl.Lens(problem).plan.shared_products(4) == 4 * 3 * 2 * 4 * 3
    whole = fl.measure(fl.Lens(problem), "pass")
    assert {whole[name].kind for name in names} == {"exact"}
    for most, there in ((288, True), (287, False)):
        monkeypatch.setattr(pipeline, "SHARED_PRODUCTS", most)
        report = fl.measure(fl.Lens(problem), "pass")
        assert {name in report for name in names} == {there}
    for key, one in report.items():
        assert one.value == pytest.approx(whole[key].value, rel=1e-12)
    named = fl.measure(fl.Lens(problem), names)
    for name in names:
        assert named[name].value == pytest.approx(whole[name].value, rel=1e-12)


def test_a_number_of_the_network_stands_beside_those_of_its_layers() -> None:
    """NMLS is the sum of each layer's MLS; relative flatness is that of the last layer, `.sum` the sum."""
    report = fl.measure(lens_on(chain([3, 4, 2], 5), normal(8, 3, seed=3)), ["mls", "nmls", "relative_flatness"])
    assert report["nmls"].value == pytest.approx(report["mls", "0"].value + report["mls", "2"].value)
    assert report["relative_flatness"].value == report["relative_flatness", "2"].value
    both = report["relative_flatness", "0"].value + report["relative_flatness", "2"].value
    assert report["relative_flatness.sum"].value == pytest.approx(both)


def test_a_sum_over_layers_has_their_errors_or_is_a_bound_below_them() -> None:
    sure, off, least = Estimate(1.0), Estimate(2.0, 0.5, "estimate"), Estimate(3.0, kind="lower bound")
    both = pipeline._over_layers({"a": off, "b": off, "c": sure}, sum)
    assert (both.value, both.stderr, both.kind) == (5.0, 1.0, "estimate")
    bound = pipeline._over_layers({"a": off, "b": least}, sum)
    assert (bound.value, bound.margin, bound.kind) == (pytest.approx(5 - 0.98), 0.0, "lower bound")
