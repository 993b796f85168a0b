"""Searches around each sample where their answer is known with pen and paper."""

from __future__ import annotations

import pytest
import torch
from builders import lens_on
from linear import linear, measured
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput


def test_a_linear_network_does_not_vary() -> None:
    found = measured("local_variation")["local_variation"]
    assert found.value == pytest.approx(0, abs=1e-12)


def test_the_steepest_secant_of_a_linear_network_is_its_largest_singular_value() -> None:
    norm = float(torch.linalg.matrix_norm(linear()[0].weight.detach(), 2))
    found = measured("mls_by_search")["mls_by_search"]
    assert found.value == pytest.approx(norm, rel=1e-3)
    assert found.value <= norm * (1 + 1e-9)


def test_tanh_around_zero() -> None:
    """f = tanh(x) in one variable: f' falls from 1 at 0 to 1 - tanh(delta)^2 at the rim."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.float64), nn.Tanh())
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    found = fl.measure(lens_on(net, torch.zeros(1, 1).double()), "local_variation(delta=0.5)")
    truth = float(torch.tanh(torch.tensor(0.5)) ** 2)
    assert found["local_variation(delta=0.5)"].value == pytest.approx(truth, rel=1e-4)


def test_a_radius_is_positive() -> None:
    with pytest.raises(BadInput, match="positive"):
        measured("local_variation(delta=0)")
