"""Tensors that forward() keeps in its modules: they are put back, and hide no weight from the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.problem.attributes import attributes_kept


class Keeping(nn.Module):
    """A network that computes a weight once, and keeps it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.out, self.where = nn.Linear(3, 4), nn.Linear(4, 2), where
        self.weight: Tensor | None = None
        self.table: dict[str, Tensor] = {}
        self.row: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            if self.weight is None:
                self.weight = self.a.weight * 2
            weight = self.weight
        elif self.where == "new attribute":
            if not hasattr(self, "late"):
                self.late = self.a.weight * 2
            weight = self.late
        elif self.where == "dict":
            weight = self.table.setdefault("w", self.a.weight * 2)
        else:
            if not self.row:
                self.row.append(self.a.weight * 2)
            weight = self.row[0]
        return self.out(F.linear(x, weight).tanh())


@pytest.mark.parametrize("where", ["attribute", "new attribute", "dict", "list"])
def test_a_kept_weight_counts_and_the_network_trains_afterwards(where: str) -> None:
    torch.manual_seed(0)
    net, plain = Keeping(where).double(), Keeping("none").double()
    plain.load_state_dict(net.state_dict())
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    asked = ["interpolation_sharpness", "hessian_trace(exact=True)", "sharpness"]
    kept, same = (fl.measure(fl.Lens(fl.Problem(one, "cross_entropy", (x, y))), asked) for one in (net, plain))
    for measure in asked:
        assert kept[measure].value == pytest.approx(same[measure].value, rel=1e-9), measure
    assert (net.weight, net.table, net.row, hasattr(net, "late")) == (None, {}, [], False)
    F.cross_entropy(net(x), y).backward()
    assert net.a.weight.grad is not None
    assert float(net.a.weight.grad.norm()) > 0


def test_what_was_there_stays() -> None:
    net = Keeping("attribute")
    before = net.weight = torch.ones(2)
    net.table["own"] = before
    with attributes_kept(net):
        net.weight, net.table["own"] = torch.zeros(2), torch.zeros(2)
        net.row.append(1)
    assert net.weight is before
    assert (net.table, net.row) == ({"own": before}, [])


def test_weights_that_torchs_hooks_compute_are_left_to_them() -> None:
    net = nn.utils.spectral_norm(nn.Linear(3, 2))
    net.eval()
    with attributes_kept(net):
        net(torch.randn(1, 3))
        now = net.weight
    assert net.weight is now


def test_a_layer_whose_weight_forward_sets() -> None:
    class Generated(nn.Module):
        def __init__(self, generated: bool) -> None:
            super().__init__()
            self.layer, self.out, self.p = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.randn(4, 3))
            self.generated = generated
            del self.layer.weight

        def forward(self, x: Tensor) -> Tensor:
            if self.generated:
                self.layer.weight = self.p.tanh()
                return self.out(self.layer(x).relu())
            return self.out(F.linear(x, self.p.tanh(), self.layer.bias).relu())

    torch.manual_seed(0)
    nets = [Generated(generated).double() for generated in (True, False)]
    nets[1].load_state_dict(nets[0].state_dict())
    data = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    values = [fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), ["interpolation_sharpness"]) for net in nets]
    assert values[0]["interpolation_sharpness"].value == pytest.approx(values[1]["interpolation_sharpness"].value)
