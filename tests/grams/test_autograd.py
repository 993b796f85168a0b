"""Operations without a finite derivative: each is named, with its samples, and costs no number that exists."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.grams import singular

EACH = 4  #: hidden units
FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda h: h.square().sum(1, keepdim=True).sqrt(),
    "pow": lambda h: h.abs().pow(0.3),
    "log": lambda h: torch.where(h.abs() > 0, h.abs().log(), 0.0),
    "acos": lambda h: torch.acos(torch.exp(-h.square())),
    "asin": lambda h: torch.asin(torch.exp(-h.square().sum(1, keepdim=True))),
    "rsqrt": lambda h: torch.where(h == 0, 0.0, h.abs().rsqrt()),
}  #: by the operation whose first derivative is not finite where h = 0
SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "power 1.5": lambda h: h.abs().pow(1.5),
    "norm": lambda h: h.norm(dim=1, keepdim=True),
    "atan2": lambda h: torch.atan2(h[:, :2], h[:, 2:]),
}  #: whose second derivative is not


def through(function: Callable[[Tensor], Tensor], width: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return module_of(
            lambda net, x: net.head(function(net.first(x))), first=nn.Linear(3, EACH, bias=False), head=(width, 2)
        )


def drawn(function: Callable[[Tensor], Tensor], seed: int) -> tuple[fl.Problem, list[int]]:
    """A network and data with one to five samples at the point where h = 0."""
    draw = random.Random(seed)
    n = draw.choice([3, 20, 700])
    at = sorted(draw.sample(range(n), draw.randint(1, min(5, n - 1))))
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[at] = 0
    width = function(torch.ones(2, EACH)).shape[1]
    dtype = draw.choice([torch.float32, torch.float64])
    y = torch.ones(n, 2, dtype=torch.float64)
    return fl.Problem(through(function, width).double(), "half_squared_error", (x, y), dtype=dtype), at


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [*FIRST, *SECOND])
def test_one_reason_for_every_name(name: str, seed: int) -> None:
    problem, at = drawn((FIRST | SECOND)[name], seed)
    lens = fl.Lens(problem)
    told = singular(problem, lens.model)
    named = ", ".join(map(str, at[:3])) + ", ..." * (len(at) > 3)
    assert f"at sample{'s' * (len(at) > 1)} {named}: " in told
    assert told.startswith(f"the derivative of {name} " if name in FIRST else "the second derivative of ")
    report = fl.measure(lens, [m for m in fl.measures.MEASURES.values() if not (m.on_request or m.held_out)])
    curved = fl.measure(lens, ["sharpness", "ggn_norm", "gradient_noise_scale", "critical_sharpness"])
    undefined = [one.note for one in (*report.values(), *curved.values()) if one.kind == "undefined"]
    assert sum(told in note for note in undefined) > len(undefined) / 2
    assert not any("overflow" in note or "other samples" in note or "direction is" in note for note in undefined)
    assert report["loss"].kind == "exact"
    assert report["ggn_trace", "head"].kind == "exact"  # the layer above the operation has its derivatives
    if name in FIRST:
        assert told in report["mls"].note
        assert told in report["local_dimension"].note


def test_finite_derivatives_and_overflows_are_not_told() -> None:
    problem, _ = drawn(torch.tanh, 0)
    assert singular(problem, problem.model) == ""
    with torch.no_grad():
        problem.model.head.weight.mul_(1e130)
    steep = problem.with_changes(data=(torch.randn(4, 3).double(), torch.ones(4, 2).double()), dtype=torch.float64)
    assert singular(steep, steep.model) == ""
