"""The one pass beside its floor: `python -m benchmarks.one_pass [--repeats 7] [--only LeNet]`.

The floor is one `torch.autograd.grad(..., is_grads_batched=True)` to the network's input and all its weights, with the
N unit vectors as cotangents, in the same chunks. This is the time that autograd needs to compute every Jacobian once,
with weight gradients summed over the samples of a chunk. The pass gives, per sample and layer, G, K (weight and bias),
R, C and ||x||^2; `with diagonals` also gives the Gauss-Newton diagonal, the column sums and the adaptive sums. `without
certificates` does not check chunks against the plan: the difference is the certificates' cost, at most 1/N + 5%. Peak
memory is the growth above the resident size just before, in a child process. About ten minutes.

`--report` takes the default report alone beside the floor, by the processor time of one thread, which other work on the
machine changes little, and large networks on four times as many samples, too. It writes
benchmarks/results/default_report.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from benchmarks.timed import NETWORKS, OUTPUTS
from flatlens.grams import Plan, lay_out, one_pass
from flatlens.grams.data_pass import ALL_GRAMS, PASS_CHUNK

DIAGONALS = (*ALL_GRAMS, "diagonal", "columns", "adaptive")
MANY = 1000
SMALLER = 128  #: autograd's own batched call is faster with smaller chunks on LeNet


def floor(net: nn.Module, x: Tensor, chunk: int) -> None:
    """Compute every Jacobian once by autograd."""
    weights = [p for key, p in net.named_parameters() if key.endswith("weight")]
    for start in range(0, len(x), chunk):
        batch = x[start : start + chunk].detach().requires_grad_()
        f = net(batch)
        units = torch.eye(f.shape[1], device=x.device)[:, None].expand(-1, *f.shape)
        torch.autograd.grad(f, [batch, *weights], units, is_grads_batched=True)


def chunk_of(problem: fl.Problem, needs: tuple[str, ...] = ALL_GRAMS) -> int:
    """Return the number of samples that the pass takes at once."""
    plan = lay_out(problem, problem.model)
    return min(PASS_CHUNK, problem.n, plan.samples_at_once(problem.memory, problem.outputs, needs))


def the_pass(problem: fl.Problem, needs: tuple[str, ...] = ALL_GRAMS) -> Callable[[], None]:
    """Return a run of the pass alone: its Grams are made and dropped."""
    plan = lay_out(problem, problem.model)

    def run() -> None:
        for chunk in one_pass(problem, problem.model, plan, needs=needs):
            for g in chunk.layers.values():
                _ = g.G, g.K, g.R, g.C, g.x_norm2
                if needs == DIAGONALS:
                    _ = g.linear.diagonal(), g.linear.columns(), g.adaptive

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


def on_trust(run: Callable[[], None]) -> Callable[[], None]:
    """Return a run of the pass without its certificates."""

    def trusting() -> None:
        with without_certificates():
            run()

    return trusting


def contestants(name: str, n: int | None = None) -> dict[str, Callable[[], Any]]:
    """Return what is timed, on `n` samples, or on as many as the network is usually timed on."""
    problem, x = NETWORKS[name].case(n)
    chunk = chunk_of(problem)
    runs: dict[str, Callable[[], Any]] = {"floor": lambda: floor(problem.model, x, chunk)}
    if chunk > SMALLER:
        runs[f"floor in chunks of {SMALLER}"] = lambda: floor(problem.model, x, SMALLER)
    runs["pass"] = the_pass(problem)
    runs["without certificates"] = on_trust(runs["pass"])
    if chunk > SMALLER:  # on a large network it takes minutes
        runs["with diagonals"] = the_pass(problem, DIAGONALS)
    runs["fl.measure"] = lambda: fl.measure(fl.Lens(problem), "pass")
    return runs


def memory(name: str, who: str) -> int:
    """Return the growth of the resident size in bytes, measured in a separate child process."""
    code = (
        "from benchmarks import machine, one_pass\n"
        f"run = one_pass.contestants({name!r})[{who!r}]\n"
        "print(machine.growth(run))"
    )
    return int(machine.in_a_child(code))


def measured(name: str, repeats: int) -> dict[str, Any]:
    """Return a network's sizes and what each contestant takes."""
    rows = machine.beside_the_floor(machine.interleaved(contestants(name), repeats))
    for who, row in rows.items():
        row["memory_growth_mib"] = round(memory(name, who) / 2**20, 1)
    timed = NETWORKS[name]
    return {"n": timed.n, "chunk": chunk_of(timed.case()[0]), "repeats": repeats, "contestants": rows}


def report(name: str, n: int, repeats: int) -> dict[str, Any]:
    """Return the default report's processor time on `n` samples in units of the floor's, on one thread."""
    torch.set_num_threads(1)
    runs = {who: run for who, run in contestants(name, n).items() if who in ("floor", "fl.measure")}
    seconds = machine.interleaved(runs, repeats, time.process_time)
    timed = NETWORKS[name]
    return {
        "n": n,
        "shape": timed.shape,
        "repeats": repeats,
        "seconds": {who: round(statistics.median(times), 3) for who, times in seconds.items()},
        "ratio_to_floor": machine.beside_the_floor(seconds)["fl.measure"]["ratio_to_floor"],
        "left_out": [key for (key, _), one in fl.measure(fl.Lens(timed.case()[0]), "pass").items()
                     if one.note.startswith("ask for it by name")],
    }  # fmt: skip


def sizes(name: str) -> tuple[int, ...]:
    """Return the numbers of samples of the report: norms of weights take the same time on few samples as on many."""
    n = NETWORKS[name].n
    return (n,) if n >= MANY else (n, 4 * n)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--only", default="", help="networks whose names hold this")
    options.add_argument("--report", action="store_true", help="the default report alone, by processor time")
    chosen = options.parse_args()
    names = [name for name in NETWORKS if chosen.only in name]
    if chosen.report:
        each = {f"{name}, n = {n}": partial(report, name, n, chosen.repeats) for name in names for n in sizes(name)}
        machine.each_network("default_report", OUTPUTS, each, whole=not chosen.only)
        return
    networks = {name: partial(measured, name, chosen.repeats) for name in names}
    machine.each_network("one_pass", OUTPUTS, networks, whole=not chosen.only)


if __name__ == "__main__":
    main()
