"""Traces of the Gauss-Newton matrix where they are known with pen and paper."""

from __future__ import annotations

import pytest
import torch
from builders import chain, lens_on
from linear import A, X, linear, measured
from networks import network

import flatlens as fl


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_network(bias: bool) -> None:
    """S = N mean ||x||^2, one more for each output's bias; ||df/dtheta||_F^2 of a sample is the same number."""
    report = fl.measure(lens_on(chain([3, 2], 5, bias=bias), X), "pass")
    S = 2 * (float(A.trace()) + bias)
    for key in ("interpolation_sharpness", "ggn_trace", "parameter_jacobian_frobenius"):
        assert report[key].value == pytest.approx(S)
    assert report["interpolation_sharpness", "0"].value == pytest.approx(S)
    assert report["interpolation_sharpness"].samples == pytest.approx(2 * (X.square().sum(1) + bias))


def test_cross_entropy_of_a_linear_network() -> None:
    """tr GGN = mean (1 - ||p||^2) ||x||^2, p the softmax of the outputs."""
    p = (X @ linear()[0].weight.detach().T).softmax(1)
    truth = float(((1 - p.square().sum(1)) * X.square().sum(1)).mean())
    assert measured("ggn_trace", loss="cross_entropy")["ggn_trace"].value == pytest.approx(truth)


def test_a_confident_network_keeps_its_digits() -> None:
    """Loss 1e-6 and below: ggn_trace against 60-digit-free float64 by the identity C = (p_a p_b) pairs."""
    net, x, y = network("mlp-tanh")
    with torch.no_grad():
        net[4].weight.mul_(0.1)
        net[4].bias.copy_(torch.tensor([40.0, 0.0, 0.0]))
    y = torch.zeros_like(y)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["ggn_trace", "relative_flatness"])
    assert 0 < report["ggn_trace"].value < 1e-12
    f = net(x).detach()
    p = f.softmax(1)
    h = net[:4](x).detach()
    pairs = sum(p[:, a] * p[:, b] for a in range(3) for b in range(3) if a != b)
    kappa = sum(
        p[:, a] * p[:, b] * 0.5 * (net[4].weight[a] - net[4].weight[b]).detach().square().sum()
        for a in range(3)
        for b in range(3)
    )
    assert report["ggn_trace", "4"].value == pytest.approx(float(((h.square().sum(1) + 1) * pairs).mean()), rel=1e-10)
    assert report["relative_flatness"].value == pytest.approx(float((h.square().sum(1) * kappa).mean()), rel=1e-10)
