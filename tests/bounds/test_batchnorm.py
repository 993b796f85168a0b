"""Theorem A.2 of sharpening: entry by entry like 1/N, in norm not at all; and that wrong forms of it are caught."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from mutants import mutated
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.bounds import BoundsReport, Verdict, batchnorm, check_bounds
from flatlens.bounds.batchnorm import Layer

SHAPES = ("rademacher", "uniform", "normal")


def drawn(shape: str, *size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if shape == "rademacher":
        return 2.0 * torch.randint(0, 2, size, generator=generator).to(torch.float64) - 1
    if shape == "uniform":
        return torch.rand(size, generator=generator, dtype=torch.float64)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def network(features: int, gamma: float = 1.0) -> nn.Module:
    net = nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, 2)).double()
    nn.init.constant_(net[0].weight, gamma)
    return net


def lens_of(net: nn.Module, x: Tensor) -> fl.Lens:
    return fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(len(x), 2, dtype=torch.float64))))


def order_of(row: Verdict) -> float:
    found = re.search(r"observed order ([0-9.]+)", row.note)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("N", [2, 5, 40])
def test_the_difference_is_the_closed_form(N: int) -> None:
    """-(gamma / N s) (1 1^T + y y^T / s^2), against the Jacobians of torch; its norm is |gamma| / s whatever N."""
    X = drawn("normal", 3, N, seed=N)
    layer = Layer(X, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 1e-5)
    y, s = X - X.mean(1, keepdim=True), (X.var(1, correction=0) + 1e-5).sqrt()[:, None, None]
    expected = -layer.gamma[:, None, None] / (N * s) * (1 + y[:, :, None] * y[:, None] / s**2)
    torch.testing.assert_close(layer.difference(X, N), expected)
    norms = torch.linalg.matrix_norm(expected, 2)
    torch.testing.assert_close(norms, layer.gamma.abs() / s[:, 0, 0])
    assert layer.fixed_norm(X) == pytest.approx(float(norms.max()))


def agree(check: Callable[..., BoundsReport]) -> None:
    """On signs, where s is nearly 1 and y nearly +-1, both sides are known: about 2 and 1 + 4; with gamma 3, thrice."""
    for gamma in (1.0, 3.0):
        report = check(lens_of(network(1, gamma), drawn("rademacher", 4096, 1)), "batchnorm_limit")
        row, order, operator = (report.of("batchnorm_limit" + part, "0") for part in ("", ".order", ".operator"))
        assert row.status == order.status == operator.status == "holds"
        assert 1.9 * gamma <= row.lhs <= 2.7 * gamma
        assert 4.9 * gamma <= row.rhs <= 6.0 * gamma
        assert 0.97 <= order_of(order) <= 1.03
        assert operator.tightness == pytest.approx(1, abs=1e-9)
        assert 0.99 * gamma <= operator.rhs <= 1.2 * gamma


def test_both_sides_are_those_of_the_theorem() -> None:
    agree(check_bounds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(10))
def test_entries_fall_like_one_over_n_and_the_norm_does_not(shape: str, seed: int) -> None:
    report = check_bounds(lens_of(network(1 + seed), drawn(shape, 2000, 1 + seed, seed=seed)), "batchnorm_limit")
    assert not report.violated
    order, operator = report.of("batchnorm_limit.order", "0"), report.of("batchnorm_limit.operator", "0")
    assert order.status == "holds"
    assert 0.9 <= order_of(order) <= 1.1
    assert operator.tightness >= 0.999
    norms = [float(value) for value in operator.note.partition(": ")[2].split(", ")]
    assert len(norms) == 5  # batches of 16 to 256
    assert norms[-1] > 0.5 * norms[0]


def test_every_layer_has_its_rows() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(64, affine=False),
        nn.Linear(64, 2),
    ).double()  # fmt: skip
    x = drawn("normal", 80, 1, 6, 6)
    before = {name: b.clone() for name, b in net.named_buffers()}
    report = check_bounds(lens_of(net, x), "batchnorm_limit")
    assert {row.layer for row in report} == {"1", "4"}
    assert not report.violated
    assert "of 80 to 1280" in report.of("batchnorm_limit.order", "1").note  # positions count: 80 images of 16
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_what_is_not_applicable() -> None:
    few = check_bounds(lens_of(network(2), drawn("normal", 40, 2)), "batchnorm_limit")
    assert [row.status for row in few] == ["not applicable"]
    assert "40 values per feature" in few[0].assumption
    none = check_bounds(lens_of(nn.Linear(2, 2).double(), drawn("normal", 40, 2)), "batchnorm_limit")
    assert none[0].status == "not applicable"
    dead = check_bounds(lens_of(network(2, 0.0), drawn("normal", 100, 2)), "batchnorm_limit")
    assert dead.of("batchnorm_limit.order", "0").status == "not applicable"
    assert not dead.violated


def test_an_order_that_is_off_refutes_nothing() -> None:
    """One value in 500 is not 0: the variance is not yet seen in small batches."""
    x = (torch.arange(1000) % 500 == 0).to(torch.float64)[:, None]
    row = check_bounds(lens_of(network(1), x), "batchnorm_limit").of("batchnorm_limit.order", "0")
    assert row.lhs > 0.1
    assert row.status == "undecided"


WRONG = [  # (function, the right expression, a wrong one)
    ("_of_layer", "N * float(D.abs().max())", "float(D.abs().max())"),
    ("_of_layer", "N * float(D.abs().max())", "N**2 * float(D.abs().max())"),
    ("_of_layer", "N * float(D.abs().max())", "N * float(D.abs().mean())"),
    ("_of_layer", "1 + (spread / s) ** 2", "(spread / s) ** 2"),
    ("_of_layer", "1 + (spread / s) ** 2", "1 + spread / s"),
    ("_of_layer", "layer.gamma.abs() / s", "1 / s"),
    ("_of_layer", "layer.gamma.abs() / s", "layer.gamma.square() / s"),
    ("_of_layer", "torch.linalg.matrix_norm(D, 2).max()", "D.abs().max()"),
    ("_of_layer", "torch.linalg.matrix_norm(D, 2).max()", "torch.linalg.matrix_norm(D).max()"),
    ("_orders", "-(t @ entries.log())", "t @ entries.log()"),
    ("_orders", "t.square().sum()", "t.abs().sum()"),
]


@pytest.mark.parametrize(("where", "right", "wrong"), WRONG)
def test_wrong_formulas_are_caught(where: str, right: str, wrong: str) -> None:
    with mutated([batchnorm], batchnorm, where, right, wrong) as check, pytest.raises(AssertionError):
        agree(check)


def test_an_input_given_by_name() -> None:
    net = module_of(lambda net, x: net.head(net.norm(input=x)), norm=nn.BatchNorm1d(3), head=(3, 2)).double()
    row = check_bounds(lens_of(net, drawn("normal", 70, 3)), "batchnorm_limit").of("batchnorm_limit", "norm")
    assert row.status == "holds"
