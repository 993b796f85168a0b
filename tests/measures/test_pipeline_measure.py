"""`fl.measure`: what a report has, and what it says where there is no number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import chain, lens_on, normal
from networks import lens
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput


def test_progress_is_told() -> None:
    seen = []
    fl.measure(lens(memory="8KB"), "pass", progress=lambda what, done, total: seen.append((what, done, total)))
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
        for (name, at), estimate in fl.measure(fl.Lens(fl.Problem(net, loss, (x, y))), "pass").items():
            assert estimate.note or torch.isfinite(torch.tensor(estimate.value)), (name, at)
    report = fl.measure(fl.Lens(fl.Problem(dead, "cross_entropy", (x, torch.zeros(1, dtype=torch.long)))), "pass")
    assert report["mls"].value == 0
    assert report["local_volume"].value == 0
    assert report["log_volume"].kind == "undefined"
    assert "G = 0" in report["local_dimension"].note


def test_the_pass_is_every_exact_measure_of_the_pass() -> None:
    report = fl.measure(lens_on(chain([3, 2], 5), normal(8, 3, seed=3)), "pass")
    known = {m.key for m in fl.measures.MEASURES.values() if not m.on_request and not m.held_out}
    known -= {"relative_flatness", "neuron_flatness", "parameter_jacobian_frobenius"}  # no number twice
    assert {name.partition(".")[0] for name in report.measures()} == known
    assert {estimate.kind for estimate in report.values()} <= {"exact", "undefined"}
    assert report.about["passes"] == 1


def test_what_is_no_lens_or_no_measure_is_one_line() -> None:
    one = lens_on(chain([3, 2], 5), normal(8, 3, seed=3))
    with pytest.raises(BadInput, match=r"expected a network or a Lens, got int: .* or measure\(Lens\(problem\)\)"):
        fl.measure(5, "pass")
    with pytest.raises(BadInput, match=r"give names of measures, such as .*, or Measure objects, got 5"):
        fl.measure(one, [5])


def test_without_held_out_data_the_gap_is_undefined() -> None:
    gap = fl.measure(lens_on(chain([3, 2], 5), normal(8, 3, seed=3)), "generalisation_gap")["generalisation_gap"]
    assert gap.kind == "undefined"
    assert math.isnan(gap.value)
    assert gap.note


def homogeneous(convolution: bool, where: str, unit: float, dtype: torch.dtype) -> fl.Lens:
    """A ReLU network without biases whose weights, or inputs, are in other units, as are its targets."""
    generator = torch.Generator().manual_seed(3)
    net: nn.Module = (
        nn.Sequential(nn.Conv2d(1, 3, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2, bias=False))
        if convolution
        else nn.Sequential(
            nn.Linear(9, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)
        )
    )
    weights = list(net.parameters())
    for p in weights:
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / p[0].numel() ** 0.5
    x, y = (torch.randn(6, k, generator=generator, dtype=torch.float64) for k in (9, 2))
    for p in {"every weight": weights, "the last": weights[-1:], "the first": weights[:1], "inputs": []}[where]:
        p.data *= unit
        y = y * unit
    x, y = (x * unit, y * unit) if where == "inputs" else (x, y)
    x = x.reshape(6, 1, 3, 3) if convolution else x
    return fl.Lens(fl.Problem(net.to(dtype), "half_squared_error", (x.to(dtype), y.to(dtype))))


@pytest.mark.parametrize("where", ["every weight", "the last", "the first", "inputs"])
@pytest.mark.parametrize("convolution", [False, True])
def test_what_underflows_is_neither_0_nor_rounding(convolution: bool, where: str) -> None:
    """Values are a power of the unit times their value at unit 1; the power shows at units that are near 1."""

    def at(unit: float, dtype: torch.dtype = torch.float64) -> dict[Any, fl.Estimate]:
        return dict(fl.measure(homogeneous(convolution, where, unit, dtype), "pass").items())

    one, few, fewer = at(1.0), at(2.0**-10), at(2.0**-20)
    powers = {}
    for key, whole in one.items():
        values = whole.value, few[key].value, fewer[key].value
        if all(value == value and value > 0 for value in values):
            first, second = math.log2(values[0] / values[1]) / 10, math.log2(values[1] / values[2]) / 10
            if abs(first - second) < 1e-9:  # a maximum or sum over layers changes hands
                powers[key] = round(second)
    assert len(powers) > 60
    for exponent, dtype in (
        (-3, None),
        *((k, torch.float64) for k in (-200, -130, -80, -55, -30)),
        (-20, torch.float32),
    ):
        found = at(10.0**exponent, dtype or torch.float64)
        for key, power in powers.items():
            estimate = found[key]
            if estimate.kind == "undefined":
                assert exponent < -20 or dtype == torch.float32, key
                assert "underflow" in estimate.note, key
                continue
            want = math.log10(one[key].value) + power * exponent
            got = math.log10(estimate.value) if estimate.value > 0 else -math.inf
            assert got == pytest.approx(want, abs=1e-8 if dtype != torch.float32 else 1e-4), (exponent, key)


def test_what_is_0_stays_0() -> None:
    """Also where the weights of another network would underflow: the derivative is looked at, not guessed."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    net[2].weight.data.zero_()
    report = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (torch.randn(5, 3), torch.randn(5, 2)))), "pass")
    assert (report["mls"].value, report["mls"].kind) == (0.0, "exact")
    assert (report["relative_flatness"].value, report["relative_flatness"].kind) == (0.0, "exact")
