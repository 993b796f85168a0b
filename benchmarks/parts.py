"""Where the time of three measures goes: `python -m benchmarks.parts [NETWORK ...]`.

The whole call of `benchmarks.one_pass` (mls, ggn_trace, relative_flatness_ggn, `Problem` and `Lens` included), each
network in a process of its own, on one thread: processor seconds by part, over those of the floor in the same process,
means over three rounds. The first three parts run once for a problem, on at most eight samples or on the weights; the
others are the pass over all samples. Products of weights are told by the weight's matrix.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

import flatlens as fl
from benchmarks import machine
from benchmarks.one_pass import EVERY, THREE, fastest
from flatlens.grams import data_pass, jacobians, output_jacobians, weight_jacobians
from flatlens.measures import lens, pipeline

REPEATS = 3
REST = "the rest"


class Clock:
    """Processor seconds of each part of a call; those of parts inside a part are its own only where it is whole."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._now: list[tuple[str, bool]] = []  #: the parts that run now, and whether each is whole
        self._since = 0.0

    @contextmanager
    def part(self, name: str, whole: bool) -> Iterator[None]:
        """Count what runs inside for a part, unless it runs inside of a whole one."""
        if self._now and self._now[-1][1]:
            yield
            return
        self._turn()
        self._now.append((name, whole))
        try:
            yield
        finally:
            self._turn()
            self._now.pop()

    def _turn(self) -> None:
        now = time.process_time()
        if self._now:
            self.seconds[self._now[-1][0]] += now - self._since
        self._since = now

    def watch(self, function: Callable[..., Any], name: str | Callable[..., str], whole: bool) -> Callable[..., Any]:
        """Return a function whose time counts for a part, perhaps named after its first argument."""

        def watched(*given: Any, **options: Any) -> Any:
            with self.part(name if isinstance(name, str) else name(given[0]), whole):
                return function(*given, **options)

        return watched


def products(jacobian: Any) -> str:
    """Return the name of the part in which a weight's products are made."""
    if not isinstance(jacobian, weight_jacobians.SharedJacobian):
        return "products of weights that act once a sample"
    g, d, m = jacobian.weight.W.shape
    return f"products of weights, {g * d} x {m} at {jacobian.J.shape[4]} positions"


#: by place in the code: the part, and whether all that runs inside is its own
PARTS: list[tuple[Any, str, str | Callable[..., str], bool]] = [
    (fl.Problem, "__init__", "Problem", True),
    (lens, "lay_out", "plan", True),
    (pipeline, "_doubts", "checks of autograd's derivative", True),
    (data_pass, "run_recorded", "forward pass", True),
    (data_pass, "output_jacobians", "copies of output Jacobians", False),
    (output_jacobians, "certificate_of", "certificates", True),
    (output_jacobians.Certificate, "apart", "certificates", True),
    (output_jacobians.Checker, "check", "certificates", True),
    (jacobians.ForwardPass, "rebuilt", "certificates", True),
    (torch.autograd, "grad", "backward passes of the outputs", False),
    (jacobians.ForwardPass, "entries", "norms and other small parameters", True),
    (jacobians, "row_products", "G", True),
    (jacobians, "input_products", "G", True),
    *((kind, what, products, True)
      for kind in (weight_jacobians.SharedJacobian, weight_jacobians.DenseJacobian)
      for what in ("trace", "bias_trace", "relative_trace")),
]  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    """Return a network's floor, and the seconds of each part of a call."""
    torch.set_num_threads(1)
    given = EVERY[name].given()
    problem = fl.Problem(*given)
    way, _ = fastest(problem, time.process_time)
    clock = Clock()

    def watched() -> None:
        with ExitStack() as stack:
            for at, what, part, whole in PARTS:
                stack.enter_context(mock.patch.object(at, what, clock.watch(getattr(at, what), part, whole)))
            stack.enter_context(clock.part(REST, False))
            fl.measure(fl.Lens(fl.Problem(*given)), THREE, progress=False)

    watched()  # the first call also loads code
    clock.seconds.clear()
    seconds = machine.interleaved({"floor": lambda: way(problem), "call": watched}, REPEATS, time.process_time)
    floor, calls = statistics.mean(seconds["floor"]), REPEATS + 1  # with the warm-up round
    parts = {part: round(total / calls / floor, 3) for part, total in clock.seconds.items()}
    return {
        "n": problem.n, "floor_seconds": round(floor, 3), "floor": str(way), "load": round(machine.BUSY, 1),
        "whole": round(sum(parts.values()), 2),
        "in_floors": dict(sorted(parts.items(), key=lambda part: -part[1])),
    }  # fmt: skip


if __name__ == "__main__":
    machine.measure_cases("parts", EVERY, __doc__)
