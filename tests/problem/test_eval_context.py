"""Networks inside torch's wrappers are measured as the network inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.problem.eval_context import unwrapped

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
WANTED = ["loss", "mls", "relative_flatness", "sharpness(rtol=1e-6)", "hessian_trace(exact=True)"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def in_place(net: nn.Sequential) -> nn.Module:
    net.compile(backend="eager")
    return net


def inside(net: nn.Sequential) -> nn.Module:
    return nn.Sequential(torch.compile(net[0], backend="eager"), *net[1:])


WRAPPED = {
    "compiled": lambda net: torch.compile(net, backend="aot_eager"),
    "parallel": nn.DataParallel,
    "compiled and parallel": lambda net: torch.compile(nn.DataParallel(net)),
    "compiled in place": in_place,
    "a part is compiled": inside,
}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ddp", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_network_inside_real_distributed_data_parallel_has_its_numbers(process_group: None) -> None:
    """Its hooks on parameters neither run nor change anything: it trains on afterwards, with the same gradients."""
    plain = fl.measure(fl.Lens(fl.Problem(network(), "cross_entropy", (X, Y))), WANTED)
    parallel = nn.parallel.DistributedDataParallel(network())
    loss = nn.CrossEntropyLoss()

    def gradients() -> list[torch.Tensor]:
        parallel.zero_grad()
        loss(parallel(X), Y).backward()
        return [p.grad.clone() for p in parallel.parameters()]

    before = gradients()
    tracker = fl.Tracker(fl.Problem(parallel, "cross_entropy", (X, Y)), "loss", every=1, live=False)
    tracker.step(0)
    found = fl.measure(fl.Lens(fl.Problem(parallel, "cross_entropy", (X, Y))), WANTED)
    assert {key: e.value for key, e in found.items()} == {key: e.value for key, e in plain.items()}
    assert found.about["layers"] == ["0", "2"]
    assert tracker.history["value"].item() == plain["loss"].value
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_network_has_the_network_s_numbers(name: str) -> None:
    plain = fl.measure(fl.Lens(fl.Problem(network(), "cross_entropy", (X, Y))), WANTED)
    wrapped = WRAPPED[name](network())
    wrapped(X)  # what was compiled before is not used, either
    found = fl.measure(fl.Lens(fl.Problem(wrapped, "cross_entropy", (X, Y))), WANTED)
    for (key, layer), e in plain.items():
        other = layer if layer is None or name != "a part is compiled" else layer.replace("0", "0._orig_mod", 1)
        assert found[key, other].value == pytest.approx(e.value, rel=1e-5), (key, layer)
    if name != "a part is compiled":
        assert found.about["layers"] == plain.about["layers"] == ["0", "2"]


def test_compiled_code_runs_compiled_again_afterwards() -> None:
    net = network()
    calls = []

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> object:
        calls.append(1)
        return graph.forward

    compiled = torch.compile(net, backend=backend)
    fl.measure(fl.Lens(fl.Problem(compiled, "cross_entropy", (X, Y))), "mls")
    assert not calls
    compiled(X)
    assert calls


def test_only_torch_s_wrappers_are_taken_off() -> None:
    holds = nn.Module()
    holds.module = holds._orig_mod = nn.Linear(3, 2)
    assert unwrapped(holds) is holds
    assert unwrapped(7) == 7


def test_a_scripted_network_is_no_wrapper() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 2)))
    assert unwrapped(scripted) is scripted
