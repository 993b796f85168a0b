"""The relative-flatness regulariser beside SAM: `python -m benchmarks.regulariser [--seeds 10]`.

ReLU networks 64-64-64-10 on 200 digits, SGD at lr 0.05 and batch size 20 for 150 epochs; the other 1597 digits are held
out. The losses are cross-entropy and the half squared error, whose output Hessian does not vanish with growing
confidence. Each way of training runs at several strengths, always from the same seeds. Relative flatness, gap and
accuracy are given as means, and as differences to plain SGD with a 95% interval (Student's, over seeds). The price of a
step is timed separately, on three networks, all ways in turn. About ten minutes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import t as student

import flatlens as fl
from benchmarks import machine
from flatlens.data import Split, digits
from flatlens.models import MLP, LeNet5
from flatlens.training import ASAM, SAM, SGD, InputJacobian, ParameterJacobian, RelativeFlatness, Training, train
from flatlens.training.run import Stepper

LOSSES = ("cross_entropy", "half_squared_error")
WAYS: dict[str, dict[str, Any]] = {
    "plain SGD": {},
    **{f"SAM, {rho}": {"ascent": SAM(rho)} for rho in (0.05, 0.2)},
    **{f"ASAM, {rho}": {"ascent": ASAM(rho)} for rho in (0.5, 2.0)},
    **{f"relative flatness of the last layer, {c}": {"penalties": (RelativeFlatness(c),)} for c in (1e-3, 1e-2)},
    **{f"relative flatness of all layers, {c}": {"penalties": (RelativeFlatness(c, "all"),)} for c in (1e-3, 1e-2)},
    **{f"input Jacobian, {c}": {"penalties": (InputJacobian(c),)} for c in (1e-3, 1e-2)},
    **{f"parameter Jacobian, {c}": {"penalties": (ParameterJacobian(c),)} for c in (1e-5, 1e-4)},
}
TIMED = {name: WAYS[name] for name in WAYS if name.endswith(("SGD", "0.2", "2.0", "0.01", "0.0001"))}
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {  # each with its batch
    "64-64-64-10": (MLP(64, (64, 64), 10), (20, 64)),
    "784-512-512-10": (MLP(784, (512, 512), 10), (128, 784)),
    "LeNet-5": (LeNet5(), (64, 3, 32, 32)),
}
MEASURED = ("relative_flatness", "relative_flatness.sum", "generalisation_gap", "test_loss", "test_accuracy", "loss")


def measured(split: Split, loss: str, how: dict[str, Any], seed: int) -> dict[str, float] | None:
    """Return the measures at the end of one run, None where training diverged."""
    settings: dict[str, Any] = {"loss": loss, "max_epochs": 150, "check_every": 1000, "seed": seed, **how}
    model = MLP(64, (64, 64), 10, seed=seed).build()
    if not train(model, split.train, Training(SGD(0.05), batch_size=20, **settings)).reached:
        return None
    problem = fl.Problem(model, loss, split.train, test=split.test)
    report = fl.measure(fl.Lens(problem), [name for name in MEASURED if "." not in name])
    return {name: report[name].value for name in MEASURED}


def summary(rows: list[dict[str, float] | None], plain: list[dict[str, float] | None]) -> dict[str, Any]:
    """Return means over seeds, and the mean difference to plain SGD with the same seed with its 95% interval."""
    pairs = [(row, other) for row, other in zip(rows, plain, strict=True) if row is not None and other is not None]
    found: dict[str, Any] = {"diverged": len(rows) - len(pairs)}
    for name in MEASURED if len(pairs) > 2 else ():
        differences = [row[name] - other[name] for row, other in pairs]
        middle = statistics.fmean(differences)
        reach = float(student.ppf(0.975, len(pairs) - 1)) * statistics.stdev(differences) / len(pairs) ** 0.5
        mean = statistics.fmean(row[name] for row, _ in pairs)
        found[name] = {"mean": mean, "difference": middle, "interval": [middle - reach, middle + reach]}
    return found


def gains(split: Split, loss: str, seeds: int) -> dict[str, Any]:
    rows = {name: [measured(split, loss, how, seed) for seed in range(seeds)] for name, how in WAYS.items()}
    found = {name: summary(each, rows["plain SGD"]) for name, each in rows.items()}
    for name, each in found.items():
        print(loss, name, {key: f"{each[key]['mean']:.4g}" for key in MEASURED if key in each}, flush=True)
    return found


def prices(network: str, repeats: int) -> dict[str, Any]:
    """Return the seconds of ten steps, and their ratio to plain SGD."""
    model, batch = NETWORKS[network]
    x = torch.randn(batch, generator=torch.Generator().manual_seed(0))
    targets = torch.eye(10)[torch.arange(len(x)) % 10]

    def steps(how: dict[str, Any]) -> Callable[[], None]:
        stepper = Stepper(model.build(), Training(SGD(1e-4), max_steps=1, **how))

        def run() -> None:
            for _ in range(10):
                stepper.take(x, targets, 1.0)

        return run

    seconds = machine.interleaved({name: steps(how) for name, how in TIMED.items()}, repeats)
    plain = statistics.median(seconds["plain SGD"])
    found = {name: machine.spread(each) | {"ratio": statistics.median(each) / plain} for name, each in seconds.items()}
    print(network, {name: round(each["ratio"], 2) for name, each in found.items()}, flush=True)
    return {"batch": batch, "seconds_of_10_steps": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    split = digits(train=200)
    found = {
        "n": 200, "network": "64-64-64-10 ReLU", "seeds": options.seeds, "repeats": options.repeats,
        "gains": {loss: gains(split, loss, options.seeds) for loss in LOSSES},
        "prices": {network: prices(network, options.repeats) for network in NETWORKS},
    }  # fmt: skip
    machine.save("regulariser", found)


if __name__ == "__main__":
    main()
