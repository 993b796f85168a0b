"""The pass on a CUDA device: `python -m benchmarks.gpu [--only LeNet] [--repeats 5]`.

LeNet, VGG-11, ResNet-18 (32 x 32 noise) and ViT-B/16 (224 x 224), n = 1024, 10 outputs. For each network: seconds of
the floor and the pass (`benchmarks.one_pass`), of all measures of one pass, and of the sharpness, each timed until the
device has finished, with the peak of allocated memory above the size before; values compared with those of the
processor in float64 on 16 samples; the pass in TF32 and in bfloat16, with the change of its values; and whether
torch.compile or a CUDA graph would help: a forward and a backward pass of one chunk is timed eagerly and through each.
The device's description is saved with the results.

`--device cpu --samples 16` runs the same code without a GPU, as a trial; its results are not kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

import flatlens as fl
from benchmarks import machine
from benchmarks.one_pass import Floor, chunk_of, fastest, the_pass
from benchmarks.timed import NETWORKS, VIT_B16, Timed
from flatlens.errors import one_line
from flatlens.problem import measuring

CASES = {name: NETWORKS[f"{name} 3x32x32"] for name in ("LeNet", "VGG-11", "ResNet-18")} | {"ViT-B/16": VIT_B16}
MEASURES = ["mls", "interpolation_sharpness", "ggn_trace", "relative_flatness_ggn"]
COMPARED = 16  #: samples that the processor measures, too


def waited_for(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the same function, which now returns only when the device has finished."""

    def whole() -> Any:
        found = run()
        if device != "cpu":
            torch.cuda.synchronize()
        return found

    return whole


def finished_at(device: str) -> float:
    """Return the time by the clock once the device has finished."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(problem: fl.Problem, names: list[str]) -> fl.Report:
    return fl.measure(fl.Lens(problem), names)


def peak(run: Callable[[], Any], device: str) -> float | None:
    """Return the most MiB allocated above the size before; None on a processor."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def apart(there: fl.Report, here: fl.Report) -> dict[str, float]:
    """Return relative differences of values."""
    return {name: there[name].value / here[name].value - 1 for name in MEASURES if here[name].kind != "undefined"}


def ways(problem: fl.Problem, device: str, repeats: int) -> dict[str, Any]:
    """Time a forward and a backward pass of one chunk: eager, through torch.compile, and as one CUDA graph."""
    net = problem.model
    x = next(iter(problem.batches(chunk_of(problem))))[0].clone().requires_grad_()
    at = [x, *net.parameters()]

    def once(of: nn.Module) -> None:
        torch.autograd.grad(of(x)[:, 0].sum(), at)

    def captured() -> Callable[[], Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            once(net)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once(net)
        return graph.replay

    makers = {"eager": lambda: partial(once, net), "compiled": lambda: partial(once, torch.compile(net))}
    runs, failed = {}, {}
    with measuring(net):
        for who, made in (makers if device == "cpu" else makers | {"CUDA graph": captured}).items():
            try:
                run = waited_for(made(), device)
                run()  # compiles
                runs[who] = run
            except Exception as error:  # whatever a compiler raises
                failed[who] = {"failed": one_line(error, 120)}
        seconds = machine.interleaved(runs, repeats)
    return {who: machine.spread(times) for who, times in seconds.items()} | failed


def in_full(way: Floor, problem: fl.Problem) -> None:
    """Run the floor, in the pass's arithmetic and with its attention."""
    with measuring(problem.model):
        way(problem)


def result(timed: Timed, n: int, device: str, memory: str, repeats: int) -> dict[str, Any]:
    """Return all results of one network."""
    problem = timed.case(n, device, memory=memory)
    with measuring(problem.model):
        way, _ = fastest(problem, partial(finished_at, device))
    runs: dict[str, Callable[[], Any]] = {
        "floor": partial(in_full, way, problem),
        "pass": the_pass(problem),
        "measures": partial(measured, problem, MEASURES),
        "sharpness": partial(measured, problem, ["sharpness"]),
    }
    coarser: list[Literal["tf32", "bfloat16"]] = ["tf32", "bfloat16"] if device != "cpu" else ["bfloat16"]
    others = {how: timed.case(n, device, memory=memory, arithmetic=how) for how in coarser}
    runs |= {f"pass in {how}": the_pass(other) for how, other in others.items()}
    seconds = machine.interleaved({who: waited_for(run, device) for who, run in runs.items()}, repeats)
    full = measured(problem, MEASURES)
    few = min(n, COMPARED)
    on_processor = measured(timed.case(few).with_changes(dtype=torch.float64), MEASURES)
    return {
        "machine": machine.describe(),
        "n": n,
        "chunk": chunk_of(problem),
        "floor": str(way),
        "contestants": {
            who: {**machine.spread(times), "memory_growth_mib": peak(runs[who], device)}
            for who, times in seconds.items()
        },
        "pass_over_floor": round(statistics.median(seconds["pass"]) / statistics.median(seconds["floor"]), 3),
        "values": {name: full[name].value for name in MEASURES},
        "off_the_processor": apart(measured(timed.case(few, device), MEASURES), on_processor),
        "off_full": {how: apart(measured(other, MEASURES), full) for how, other in others.items()},
        "one_backward": ways(problem, device, repeats),
    }  # fmt: skip


def described() -> dict[str, Any]:
    """Return a description of the device."""
    seen = torch.cuda.get_device_properties(0)
    return {
        "device": seen.name,
        "memory_gib": round(seen.total_memory / 2**30, 1),
        "capability": f"{seen.major}.{seen.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--samples", type=int, default=1024)
    options.add_argument("--memory", default="16GiB")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    chosen = options.parse_args()
    if chosen.device != "cpu" and not torch.cuda.is_available():
        told = "torch sees no CUDA device here; --device cpu --samples 16 shows what it does"
        print(f"benchmarks.gpu: {told}", file=sys.stderr)
        return 2
    networks = machine.earlier("gpu").get("networks", {}) if chosen.device != "cpu" else {}
    for name in chosen.only:
        networks[name] = result(CASES[name], chosen.samples, chosen.device, chosen.memory, chosen.repeats)
        print(name, json.dumps(networks[name], indent=1))
        if chosen.device != "cpu":
            machine.save("gpu", {"gpu": described(), "networks": networks})
    return 0


if __name__ == "__main__":
    sys.exit(main())
