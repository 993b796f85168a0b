"""Relative flatness on networks where it is known with pen and paper, and Theorem 4 done by hand.

On every kind of network it is compared with Definition 3 in tests/truths/test_literal.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from builders import chain, normal
from networks import module_of, network
from torch import nn

import flatlens as fl
from flatlens.errors import BadOption

X = normal(8, 3, seed=3)


def on(name: str) -> fl.Lens:
    net, x, y = network(name)
    return fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))


def test_ridge_regression_is_relative_flatness_of_the_squared_error() -> None:
    """relative2021 section 3 (i): 2 ||w||^2 mean ||x||^2 for the squared error (the printed one drops 1/|S|)."""
    net = chain([3, 1], 5, bias=False)
    report = fl.measure(fl.Lens(fl.Problem(net, "mse", (X, torch.zeros(8, 1).double()))), "pass")
    truth = 2 * float(net[0].weight.detach().square().sum()) * float(X.square().sum(1).mean())
    assert report["relative_flatness"].value == pytest.approx(truth)


def test_the_identities_of_dense_piecewise_linear_networks() -> None:
    """kappa^l = mean ||phi||^2 tr(C G); normalised MLS <= kappa^1 for C = I."""
    net, x, y = network("mlp-relu")
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, y)))
    report = fl.measure(lens, "pass")
    assert report["normalized_mls"].value <= report["relative_flatness", "0"].value
    assert report["relative_flatness"].value == report["relative_flatness_ggn"].value


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-tanh", "twice-tanh"])
def test_theorem_4_on_the_network_itself(name: str) -> None:
    """normalized="std" is the plain measure of the network with features divided, and weights multiplied, by the
    spread."""
    net, x, y = network(name)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    report = fl.measure(lens, ["relative_flatness(normalized='std')", "relative_flatness"])
    scale = lens.feature_scale()
    layer = {"mlp-tanh": "2", "cnn-tanh": "2", "twice-tanh": "mid"}[name]

    def scaled(inner: nn.Module, s: torch.Tensor) -> nn.Module:
        def forward(net: nn.Module, h: torch.Tensor) -> torch.Tensor:
            per_channel = s.reshape(-1) if h.ndim == 2 else s[:, ::4].reshape(1, -1, 1, 1)
            return net.inner(h / per_channel)

        with torch.no_grad():
            inner.weight.mul_(s.repeat_interleave(inner.weight.shape[0] // len(s), 0).reshape(inner.weight.shape))
        return module_of(forward, inner=inner)

    if name == "twice-tanh":
        net.mid = scaled(net.mid, scale[layer])
    else:
        net[int(layer)] = scaled(net[int(layer)], scale[layer])
    plain = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["relative_flatness"])
    ours = report["relative_flatness(normalized='std')", layer].value
    assert ours == pytest.approx(plain["relative_flatness", f"{layer}.inner"].value, rel=1e-9)
    assert ours != pytest.approx(report["relative_flatness", layer].value, rel=1e-2)


@pytest.mark.parametrize("name", ["relative_flatness", "relative_flatness_ggn"])
def test_an_unknown_way_to_normalise_names_the_known_ones(name: str) -> None:
    with pytest.raises(BadOption, match=r"option normalized='x': one of 'std', 'variance'"):
        fl.measure(on("mlp-relu"), [f"{name}(normalized='x')"])


def test_curvature_products_are_counted() -> None:
    """min(d, m) of them for a dense layer below a tanh, none where the pass is exact."""
    report = fl.measure(on("mlp-tanh"), "relative_flatness")
    assert [report["relative_flatness", at].products for at in ("0", "2", "4")] == [6, 5, 0]
    assert report["relative_flatness.sum"].products == 11
    assert report["relative_flatness"].products == 0
    assert fl.measure(on("mlp-relu"), "relative_flatness")["relative_flatness.sum"].products == 0


@pytest.mark.parametrize("size", [1e-4, 1e-8, 1e-12, 1e-14])
@pytest.mark.parametrize("twice", [False, True])
def test_small_weights_in_float32_lose_no_second_derivative(size: float, twice: bool) -> None:
    """The second derivative of an activation times two weights of 1e-12 is below float32; in their units it is not."""

    names = ["relative_flatness", "kappa_trace", "neuron_flatness"]
    for seed in range(3):
        torch.manual_seed(seed)
        net = module_of(
            lambda net, x: net.b((net.a(net.a(x).tanh()) if twice else net.a(x)).tanh()), a=(4, 4), b=(4, 3)
        ).requires_grad_(False)
        for p in net.parameters():
            p.mul_(size)
        net.requires_grad_()
        x, y = torch.randn(9, 4), torch.randint(3, (9,))
        wide = fl.measure(fl.Lens(fl.Problem(copy.deepcopy(net).double(), "cross_entropy", (x.double(), y))), names)
        for key, found in fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), names).items():
            if found.kind != "undefined":
                assert found.value == pytest.approx(wide[key].value, rel=1e-2, abs=0), key
