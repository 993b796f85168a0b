"""Norms whose scale can move into what reads them, and factors of gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.operations.graph import Graph
from flatlens.operations.pair_finders import HeadFinder, ScaleFinder

X = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Read(nn.Module):
    def __init__(self, norm: nn.Module, skip: bool = False) -> None:
        super().__init__()
        self.norm, self.skip = norm, skip
        self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.a(h).tanh() + self.b(h[:, :1]) + (h.sum(-1, keepdim=True).exp() if self.skip else 0)


class ByHand(nn.Module):
    """A norm written out, with scale and shift apart."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.s = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * (x / x.norm(dim=-1, keepdim=True)) + self.s


def scales_of(net: nn.Module):
    net = net.double()
    return ScaleFinder(HeadFinder(Graph(net(X.clone().requires_grad_()), net))).run()


@pytest.mark.parametrize(
    ("norm", "scale", "shift"),
    [
        (nn.LayerNorm(4), "norm.weight", "norm.bias"),
        (nn.LayerNorm(4, bias=False), "norm.weight", None),
        (nn.RMSNorm(4), "norm.weight", None),
        (ByHand(), "norm.g", "norm.s"),
    ],
)
def test_a_norm_and_all_that_reads_it(norm, scale, shift):
    (found,) = scales_of(Read(norm)).norms
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
    (found,) = scales_of(Read(norm)).norms
    parameters = {"norm.weight": norm.weight, "norm.bias": norm.bias}
    torch.testing.assert_close(found.scale.of(parameters)[:, 0], 1 + norm.weight.detach())
    found.scale.set(parameters, torch.full((4, 1), 3.0).double())
    assert norm.weight.tolist() == [2.0] * 4


def test_a_shift_that_is_made_hides_the_norm():
    class Shifted(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (4,), self.weight, 2 * self.bias)

    assert not scales_of(Read(Shifted(4))).norms


def test_features_that_go_elsewhere_refuse():
    found = scales_of(Read(nn.LayerNorm(4), skip=True))
    assert not found.norms
    (why,) = found.refused_norms.values()
    assert why == "its features are read by Exp, too, directly or over a skip"


def test_each_factor_that_comes_straight_from_a_weight_is_a_gate():
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.u, self.o = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(F.silu(self.g(x)) * self.u(x))

    (gate,) = scales_of(Gates()).gates
    assert [entries.parameter for entries in gate.left] == ["u.weight", "u.bias"]
    assert [entries.parameter for entries in gate.right] == ["o.weight"]
    assert gate.free is None
