"""Factors of the Gauss-Newton matrix where they are known with pen and paper."""

from __future__ import annotations

import math

import pytest
import torch
from builders import chain, lens_on
from linear import A, X, measured
from networks import module_of
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


def test_a_table_that_also_makes_the_outputs_has_a_block_and_no_features() -> None:
    """Its products read what a lookup made of the weight: only the factors of other layers are known."""

    torch.manual_seed(0)
    net = module_of(
        lambda net, ids: nn.functional.linear(net.norm(net.table(ids)).mean(1), net.table.weight),
        table=nn.Embedding(7, 4),
        norm=nn.LayerNorm(4),
    ).double()
    problem = fl.Problem(net, "cross_entropy", (torch.randint(7, (6, 3)), torch.randint(7, (6,))))
    report = fl.measure(fl.Lens(problem), ["layer_factors"])
    assert report["layer_factors", "table.weight"].value > 0
    for part in ("features", "jacobian"):
        assert report[f"layer_factors.{part}", "table.weight"].kind == "undefined"


@pytest.mark.parametrize("statistics", [None, 3])
def test_the_losses_curvature_is_that_of_the_risk(statistics: int | None) -> None:
    """Pixels and weights of classes make masses other than 1, whichever way BatchNorm has its statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    x, y = torch.randn(6, 2, 3, 3).double(), torch.randint(0, 3, (6, 3, 3))
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64), ignore_index=1)
    mode = {"batchnorm": "train", "ghost_batch": statistics} if statistics else {}
    problem = fl.Problem(net.eval(), loss, (x, y), **mode)
    net.train(statistics is not None)
    parts = x.split(statistics or 6)
    f = torch.cat([net(part) for part in parts]).detach()
    C = torch.autograd.functional.hessian(lambda f: loss(f, y), f).reshape(f.numel(), -1)
    found = fl.measure(fl.Lens(problem), ["layer_factors(blocks=False)"])["layer_factors(blocks=False).loss_curvature"]
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(C)[-1]) ** 0.5, rel=1e-9)


def test_a_loss_that_is_not_convex_has_no_root_of_its_curvature() -> None:
    problem = fl.Problem(chain([3, 2], 5), lambda f, t: -(f - t).square().sum(1), (X[:, :3], X[:, :2]))
    found = fl.measure(fl.Lens(problem), ["layer_factors(blocks=False)"])["layer_factors(blocks=False).loss_curvature"]
    assert found.kind == "undefined"
    assert "not convex" in found.note
