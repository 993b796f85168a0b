"""Sizes of weights, features and outputs, and the Fisher-Rao norm, on networks where they are known."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from builders import chain, lens_on
from linear import X, linear, measured
from networks import module_of, network
from torch import nn

import flatlens as fl


def close(value: float, truth: float, tolerance: float) -> None:
    assert value == pytest.approx(float(truth), rel=tolerance, abs=1e-13)


def test_a_linear_network() -> None:
    W, report = linear()[0].weight.detach(), measured("weight_norm", "output_norm", "feature_norm", "fisher_rao")
    assert report["weight_norm"].value == pytest.approx(float(W.norm()))
    assert report["weight_norm.spectral"].value == pytest.approx(float(torch.linalg.matrix_norm(W, 2)))
    assert report["output_norm"].value == pytest.approx(float((X @ W.T).norm()))
    assert report["feature_norm"].value == pytest.approx(float(torch.linalg.matrix_norm(X, 2)))
    inner = (X @ W.T).square().sum(1)  # <dl/df, f> for targets 0
    assert report["fisher_rao"].value == pytest.approx(math.sqrt(float(inner.square().mean())))


def test_the_norm_of_two_layers_is_that_of_all_their_weights() -> None:
    net = chain([3, 4, 2], 5)
    report = fl.measure(lens_on(net, X), ["weight_norm"])
    sizes = [float(net[i].weight.detach().norm()) for i in (0, 2)]
    assert report["weight_norm"].value == pytest.approx(math.hypot(*sizes))
    assert [report["weight_norm", at].value for at in ("0", "2")] == pytest.approx(sizes)


def test_fisher_rao_is_one_number_without_biases_and_two_with() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        plain = nn.Sequential(
            nn.Conv2d(1, 3, 2, bias=False), nn.ReLU(), nn.Flatten(),
            nn.Linear(12, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False),
        ).double()  # fmt: skip
        x = torch.randn(6, 1, 3, 3).double()
    report = fl.measure(fl.Lens(fl.Problem(plain, "cross_entropy", (x, torch.arange(6) % 3))), ["fisher_rao"])
    close(report["fisher_rao.parameters"].value, report["fisher_rao"].value, 1e-12)
    assert report["fisher_rao"].note == ""
    net, x, y = network("mlp-relu")
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["fisher_rao"])
    assert report["fisher_rao.parameters"].value != pytest.approx(report["fisher_rao"].value, rel=0.01)
    assert "biases" in report["fisher_rao"].note


def test_sizes_in_train_mode_are_those_of_the_ghost_batches() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
        x = torch.randn(10, 5).double() * torch.arange(1.0, 11.0)[:, None]
    problem = fl.Problem(net, "cross_entropy", (x, torch.arange(10) % 3), batchnorm="train", ghost_batch=4)
    report = fl.measure(fl.Lens(problem), ["weight_norm", "feature_norm", "output_norm"])
    assert report["weight_norm"].value == pytest.approx(
        math.hypot(*(float(net[i].weight.detach().norm()) for i in (0, 3)))
    )
    state = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        features = [net[:3](batch) for batch in x.split(4)]
    net.load_state_dict(state)
    close(report["feature_norm", "3"].value, float(torch.linalg.matrix_norm(torch.cat(features), 2)), 1e-12)
    close(report["output_norm"].value, float(net[3](torch.cat(features)).detach().norm()), 1e-12)


def convolved(length: int) -> fl.Lens:
    """A convolution that adds an entry and its neighbours; its norm is 1 + 2 cos(pi / (length + 1))."""
    net = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Flatten(), nn.AvgPool1d(length)).double()
    nn.init.ones_(net[0].weight)
    return fl.Lens(fl.Problem(net, "mse", (torch.ones(2, 1, length).double(), torch.zeros(2, 1).double())))


def test_the_norm_of_a_long_convolution_in_float64() -> None:
    """A search to a residual of 1e-6 would mix the largest singular values."""
    found = fl.measure(convolved(4100), ["weight_norm"])["weight_norm.spectral"]
    assert found.value == pytest.approx(1 + 2 * math.cos(math.pi / 4101), rel=1e-12)
    assert found.kind == "exact"


def test_a_search_that_stops_early_gives_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest singular values lie so close together that the searches have too few products."""
    angles = torch.linspace(0, math.pi, 400, dtype=torch.float64)
    x = torch.cat([torch.diag((1 + angles.cos() / 2).sqrt()), torch.zeros(1, 400).double()])
    net = nn.Linear(400, 1, dtype=torch.float64)
    norm = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(401, 1).double()))), ["feature_norm"])
    monkeypatch.setattr("flatlens.operations.operator_norm._MOST", 30)
    report = fl.measure(convolved(500), ["weight_norm", "matrix_normalized_sharpness"])
    for found, truth in (
        (norm["feature_norm"], math.sqrt(1.5)),
        (report["weight_norm.spectral"], 1 + 2 * math.cos(math.pi / 501)),
    ):
        assert found.value < truth
        assert found.kind == "lower bound"
        assert "before its tolerance" in found.note
    assert report["weight_norm.kernel"].kind == "exact"
    assert report["matrix_normalized_sharpness"].kind == "lower bound"


def test_the_norm_of_a_transposed_convolution_is_that_of_its_call() -> None:
    """`output_size=` of the call, as in a U-Net, sets the output padding."""

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = module_of(
            lambda net, x: net.out(net.up(x, output_size=(6, 6)).tanh().flatten(1)),
            up=nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, bias=False),
            out=(72, 2),
        ).double()
        x = torch.randn(4, 2, 3, 3).double()
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, torch.arange(4) % 2))), ["weight_norm"])
    units = torch.eye(18, dtype=torch.float64).reshape(18, 2, 3, 3)
    operator = net.up(units, output_size=(6, 6)).flatten(1).detach()
    close(report["weight_norm.spectral", "up"].value, float(torch.linalg.matrix_norm(operator, 2)), 1e-9)


def test_a_norm_of_groups_warns_of_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    problem = fl.Problem(net, "cross_entropy", (torch.randn(4, 2, 5, 5), torch.arange(4) % 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fl.measure(fl.Lens(problem), "pass")["fisher_rao"].value > 0


def test_fisher_rao_of_a_class_without_weight() -> None:
    """Smoothed labels give a sample of weight 0 a slope, which F divides by that weight; plain ones do not."""
    net, y = chain([3, 3], 5), torch.arange(8) % 3
    for smoothing, kind in ((0.0, "exact"), (0.1, "undefined")):
        loss = nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 2.0], dtype=X.dtype), label_smoothing=smoothing)
        report = fl.measure(fl.Lens(fl.Problem(net, loss, (X, y))), ["fisher_rao"])
        assert {report[name].kind for name in report.measures()} == {kind}
