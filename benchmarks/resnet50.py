"""What measuring a ResNet-50 on 10,000 images takes, by `fl.cost`: `python -m benchmarks.resnet50 [CASE ...]`.

Each case in a process of its own, on one thread, with random weights and images of noise. The trials are timed by the
processor's clock, so that other work on the machine does not count. docs/resnet50.md shows the result.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import flatlens as fl
from benchmarks import machine
from benchmarks.typical import resnet50


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images of noise, 3 x 224 x 224, of 1,000 classes, drawn when they are read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(3, 224, 224, generator=drawn), torch.randint(1000, (), generator=drawn)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "summary": (10_000, {}),
    "summary, outputs=4": (10_000, {"outputs": 4}),
    "summary, 1,000 images": (1_000, {}),
    "summary, 100 images": (100, {}),
    "sharpness": (10_000, {"measures": "sharpness"}),
    "mls": (10_000, {"measures": "mls"}),
    "ggn_trace": (10_000, {"measures": "ggn_trace"}),
    "ggn_trace, outputs=4": (10_000, {"measures": "ggn_trace", "outputs": 4}),
    "loss, weight_norm": (10_000, {"measures": ["loss", "weight_norm"]}),
}


def measured(name: str) -> dict[str, Any]:
    """Return the expected processor time, memory and products of one case."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples, arguments = CASES[name]
    network = resnet50()
    time.monotonic = time.perf_counter = time.process_time
    start = time.process_time()
    expected = fl.cost(network, "cross_entropy", Images(samples), **arguments)
    return {
        "samples": samples,
        "arguments": arguments,
        "answer": expected.answer,
        "expected_seconds": round(expected.seconds),
        "trial_seconds": round(time.process_time() - start, 1),
        "memory_mib": round(expected.memory / 2**20),
        "products": expected.products,
        "parts": [row | {"seconds": round(row["seconds"])} for row in expected.frame().to_dict("records")],
    }


if __name__ == "__main__":
    machine.measure_cases("resnet50", CASES, __doc__)
