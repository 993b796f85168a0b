"""What forward() keeps in its modules is put back, and hides no weight from the pass."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flatlens as fl
from flatlens.problem.eval_context import attributes_kept, put_back


def keeping(where: str) -> nn.Module:
    """A network that computes a weight once, and keeps it."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        if where == "attribute":
            if net.weight is None:
                net.weight = net.a.weight * 2
            weight = net.weight
        elif where == "new attribute":
            if not hasattr(net, "late"):
                net.late = net.a.weight * 2
            weight = net.late
        elif where == "dict":
            weight = net.table.setdefault("w", net.a.weight * 2)
        else:
            if not net.row:
                net.row.append(net.a.weight * 2)
            weight = net.row[0]
        return net.out(F.linear(x, weight).tanh())

    return module_of(forward, a=(3, 4), out=(4, 2), weight=None, table={}, row=[])


@pytest.mark.parametrize("where", ["attribute", "new attribute", "dict", "list"])
def test_a_kept_weight_counts_and_the_network_trains_afterwards(where: str) -> None:
    torch.manual_seed(0)
    net, plain = keeping(where).double(), keeping("none").double()
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
    net = keeping("attribute")
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


def caching(kind: str) -> nn.Module:
    """A network whose cache has a flag, a length or a set beside it; or whose blocks and loss read what it keeps."""

    def factor(net: nn.Module, x: Tensor) -> Tensor:
        if kind == "flag" and not net.ready:
            net.kept, net.ready = torch.full((4,), 2.0).to(x), True
        if kind == "length" and x.shape[1] > net.length:
            net.kept, net.length = torch.full((4,), 2.0).to(x), x.shape[1]
        if kind == "set" and x.shape[1] not in net.seen:
            net.seen.add(x.shape[1])
            net.table[x.shape[1]] = torch.full((4,), 2.0).to(x)
        net.scale = x.new_full((4,), 2.0) if kind == "checkpoint" else None
        if net.scale is not None:
            return net.scale
        return net.table[x.shape[1]] if kind == "set" else net.kept

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        by = factor(net, x)
        if kind == "checkpoint":
            return net.out(checkpoint(lambda h: (net.a(h) * net.scale).tanh(), x, use_reentrant=False))
        return net.out((net.a(x) * by).tanh())

    return module_of(forward, a=(3, 4), out=(4, 2), ready=False, length=0, seen=set(), table={}, scale=None)


@pytest.mark.parametrize("kind", ["flag", "length", "set", "checkpoint"])
def test_what_forward_keeps_beside_a_tensor(kind: str) -> None:
    torch.manual_seed(0)
    net = caching(kind).double()
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
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        f = net.a(x)
        net.aux = f.square().mean(1)
        return f

    torch.manual_seed(0)
    net, x = module_of(forward, a=(3, 2)).double(), torch.randn(5, 3, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1])
    problem = fl.Problem(net, lambda f, y: F.cross_entropy(f, y, reduction="none") + 0 * net.aux.detach().sum(), (x, y))
    assert fl.measure(fl.Lens(problem), ["loss"])["loss"].value == pytest.approx(
        float(F.cross_entropy(net(x), y).detach())
    )


def test_a_layer_whose_weight_forward_sets() -> None:
    def generating(generated: bool) -> nn.Module:
        def forward(net: nn.Module, x: Tensor) -> Tensor:
            if generated:
                net.layer.weight = net.p.tanh()
                return net.out(net.layer(x).relu())
            return net.out(F.linear(x, net.p.tanh(), net.layer.bias).relu())

        net = module_of(forward, layer=nn.Linear(3, 4), out=nn.Linear(4, 2), p=nn.Parameter(torch.randn(4, 3)))
        del net.layer.weight
        return net

    torch.manual_seed(0)
    nets = [generating(generated).double() for generated in (True, False)]
    nets[1].load_state_dict(nets[0].state_dict())
    data = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    values = [fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), ["interpolation_sharpness"]) for net in nets]
    assert values[0]["interpolation_sharpness"].value == pytest.approx(values[1]["interpolation_sharpness"].value)
