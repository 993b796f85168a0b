"""A forward() that writes where it must not: put back, or refused with everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadModel

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 2
ROWS = torch.zeros(8, dtype=torch.long)


class Writes(nn.Module):
    """Does something to itself in each forward()."""

    def __init__(self, way: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear, self.norm, self.table = nn.Linear(3, 2), nn.BatchNorm1d(3), nn.Embedding(3, 2)
        self.register_buffer("count", torch.zeros(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        WAYS[self.way](self, x.detach())
        return self.linear(x)


def _through_grad(net: Writes, x: Tensor) -> None:
    with torch.enable_grad():
        net.table(ROWS).sum().backward()


WAYS = {
    "nothing": lambda net, x: None,
    "a running mean, in train mode": lambda net, x: net.norm.train()(x),
    "a running mean, by its function": lambda net, x: F.batch_norm(
        x, net.norm.running_mean, net.norm.running_var, training=True
    ),
    "a buffer in place": lambda net, x: net.count.add_(1),
    "a buffer through .data": lambda net, x: net.count.data.add_(1),
    "a buffer's .data itself": lambda net, x: setattr(net.count, "data", net.count.data + 1),
    "a buffer's shape": lambda net, x: net.count.resize_(5),
    "a buffer's place": lambda net, x: setattr(net, "count", net.count + 1),
    "a gradient": lambda net, x: setattr(net.linear.weight, "grad", torch.ones(2, 3)),
    "a gradient, by backward": _through_grad,
    "its mode": lambda net, x: net.train(),
    "a parameter through .data": lambda net, x: net.linear.weight.data.mul_(1.5),
    "a parameter that settles": lambda net, x: net.linear.weight.data.clamp_(-0.1, 0.1),
    "a parameter's .data itself": lambda net, x: setattr(net.linear.weight, "data", net.linear.weight.data * 2),
    "long rows, by a function": lambda net, x: F.embedding(ROWS, net.table.weight, max_norm=0.01),
    "a freezing": lambda net, x: net.linear.weight.requires_grad_(False),
    "a parameter's place": lambda net, x: setattr(net.linear, "weight", nn.Parameter(net.linear.weight.data.clone())),
    "a module more": lambda net, x: setattr(net, "more", nn.Linear(2, 2)),
}
REFUSED = {
    "a parameter through .data": "changes the parameter 'linear.weight' in place",
    "a parameter that settles": "changes the parameter 'linear.weight' in place",
    "a parameter's .data itself": "changes the parameter 'linear.weight' in place",
    "long rows, by a function": "changes the parameter 'table.weight'.*max_norm",
    "a freezing": "changes the parameter 'linear.weight' in place",
    "a parameter's place": "creates the parameter 'linear.weight' or replaces it",
    "a module more": "creates the parameter 'more.weight' or replaces it",
}


def state(net: nn.Module) -> list[object]:
    """All that a network is, as plain values."""
    kept: list[object] = [(name, id(module), module.training) for name, module in net.named_modules()]
    for name, t in [*net.named_parameters(), *net.named_buffers()]:
        grad = None if t.grad is None else t.grad.tolist()
        where = t.data_ptr() if isinstance(t, nn.Parameter) else 0
        kept.append((name, id(t), where, t.tolist(), t.requires_grad, id(t.grad), grad))
    return kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("batchnorm", ["eval", "train"])
def test_whatever_forward_writes_to_is_as_it_was(way: str, gradients: bool, batchnorm: str) -> None:
    net = Writes(way)
    for p in net.parameters() if gradients else ():
        p.grad = torch.full_like(p, 2.0)
    before = state(net)
    options = {} if batchnorm == "eval" else {"batchnorm": "train", "ghost_batch": 4}
    names = ["hessian_trace(exact=True)"] if options else ["mls", "ggn_trace"]
    if way in REFUSED:
        with pytest.raises(BadModel, match=REFUSED[way]):
            fl.Problem(net, "cross_entropy", (X, Y), **options)
    else:
        plain = fl.measure(fl.Lens(fl.Problem(Writes("nothing"), "cross_entropy", (X, Y), **options)), names)
        lens = fl.Lens(fl.Problem(net, "cross_entropy", (X, Y), **options))
        for _ in range(2):  # the second one finds the lens fresh
            found = fl.measure(lens, names)
            assert [e.value for e in found.values()] == [e.value for e in plain.values()]
    assert state(net) == before


@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_an_embedding_with_max_norm_is_left_alone(scale: float) -> None:
    """Rows short enough: measured. Longer ones, that a look-up would shorten: refused before any change."""
    net = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight.copy_(scale * torch.ones(5, 3))
    before = state(net)
    if scale > 1:
        with pytest.raises(BadModel, match=r"5 of 5 rows of '0\.weight' exceed max_norm=1"):
            fl.Problem(net, "cross_entropy", (ROWS, Y))
    else:
        lens = fl.Lens(fl.Problem(net, "cross_entropy", (ROWS, Y)))
        assert fl.measure(lens)["ggn_trace"].kind == fl.measure(lens, "ggn_norm")["ggn_norm"].kind == "exact"
    assert state(net) == before
