"""How well `memory=` is kept: `python -m benchmarks.memory [--samples 10000] [--memory 1GiB]`.

VGG-11 on 32 x 32 noise, each row in a process of its own: the most bytes resident during `fl.measure`, over the size
just before, as a share of what was allowed. `of one pass` measures MLS, sharpness, the Gauss-Newton trace and relative
flatness of all samples; `everything` is what `fl.measure` does unasked, Gauss-Newton diagonals of all weights
included, of 256 samples, for it takes seconds for each. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

import flatlens as fl
from benchmarks import machine
from flatlens.models import VGG11

OF_ONE_PASS = ["mls", "interpolation_sharpness", "ggn_trace", "relative_flatness_ggn"]
EVERYTHING, FEW = None, 256


def grown(samples: int, memory: str, measures: list[str] | None) -> dict[str, Any]:
    """One measurement, in this process."""
    torch.manual_seed(0)
    net = VGG11(batchnorm=False).build()
    data = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
    problem = fl.Problem(net, "cross_entropy", data, memory=memory)
    start = time.perf_counter()
    most = machine.growth(lambda: fl.measure(fl.Lens(problem), measures))
    seconds = time.perf_counter() - start
    return {
        "n": samples,
        "memory": memory,
        "growth_mib": round(most / 2**20),
        "share_of_memory": round(most / problem.memory, 3),
        "seconds": round(seconds, 1),
    }


def in_a_child(*arguments: object) -> dict[str, Any]:
    """`grown`, where nothing was held before."""
    code = f"import json\nfrom benchmarks import memory\nprint(json.dumps(memory.grown{arguments!r}))"
    found: dict[str, Any] = json.loads(machine.in_a_child(code))
    print(found, file=sys.stderr)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=10_000)
    options.add_argument("--memory", default="1GiB")
    chosen = options.parse_args()
    rows = {
        "everything": in_a_child(FEW, chosen.memory, EVERYTHING),
        "of one pass": in_a_child(chosen.samples, chosen.memory, OF_ONE_PASS),
    }
    path = machine.save("memory", {"network": "VGG-11", "measures_of_one_pass": OF_ONE_PASS, "rows": rows})
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
