"""Norms whose scale can move into what reads them, and factors of gates."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.operations.graph import Graph
from flatlens.operations.pair_finders import HeadFinder, ScaleFinder

X = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def read(norm: nn.Module, skip: bool = False) -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.norm(x)
        return net.a(h).tanh() + net.b(h[:, :1]) + (h.sum(-1, keepdim=True).exp() if skip else 0)

    return module_of(forward, norm=norm, a=nn.Linear(4, 5), b=nn.Linear(4, 5, bias=False))


def by_hand() -> nn.Module:
    """A norm written out, with scale and shift apart."""
    return module_of(
        lambda net, x: net.g * (x / x.norm(dim=-1, keepdim=True)) + net.s,
        g=nn.Parameter(torch.ones(4)),
        s=nn.Parameter(torch.zeros(4)),
    )


def scales_of(net: nn.Module):
    net = net.double()
    return ScaleFinder(HeadFinder(Graph(net(X.clone().requires_grad_()), net))).run()


@pytest.mark.parametrize(
    ("norm", "scale", "shift"),
    [
        (nn.LayerNorm(4), "norm.weight", "norm.bias"),
        (nn.LayerNorm(4, bias=False), "norm.weight", None),
        (nn.RMSNorm(4), "norm.weight", None),
        (by_hand(), "norm.g", "norm.s"),
    ],
)
def test_a_norm_and_all_that_reads_it(norm, scale, shift):
    (found,) = scales_of(read(norm)).norms
    assert found.scale.parameter == scale
    assert (found.shift.parameter if found.shift else None) == shift
    assert [columns.parameter for columns, _ in found.readers] == ["a.weight", "b.weight"]
    assert [bias.parameter if bias else None for _, bias in found.readers] == ["a.bias", None]
    at = torch.arange(20).reshape(5, 4).T
    assert all(torch.equal(columns.at, at) for columns, _ in found.readers)


def test_a_constant_in_a_scale_is_told_apart():
    class OneMore(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (4,), 1 + self.weight, self.bias)

    norm = OneMore(4)
    (found,) = scales_of(read(norm)).norms
    parameters = {"norm.weight": norm.weight, "norm.bias": norm.bias}
    torch.testing.assert_close(found.scale.of(parameters)[:, 0], 1 + norm.weight.detach())
    found.scale.set(parameters, torch.full((4, 1), 3.0).double())
    assert norm.weight.tolist() == [2.0] * 4


def test_a_shift_that_is_made_hides_the_norm():
    class Shifted(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (4,), self.weight, 2 * self.bias)

    assert not scales_of(read(Shifted(4))).norms


def test_features_that_go_elsewhere_refuse():
    found = scales_of(read(nn.LayerNorm(4), skip=True))
    assert not found.norms
    (why,) = found.refused_norms.values()
    assert why == "its features are read by Exp, too, directly or over a skip"


def test_each_factor_that_comes_straight_from_a_weight_is_a_gate():
    net = module_of(lambda net, x: net.o(F.silu(net.g(x)) * net.u(x)), g=(4, 6), u=(4, 6), o=(6, 4))
    (gate,) = scales_of(net).gates
    assert [entries.parameter for entries in gate.left] == ["u.weight", "u.bias"]
    assert [entries.parameter for entries in gate.right] == ["o.weight"]
    assert gate.free is None
