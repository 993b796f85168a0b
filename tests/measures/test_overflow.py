"""No number that is NaN or infinite has a kind of its own: where arithmetic overflows it is undefined, and says so."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.errors import BadModel
from flatlens.estimate import Estimate
from flatlens.grams import LayerGrams
from flatlens.measures import MEASURES, mean
from flatlens.measures.definition import on_lens
from flatlens.measures.sensitivity import of_image

SLOW = {"pac_bayes_flatness", "average_sharpness", "representativeness", "feature_robustness"}
"""They search or draw for long where nothing is finite; what becomes of their values is the same."""


def lens(scales: tuple[float, ...], dtype: torch.dtype, loss: str = "cross_entropy", **options: object) -> fl.Lens:
    """On a ReLU network whose weights grow and shrink on the way, so that outputs are finite and slopes overflow."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in scales]
    net = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1]).to(dtype)
    with torch.no_grad():
        for layer, scale in zip(layers, scales, strict=True):
            layer.weight.mul_(scale)
    y = torch.randint(0, 4, (20,)) if loss == "cross_entropy" else torch.randn(20, 4)
    return fl.Lens(fl.Problem(net, loss, (torch.randn(20, 4), y)), **options)


def sound(report: fl.Report) -> None:
    for key, found in report.items():
        if found.kind == "undefined":
            assert math.isnan(found.value), key
            assert found.note, key
        else:
            assert math.isfinite(found.value), (key, found)


CASES = [
    (1e-100, 1e80, 1e80, 1.0),
    (1.0, 1.0, 1.0, 1e155),
    (1e160, 1e-160, 1.0),
]
"""Of slopes or weights whose squares overflow."""


@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error"])
@pytest.mark.parametrize("scales", CASES)
def test_nothing_is_called_exact_that_is_not_finite(scales: tuple[float, ...], loss: str) -> None:
    found = fl.measure(lens(scales, torch.float64, loss), "pass")
    sound(found)
    assert any("overflows: smaller weights may help" in one.note for one in found.values())


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [((1e-38, 1e20, 1e20, 1.0), torch.float32), ((1e-300, 1e160, 1e160, 1.0), torch.float64)],
)
def test_slopes_that_overflow_themselves(scales: tuple[float, ...], dtype: torch.dtype) -> None:
    """No plan of the pass can be held against them: they are refused, or their numbers undefined."""
    for name in ("ggn_trace", "interpolation_sharpness", "mls", "hessian_trace"):
        with suppress(BadModel):
            sound(fl.measure(lens(scales, dtype), name))


@pytest.mark.parametrize("name", [m for m, one in MEASURES.items() if one.on_request and m not in SLOW])
def test_nor_is_what_takes_products(name: str) -> None:
    if not MEASURES[name].held_out:
        sound(fl.measure(lens(CASES[0], torch.float64), name))


def test_sketches_that_overflow() -> None:
    sound(
        fl.measure(
            lens(CASES[0], torch.float64, outputs=2),
            ["mls", "ggn_trace", "interpolation_sharpness", "relative_flatness"],
        )
    )


def test_a_sum_and_a_maximum_over_layers_have_no_value_where_a_layer_has_none() -> None:
    """The largest of NaN and a number is either, by their order."""
    found = fl.measure(lens(CASES[0], torch.float64), "interpolation_sharpness")
    without = [key for key, one in found.items() if key[1] is not None and one.kind == "undefined"]
    assert 0 < len(without) < 4
    for part in ("interpolation_sharpness", "interpolation_sharpness.max"):
        assert found[part].kind == "undefined"
        assert "overflows" in found[part].note


def test_double_precision_mends_it_as_the_note_says() -> None:
    """Scaled by 2^a, 2^b, 2^c, 2^d, a ReLU network's layer has 2^(2 (the others)) of its own squared derivatives."""
    powers = (-100, 70, 70, 0)
    small, large = (
        fl.measure(lens(scales, dtype, "half_squared_error"), "ggn_trace")
        for scales, dtype in (((1.0,) * 4, torch.float64), (tuple(2.0**p for p in powers), torch.float64))
    )
    for power, name in zip(powers, ("0", "2", "4", "6"), strict=True):
        expected = small["ggn_trace", name].value * 4.0 ** (sum(powers) - power)
        assert large["ggn_trace", name].value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["exact", "estimate", "lower bound", "upper bound"])
def test_whatever_a_measure_gives(value: float, kind: str) -> None:
    @on_lens(id="own", family="own", symbol="x", source="nowhere", unit="loss")
    def own(lens: fl.Lens) -> Estimate:
        """A number."""
        return Estimate(value, stderr=value, kind=kind, note="of its own")

    found = fl.measure(lens((1.0,), torch.float32), [own])["own"]
    assert (found.kind, found.margin) == ("undefined", 0.0)
    assert found.note.startswith(
        f"the result is {value}, because an intermediate number overflows: dtype=torch.float64"
    )


def test_a_definition_of_zero_over_zero_is_not_called_an_overflow() -> None:
    """One sample of two has a Jacobian of 0."""

    @of_image(id="own", symbol="x", source="nowhere", unit="", reduce=mean)
    def ratio(g: LayerGrams) -> torch.Tensor:
        """Share of the first output."""
        squares = g.G.diagonal(dim1=1, dim2=2)
        return squares[:, 0] / squares.sum(1)

    net = torch.nn.Sequential(torch.nn.Linear(1, 1, dtype=torch.float64), torch.nn.ReLU())
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.zero_()
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, x))), [ratio])["ratio"]
    assert found.kind == "undefined"
    assert found.note.startswith("1 of 2 samples have no value: the definition divides 0 by 0 there")
