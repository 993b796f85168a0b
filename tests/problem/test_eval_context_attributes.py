"""What forward() keeps in its modules is put back, and hides no weight from the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flatlens as fl
from flatlens.problem.eval_context import attributes_kept, put_back


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
        net.weight, net.table["own"], net.late = torch.zeros(2), torch.zeros(2), 3
        net.row.append(1)
        with attributes_kept(net):
            assert (net.weight, net.row, hasattr(net, "late")) == (before, [], False)
            net.row.append(2)
        put_back(net)
        assert net.row == []
    assert net.weight is before
    assert (net.table, net.row) == ({"own": before}, [])


def test_weights_that_torchs_hooks_compute_are_left_to_them() -> None:
    net = nn.utils.spectral_norm(nn.Linear(3, 2))
    net.eval()
    with attributes_kept(net):
        net(torch.randn(1, 3))
        now = net.weight
    assert net.weight is now


class Caching(nn.Module):
    """A network whose cache has a flag, a length or a set beside it; or whose blocks and loss read what it keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.out = kind, nn.Linear(3, 4), nn.Linear(4, 2)
        self.ready, self.length, self.seen, self.table = False, 0, set[int](), dict[int, Tensor]()
        self.scale: Tensor | None = None

    def factor(self, x: Tensor) -> Tensor:
        if self.kind == "flag" and not self.ready:
            self.kept, self.ready = torch.full((4,), 2.0).to(x), True
        if self.kind == "length" and x.shape[1] > self.length:
            self.kept, self.length = torch.full((4,), 2.0).to(x), x.shape[1]
        if self.kind == "set" and x.shape[1] not in self.seen:
            self.seen.add(x.shape[1])
            self.table[x.shape[1]] = torch.full((4,), 2.0).to(x)
        self.scale = x.new_full((4,), 2.0) if self.kind == "checkpoint" else None
        if self.scale is not None:
            return self.scale
        return self.table[x.shape[1]] if self.kind == "set" else self.kept

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor(x)
        if self.kind == "checkpoint":
            return self.out(checkpoint(lambda h: (self.a(h) * self.scale).tanh(), x, use_reentrant=False))
        return self.out((self.a(x) * factor).tanh())


@pytest.mark.parametrize("kind", ["flag", "length", "set", "checkpoint"])
def test_what_forward_keeps_beside_a_tensor(kind: str) -> None:
    torch.manual_seed(0)
    net = Caching(kind).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["interpolation_sharpness", "sharpness"])
    with torch.no_grad():
        scaled = nn.Linear(3, 4).double()
        scaled.weight.copy_(2 * net.a.weight)
        scaled.bias.copy_(2 * net.a.bias)
    truth = fl.measure(fl.Lens(fl.Problem(nn.Sequential(scaled, nn.Tanh(), net.out), "cross_entropy", (x, y))), ["mls"])
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["mls"])
    assert found["mls"].value == pytest.approx(truth["mls"].value, rel=1e-12)
    assert report["interpolation_sharpness"].kind == "exact"
    assert (net.ready, net.length, net.seen, net.table) == (False, 0, set(), {})


def test_a_loss_may_read_what_the_last_pass_kept() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            f = self.a(x)
            self.aux = f.square().mean(1)
            return f

    torch.manual_seed(0)
    net, x, y = Mixture().double(), torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    problem = fl.Problem(net, lambda f, y: F.cross_entropy(f, y, reduction="none") + 0 * net.aux.detach().sum(), (x, y))
    assert fl.measure(fl.Lens(problem), ["loss"])["loss"].value == pytest.approx(
        float(F.cross_entropy(net(x), y).detach())
    )


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
