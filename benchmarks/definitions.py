"""The pass beside the compression paper's definitions read literally: `python -m benchmarks.definitions [--repeats 3]`.

MLP 784-512-512-512-10, n = 100, cross-entropy, float32 with sums in float64 on both sides. The literal side takes, for
every sample, the Jacobian of the outputs with respect to each layer's input or each parameter, by one backward per
output, and writes it out. From these it computes S, the Gauss-Newton trace, MLS, NMLS and the normalised and
input-invariant MLS, log volume and dimension of every layer, the adaptive sharpness of Lemma E.2 and that of Eq. 35.
`each by itself` has a separate loop for each of these; in `from one loop` they share the Jacobians. flatlens gives
these and all its other measures of one pass, for every layer. A second comparison adds Eq. 36, whose minimum the
literal side finds by L-BFGS, and everything else that flatlens measures by default. The table has the values of both
sides, the seconds (median, quartiles) and their ratios.

For the relative flatness of all layers by a literal Definition 3, which needs a Hessian row for each of a layer's d m
weights, the seconds are the median of `ROWS` random rows times d m. Its value would be the sum over all rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from benchmarks.timed import mlp

WIDTHS, N_SAMPLES, ROWS = (784, 512, 512, 512, 10), 100, 20
LAYERS = ("0", "2", "4", "6")


def case() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return the network, its samples and their labels."""
    torch.manual_seed(0)
    return mlp(*WIDTHS), torch.randn(N_SAMPLES, WIDTHS[0]), torch.randint(WIDTHS[-1], (N_SAMPLES,))


@dataclass
class Sample:
    """The inputs of the definitions for one sample."""

    x: Tensor
    C: Tensor  #: output Hessian, (N, N)
    to_inputs: dict[str, Tensor]  #: df/dx for each layer's input, (N, M)
    to_parameters: dict[str, Tensor]  #: df/dtheta for each parameter, (N, size)
    values: dict[str, Tensor]  #: values of each parameter, (size,)


def looked_at(net: nn.Sequential, x: Tensor, which: Collection[str]) -> Sample:
    """Return one sample's Jacobians, written out; `which` contains "inputs", "parameters" or both."""
    inputs: dict[str, Tensor] = {}
    h = x[None]
    for number, module in enumerate(net):
        if str(number) in LAYERS:
            h = h.detach().requires_grad_() if not inputs else h
            inputs[str(number)] = h
        h = module(h)
    parameters: dict[str, Tensor] = dict(net.named_parameters())
    at = (inputs if "inputs" in which else {}) | (parameters if "parameters" in which else {})
    rows = [torch.autograd.grad(h[0, k], list(at.values()), retain_graph=True) for k in range(h.shape[1])]
    found = {name: torch.stack([row[i].flatten() for row in rows]) for i, name in enumerate(at)}
    p = h.detach()[0].double().softmax(0)
    to_inputs = {name: J for name, J in found.items() if name in LAYERS}
    to_parameters = {name: J for name, J in found.items() if name not in LAYERS}
    values = {name: theta.detach().flatten() for name, theta in parameters.items()}
    return Sample(x, p.diag() - p[:, None] * p, to_inputs, to_parameters, values)


def size(J: Tensor) -> float:
    return float(J.square().sum(dtype=torch.float64))


def norm(J: Tensor) -> float:
    return float(torch.linalg.svdvals(J.double())[0])


def curved(s: Sample, J: Tensor) -> Tensor:
    """Return the diagonal of J^T C J."""
    return ((s.C.to(J) @ J) * J).sum(0).double()


def dimension(J: Tensor) -> float:
    squares = torch.linalg.svdvals(J.double()).square()
    return float(squares.sum() ** 2 / squares.square().sum())


FIRST = LAYERS[0]
DEFINITIONS: dict[str, tuple[str, Callable[[Sample], float]]] = {
    "interpolation_sharpness": ("parameters", lambda s: sum(map(size, s.to_parameters.values()))),
    "ggn_trace": ("parameters", lambda s: sum(float(curved(s, J).sum()) for J in s.to_parameters.values())),
    "adaptive_sharpness_ggn": (
        "parameters",
        lambda s: sum(float(curved(s, J) @ s.values[name].double() ** 2) for name, J in s.to_parameters.items()),
    ),
    "nmls": ("inputs", lambda s: sum(map(norm, s.to_inputs.values()))),
    "normalized_mls": ("inputs", lambda s: size(s.x) * norm(s.to_inputs[FIRST]) ** 2),
    "input_invariant_mls": ("inputs", lambda s: size(s.to_inputs[FIRST] * s.x)),
    **{f"squares {one}": ("parameters", lambda s, one=one: size(s.to_parameters[f"{one}.weight"])) for one in LAYERS},
    **{f"mls {one}": ("inputs", lambda s, one=one: norm(s.to_inputs[one])) for one in LAYERS},
    **{
        f"log_volume {one}": (
            "inputs",
            lambda s, one=one: float(torch.linalg.svdvals(s.to_inputs[one].double()).log().sum()),
        )
        for one in LAYERS
    },
    **{f"local_dimension {one}": ("inputs", lambda s, one=one: dimension(s.to_inputs[one])) for one in LAYERS},
}
TOGETHER = [
    [name for name in DEFINITIONS if name.split()[0] == kind]
    for kind in dict.fromkeys(n.split()[0] for n in DEFINITIONS)
]


def literal(net: nn.Sequential, x: Tensor, *, apart: bool, minimise: bool = False) -> dict[str, float]:
    """Return the means over samples: one loop per definition if `apart`, else all from the same Jacobians."""
    totals: dict[str, float] = defaultdict(float)
    for names in TOGETHER if apart else [list(DEFINITIONS)]:
        which = {DEFINITIONS[name][0] for name in names}
        for sample in x:
            seen = looked_at(net, sample, which)
            for name in names:
                totals[name] += DEFINITIONS[name][1](seen) / len(x)
    weights = {name: net.get_parameter(f"{name}.weight").detach().double() for name in LAYERS}
    for name, W in weights.items():
        totals["matrix_normalized_sharpness"] += (
            float(torch.linalg.matrix_norm(W, 2)) * totals.pop(f"squares {name}") ** 0.5
        )
    if minimise:
        diagonals = {name: torch.zeros_like(W) for name, W in weights.items()}
        for sample in x:
            seen = looked_at(net, sample, {"parameters"})
            for name, H in diagonals.items():
                H += curved(seen, seen.to_parameters[f"{name}.weight"]).reshape(H.shape) / len(x)
        totals |= {f"normalized_sharpness {name}": equation_36(H, weights[name]) for name, H in diagonals.items()}
    return dict(totals)


def equation_36(H: Tensor, W: Tensor) -> float:
    """Return min over s, s' of sum_ij H_ij (s_i s'_j)^2 + W_ij^2 / (4 (s_i s'_j)^2), over their logarithms."""
    a, b = (torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in H.shape)
    descent = torch.optim.LBFGS(
        [a, b], max_iter=500, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def value() -> Tensor:
        product = (2 * a[:, None] + 2 * b).exp()
        total: Tensor = (H * product + W.square() / (4 * product)).sum()
        return total

    def closure() -> Tensor:
        descent.zero_grad()
        total = value()
        total.backward()
        return total

    descent.step(closure)
    return float(value().detach())


def ours(net: nn.Sequential, x: Tensor, y: Tensor, measures: list[str] | None = None) -> fl.Report:
    """Return flatlens's report of the given measures, by default of all that it measures unasked."""
    return fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), measures)


def of_the_pass(report: fl.Report) -> list[str]:
    """Return the names of a report's measures from the one pass, except the one that then minimises."""
    here = {measure for measure, _ in report}
    cards = [card for card in fl.catalogue() if card.name in here and card.cost.startswith("one pass")]
    return [card.name for card in cards if card.name != "normalized_sharpness"]


def definition_3(net: nn.Sequential, x: Tensor, y: Tensor, layer: str) -> float:
    """Return the seconds of one layer's literal relative flatness: a Hessian row for each weight."""
    weight = net.get_parameter(f"{layer}.weight")
    picked = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(0))[:ROWS].tolist()
    start = time.perf_counter()
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), weight, create_graph=True)
    once, taken = time.perf_counter() - start, []
    for index in picked:
        start = time.perf_counter()
        torch.autograd.grad(slope.flatten()[index], weight, retain_graph=True)
        taken.append(time.perf_counter() - start)
    return once + statistics.median(taken) * weight.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    net, x, y = case()
    report = ours(net, x, y)
    names = of_the_pass(report)
    runs = {
        f"literal, {how}{', with Eq. 36' if minimise else ''}": partial(literal, net, x, apart=apart, minimise=minimise)
        for minimise in (False, True)
        for how, apart in (("each by itself", True), ("from one loop", False))
    }
    runs |= {
        "flatlens, all of one pass": partial(ours, net, x, y, names),
        "flatlens, all by default, with Eq. 36": partial(ours, net, x, y),
        "flatlens, relative flatness": partial(ours, net, x, y, ["relative_flatness"]),
    }
    seconds = machine.interleaved(runs, repeats)
    both: dict[str, Any] = {}
    for name, value in literal(net, x, apart=False, minimise=True).items():
        measure, _, layer = name.partition(" ")
        mine = report[measure, layer].value if layer else report[measure].value
        both[name] = {"literal": value, "flatlens": mine, "relative_difference": mine / value - 1}
    median = {who: statistics.median(times) for who, times in seconds.items()}
    rows = {layer: definition_3(net, x, y, layer) for layer in LAYERS}
    whole, one_pass = median["flatlens, all by default, with Eq. 36"], median["flatlens, all of one pass"]
    times_as_fast = {
        who: round(taken / (whole if "36" in who else one_pass), 1)
        for who, taken in median.items()
        if who.startswith("literal")
    }
    result = {
        "n": N_SAMPLES, "widths": WIDTHS, "repeats": repeats, "measures_of_one_pass": len(names), "values": both,
        "seconds": {who: machine.spread(times) for who, times in seconds.items()},
        "flatlens_times_as_fast_as": times_as_fast,
        "definition_3_seconds_by_layer": rows,
        "relative_flatness_times_as_fast": round(sum(rows.values()) / median["flatlens, relative flatness"]),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    machine.save("definitions", result)


if __name__ == "__main__":
    main()
