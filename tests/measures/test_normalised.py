"""Sharpness in units of the weights where it is known with pen and paper."""

from __future__ import annotations

import math

import pytest
import torch
from builders import chain, lens_on, normal
from linear import A, linear, measured

import flatlens as fl
from flatlens.errors import BadOption


def test_a_linear_network() -> None:
    """sum_kj w_kj^2 A_jj; ||W|| sqrt(S) with S = N tr A."""
    W, S = linear()[0].weight.detach(), 2 * float(A.trace())
    report = measured("adaptive_sharpness_ggn", "matrix_normalized_sharpness",
                      "matrix_normalized_sharpness(frobenius=True)")  # fmt: skip
    assert report["adaptive_sharpness_ggn"].value == pytest.approx(float((W.square() * A.diagonal()).sum()))
    spectral = float(torch.linalg.matrix_norm(W, 2))
    assert report["matrix_normalized_sharpness"].value == pytest.approx(spectral * math.sqrt(S))
    frobenius = report["matrix_normalized_sharpness(frobenius=True)"].value
    assert frobenius == pytest.approx(float(W.norm()) * math.sqrt(S))


def test_a_scale_that_is_not_positive_is_refused() -> None:
    with pytest.raises(BadOption, match=r"option lam=-1: expected a positive number"):
        measured("normalized_sharpness(lam=-1)")


def test_one_weight() -> None:
    """min_u h u + w^2 / (4 u) = |w| sqrt(h), h = mean x^2; lambda divides it."""
    net, x = chain([1, 1], 2, bias=False), normal(6, 1, seed=1)
    truth = abs(float(net[0].weight.detach())) * math.sqrt(float(x.square().mean()))
    report = fl.measure(lens_on(net, x), ["normalized_sharpness", "normalized_sharpness(lam=4.0)"])
    assert report["normalized_sharpness"].value == pytest.approx(truth)
    assert report["normalized_sharpness(lam=4.0)"].value == pytest.approx(truth / 4)
