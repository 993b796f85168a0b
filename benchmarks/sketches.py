"""A thousand outputs by a few combinations of them: `python -m benchmarks.sketches [--probes 16] [--threads 2]`.

ResNet-18 on 32 x 32 noise, n = 256, cross-entropy. The floor of an exact pass is only its backward passes, one for each
output, to all weights and the input at once: 20 are timed and multiplied by 50. Beside it each measure has a lens of
its own, which includes the plan and everything else, and one lens measures all three. Values are checked at n = 8,
where the exact pass takes every output. About ten minutes, most of them for the check; `--no-check` leaves it out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import flatlens as fl
from benchmarks import machine
from benchmarks.resnet import resnet18

OUTPUTS, SAMPLES, CHECKED, TIMED = 1000, 256, 8, 20
FEW = 4  #: number of probes that suffices for 2%
MEASURES = ["interpolation_sharpness", "ggn_trace", "mls"]


def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return x[:n], torch.randint(OUTPUTS, (SAMPLES,), generator=generator)[:n]


def some_backwards(net: nn.Module, x: torch.Tensor) -> None:
    """Run `TIMED` of the N backward passes, to all weights and the input."""
    x = x.clone().requires_grad_()
    f, at = net(x), [x, *net.parameters()]
    for k in range(TIMED):
        torch.autograd.grad(f[:, k].sum(), at, retain_graph=True)


def measured(problem: fl.Problem, names: list[str], outputs: Any, seed: int = 0) -> fl.Report:
    return fl.measure(fl.Lens(problem, outputs=outputs), names, generator=torch.Generator().manual_seed(seed))


def row(estimate: fl.Estimate) -> dict[str, Any]:
    residuals = estimate.arrays.get("residuals")
    return {
        "value": estimate.value,
        "kind": estimate.kind,
        "relative_stderr": estimate.stderr / estimate.value,
        "residual_of_the_square": None if residuals is None else float(residuals.max()),
    }


def check(net: nn.Module, probes: int) -> dict[str, Any]:
    """Compare all outputs of a few samples with combinations of them."""
    problem = fl.Problem(net, "cross_entropy", data(CHECKED), memory="4GiB")
    exact, sketched = measured(problem, MEASURES, "exact"), measured(problem, MEASURES, probes, seed=1)
    found: dict[str, Any] = {"n": CHECKED, "probes": probes, "seconds_exact": exact["mls"].seconds}
    for name in MEASURES:
        a, b = exact[name], sketched[name]
        found[name] = {"exact": a.value, **row(b), "relative_error": b.value / a.value - 1}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    net = resnet18(OUTPUTS)
    x, y = data(SAMPLES)
    problem = fl.Problem(net, "cross_entropy", (x, y), memory="4GiB")
    contestants: dict[str, Callable[[], Any]] = {"backwards": lambda: some_backwards(net, x)}
    for name in MEASURES:
        contestants[name] = lambda name=name: measured(problem, [name], options.probes)
    contestants["together"] = lambda: measured(problem, MEASURES, options.probes)
    contestants[f"together, {FEW} probes"] = lambda: measured(problem, MEASURES, FEW)
    seconds = machine.interleaved(contestants, options.repeats)
    exact = statistics.median(seconds["backwards"]) * OUTPUTS / TIMED
    found = measured(problem, MEASURES, options.probes)
    rows: dict[str, Any] = {name: row(found[name]) for name in MEASURES}
    rows["together"] = {}
    few = measured(problem, MEASURES, FEW)
    rows[f"together, {FEW} probes"] = {name: row(few[name]) for name in MEASURES}
    for name, entry in rows.items():
        entry |= machine.spread(seconds[name])
        entry["share_of_exact"] = statistics.median(seconds[name]) / exact
        print(name, entry)
    result = {
        "network": "ResNet-18", "n": SAMPLES, "input": [3, 32, 32], "outputs": OUTPUTS, "probes": options.probes,
        "repeats": options.repeats, "seconds_of_all_backwards": exact, "measures": rows,
    }  # fmt: skip
    if not options.no_check:
        result["check"] = check(net, 8 * options.probes)
        print(result["check"])
    machine.save("sketches", result)


if __name__ == "__main__":
    main()
