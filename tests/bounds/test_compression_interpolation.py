"""Lemma B.1 against explicit second derivatives, and where it says nothing."""

from __future__ import annotations

import pytest
import torch
from networks import network
from torch.func import functional_call, hessian

import flatlens as fl
from flatlens.bounds import check_bounds


def sides(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """(|Tr H - S|, mean_i sum_j |<f_i - y_i, d2 f_i / dtheta_j2>|) from the outputs' whole Hessians."""
    values = {name: p.detach() for name, p in net.named_parameters()}
    signed = total = 0.0
    for i in range(len(x)):
        off = (net(x[i : i + 1]) - y[i]).detach()[0]
        second = hessian(lambda p, i=i: functional_call(net, p, (x[i : i + 1],))[0])(values)
        for name, p in values.items():
            size = p.numel()
            block = second[name][name].reshape(len(off), size, size).diagonal(dim1=1, dim2=2)
            signed += float((off[:, None] * block).sum())
            total += float((off @ block).abs().sum())
    return abs(signed) / len(x), total / len(x)


@pytest.mark.parametrize("name", ["mlp-tanh", "mlp-gelu"])
def test_both_sides_are_those_of_the_lemma(name: str) -> None:
    net, x, _ = network(name, n=4)
    y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    table = check_bounds(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), "interpolation_bound")
    row = table.of("interpolation_bound")
    left, right = sides(net, x, y)
    assert (row.lhs, row.rhs) == pytest.approx((left, right), rel=1e-8)
    assert row.status == "holds"
    assert 0 < left < right


def test_at_interpolation_sharpness_is_the_trace() -> None:
    net, x, _ = network("mlp-tanh", n=6)
    near = net(x).detach() + 1e-6
    table = check_bounds(fl.Lens(fl.Problem(net, "half_squared_error", (x, near))), "interpolation_bound")
    row = table.of("interpolation_bound")
    assert row.status == "holds"
    assert row.note.endswith(" of Tr H")
    assert float(row.note.split()[0]) < 1e-4


def test_piecewise_linear_networks_have_no_gap() -> None:
    net, x, _ = network("mlp-relu", n=6)
    row = check_bounds(
        fl.Lens(fl.Problem(net, "half_squared_error", (x, torch.zeros(6, 3).double()))), "interpolation_bound"
    ).of("interpolation_bound")
    assert (row.lhs, row.rhs, row.status) == (0.0, 0.0, "holds")


def test_under_other_losses_and_for_other_parameters_it_says_nothing() -> None:
    net, x, y = network("mlp-tanh", n=6)
    row = check_bounds(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), "interpolation_bound").of(
        "interpolation_bound"
    )
    assert (row.status, row.assumption) == ("not applicable", "half_squared_error: the loss is cross_entropy")
    net, x, y = network("attention", n=4)
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(4, 3).double()))
    row = check_bounds(fl.Lens(problem), "interpolation_bound").of("interpolation_bound")
    assert row.status == "not applicable"
    assert row.assumption.startswith("bounded_second_derivatives: ")
