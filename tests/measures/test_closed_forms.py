"""A network whose numbers are known with pen and paper."""

from __future__ import annotations

import math

import pytest
import torch
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
    report = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (X, torch.zeros(8, 2).double()))), "pass")
    assert report["mls"].value == pytest.approx(float(s[0]))
    assert report["nmls"].value == pytest.approx(float(s[0]))
    assert report["interpolation_sharpness"].value == pytest.approx(2 * x2)
    assert report["ggn_trace"].value == pytest.approx(2 * x2)
    assert report["relative_flatness"].value == pytest.approx(float(W.square().sum()) * x2)
    assert report["local_volume"].value == pytest.approx(float(s.prod()))
    assert report["log_volume"].value == pytest.approx(math.log(float(s.prod())))
    assert report["local_dimension"].value == pytest.approx(float(s.square().sum() ** 2 / s.pow(4).sum()))
