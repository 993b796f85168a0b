"""Networks whose numbers are known with pen and paper, and Theorem 4 done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from networks import network
from torch import nn

import flatlens as fl

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).double()


def linear(N: int = 2) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(3, N, bias=False).double()


def test_a_linear_network() -> None:
    """f = W x: MLS = ||W||_2, S = N mean ||x||^2, kappa = ||W||_F^2 mean ||x||^2 under the half squared error."""
    net = linear()
    W, x2 = net.weight.detach(), float(X.square().sum(1).mean())
    s = torch.linalg.svdvals(W)
    report = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (X, torch.zeros(8, 2).double()))))
    assert report["mls"].value == pytest.approx(float(s[0]))
    assert report["nmls"].value == pytest.approx(float(s[0]))
    assert report["interpolation_sharpness"].value == pytest.approx(2 * x2)
    assert report["ggn_trace"].value == pytest.approx(2 * x2)
    assert report["relative_flatness"].value == pytest.approx(float(W.square().sum()) * x2)
    assert report["local_volume"].value == pytest.approx(float(s.prod()))
    assert report["log_volume"].value == pytest.approx(math.log(float(s.prod())))
    assert report["local_dimension"].value == pytest.approx(float(s.square().sum() ** 2 / s.pow(4).sum()))


def test_ridge_regression_is_relative_flatness_of_the_squared_error() -> None:
    """relative2021 section 3 (i): 2 ||w||^2 mean ||x||^2 for the squared error (the printed one drops 1/|S|)."""
    net = linear(1)
    report = fl.measure(fl.Lens(fl.Problem(net, "mse", (X, torch.zeros(8, 1).double()))))
    truth = 2 * float(net.weight.detach().square().sum()) * float(X.square().sum(1).mean())
    assert report["relative_flatness"].value == pytest.approx(truth)


def test_the_identities_of_dense_piecewise_linear_networks() -> None:
    """kappa^l = mean ||phi||^2 tr(C G); normalised MLS <= kappa^1 for C = I."""
    net, x, y = network("mlp-relu")
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, y)))
    report = fl.measure(lens)
    assert report["normalized_mls"].value <= report["relative_flatness", "0"].value
    assert report["relative_flatness"].value == report["relative_flatness_ggn"].value


def test_gap_conventions() -> None:
    net = linear()
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    problem = fl.Problem(net, "cross_entropy", (X, y), test=(2 * X[:5], y[:5]))
    lens = fl.Lens(problem)
    keys = [
        "generalisation_gap",
        *(f"generalisation_gap(convention='{c}')" for c in ("absolute", "summed_x5", "accuracy")),
    ]
    report = fl.measure(lens, [*keys, "loss", "test_loss", "accuracy", "test_accuracy"])
    train = nn.functional.cross_entropy(net(X), y, reduction="none").detach()
    test = nn.functional.cross_entropy(net(2 * X[:5]), y[:5], reduction="none").detach()
    assert report["loss"].value == pytest.approx(float(train.mean()))
    assert report["test_loss"].stderr == pytest.approx(float(test.std()) / math.sqrt(5))
    signed = float(test.mean() - train.mean())
    assert report[keys[0]].value == pytest.approx(signed)
    assert report[keys[1]].value == pytest.approx(abs(signed))
    assert report[keys[2]].value == pytest.approx(float(5 * test.sum() - train.sum()))
    hits = (net(X).argmax(1) == y).double().mean() - (net(2 * X[:5]).argmax(1) == y[:5]).double().mean()
    assert report[keys[3]].value == pytest.approx(float(hits))
    alone = fl.Lens(fl.Problem(net, "cross_entropy", (X, y)))
    assert "test=" in fl.measure(alone, ["generalisation_gap"])["generalisation_gap"].note
    assert "generalisation_gap" not in fl.measure(alone).measures()


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-tanh", "twice-tanh"])
def test_theorem_4_on_the_network_itself(name: str) -> None:
    """normalize="std" is the plain measure of the network with features divided, and weights multiplied, by the
    spread."""
    net, x, y = network(name)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    report = fl.measure(lens, ["relative_flatness(normalize='std')", "relative_flatness"])
    scale = lens.feature_scale()
    layer = {"mlp-tanh": "2", "cnn-tanh": "2", "twice-tanh": "mid"}[name]

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module, s: torch.Tensor) -> None:
            super().__init__()
            self.inner, self.s = inner, s
            g = len(s)
            with torch.no_grad():
                inner.weight.mul_(s.repeat_interleave(inner.weight.shape[0] // g, 0).reshape(inner.weight.shape))

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            per_channel = self.s.reshape(-1) if h.ndim == 2 else self.s[:, ::4].reshape(1, -1, 1, 1)
            return self.inner(h / per_channel)

    if name == "twice-tanh":
        net.mid = Scaled(net.mid, scale[layer])
    else:
        net[int(layer)] = Scaled(net[int(layer)], scale[layer])
    plain = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["relative_flatness"])
    ours = report["relative_flatness(normalize='std')", layer].value
    assert ours == pytest.approx(plain["relative_flatness", f"{layer}.inner"].value, rel=1e-9)
    assert ours != pytest.approx(report["relative_flatness", layer].value, rel=1e-2)


def test_the_excess_of_a_smoothed_loss_is_what_training_can_take_away() -> None:
    """Outputs that meet the smoothed labels leave their entropy and nothing else; hard labels have none."""
    p = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)  # (1 - 0.3) 1 + 0.3/3, 0.3/3, 0.3/3
    net = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.stack([p.roll(k).log() for k in range(3)], 1))
    x, y = torch.eye(3, dtype=torch.float64), torch.arange(3)
    smoothed = fl.measure(
        fl.Lens(fl.Problem(net, nn.CrossEntropyLoss(label_smoothing=0.3), (x, y))), ["loss", "loss(excess=True)"]
    )
    assert smoothed["loss"].value == pytest.approx(-float((p * p.log()).sum()))
    assert smoothed["loss(excess=True)"].value == pytest.approx(0.0, abs=1e-12)
    hard = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["loss", "loss(excess=True)"])
    assert hard["loss(excess=True)"].value == hard["loss"].value == pytest.approx(-math.log(0.8))
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double(), label_smoothing=0.3)
    problem = fl.Problem(net, weighted, (x, y))
    report = fl.measure(fl.Lens(problem), ["loss", "loss(excess=True)"])
    least = float(problem.loss.least(x, y).sum() / 6)  # divided by the labels' weights, as torch divides the loss
    assert report["loss(excess=True)"].value == pytest.approx(report["loss"].value - least)
    own = fl.Problem(net, lambda f, y: f.square().sum(1), (x, y))
    assert fl.measure(fl.Lens(own), "loss(excess=True)")["loss(excess=True)"].kind == "undefined"
