"""Norms of the input-output Jacobian where it is a matrix written down."""

from __future__ import annotations

import pytest
import torch
from builders import chain, lens_on
from linear import X, linear, measured
from torch import nn

import flatlens as fl

KEYS = ("mls", "nmls", "jacobian_norm", "normalized_mls", "input_invariant_mls", "jacobian_frobenius")


def test_a_linear_network() -> None:
    """df/dx = W for every sample."""
    W = linear()[0].weight.detach()
    report, norm, x2 = measured(*KEYS), float(torch.linalg.matrix_norm(W, 2)), X.square()
    for key in ("mls", "nmls", "jacobian_norm"):
        assert report[key].value == pytest.approx(norm)
    assert report["normalized_mls"].value == pytest.approx(norm**2 * float(x2.sum(1).mean()))
    assert report["input_invariant_mls"].value == pytest.approx(float((x2 @ W.square().sum(0)).mean()))
    assert report["jacobian_frobenius"].value == pytest.approx(float(W.square().sum()))
    assert report["mls"].samples == pytest.approx(torch.full((8,), norm).double())


def test_probabilities_in_place_of_outputs() -> None:
    """dp/dx = (diag p - p p^T) W: mean and largest norm."""
    W = linear()[0].weight.detach()
    p = (X @ W.T).softmax(1)
    norms = torch.linalg.matrix_norm((torch.diag_embed(p) - p[:, :, None] * p[:, None]) @ W, 2)
    report = measured("mls(softmax=True)", "jacobian_norm(softmax=True)", loss="cross_entropy")
    assert report["mls(softmax=True)"].value == pytest.approx(float(norms.mean()))
    assert report["jacobian_norm(softmax=True)"].value == pytest.approx(float(norms.max()))


def test_two_linear_layers() -> None:
    """NMLS = ||W_2 W_1|| + ||W_2||."""
    net = nn.Sequential(*[m for m in chain([3, 4, 2], 5, bias=False) if isinstance(m, nn.Linear)])
    W, V = (m.weight.detach() for m in net)
    truth = torch.linalg.matrix_norm(V @ W, 2) + torch.linalg.matrix_norm(V, 2)
    assert fl.measure(lens_on(net, X), "nmls")["nmls"].value == pytest.approx(float(truth))
