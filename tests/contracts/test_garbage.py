"""What a measurement has used is freed at once: a graph in a reference cycle waits for Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from networks import network
from torch.autograd.graph import Node

import flatlens as fl
from flatlens.errors import FlatlensError

QUICK = {"local_learning_coefficient": "local_learning_coefficient(draws=5, burn_in=5)"}
HELD_OUT = ("test_loss", "test_accuracy", "generalisation_gap")
MEASURED = [QUICK.get(name, name) for name in fl.measures.MEASURES if name not in HELD_OUT]


def graphs_that_wait(work: Callable[[], object]) -> Iterator[str]:
    """Yield the names of the autograd nodes that only the garbage collector frees after this work."""
    gc.collect()
    gc.disable()
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        yield from (one.name() for one in gc.garbage if isinstance(one, Node))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_graph_in_a_cycle_is_seen():
    def work() -> None:
        cycle: list[object] = [network("mlp-relu")[0](network("mlp-relu")[1]).sum().grad_fn]
        cycle.append(cycle)

    assert list(graphs_that_wait(work)) == ["SumBackward0"]


@pytest.mark.parametrize("name", ["the plan", *MEASURED])
def test_no_graph_waits_for_the_garbage_collector(name: str) -> None:
    net, x, y = network("cnn-relu-inplace", n=12)
    problem = fl.Problem(net, "cross_entropy", (x, y))

    def work() -> None:
        lens = fl.Lens(problem)
        try:
            _ = lens.plan if name == "the plan" else fl.measure(lens, [name], anyway=True)
        except FlatlensError:
            pytest.skip("needs an optimiser")

    assert not list(graphs_that_wait(work))
