"""Output Jacobians: the backward passes begin below the last layer only if nothing follows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from literal import call_jacobians, input_jacobian, parameter_jacobian
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.grams import lay_out, one_pass
from flatlens.grams.output_jacobians import _head
from flatlens.grams.record import run_recorded

module = sys.modules["flatlens.grams.output_jacobians"]


def ends(end: Callable[[Any, Tensor], Tensor], last: nn.Linear | None = None) -> nn.Module:
    """Two layers, and a function that ends the network."""
    torch.manual_seed(1)
    first = nn.Linear(4, 6)
    return module_of(lambda net, x: end(net, torch.tanh(net.first(x))), first=first, last=last or (6, 3))


class Twice(nn.Linear):
    """A layer that doubles its input, although its type is that of a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(2 * x, self.weight, self.bias)


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.weight > 0), self.bias)


class Loud(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return torch.addmm(self.bias, x, self.weight.t(), alpha=3)


def plain(net: Any, h: Tensor) -> Tensor:
    return net.last(h)


def in_place(net: Any, h: Tensor) -> Tensor:
    return net.last(h).mul_(2)


def around(net: Any, h: Tensor) -> Tensor:
    return net.last(h) + h[:, :3]


def doubled(net: Any, h: Tensor) -> Tensor:
    return net.last(h) * 2


def twice(net: Any, h: Tensor) -> Tensor:
    """The second call alone gives the outputs."""
    return net.last(torch.cat([net.last(h), h[:, :3]], 1))


def hooked(net: nn.Module) -> nn.Module:
    net.last.register_forward_hook(lambda module, args, z: 0.5 * z)
    return net


def heard(net: Any, h: Tensor) -> Tensor:
    """A hook on the outputs themselves."""
    z = net.last(h)
    if z.requires_grad:
        z.register_hook(lambda gradient: 2 * gradient)
    return z


def frozen(net: nn.Module) -> nn.Module:
    net.last.requires_grad_(False)
    return net


ENDS: dict[str, tuple[nn.Module, bool]] = {
    "plain": (ends(plain), True),
    "no bias": (ends(plain, nn.Linear(6, 3, bias=False)), True),
    "frozen": (frozen(ends(plain)), True),
    "two calls": (ends(twice), True),
    "in place behind it": (ends(in_place), False),
    "a road around it": (ends(around), False),
    "a factor behind it": (ends(doubled), False),
    "a hook behind it": (hooked(ends(plain)), False),
    "a hook on the outputs": (ends(heard), False),
    "spectral norm": (ends(plain, nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))), False),
    "a factor before it": (ends(plain, Twice(6, 3)), False),
    "a mask on its weight": (ends(plain, Masked(6, 3)), False),
    "a factor inside it": (ends(plain, Loud(6, 3)), False),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ENDS)
def test_the_passes_begin_below_the_head_only_where_nothing_is_behind_it(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, expected = ENDS[name]
    net = net.double().eval()
    x, y = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(7) % 3
    problem = fl.Problem(net, "cross_entropy", (x, y), parameters="all")
    tape, _, f, _ = run_recorded(problem, net, (x, y))
    assert (_head(tape, f) is not None) == expected
    watched = 6 if expected else 6 + 6 + 3  # entries of one output's derivatives: at first's output alone, or all
    monkeypatch.setattr(module, "MEMORY_SHARE", problem.memory // (count * 7 * watched * 8))
    [chunk] = list(one_pass(problem, net, lay_out(problem, net)))
    J = input_jacobian(net, x)  # the outputs taken together are as many as `count` says
    assert chunk.input is not None
    assert torch.allclose(chunk.input.G, J @ J.mT, rtol=1e-12, atol=1e-14)
    if name in ("a factor before it", "a mask on its weight", "a factor inside it"):
        return  # what its input is, is for the network to say
    for call, at_x in enumerate(call_jacobians(net, "last", x)):
        g = chunk.layers["last" if call == 0 else f"last:{call}"]
        assert torch.allclose(g.G, at_x @ at_x.mT, rtol=1e-12, atol=1e-14)
    if name in ("spectral norm", "a hook behind it", "a hook on the outputs"):
        return  # the layer does not explain its weight, or jacrev ignores the hook
    for layer in ("first", "last"):
        own = [M for key, M in parameter_jacobian(net, x).items() if key.startswith(layer)]
        assert torch.allclose(chunk.layers[layer].K, sum(M @ M.mT for M in own), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["plain", "frozen"])
def test_without_the_head_the_numbers_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = ENDS[name][0].double().eval()
    problem = fl.Problem(net, "cross_entropy", (torch.randn(9, 4).double(), torch.arange(9) % 3), parameters="all")
    found = fl.measure(fl.Lens(problem), "pass")
    monkeypatch.setattr(module, "_head", lambda tape, f: None)
    for key, estimate in fl.measure(fl.Lens(problem), "pass").items():
        assert found[key].value == pytest.approx(estimate.value, rel=1e-11, abs=1e-15, nan_ok=True), key
