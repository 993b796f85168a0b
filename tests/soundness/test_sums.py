"""Sums over layers hold every weight, or are undefined, or say in their note which they leave out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from builders import normal
from drawn_layers import Wired
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl

SUMS = (
    "layer_sharpness",
    "layer_factors",
    "maximal_relative_flatness",
    "kappa_trace",
    "neuron_flatness",
    "weight_norm",
)


def parts_missing(make: Callable[[], nn.Module], x: Tensor, weights: set[str]) -> list[str]:
    """Sums that neither include a weight nor are undefined nor name it in their note."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().double()
    y = torch.arange(len(x)) % 3
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), SUMS)
    wrong = []
    for name in SUMS:
        whole = report["maximal_relative_flatness.sum"] if f"{name}.sum" in report else report[name]
        rows = {at for key, at in report if key == name and at is not None}
        there = {at.partition(":")[0] for at in rows if report[name, at].kind != "undefined"}
        for weight in sorted(weights):
            layer = weight.rpartition(".")[0]
            if whole.kind != "undefined" and not {weight, layer} & there and layer not in whole.note:
                wrong.append(f"{name}: {weight} is in no row and not in the note ({whole.note!r})")
    return wrong


class Attended(nn.Module):
    """Attention and a recurrence over three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrence, self.outer = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.recurrence(x)[0]
        return self.outer(self.attention(h, h, h, need_weights=False)[0].mean(1))


def in_turn(inner: nn.Module, width: int) -> nn.Module:
    """A layer, a ReLU, and a plain layer."""
    return Wired(lambda s, x: s.outer(F.relu(s.inner(x)).flatten(1)), inner=inner, outer=nn.Linear(width, 3))


def experts() -> nn.Module:
    def forward(s: Wired, x: Tensor) -> Tensor:
        first, h = x[:, 0] > 0, x.new_zeros(len(x), 5)
        h = h.index_put((first,), s.inner(x[first])).index_put((~first,), s.other(x[~first]))
        return s.outer(F.relu(h))

    return Wired(forward, inner=nn.Linear(4, 5), other=nn.Linear(4, 5), outer=nn.Linear(5, 3))


def tied() -> nn.Module:
    def forward(s: Wired, x: Tensor) -> Tensor:
        return s.outer(F.linear(F.relu(s.inner(x)), s.inner.weight.t()))

    return Wired(forward, inner=nn.Linear(4, 4), outer=nn.Linear(4, 3))


BOTH = {"inner.weight", "outer.weight"}
SUMMED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "weight norm": (lambda: in_turn(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), 5), (20, 4), BOTH),
    "tied to its transpose": (tied, (20, 4), BOTH),
    "experts": (experts, (20, 4), {*BOTH, "other.weight"}),
    "transposed convolution": (lambda: in_turn(nn.ConvTranspose2d(2, 3, 2), 27), (10, 2, 2, 2), BOTH),
    "attention and recurrence": (
        Attended,
        (8, 3, 4),
        {
            *("attention.in_proj_weight", "attention.out_proj.weight", "outer.weight"),
            *("recurrence.weight_ih_l0", "recurrence.weight_hh_l0"),
        },
    ),
}


@pytest.mark.parametrize("kind", SUMMED)
def test_sums_over_layers_hold_every_weight_or_say_which_they_leave_out(kind: str) -> None:
    make, shape, weights = SUMMED[kind]
    assert parts_missing(make, normal(*shape), weights) == []


def test_a_plain_network_leaves_out_nothing() -> None:
    assert parts_missing(lambda: in_turn(nn.Linear(4, 5), 5), normal(20, 4), BOTH) == []
