"""The gain of a tracker's warm start: `python -m benchmarks.warm_start [--moments 60]`.

Networks are trained. At each moment the largest eigenvalue is searched three times, to the same residual, 1e-3 of its
size: cold, as `fl.measure` does on a fresh Lens (its warm-up on a share of the data is counted); by Lanczos from the
last moment's eigenvector; and with everything remembered from the last moment, as `fl.Tracker` does. The first moment
is cold for all and is left out. Each value is compared with a search to 1e-6. A product is one curvature-vector product
over all the data. Seconds are those of the search, except for the tracker, where they are those of the whole measure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from flatlens.curvature import GaussNewton, Hessian, eigenpairs
from flatlens.problem import measuring

OPERATORS = {"sharpness": Hessian, "ggn_norm": GaussNewton}


@dataclass(frozen=True)
class Case:
    """A network, its data, its training and how often it is measured."""

    network: str
    n: int  #: number of samples
    every: int  #: training steps between moments
    batch: int
    lr: float
    momentum: float = 0.0
    measure: str = "sharpness"

    @property
    def name(self) -> str:
        """Return the printed name."""
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        how = f"SGD {self.lr:g}{momentum}, batch {self.batch}, every {self.every}"
        return f"{self.measure}, {self.network}, n={self.n}, {how}"


CASES = [
    *(Case("digits MLP, ReLU", 1000, every, 64, 0.1) for every in (1, 10, 50, 200)),
    *(Case("digits convolutions", 1000, every, 64, 0.1) for every in (1, 10, 50, 200)),
    Case("digits convolutions", 400, 50, 64, 0.1),  # too few samples for the cold start's warm-up
    Case("digits MLP, tanh", 1000, 10, 1000, 0.3),  # gradient descent at the edge of stability
    Case("digits MLP, ReLU", 1000, 50, 64, 0.05, momentum=0.9),
    Case("random convolutions", 1000, 50, 64, 0.1),
    Case("digits MLP, ReLU", 1000, 50, 64, 0.1, measure="ggn_norm"),
    Case("digits convolutions", 1000, 50, 64, 0.1, measure="ggn_norm"),
]


def mlp(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def build(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data[: case.n] / 16, dtype=torch.float32), torch.tensor(digits.target[: case.n])
    if "random" in case.network:
        x, y = torch.randn(case.n, 64), torch.randint(10, (case.n,))
    if "convolutions" in case.network:
        return convolutions(), x.reshape(-1, 1, 8, 8), y
    return mlp(nn.Tanh if "tanh" in case.network else nn.ReLU), x, y


def compare(case: Case, moments: int) -> dict[str, Any]:
    net, x, y = build(case)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    optimiser = torch.optim.SGD(net.parameters(), lr=case.lr, momentum=case.momentum)
    tracker = fl.Tracker(problem, case.measure, every=case.every, live=False)
    found: dict[str, list[tuple[float, float, int, float]]] = {"cold": [], "old eigenvector": [], "remembered": []}
    eigenvector = None
    for step in range((moments - 1) * case.every + 1):
        if step % case.every == 0:
            truth = search(problem, case, None, 1e-6)[0].largest
            cold, *cold_cost = search(problem, case, None)
            warm, *warm_cost = search(problem, case, eigenvector)
            eigenvector = warm.vectors[0]
            report = tracker.step(step)
            assert report is not None
            own = report[case.measure]
            assert abs(own.value - truth) <= float(own.arrays["residuals"][0]) + 1e-6 * truth, (case, step)
            if step:
                found["cold"].append((cold.largest, truth, *cold_cost))
                found["old eigenvector"].append((warm.largest, truth, *warm_cost))
                found["remembered"].append((own.value, truth, own.products, own.seconds))
        batch = torch.randint(case.n, (case.batch,)) if case.batch < case.n else slice(None)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    return {how: summary(rows) for how, rows in found.items()} | {
        "values": [round(found["cold"][at][1], 4) for at in (0, len(found["cold"]) // 2, -1)]
    }


def search(problem: fl.Problem, case: Case, start: Tensor | None, tolerance: float = 1e-3) -> tuple[Any, int, float]:
    """Return (pairs, products, seconds)."""
    with measuring(problem.model):
        operator = OPERATORS[case.measure](problem)
        begun = time.perf_counter()
        pairs = eigenpairs(operator, start=start, rtol=tolerance)
        return pairs, operator.products, time.perf_counter() - begun


def summary(rows: list[tuple[float, float, int, float]]) -> dict[str, float]:
    products = [row[2] for row in rows]
    return {
        "median_products": statistics.median(products),
        "total_products": sum(products),
        "most_products": max(products),
        "largest_relative_error": float(f"{max(abs(value / truth - 1) for value, truth, *_ in rows):.2g}"),
        "seconds": round(sum(row[3] for row in rows), 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--moments", type=int, default=60)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    described, results = machine.describe(), {}
    for case in CASES:
        results[case.name] = found = compare(case, chosen.moments)
        for what in ("median", "total"):
            key = f"{what}_products"
            found[f"{what}_over_cold"] = round(found["remembered"][key] / found["cold"][key], 3)
        print(f"{case.name}: values {found['values']}")
        for how in ("cold", "old eigenvector", "remembered"):
            print(f"  {how:16} {found[how]}")
        print(f"  of the cold products: median {found['median_over_cold']:.2f}, total {found['total_over_cold']:.2f}")
        sys.stdout.flush()
    every = {how: sum(found[how]["total_products"] for found in results.values()) for how in ("cold", "remembered")}
    result = {
        "machine": described,
        "moments": chosen.moments,
        "tolerance": 1e-3,
        "runs": results,
        "all_products": every,
    }
    print(f"all: {every}")
    machine.save("warm_start", result)


if __name__ == "__main__":
    main()
