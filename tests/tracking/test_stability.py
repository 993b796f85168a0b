"""The edge of stability, against what the optimisers do on a quadratic."""

from __future__ import annotations

import math

import pytest
import torch

from flatlens.tracking import Edge, edge_of

SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.03, "momentum": 0.5},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.3, "nesterov": True},
    {"lr": 0.1, "momentum": 0.6, "dampening": 0.4},
    {"lr": 0.1, "dampening": 0.4},
    {"lr": 0.1, "weight_decay": 0.5},
    {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9, "nesterov": True},
    {"lr": torch.tensor(0.1), "momentum": 0.5},
]


def grows(settings: dict[str, object], curvature: float) -> bool:
    """Whether |x| is larger after many steps on 0.5 h x^2."""
    x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimiser = torch.optim.SGD([x], **settings)
    for _ in range(4000):
        optimiser.zero_grad()
        (0.5 * curvature * x.square()).sum().backward()
        optimiser.step()
    return not float(x.detach().abs()) < 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_grow_beyond_the_edge_and_shrink_below_it(settings: dict[str, object]) -> None:
    edge = edge_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], **settings))
    assert edge.lr == pytest.approx(float(settings["lr"]))
    assert not grows(settings, 0.99 * edge.value)
    assert grows(settings, 1.01 * edge.value)


def test_the_two_edges_everyone_knows() -> None:
    w = [torch.nn.Parameter(torch.ones(1))]
    assert edge_of(torch.optim.SGD(w, lr=0.05)) == Edge(0.05, 40.0, "2/lr")
    heavy = edge_of(torch.optim.SGD(w, lr=0.05, momentum=0.9))
    assert heavy.value == pytest.approx(2 * 1.9 / 0.05)
    assert heavy.formula == "2(1+momentum)/lr"


def test_where_there_is_no_edge() -> None:
    one, two = ([torch.nn.Parameter(torch.ones(1))] for _ in range(2))
    adam = edge_of(torch.optim.Adam(one, lr=0.05))
    assert adam.lr == 0.05
    assert math.isnan(adam.value)
    assert math.isnan(edge_of(None).lr)
    assert math.isnan(edge_of(None).value)
    mixed = torch.optim.SGD([{"params": one, "lr": 0.1}, {"params": two, "lr": 0.2}])
    assert math.isnan(edge_of(mixed).lr)
    assert math.isnan(edge_of(mixed).value)
    alike = torch.optim.SGD([{"params": one}, {"params": two}], lr=0.1)
    assert edge_of(alike).value == 20
    apart = torch.optim.SGD([{"params": one}, {"params": two, "weight_decay": 1.0}], lr=0.1)
    assert (edge_of(apart).lr, math.isnan(edge_of(apart).value)) == (0.1, True)
    assert math.isnan(edge_of(torch.optim.SGD(one, lr=0.1, maximize=True)).value)
    assert math.isnan(edge_of(torch.optim.SGD(one, lr=0.0)).value)
