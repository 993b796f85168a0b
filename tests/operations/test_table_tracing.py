"""The trace of a network: what its nodes are called, which hold sizes or constants, and that it runs as the network."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

from flatlens.operations.table import Trace, asks


def forward(net: nn.Module, x: Tensor, y: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
    h = (x - net.mean).view(x.size(0), x.shape[1] * x.shape[2])
    h = torch.tanh(net.fc(h)) * scale + torch.zeros(4)
    return h.reshape(x.size()[0] // 1, -1)


NET = module_of(forward, fc=(6, 4), mean=torch.tensor(0.3)).double()
TRACE = Trace(NET)
X = torch.randn(3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_every_call_has_a_name_and_an_operation() -> None:
    seen = {TRACE.called(n): getattr(TRACE.operation(n), "name", None) for n in TRACE.nodes if n.op.startswith("call")}
    for called, name in {"fc (Linear)": "linear", "tanh()": "tanh", "view()": "shape", "sub()": "subtraction"}.items():
        assert seen[called] == name
    assert seen["size()"] is seen["getattr()"] is None
    assert TRACE.operation(TRACE.nodes[0]) is None


def test_sizes_and_constants_hold_no_values_of_the_input() -> None:
    sizes, fixed = TRACE.without_values(), TRACE.without_values(constants=True)
    assert sizes < fixed
    assert all(n in sizes for n in TRACE.nodes if asks(n))
    assert {"floordiv", "mul"} <= {n.name for n in sizes}
    assert {n.name for n in fixed - sizes} == {"y", "scale", "mean", "_tensor_constant0"}
    on = {n.name for n in TRACE.nodes} - {n.name for n in fixed}
    assert {"x", "sub", "view", "fc", "tanh", "mul_1", "add", "reshape", "output"} == on


def test_it_runs_in_the_place_of_the_network() -> None:
    run = TRACE.in_place()
    for options in ({}, {"scale": -1.0}, {"y": X}):
        assert torch.equal(run(X, **options), NET(X, **options))
    with pytest.raises(TypeError, match="missing"):
        run()


def test_what_cannot_be_traced_raises() -> None:
    with pytest.raises(Exception, match="control flow"):
        Trace(module_of(lambda net, x: x if x.sum() > 0 else -x))
