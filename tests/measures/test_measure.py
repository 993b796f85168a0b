"""`fl.measure`: what a report has, and what it says where there is no number."""

from __future__ import annotations

import math

import pytest
import torch
from builders import chain, lens_on, normal
from networks import lens
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput


def test_progress_is_told() -> None:
    seen = []
    fl.measure(lens(memory="8KB"), progress=lambda what, done, total: seen.append((what, done, total)))
    assert seen[-1] == ("one pass", 5, 5)
    assert len(seen) > 1


def test_degenerate_networks_give_numbers_or_reasons() -> None:
    """A dead layer, one output, one sample, more outputs than inputs: finite, or undefined with a reason."""
    dead = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        dead[0].bias.fill_(-100)
    wide = nn.Linear(2, 5).double()
    single = nn.Linear(3, 1).double()
    for net, inputs, loss in (
        (dead, 3, "cross_entropy"),
        (wide, 2, "cross_entropy"),
        (single, 3, "half_squared_error"),
    ):
        x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(0)).double()
        y = torch.zeros(1, 1).double() if loss != "cross_entropy" else torch.zeros(1, dtype=torch.long)
        for (name, at), estimate in fl.measure(fl.Lens(fl.Problem(net, loss, (x, y)))).items():
            assert estimate.note or torch.isfinite(torch.tensor(estimate.value)), (name, at)
    report = fl.measure(fl.Lens(fl.Problem(dead, "cross_entropy", (x, torch.zeros(1, dtype=torch.long)))))
    assert report["mls"].value == 0
    assert report["local_volume"].value == 0
    assert report["log_volume"].kind == "undefined"
    assert "G = 0" in report["local_dimension"].note


def test_without_names_it_is_every_exact_measure_of_the_pass() -> None:
    report = fl.measure(lens_on(chain([3, 2], 5), normal(8, 3, seed=3)))
    known = [m for m in fl.measures.MEASURES.values() if not m.on_request and not m.held_out]
    assert {name.partition(".")[0] for name in report.measures()} == {m.key for m in known}
    assert {estimate.kind for estimate in report.values()} <= {"exact", "undefined"}
    assert report.about["passes"] == 1


def test_what_is_no_lens_or_no_measure_is_one_line() -> None:
    one = lens_on(chain([3, 2], 5), normal(8, 3, seed=3))
    with pytest.raises(BadInput, match=r"a Lens is needed, got int: measure\(Lens\(problem\)\)"):
        fl.measure(5)
    with pytest.raises(BadInput, match=r"give names of measures, such as .*, or Measure objects, got 5"):
        fl.measure(one, [5])


def test_without_held_out_data_the_gap_is_undefined() -> None:
    gap = fl.measure(lens_on(chain([3, 2], 5), normal(8, 3, seed=3)), "generalisation_gap")["generalisation_gap"]
    assert gap.kind == "undefined"
    assert math.isnan(gap.value)
    assert gap.note
