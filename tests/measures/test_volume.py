"""Volumes and dimension of the image of a small ball where the Jacobian is a matrix written down."""

from __future__ import annotations

import math

import pytest
import torch
from builders import lens_on
from linear import X, linear, measured

import flatlens as fl
from flatlens.errors import BadInput


def test_a_linear_network() -> None:
    """Volume s_1 s_2, its logarithm, and dimension (s_1^2 + s_2^2)^2 / (s_1^4 + s_2^4)."""
    s = torch.linalg.svdvals(linear()[0].weight.detach())
    report = measured("local_volume", "local_volume(top_k=1)", "log_volume", "network_volume", "local_dimension")
    assert report["local_volume"].value == pytest.approx(float(s.prod()))
    assert report["network_volume"].value == pytest.approx(float(s.prod()))
    assert report["local_volume(top_k=1)"].value == pytest.approx(float(s[0]))
    assert report["log_volume"].value == pytest.approx(math.log(float(s.prod())))
    truth = float(s.square().sum() ** 2 / s.pow(4).sum())
    assert report["local_dimension"].value == pytest.approx(truth)


def test_a_map_onto_a_line_has_no_volume_and_one_dimension() -> None:
    net = linear()
    with torch.no_grad():
        net[0].weight[1] = net[0].weight[0]
    report = fl.measure(lens_on(net, X), ["local_volume", "log_volume", "local_dimension", "local_volume(top_k=1)"])
    assert report["local_volume"].value == 0
    assert "rank-deficient" in report["local_volume"].note
    assert report["log_volume"].kind == "undefined"
    assert report["local_dimension"].value == pytest.approx(1.0)
    assert report["local_volume(top_k=1)"].value == pytest.approx(
        math.sqrt(2) * float(net[0].weight[0].detach().norm())
    )


@pytest.mark.parametrize("top_k", [0, 3, 1.5])
def test_no_more_directions_than_outputs(top_k: object) -> None:
    with pytest.raises(BadInput, match="between 1 and the number of outputs, 2"):
        measured(fl.measures.local_volume(top_k=top_k))
