"""What a measurement has used is freed at once: what lies in a reference cycle waits for Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo  # its first import, by torch.optim, leaves frames in cycles
from networks import network
from torch.autograd.graph import Node
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl

QUICK = {"local_learning_coefficient": "local_learning_coefficient(draws=20, burn_in=5)"}
HELD_OUT = ("test_loss", "test_accuracy", "generalisation_gap")
MEASURED = [QUICK.get(name, name) for name in fl.measures.MEASURES if name not in HELD_OUT]


def waiting(work: Callable[[], object], size: int) -> Iterator[str]:
    """Yield what only the garbage collector frees after this: autograd nodes, tensors with one or of `size` numbers."""
    gc.collect()
    gc.disable()
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        yield from (one.name() for one in gc.garbage if isinstance(one, Node))
        tensors = [one for one in gc.garbage if isinstance(one, torch.Tensor)]
        yield from (one.grad_fn.name() for one in tensors if one.grad_fn is not None)
        yield from ("a batch" for one in tensors if one.numel() == size)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_what_lies_in_a_cycle_is_seen() -> None:
    def work() -> None:
        leaf = torch.ones(3, requires_grad=True)
        cycle: list[object] = [leaf.sum().grad_fn, leaf.exp(), torch.ones(7)]
        cycle.append(cycle)

    assert list(waiting(work, 7)) == ["SumBackward0", "ExpBackward0", "a batch"]


@pytest.mark.parametrize("name", ["the plan", *MEASURED])
def test_no_graph_and_no_batch_waits_for_the_garbage_collector(name: str) -> None:
    net, x, y = network("cnn-relu-inplace", n=12)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)

    def work() -> None:
        problem = fl.Problem(net, "cross_entropy", loader)
        lens = fl.Lens(problem)
        _ = lens.plan if name == "the plan" else fl.measure(lens, [name], anyway=True)

    assert not list(waiting(work, x[:3].numel()))
