"""Factors of the Gauss-Newton matrix where they are known with pen and paper."""

from __future__ import annotations

import math

import pytest
import torch
from builders import chain, lens_on
from linear import A, X, measured
from torch import nn

import flatlens as fl


def test_a_linear_network() -> None:
    """lmax(GGN) = lmax(X^T X / n) = (1 / n) ||X||_2^2 1^2: the bound by the three factors is reached."""
    report, key = measured("layer_factors(rtol=1e-8)"), "layer_factors(rtol=1e-08)"
    assert report[key].value == pytest.approx(float(torch.linalg.eigvalsh(A)[-1]), rel=1e-7)
    assert report[f"{key}.loss_curvature"].value == pytest.approx(math.sqrt(1 / 8), rel=1e-7)
    assert report[f"{key}.features", "0"].value == pytest.approx(float(torch.linalg.matrix_norm(X, 2)), rel=1e-7)
    assert report[f"{key}.jacobian", "0"].value == pytest.approx(1.0, rel=1e-7)
    parts = [report[f"{key}.loss_curvature"], report[f"{key}.features", "0"], report[f"{key}.jacobian", "0"]]
    assert math.prod(part.value**2 for part in parts) == pytest.approx(report[key].value, rel=1e-6)


def test_the_second_factor_of_a_lower_layer_is_the_map_above_it() -> None:
    """Two linear layers: the outputs' derivative at the first one's outputs is W_2."""
    net = nn.Sequential(*[m for m in chain([3, 4, 2], 5, bias=False) if isinstance(m, nn.Linear)])
    report = fl.measure(lens_on(net, X), ["layer_factors(rtol=1e-8)"])
    above = float(torch.linalg.matrix_norm(net[1].weight.detach(), 2))
    assert report["layer_factors(rtol=1e-08).jacobian", "0"].value == pytest.approx(above, rel=1e-7)


def test_without_the_blocks_the_factors_stay() -> None:
    """They come from one pass: the factors are the same numbers, and no product is taken for a block."""
    net = chain([3, 4, 2], 5)
    whole, factors = (fl.measure(lens_on(net, X), [f"layer_factors{asked}"]) for asked in ("", "(blocks=False)"))
    alone = "layer_factors(blocks=False)"
    for part, layer in (("loss_curvature", None), ("features", "0"), ("jacobian", "0"), ("features", "2")):
        assert factors[f"{alone}.{part}", layer].value == whole[f"layer_factors.{part}", layer].value
    assert factors[alone].kind == "undefined"
    assert factors[alone].note == "blocks=False leaves the blocks out"
