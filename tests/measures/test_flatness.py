"""Relative flatness on networks where it is known with pen and paper, and Theorem 4 done by hand.

On every kind of network it is compared with Definition 3 in tests/truths/test_literal.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from builders import chain, cross_entropy, normal
from literal import definition_3, matrices, weight_hessian
from networks import module_of, network
from torch import nn

import flatlens as fl
from flatlens.errors import BadOption
from flatlens.measures.flatness import shape_of_kernel

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


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-tanh", "twice-tanh", "mlp-relu"])
def test_another_shape_of_the_kernel_is_definition_3_of_weights_in_that_shape(name: str) -> None:
    """sum <w_s S, w_s' S> Tr H_{s,s'} with S from the features' spread, tr S^2 = m; H explicit."""
    net, x, y = network(name)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    found = fl.measure(lens, ["relative_flatness(kernel='spread')"])
    for layer, (weight, module) in matrices(net).items():
        spread = lens.feature_scale()[layer]
        S = spread * (spread.shape[1] / spread.square().sum(1, keepdim=True)).sqrt()
        W = module.weight.detach()
        scaled = W * S.repeat_interleave(len(W) // len(S), 0).reshape(len(W), *W.shape[1:])
        H = weight_hessian(net, cross_entropy, x, y, weight)
        truth = definition_3(H, scaled, getattr(module, "groups", 1))
        assert found["relative_flatness(kernel='spread')", layer].value == pytest.approx(truth, rel=1e-8)


def test_the_change_under_stretched_noise_is_that_flatness() -> None:
    """Theorem 5 with A = delta S O: the mean change of the risk of a linear head is delta^2 / (2m) of it."""
    net, x, y = chain([4, 2], 5, bias=False), normal(30, 4, seed=3) * torch.tensor([3.0, 1, 1, 0.3]), normal(30, 2)
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, y)))
    flat = fl.measure(lens, ["relative_flatness(kernel='spread')", "relative_flatness"])
    W, S = net[0].weight.detach(), shape_of_kernel(lens.feature_scale()["0"])[0]

    def risk(W: torch.Tensor) -> torch.Tensor:
        return (x @ W.mT - y).square().sum(-1).mean(-1) / 2

    Q = torch.linalg.qr(normal(20_000, 4, 4, seed=8))[0]
    Q = Q * torch.randint(0, 2, (20_000, 1, 4), generator=torch.Generator().manual_seed(1)).mul(2).sub(1)
    changes = (risk(W + 0.1 * (W * S) @ Q) + risk(W - 0.1 * (W * S) @ Q)) / 2 - risk(W)
    error = 4 * float(changes.std()) / 20_000**0.5
    assert float(changes.mean()) == pytest.approx(
        0.01 / 8 * flat["relative_flatness(kernel='spread')"].value, abs=error
    )
    assert abs(flat["relative_flatness"].value - flat["relative_flatness(kernel='spread')"].value) * 0.01 / 8 > error


def test_the_two_preprocessings_exclude_each_other() -> None:
    with pytest.raises(BadOption, match="exclude each other"):
        fl.measure(on("mlp-relu"), ["relative_flatness(normalized='std', kernel='spread')"])
    with pytest.raises(BadOption, match=r"option kernel='x': expected one of 'spread'"):
        fl.measure(on("mlp-relu"), ["relative_flatness(kernel='x')"])


@pytest.mark.parametrize("name", ["relative_flatness", "relative_flatness_ggn"])
def test_an_unknown_way_to_normalise_names_the_known_ones(name: str) -> None:
    with pytest.raises(BadOption, match=r"option normalized='x': expected one of 'std', 'variance'"):
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
