"""The one pass beside torch's fastest way: `python -m benchmarks.one_pass [--repeats 7] [--only LeNet]`.

The floor is autograd's time for every Jacobian once: N backward passes to the network's input and all parameters, with
the parameters' gradients summed over the samples of a chunk. It is the fastest of N passes one by one and of one call
with `is_grads_batched`, both in chunks of several sizes, found by a trial on this network and with these threads. Of
token ids the input is the output of the first embedding, and tables of embeddings are left out: their gradients are
dense there, which would make the floor slower. Attention is torch's own choice in the floor.

The pass gives, per sample and layer, G, K (weight and bias), R, C and ||x||^2, and K of every other parameter, from a
plan that is there. `without certificates` does not check chunks against the plan. The other rows are whole calls:
`Problem` alone, also in units of one forward pass; three measures, `Problem` and `Lens` included; and the summary
without its measures that take products. Seconds are the processor's with one thread, those of the wall with more. Peak
memory is the growth above the resident size just before, in a child process. Some twenty minutes. Transformers of other
packages need `.venv-timm/bin/python`, which `.ci/timm` makes; where a package is missing, its networks keep their last
results.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from benchmarks.timed import NETWORKS, OUTPUTS, TRANSFORMERS
from flatlens.errors import out_of_memory
from flatlens.grams import Plan, lay_out, one_pass
from flatlens.grams.data_pass import ALL_GRAMS, PASS_CHUNK, chunk_size
from flatlens.measures import definition, pipeline

THREE = ["mls", "ggn_trace", "relative_flatness_ggn"]
CHUNKS = (8, 32, 128, 256)
HOPELESS = 1.5  #: a way whose first run takes this many times the best is not tried again
EVERY = NETWORKS | TRANSFORMERS


@dataclass(frozen=True)
class Floor:
    """A way to compute every Jacobian once by autograd."""

    chunk: int
    batched: bool

    def __str__(self) -> str:
        return f"{'one call' if self.batched else 'one by one'}, chunks of {self.chunk}"

    def __call__(self, problem: fl.Problem) -> None:
        """Compute the Jacobians of every sample, and drop them."""
        model = problem.model
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        weights = [p for p in model.parameters() if not any(p is table.weight for table in tables)]
        embedded: list[Tensor] = []
        with ExitStack() as stack:
            for module in tables:
                stack.callback(module.register_forward_hook(lambda m, i, o: embedded.append(o)).remove)
            for inputs, _ in problem.batches(self.chunk):
                embedded.clear()
                if isinstance(inputs, Tensor):
                    inputs = inputs.detach().requires_grad_()
                    f, at = model(inputs), [inputs, *weights]
                else:
                    f = model(**inputs).logits
                    at = [embedded[0], *weights]
                units = torch.eye(f.shape[1], device=f.device)[:, None].expand(-1, *f.shape)
                if self.batched:
                    torch.autograd.grad(f, at, units, is_grads_batched=True, allow_unused=True)
                    continue
                for unit in units:
                    torch.autograd.grad(f, at, unit, retain_graph=True, allow_unused=True)


def fastest(problem: fl.Problem, clock: Callable[[], float] = time.perf_counter) -> tuple[Floor, dict[str, float]]:
    """Return the fastest floor on this network, and the seconds of each way that was tried."""
    n = problem.n
    chunks = sorted({chunk_of(problem), min(n, max(CHUNKS)), *(chunk for chunk in CHUNKS if chunk <= n)})
    tried: dict[Floor, float] = {}
    for way in [Floor(chunk, batched) for batched in (False, True) for chunk in chunks]:
        for _ in range(2):
            start = clock()
            try:
                way(problem)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                break
            tried[way] = min(tried.get(way, math.inf), clock() - start)
            if tried[way] > HOPELESS * min(tried.values()):
                break
    return min(tried, key=tried.__getitem__), {str(way): round(seconds, 4) for way, seconds in tried.items()}


def chunk_of(problem: fl.Problem, needs: tuple[str, ...] = ALL_GRAMS) -> int:
    """Return the number of samples that the pass takes at once."""
    return min(problem.n, chunk_size(problem, lay_out(problem, problem.model), problem.outputs, needs))


def the_pass(problem: fl.Problem, needs: tuple[str, ...] = ALL_GRAMS) -> Callable[[], None]:
    """Return a run of the pass alone: its Grams are made and dropped."""
    plan = lay_out(problem, problem.model)

    def run() -> None:
        for chunk in one_pass(problem, problem.model, plan, needs=needs):
            for g in chunk.layers.values():
                _ = g.C, g.x_norm2
                if g.input_side is not None:
                    _ = g.G
                if g.weight is not None:
                    _ = g.K, g.R
            for g in chunk.others.values():
                _ = g.K

    return run


@contextmanager
def without_certificates() -> Iterator[None]:
    """Accept every chunk without a certificate."""
    module = sys.modules["flatlens.grams.data_pass"]
    output_jacobians, require_same = module.output_jacobians, Plan.require_same
    module.output_jacobians = lambda *given, **options: output_jacobians(*given, **(options | {"certify": None}))
    Plan.require_same = lambda *given: None
    try:
        yield
    finally:
        module.output_jacobians, Plan.require_same = output_jacobians, require_same


def on_trust(run: Callable[[], None]) -> None:
    """Run the pass without its certificates."""
    with without_certificates():
        run()


def forward(problem: fl.Problem) -> None:
    """Run the network once on every sample."""
    with torch.no_grad():
        for inputs, _ in problem.batches(PASS_CHUNK):
            problem.model(**inputs) if isinstance(inputs, dict) else problem.model(inputs)


def contestants(name: str, way: Floor) -> dict[str, Callable[[], Any]]:
    """Return what is timed."""
    given = EVERY[name].given()
    problem = fl.Problem(*given)
    report = fl.measure(fl.Lens(problem))
    asked = definition.asked_for("summary", held_out=False)
    free = {one for row, one in asked.answers.items() if row not in report or not report[row].products}
    brief = replace(asked, measures=tuple(one for one in asked.measures if one in free))

    def summary() -> None:
        with mock.patch.object(pipeline, "asked_for", return_value=brief):
            fl.measure(fl.Lens(fl.Problem(*given)))

    run = the_pass(problem)
    return {
        "floor": partial(way, problem),
        "pass": run,
        "without certificates": partial(on_trust, run),
        "three measures": lambda: fl.measure(fl.Lens(fl.Problem(*given)), THREE),
        "summary": summary,
        "Problem": lambda: fl.Problem(*given),
        "forward": partial(forward, problem),
    }


def memory(name: str, way: Floor, who: str) -> int:
    """Return the growth of the resident size in bytes, measured in a separate child process."""
    code = (
        "from benchmarks import machine, one_pass\n"
        f"run = one_pass.contestants({name!r}, one_pass.{way!r})[{who!r}]\n"
        "print(machine.growth(run))"
    )
    return int(machine.in_a_child(code))


def measured(name: str, threads: int, repeats: int, with_memory: bool) -> dict[str, Any]:
    """Return a network's sizes and what each contestant takes."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    problem = EVERY[name].case()
    way, tried = fastest(problem, clock)
    seconds = machine.interleaved(contestants(name, way), repeats, clock)
    rows = machine.beside_the_floor(seconds)
    for who in rows if with_memory else ():
        rows[who]["memory_growth_mib"] = round(memory(name, way, who) / 2**20, 1)
    return {
        "machine": machine.describe(), "n": problem.n, "shape": EVERY[name].shape or EVERY[name].tokens,
        "chunk": chunk_of(problem), "repeats": repeats, "floor": str(way), "tried": tried,
        "problem_in_forward_passes": round(
            statistics.median(seconds["Problem"]) / statistics.median(seconds["forward"]), 2
        ),
        "contestants": rows,
    }  # fmt: skip


def each(name: str, threads: list[int], repeats: int, with_memory: bool) -> dict[str, Any]:
    """Return a network's results for each number of threads, in processes of their own."""
    found = {f"threads {k}": machine.answer("one_pass", "measured", name, k, repeats, with_memory) for k in threads}
    return machine.earlier("one_pass").get("networks", {}).get(name, {}) | found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--only", default="", help="networks whose names hold this")
    options.add_argument("--memory", action="store_true", help="the growth of the resident size, too")
    chosen = options.parse_args()
    networks = {
        name: partial(each, name, chosen.threads, chosen.repeats, chosen.memory)
        for name in EVERY
        if chosen.only in name and (name in NETWORKS or importlib.util.find_spec(name.partition(" ")[0]))
    }
    machine.each_network("one_pass", OUTPUTS, networks, whole=False)


if __name__ == "__main__":
    main()
