"""Sums over layers hold every weight, or are undefined, or say in their note which they leave out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from builders import normal
from networks import module_of
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


def attended() -> nn.Module:
    """Attention and a recurrence over three tokens."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.recurrence(x)[0]
        return net.outer(net.attention(h, h, h, need_weights=False)[0].mean(1))

    return module_of(
        forward,
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        recurrence=nn.LSTM(4, 4, batch_first=True),
        outer=(4, 3),
    )


def in_turn(inner: nn.Module, width: int) -> nn.Module:
    """A layer, a ReLU, and a plain layer."""
    return module_of(lambda s, x: s.outer(F.relu(s.inner(x)).flatten(1)), inner=inner, outer=(width, 3))


def experts() -> nn.Module:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        first, h = x[:, 0] > 0, x.new_zeros(len(x), 5)
        h = h.index_put((first,), s.inner(x[first])).index_put((~first,), s.other(x[~first]))
        return s.outer(F.relu(h))

    return module_of(forward, inner=(4, 5), other=(4, 5), outer=(5, 3))


def tied() -> nn.Module:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        return s.outer(F.linear(F.relu(s.inner(x)), s.inner.weight.t()))

    return module_of(forward, inner=(4, 4), outer=(4, 3))


BOTH = {"inner.weight", "outer.weight"}
SUMMED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "weight norm": (lambda: in_turn(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), 5), (20, 4), BOTH),
    "tied to its transpose": (tied, (20, 4), BOTH),
    "experts": (experts, (20, 4), {*BOTH, "other.weight"}),
    "transposed convolution": (lambda: in_turn(nn.ConvTranspose2d(2, 3, 2), 27), (10, 2, 2, 2), BOTH),
    "attention and recurrence": (
        attended,
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
