"""What a tracker of sharpness along the update costs: `python -m benchmarks.tracking [--only NAME]`.

Networks are trained, with a tracker at every = 100 for each measure and number of samples. A measurement's share is its
processor time over that of the 100 training steps before it, on one thread; medians and quartiles over the moments
after the first. Each value is divided by that on all training samples at the same moment. About seven minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from flatlens.data import Split, digits, patches
from flatlens.models import MLP, LeNet5, ViT

EVERY = 100
MEASURES = ("critical_sharpness", "directional_sharpness")


@dataclass(frozen=True)
class Case:
    """A network, its data and its training."""

    build: Callable[[], nn.Module]
    data: Callable[[], Split]
    batch: int
    optimiser: Callable[[Any], torch.optim.Optimizer]
    how: str  #: the optimiser in words


CASES = {
    "MLP 64-2048-2048-10": Case(
        MLP(64, (2048, 2048), 10).build, partial(digits, 1500), 256, partial(torch.optim.SGD, lr=0.05), "SGD 0.05"
    ),
    "LeNet-5": Case(
        LeNet5(classes=2).build, partial(patches, 1500, 100), 256, partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        "SGD 0.01, momentum 0.9",
    ),
    "ViT 64 x 4, 17 tokens": Case(
        ViT(classes=2, patch=8).build, partial(patches, 1500, 100), 256, partial(torch.optim.Adam, lr=3e-4),
        "Adam 0.0003",
    ),
}  # fmt: skip


def samples_of(case: Case, n: int) -> dict[str, int]:
    """Return the numbers of samples that are compared; the last is all of them."""
    return {"an eighth of a batch": case.batch // 8, "a batch": case.batch, "all": n}


def compare(name: str, moments: int) -> dict[str, Any]:
    case = CASES[name]
    net, split = case.build(), case.data()
    optimiser, problem = case.optimiser(net.parameters()), fl.Problem(net, "cross_entropy", split.train)
    counts, generator = samples_of(case, len(split.x)), torch.Generator().manual_seed(0)
    trackers = {
        (measure, which): fl.Tracker(problem, measure, every=EVERY, samples=count, live=False)
        for measure in MEASURES
        for which, count in counts.items()
    }
    training: list[float] = []  # seconds of the steps before each moment
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in trackers}
    values: dict[tuple[str, str], list[float]] = {key: [] for key in trackers}
    for moment in range(moments + 1):
        if moment:
            training.append(seconds(lambda: train(net, optimiser, split.x, split.y, case.batch, generator)))
        for key, tracker in trackers.items():
            lasted = seconds(partial(tracker.step, moment * EVERY, optimiser=optimiser))
            if moment:  # the first has no step to begin its search with
                assert tracker.latest is not None
                taken[key].append(lasted)
                values[key].append(tracker.latest.report[key[0]].value)
    contestants = {}
    for (measure, which), times in taken.items():
        pairs = zip(values[measure, which], values[measure, "all"], strict=True)
        ratios = [mine / whole for mine, whole in pairs if math.isfinite(mine / whole)]
        contestants[f"{measure}, {which}"] = {
            "samples": counts[which],
            "seconds": machine.spread(times),
            "share_of_training": machine.spread([mine / one for mine, one in zip(times, training, strict=True)]),
            "value_over_all": machine.spread(ratios) if ratios else {},
            "undefined": sum(value != value for value in values[measure, which]),
        }
    return {
        "n": len(split.x), "batch": case.batch, "optimiser": case.how, "every": EVERY, "moments": moments,
        "seconds_of_a_step": round(statistics.median(training) / EVERY, 5), "contestants": contestants,
    }  # fmt: skip


def train(
    net: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor, batch: int, generator: torch.Generator
) -> None:
    """Take `EVERY` steps."""
    for _ in range(EVERY):
        drawn = torch.randint(len(x), (batch,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[drawn]), y[drawn]).backward()
        optimiser.step()


def seconds(run: Callable[[], object]) -> float:
    """Return the processor time that a function takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--moments", type=int, default=7)
    options.add_argument("--only", default="", help="networks whose names hold this")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    networks = {name: partial(compare, name, chosen.moments) for name in CASES if chosen.only in name}
    machine.each_network("tracking", 10, networks, whole=not chosen.only)


if __name__ == "__main__":
    main()
