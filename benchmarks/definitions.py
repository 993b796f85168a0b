"""The pass beside a literal reading of the compression paper: `python -m benchmarks.definitions [--repeats 3]`.

MLP 784-512-512-512-10, n = 100, cross-entropy, one batch. Literally: for every sample, a Jacobian of the outputs to the
input of each layer and to each weight by one backward per output, and from these, layer by layer, the sharpness
S = mean_i ||J_i||_F^2, MLS, log volume and dimension, and the Gauss-Newton trace with the loss's C. flatlens gives them
and all its other one-pass measures, of all layers. The table has both values of what both give, the seconds of each
(median, quartiles) and their ratio.

Relative flatness of the 512 x 512 layers by a literal Definition 3, a Hessian row for each of d m weights: as long
as it takes for `ROWS` of them, drawn at random, times d m / ROWS; its value would be the sum over all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine

WIDTHS, N_SAMPLES, ROWS = (784, 512, 512, 512, 10), 100, 20
LAYERS = ("0", "2", "4", "6")


def case() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for into, out in pairwise(WIDTHS):
        parts += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*parts[:-1]), torch.randn(N_SAMPLES, WIDTHS[0]), torch.randint(WIDTHS[-1], (N_SAMPLES,))


def literal(net: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, float]:
    """One sample after the other, its Jacobians written out."""
    parameters = list(net.parameters())
    totals: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        totals[name] = totals.get(name, 0.0) + value / len(x)

    for sample in x:
        inputs: list[Tensor] = []
        h = sample[None]
        for number, module in enumerate(net):
            if str(number) in LAYERS:
                h = h.detach().requires_grad_() if not inputs else h
                inputs.append(h)
            h = module(h)
        p = h.detach()[0].double().softmax(0)
        C = p.diag() - p[:, None] * p
        at = [*inputs, *parameters]
        rows = [torch.autograd.grad(h[0, k], at, retain_graph=True) for k in range(h.shape[1])]
        jacobians = [torch.stack([row[i].flatten() for row in rows]) for i in range(len(at))]
        to_parameters = jacobians[len(inputs) :]
        add("interpolation_sharpness", sum(float(J.square().sum(dtype=torch.float64)) for J in to_parameters))
        add("ggn_trace", sum(float((C * (J @ J.T)).sum()) for J in to_parameters))
        for name, J in zip(LAYERS, jacobians, strict=False):
            values = torch.linalg.svdvals(J.double())
            add(f"mls {name}", float(values[0]))
            add(f"log_volume {name}", float(values.log().sum()))
            squares = values.square()
            add(f"local_dimension {name}", float(squares.sum() ** 2 / squares.square().sum()))
    return totals


def ours(net: nn.Sequential, x: Tensor, y: Tensor, measures: str | None = None) -> fl.Report:
    """Everything that one pass gives, or some of it."""
    return fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), measures)


def definition_3(net: nn.Sequential, x: Tensor, y: Tensor, layer: str) -> float:
    """Seconds of a literal relative flatness of one layer: a Hessian row of each weight."""
    weight = net.get_parameter(f"{layer}.weight")
    picked = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(0))[:ROWS].tolist()
    start = time.perf_counter()
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), weight, create_graph=True)
    for index in picked:
        torch.autograd.grad(slope.flatten()[index], weight, retain_graph=True)
    return (time.perf_counter() - start) * weight.numel() / ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    net, x, y = case()
    seconds = machine.interleaved({"literal": lambda: literal(net, x, y), "flatlens": lambda: ours(net, x, y)}, repeats)
    report, values = ours(net, x, y), literal(net, x, y)
    both = {}
    for name, value in values.items():
        measure, _, layer = name.partition(" ")
        mine = report[measure, layer].value if layer else report[measure].value
        both[name] = {"literal": value, "flatlens": mine}
    flatness = {"flatlens": lambda: ours(net, x, y, "relative_flatness")}
    taken = statistics.median(machine.interleaved(flatness, repeats)["flatlens"])
    rows = {layer: definition_3(net, x, y, layer) for layer in LAYERS}
    ratio = statistics.median(seconds["literal"]) / statistics.median(seconds["flatlens"])
    result = {
        "n": N_SAMPLES, "widths": WIDTHS, "repeats": repeats, "values": both,
        "seconds": {who: machine.spread(times) for who, times in seconds.items()}, "times_as_fast": round(ratio, 1),
        "relative_flatness": {
            "flatlens, all layers": round(taken, 4), "Definition 3, by layer": rows,
            "times_as_fast": round(sum(rows.values()) / taken),
        },
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    print(f"written to {machine.save('definitions', result)}", file=sys.stderr)


if __name__ == "__main__":
    main()
