"""Peak memory beside the allowed `memory=`: `python -m benchmarks.memory [--samples 10000] [--memory 1GiB]`.

Each row has a process of its own. It gives the most bytes resident during `fl.measure`, above the size just before, as
a share of the allowed memory. VGG-11 on 32 x 32 noise: `of one pass` measures MLS, sharpness, the Gauss-Newton trace
and relative flatness on all samples. `everything` is what `fl.measure` does by default, with the Gauss-Newton diagonals
of all weights, on 256 samples only, as it takes seconds for each. `of one pass, 100 outputs` uses 2000 samples of an
MLP. Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import flatlens as fl
from benchmarks import machine
from benchmarks.timed import NETWORKS, Timed, mlp

VGG, MANY = "VGG-11 3x32x32", "MLP 784-512-512-512-100"
NETS = {VGG: NETWORKS[VGG], MANY: Timed(lambda: mlp(784, 512, 512, 512, 100), 2000, (784,), 100)}
OF_ONE_PASS = ["mls", "interpolation_sharpness", "ggn_trace", "relative_flatness_ggn"]
EVERYTHING, FEW = None, 256


def grown(network: str, samples: int, memory: str, measures: list[str] | None) -> dict[str, Any]:
    """Run one measurement, in this process."""
    problem = NETS[network].case(samples, memory=memory)
    start = time.perf_counter()
    most = machine.growth(lambda: fl.measure(fl.Lens(problem), measures))
    seconds = time.perf_counter() - start
    return {
        "network": network,
        "n": samples,
        "memory": memory,
        "growth_mib": round(most / 2**20),
        "share_of_memory": round(most / problem.memory, 3),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=10_000)
    options.add_argument("--memory", default="1GiB")
    chosen = options.parse_args()
    rows = {
        row: machine.answer("memory", "grown", *how)
        for row, how in {
            "everything": (VGG, FEW, chosen.memory, EVERYTHING),
            "of one pass, 100 outputs": (MANY, NETS[MANY].n, chosen.memory, OF_ONE_PASS),
            "of one pass": (VGG, chosen.samples, chosen.memory, OF_ONE_PASS),
        }.items()
    }
    machine.save("memory", {"measures_of_one_pass": OF_ONE_PASS, "rows": rows})


if __name__ == "__main__":
    main()
