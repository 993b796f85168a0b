"""Casts to half types in forward(): measures are those of the network without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.precision import InHalf
from builders import normal
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl

HALF = (torch.float16, torch.bfloat16)
MEASURES = ["loss", "mls", "ggn_trace", "relative_flatness", "sharpness", "hessian_trace", "critical_sharpness",
            "directional_sharpness", "average_sharpness(probes=2)", "jacobian_norm"]  # fmt: skip


class Own(torch.autograd.Function):
    """tanh in a dtype of its own, also backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.to = to
        return x.to(to).tanh().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return (slopes[0].to(ctx.to) * (1 - x.to(ctx.to).tanh() ** 2)).to(x.dtype), None


@torch.jit.script
def _scripted(x: Tensor, weight: Tensor, to: torch.dtype) -> Tensor:
    return x.to(to) @ weight.to(to).mT


def _linear(layer: Any, x: Tensor, to: torch.dtype) -> Tensor:
    return F.linear(x.to(to), layer.weight.to(to), layer.bias.to(to))


def _held(net: Any, x: Tensor, to: torch.dtype) -> Tensor:
    out = torch.zeros(len(x), 6, dtype=to)
    out += _linear(net.first, x, to)
    return out * net.table.to(to)[:6] + net.shift


def _mapped(net: Any, x: Tensor, to: torch.dtype) -> Tensor:
    return torch.vmap(lambda one: _linear(net.first, one, to))(x)


def _checkpointed(net: Any, x: Tensor, to: torch.dtype) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(_linear, net.first, x, to, use_reentrant=True)
    return found


WAYS: dict[str, Callable[[Any, Tensor, torch.dtype], Tensor]] = {
    "to": lambda net, x, to: _linear(net.first, x, to),
    "type": lambda net, x, to: _linear(net.first, x.type(to), to),
    "autograd.Function": lambda net, x, to: Own.apply(net.first(x), to),  # type: ignore[no-untyped-call]
    "torch.jit": lambda net, x, to: _scripted(x, net.first.weight, to) + net.first.bias,
    "tensors made in it": _held,
    "vmap": _mapped,
    "checkpoint": _checkpointed,
}


def made(way: str, to: torch.dtype) -> nn.Module:
    """A network that casts in one of the ways; with float32 as its own, one without casts."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = WAYS[way](net, x, net.to_).to(x.dtype)
        return net.last(torch.tanh(h))  # type: ignore[no-any-return]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        table, shift = torch.linspace(0.5, 1.5, 7), torch.linspace(-0.1, 0.1, 6).to(to)
        return module_of(forward, first=(4, 6), last=(6, 3), to_=to, table=table, shift=shift)


def numbers(net: nn.Module) -> dict[Any, float]:
    x, y = normal(9, 4).float(), torch.arange(9) % 3
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), optimiser=torch.optim.SGD(net.parameters(), 0.1))
    return {key: e.value for key, e in fl.measure(lens, MEASURES).items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", HALF)
def test_every_measure_is_that_of_the_network_without_its_casts(way: str, to: torch.dtype) -> None:
    net, plain = made(way, to), made(way, torch.float32)
    if way == "tensors made in it":  # an attribute keeps its own rounding
        plain.shift = net.shift.float()  # type: ignore[union-attr, operator]
    x = normal(9, 4).float()
    before = net(x)
    found, truth = numbers(net), numbers(plain)
    assert found.keys() == truth.keys()
    for key, value in truth.items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    assert torch.equal(net(x), before)  # the network itself casts as before
    assert not torch.allclose(plain(x), before, rtol=1e-5, atol=1e-6)


def test_a_report_says_which_casts_are_left_out() -> None:
    x, y = normal(9, 4).float(), torch.arange(9) % 3
    report = fl.measure(made("to", torch.float16), "cross_entropy", (x, y), measures=["mls"])
    assert report.about["casts"] == "float16"
    assert "without forward()'s casts to float16" in str(report)
    assert "casts" not in fl.measure(made("to", torch.float32), "cross_entropy", (x, y), measures=["mls"]).about


def test_a_half_network_with_fixed_casts_is_measured_in_float32() -> None:
    net = module_of(lambda net, x: net.l(x.bfloat16()), l=(4, 3)).bfloat16()
    x, y = normal(9, 4).float(), torch.arange(9) % 3
    plain = nn.Linear(4, 3)
    plain.load_state_dict({name.removeprefix("l."): p.float() for name, p in net.state_dict().items()})
    found, truth = (fl.measure(fl.Lens(fl.Problem(one, "cross_entropy", (x, y))), ["mls", "sharpness"])
                    for one in (net, plain))  # fmt: skip
    assert [e.value for e in found.values()] == pytest.approx([e.value for e in truth.values()], rel=1e-6)


def test_what_needs_its_casts_keeps_them() -> None:
    """Bits of a half type, read as whole numbers, are others without the cast."""

    def forward(net: Any, x: Tensor) -> Tensor:
        signs = (x.to(torch.float16).view(torch.int16) >= 0).to(x.dtype)
        return net.l(x * signs)  # type: ignore[no-any-return]

    x, y = normal(9, 4).float(), torch.arange(9) % 3
    problem = fl.Problem(module_of(forward, l=(4, 3)), "cross_entropy", (x, y))
    assert problem.casts is None
    assert fl.measure(fl.Lens(problem), "mls")["mls"].kind == "exact"


def test_a_kernel_of_one_s_own_is_not_seen() -> None:
    net = module_of(lambda net, x: InHalf.apply(x, net.l.weight, torch.float16), l=(4, 3))  # type: ignore[no-untyped-call]
    assert fl.Problem(net, "cross_entropy", (normal(9, 4).float(), torch.arange(9) % 3)).casts is None
