"""Traces of the Hessian where they are known with pen and paper, and Lemma B.1 with every derivative written out."""

from __future__ import annotations

import pytest
import torch
from builders import chain, lens_on, normal
from linear import A, measured
from literal_curvature import LOSSES, flat_parameters, hessian_of, jacobian_of, output_derivatives
from networks import network

import flatlens as fl
from flatlens.measures import interpolation_gap


def close(value: float, truth: object, tolerance: float = 1e-8, scale: float = 0.0) -> None:
    assert value == pytest.approx(float(truth), rel=tolerance, abs=max(1e-13, tolerance * scale))


def test_a_linear_network_has_no_second_derivative_of_its_own() -> None:
    """tr H = N tr(X^T X / n) = S, the whole of it the Gauss-Newton part."""
    report = measured("hessian_trace", "interpolation_gap")
    assert report["hessian_trace"].value == pytest.approx(2 * float(A.trace()))
    assert report["hessian_trace.gauss_newton"].value == pytest.approx(2 * float(A.trace()))
    assert report["hessian_trace"].kind == "exact"
    assert report["interpolation_gap"].value == pytest.approx(0, abs=1e-12)


def test_tanh_of_one_number() -> None:
    """R = mean tanh(w x)^2 / 2: d2R/dw2 = mean x^2 (t'^2 + t t''), t' = 1 - t^2, t'' = -2 t t'."""
    net, x = chain([1, 1, 1], 2, bias=False), normal(5, 1, seed=1)
    with torch.no_grad():
        net[2].weight.fill_(1.0)
    net[2].requires_grad_(False)
    t = torch.tanh(float(net[0].weight.detach()) * x)
    first = 1 - t.square()
    truth = float((x.square() * (first.square() - 2 * t.square() * first)).mean())
    report = fl.measure(lens_on(net, x), ["hessian_trace(exact=True)", "adaptive_sharpness(exact=True)"])
    assert report["hessian_trace(exact=True)"].value == pytest.approx(truth)
    w2 = float(net[0].weight.detach().square())
    assert report["adaptive_sharpness(exact=True)"].value == pytest.approx(w2 * truth)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", ["mlp-relu", "mlp-tanh", "cnn-tanh", "cnn-3d"])
def test_lemma_b1_and_its_middle_term(name: str, adaptive: bool) -> None:
    """|Tr H - S| <= mean_i sum_j |<f_i - y_i, d2 f_i / dtheta_j2>|, every second derivative written out."""
    net, x, y = network(name, n=3)
    measure = interpolation_gap(exact=True, bound=True, adaptive=adaptive)
    report = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), [measure])
    theta, J = flat_parameters(net), jacobian_of(net, x)
    slopes, _ = output_derivatives(LOSSES["half_squared_error"], net(x.clone()).detach(), y)
    scale = theta.square() if adaptive else torch.ones_like(theta)
    bends = []
    for i in range(len(x)):
        weighed = hessian_of(net, lambda f, i=i: (slopes[i] * f[0]).sum(), x[i : i + 1])
        bends.append(weighed.diagonal() * scale)
    bound = torch.stack(bends).abs().sum(1).mean()
    H = hessian_of(net, lambda f: LOSSES["half_squared_error"](f, y).mean(), x)
    size = float((J.square().sum((0, 1)) / len(x) * scale).sum())
    close(report[measure.key].value, float((H.diagonal() * scale).sum()) - size, scale=size)
    close(report[f"{measure.key}.bound"].value, bound)
    assert abs(report[measure.key].value) <= float(bound) + 1e-12 * size
    assert (name == "mlp-relu") == (float(bound) == 0)
