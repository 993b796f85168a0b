"""Growth of the pass's time: `python -m benchmarks.growth [--repeats 7] [--only samples]`.

The number of samples (5 to 40 chunks of 256), the outputs N, the depth or the width of ReLU networks grows, while the
other three are fixed. The pass makes G, K and R of every layer; beside it is its floor (`benchmarks.one_pass`). All
sizes of a kind are run in turn. The exponent is the slope of a line through the logarithms of the medians, with
Student's 95% interval over the sizes. For outputs, depth and width the time is a sum of powers, and the interval mostly
shows how far it is from one power. About ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from scipy.stats import linregress
from scipy.stats import t as student

from benchmarks import machine
from benchmarks.one_pass import fastest, the_pass
from benchmarks.timed import COLOURS, Timed, lenet, mlp
from flatlens.grams.data_pass import PASS_CHUNK

GROWN: dict[str, tuple[str, list[int], Callable[[int], Timed]]] = {
    "samples": (
        "MLP 784-512-512-10, n =",
        [round(5 * PASS_CHUNK * 2 ** (k / 2)) for k in range(7)],
        lambda n: Timed(partial(mlp, 784, 512, 512, 10), n, (784,)),
    ),
    "samples of images": (
        "LeNet 3x32x32, n =",
        [round(5 * PASS_CHUNK * 2 ** (k / 2)) for k in range(7)],
        lambda n: Timed(lenet, n, COLOURS),
    ),
    "outputs": (
        "MLP 784-512-512-N, n = 512, N =",
        [5, 10, 20, 40, 80, 160],
        lambda N: Timed(partial(mlp, 784, 512, 512, N), 512, (784,), outputs=N),
    ),
    "depth": (
        "MLP 784-256-...-256-10, n = 1024, hidden layers:",
        [2, 4, 8, 16, 32],
        lambda depth: Timed(partial(mlp, 784, *[256] * depth, 10), 1024, (784,)),
    ),
    "width": (
        "MLP w-w-w-w-10, n = 512, w =",
        [64, 128, 256, 512, 1024, 2048],
        lambda width: Timed(partial(mlp, *[width] * 4, 10), 512, (width,)),
    ),
}


def exponent(sizes: list[int], seconds: list[float]) -> dict[str, Any]:
    """Return the exponent of the seconds as a power of the size, with its interval."""
    fit = linregress([math.log(size) for size in sizes], [math.log(taken) for taken in seconds])
    half = float(student.ppf(0.975, len(sizes) - 2)) * fit.stderr
    return {"value": round(fit.slope, 3), "interval": [round(fit.slope - half, 3), round(fit.slope + half, 3)]}


def runs(timed: Timed) -> dict[str, Callable[[], Any]]:
    problem = timed.case()
    way, _ = fastest(problem)
    return {"pass": the_pass(problem), "floor": partial(way, problem)}


def grown(kind: str, repeats: int) -> dict[str, Any]:
    """Measure one kind of growth."""
    what, sizes, timed = GROWN[kind]
    by_size = {(size, who): run for size in sizes for who, run in runs(timed(size)).items()}
    seconds = machine.interleaved({f"{size} {who}": run for (size, who), run in by_size.items()}, repeats)
    found: dict[str, Any] = {"what": what, "sizes": sizes}
    for who in ("pass", "floor"):
        taken = [seconds[f"{size} {who}"] for size in sizes]
        found[who] = {
            "seconds": [machine.spread(times) for times in taken],
            "exponent": exponent(sizes, [statistics.median(times) for times in taken]),
        }
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--only", nargs="+", choices=list(GROWN), default=list(GROWN))
    chosen = options.parse_args()
    kinds = machine.earlier("growth").get("kinds", {})
    for kind in chosen.only:
        kinds[kind] = {"repeats": chosen.repeats, "machine": machine.describe(), **grown(kind, chosen.repeats)}
        print(kind, json.dumps({who: kinds[kind][who]["exponent"] for who in ("pass", "floor")}))
        machine.save("growth", {"kinds": kinds})


if __name__ == "__main__":
    main()
