"""Flatness of a linear head reduces to ridge regression: beside its literal definition, and scikit-learn's Ridge."""

from __future__ import annotations

import pytest
import torch
from builders import chain, normal
from literal import definition_3, weight_hessian
from literal_curvature import largest
from networks import network
from sklearn.linear_model import Ridge
from torch import nn

import flatlens as fl

LOSSES = {
    "mse": lambda f, y: (f - y).square().mean(1),
    "half_squared_error": lambda f, y: (f - y).square().sum(1) / 2,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("widths", "head"), [([3, 1], "0"), ([4, 3], "0"), ([4, 5, 3], "2")])
def test_both_sides_are_their_literal_definitions(widths: list[int], head: str, loss: str) -> None:
    """Definition 3 and Definition 1 from the explicit Hessian; the penalty from the weights and features."""
    net, x, y = chain(widths, 5), normal(8, widths[0], seed=3), normal(8, widths[-1], seed=4)
    lens = fl.Lens(fl.Problem(net, loss, (x, y)))
    H, W = weight_hessian(net, LOSSES[loss], x, y, f"{head}.weight"), net[int(head)].weight.detach()
    phi = net[: int(head)](x).detach()
    c = 1.0 if loss == "half_squared_error" else 2 / widths[-1]
    report = fl.check_bounds(lens, "ridge_reduction")
    assert [row.status for row in report] == ["holds"] * 4
    kappa = definition_3(H, W, 1)
    assert float(c * W.square().sum() * phi.square().sum(1).mean()) == pytest.approx(kappa, rel=1e-10)
    assert fl.measure(lens, "relative_flatness")["relative_flatness"].value == pytest.approx(kappa, rel=1e-10)
    row = report.of("ridge_reduction.eigenvalue", head)
    top = float(W.square().sum()) * largest(H.reshape(W.numel(), -1))
    assert (row.lhs, row.rhs) == (pytest.approx(top, rel=1e-9), pytest.approx(top, rel=1e-9))


def test_the_penalised_risk_has_its_minimum_at_ridge_regression() -> None:
    """Risk + mu kappa_Tr is least at scikit-learn's Ridge(alpha = 2 mu sum ||x||^2), which is |S| mu c: of the mean."""
    x, y, mu = normal(12, 4, seed=1), normal(12, 1, seed=2), 0.3
    alpha = 2 * mu * float(x.square().sum())
    net = nn.Linear(4, 1, bias=False).double()

    def penalised(w: torch.Tensor) -> float:
        with torch.no_grad():
            net.weight.copy_(w)
        report = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, y))), ["relative_flatness"])
        return (net(x) - y).square().mean().item() + mu * report["relative_flatness"].value

    def best(alpha: float) -> torch.Tensor:
        return torch.as_tensor(Ridge(alpha, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_).reshape(1, 4)

    for direction in torch.eye(4).double()[:, None]:
        ahead, behind = (penalised(best(alpha) + s * direction) for s in (1, -1))
        assert ahead == pytest.approx(behind, rel=1e-9)  # a parabola around its minimum
        assert ahead > penalised(best(alpha))
        printed = [penalised(best(12 * alpha) + s * direction) for s in (1, -1)]  # the papers' constant: a sum
        assert printed[0] != pytest.approx(printed[1], rel=1e-3)


def test_other_losses_and_heads_are_named() -> None:
    net, x, y = network("mlp-tanh")
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    (found,) = {row.assumption for row in fl.check_bounds(lens, "ridge_reduction")}
    assert found == "squared_error: the loss's second derivative is not c I"
    curved = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    problem = fl.Problem(curved, "half_squared_error", (normal(5, 3), normal(5, 2)))
    (row,) = fl.check_bounds(fl.Lens(problem), "ridge_reduction")
    assert (row.status, row.assumption) == ("not applicable", "linear_head: no dense layer's result is f")
