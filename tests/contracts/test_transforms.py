"""Every measure under flatlens's own transforms, on generic networks of several kinds: none moves that must stay."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import network
from torch import Tensor, nn

import flatlens as fl


def with_norms() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(27, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3),
        ).double()  # fmt: skip
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(std=0.3)
                module.running_var.uniform_(0.5, 2)
                nn.init.uniform_(module.weight, 0.5, 2)
        return net.eval(), torch.randn(12, 2, 6, 6).double(), torch.randint(3, (12,))


KINDS = {
    "mlp": lambda: network("mlp-relu", n=12),
    "tanh": lambda: network("mlp-tanh", n=12),
    "conv and norms": with_norms,
    "residual": lambda: network("residual", n=12),
}
QUICK = [m for m in fl.measures.MEASURES.values() if not m.on_request and not m.held_out]
SEARCHED = [f"{name}(rtol=1e-8)" for name in ("sharpness", "ggn_norm", "layer_sharpness", "maximal_relative_flatness")]
OTHERS = [
    *SEARCHED,
    "hessian_trace(exact=True)",
    "adaptive_sharpness(exact=True)",
    "average_sharpness",
    "representativeness",
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_moves_that_is_declared_to_stay(kind: str) -> None:
    net, x, y = KINDS[kind]()
    found = fl.check_invariance(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [*QUICK, *OTHERS])
    assert [(cell.measure, cell.transform, cell.before, cell.after) for cell in found.disagreeing] == []
    assert found.moved
    assert all(done.difference < 1e-10 for done in found.moved.values())
    stayed = {(cell.measure, cell.transform) for cell in found if cell.unchanged}
    assert {("mls", name) for name in found.moved} <= stayed


def test_a_percent_shows_in_float32_too() -> None:
    net, x, y = network("mlp-relu", n=12)
    single = fl.Lens(fl.Problem(copy.deepcopy(net).float(), "cross_entropy", (x.float(), y)))
    double = fl.Lens(fl.Problem(copy.deepcopy(net).float().double(), "cross_entropy", (x, y)))
    a, b = (fl.check_invariance(lens, QUICK, "neuronwise") for lens in (single, double))
    assert [cell.unchanged for cell in a] == [cell.unchanged for cell in b]
