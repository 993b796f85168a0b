"""Largest eigenvalues as estimates: what their kind and their note say."""

from __future__ import annotations

import torch
from torch import nn

import flatlens as fl


def test_a_lower_bound_allows_for_underflow() -> None:
    """Among numbers below float32's smallest normal one, products round by more than the residual."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    x, y = 1e-20 * torch.randn(6, 3), torch.arange(6) % 3
    keys, weight = ["layer_sharpness", "layer_factors", "sharpness"], "0.weight"
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), keys)
    H = fl.curvature.Hessian(fl.Problem(net.double(), "cross_entropy", (x.double(), y)), [weight]).matrix()
    truth = float(torch.linalg.eigvalsh(H)[-1])
    assert 0 < truth < torch.finfo(torch.float32).tiny
    for key in keys[:2]:
        one = found[key, "0"]
        assert one.kind == "lower bound"
        assert "products underflow torch.float32" in one.note
        assert truth - float(one.arrays["residuals"][0]) <= one.value <= truth
    assert "underflow" not in found["sharpness"].note
