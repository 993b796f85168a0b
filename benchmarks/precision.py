"""Intervals against float64, of networks trained in half precision: `python -m benchmarks.precision [--only WORDS]`.

Three small networks (an MLP, a convolutional network with GroupNorm, a transformer encoder) are trained in bfloat16 and
in float16, in four ways: with half parameters, under an autocast of their own, with casts in forward(), and by a
kernel that computes in half precision out of sight. At 17 steps of each training, four measures are compared
with their literal definitions in float64 at the same weights: double backward, a dense line search, the mean over 300
batches, an ascent with more starts and steps. The interval of a measure should hold that value in 89 of 100 sets of
weights, and in 94% of all; a number of kind "exact" holds it within 1e-4. Rows go to results/precision.csv.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

import flatlens as fl
from benchmarks import machine

ROWS = Path(__file__).parent / "results" / "precision.csv"
MEASURES = ("critical_sharpness", "directional_sharpness", "batch_sharpness", "worst_sharpness")
OPTIONS = {"batch_sharpness": "(samples=16, batches=8)", "worst_sharpness": "(restarts=1)"}
WAYS = ("parameters", "autocast", "casts", "function")
SHORT = (torch.bfloat16, torch.float16)
SAMPLES, BATCH, TRUE_BATCHES, STEPS = 64, 16, 300, 40
MOMENTS = (0, 2, 4, 7, 11, 16, 23, 32, 45, 60, 80, 105, 140, 180, 230, 300, 400)  #: steps of training
RHO = 0.05
EXACT = 1e-4  #: relative error within which a number of kind "exact" is right: the rounding of float32
ASCENT = 1e-3  #: relative error of the ascent in float64


class InHalf(torch.autograd.Function):
    """x W^T in half precision, as by a kernel of one's own: autograd and torch's modes see float32 alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, to: torch.dtype) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, weight)
        ctx.to = to
        return _product(x, weight, to)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:  # noqa: D102
        x, weight = ctx.saved_tensors
        (g,) = slopes
        rows, ahead = x.flatten(0, -2), g.flatten(0, -2)
        return InHalf.apply(g, weight.mT, ctx.to), InHalf.apply(ahead.mT, rows.mT, ctx.to), None


def _product(x: Tensor, weight: Tensor, to: torch.dtype) -> Tensor:
    with _disable_current_modes():
        return (x.to(to) @ weight.to(to).mT).to(x.dtype)


class Layer(nn.Module):
    """A dense layer with its activation, computed in another dtype in one of four ways."""

    def __init__(self, inputs: int, outputs: int, act: Callable[[Tensor], Tensor] = nn.Identity()) -> None:  # noqa: B008
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.act = act
        self.way, self.short = "", torch.float32

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.way == "function":
            return self.act(InHalf.apply(x, self.weight, self.short) + self.bias)
        if self.way == "casts":
            to, x = x.dtype, x.to(self.short)
            return self.act(F.linear(x, self.weight.to(self.short), self.bias.to(self.short))).to(to)
        return self.act(F.linear(x, self.weight, self.bias))


class Net(nn.Module):
    """A network on 36 numbers a sample, under an autocast of its own if that is its way."""

    def __init__(self, parts: dict[str, nn.Module], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.run = run
        self.way, self.short = "", torch.float32

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.way != "autocast":
            return self.run(self, x)
        with torch.autocast("cpu", self.short):
            return self.run(self, x).float()


def _mlp() -> Net:
    layers = nn.Sequential(Layer(36, 8, F.gelu), Layer(8, 8, F.gelu), Layer(8, 3))
    return Net({"layers": layers}, lambda net, x: net.layers(x))


def _conv() -> Net:
    def run(net: Any, x: Tensor) -> Tensor:
        patches = F.unfold(x.reshape(-1, 1, 6, 6), 3, stride=1).mT  # (n, 16, 9)
        h = F.gelu(net.norm(net.conv(patches).mT)).reshape(-1, 4, 4, 4)
        h = net.next(F.unfold(h, 3, stride=1).mT).mT  # (n, 4, 4)
        out: Tensor = net.head(h.flatten(1))
        return out

    parts = {"conv": Layer(9, 4), "norm": nn.GroupNorm(2, 4), "next": Layer(36, 4, F.gelu), "head": Layer(16, 3)}
    return Net(parts, run)


def _encoder() -> Net:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.embed(x.reshape(-1, 4, 9))
        q, k, v = (part.reshape(-1, 4, 2, 4).transpose(1, 2) for part in net.qkv(net.first(h)).chunk(3, -1))
        seen = (q @ k.mT / 2).softmax(-1) @ v
        h = h + net.out(seen.transpose(1, 2).reshape(-1, 4, 8))
        h = h + net.narrow(net.wide(net.second(h)))
        out: Tensor = net.head(h.mean(1))
        return out

    parts = {"embed": Layer(9, 8), "first": nn.LayerNorm(8), "qkv": Layer(8, 24), "out": Layer(8, 8),
             "second": nn.LayerNorm(8), "wide": Layer(8, 8, F.gelu), "narrow": Layer(8, 8),
             "head": Layer(8, 3)}  # fmt: skip
    return Net(parts, run)


@dataclass(frozen=True)
class Case:
    """A network and its training."""

    build: Callable[[], Net]
    optimiser: Callable[[Any], torch.optim.Optimizer]


CASES = {
    "mlp": Case(_mlp, lambda p: torch.optim.SGD(p, lr=0.1)),
    "conv": Case(_conv, lambda p: torch.optim.SGD(p, lr=0.05)),
    "encoder": Case(_encoder, lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-4)),
}


def in_way(net: Net, way: str, short: torch.dtype) -> Net:
    """Return a copy of a network that computes in this way."""
    found = copy.deepcopy(net)
    for module in found.modules():
        if isinstance(module, Net | Layer):
            module.way, module.short = way, short
    return found.to(short) if way == "parameters" else found


def plain(net: Net) -> Net:
    """Return the same network in float64, without casts."""
    return in_way(net, "", torch.float64).double()


def data() -> tuple[Tensor, Tensor]:
    """Return inputs in three overlapping classes."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(SAMPLES) % 3
    centres = torch.randn(3, 36, generator=draw) / 3
    return (centres[y] + torch.randn(SAMPLES, 36, generator=draw)), y


def trained(name: str, way: str, short: torch.dtype) -> Iterator[tuple[int, Net, torch.optim.Optimizer]]:
    """Yield (step, network, optimiser) at each moment of a training in minibatches."""
    torch.manual_seed(0)
    net, (x, y) = in_way(CASES[name].build(), way, short), data()
    optimiser, draw = CASES[name].optimiser(net.parameters()), torch.Generator().manual_seed(1)
    for step in range(MOMENTS[-1] + 1):
        if step in MOMENTS:
            yield step, net, optimiser
        rows = torch.randperm(SAMPLES, generator=draw)[:BATCH]
        optimiser.zero_grad()
        F.cross_entropy(net(x[rows].to(next(net.parameters()).dtype)).float(), y[rows]).backward()
        optimiser.step()


# Literal definitions in float64


class Truth:
    """The risk in float64 at the weights of a network, as a function of one vector."""

    def __init__(self, net: Net, optimiser: torch.optim.Optimizer) -> None:
        self.net, (x, y) = plain(net), data()
        self.x, self.y = x.double(), y
        self.shapes = {name: p.shape for name, p in self.net.named_parameters()}
        self.here = torch.cat([p.detach().flatten() for p in self.net.parameters()])
        self.gradient = grad(self.risk)(self.here)
        self.update = self._update(optimiser)

    def risk(self, theta: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """Return the mean loss, on all samples or on some."""
        parts = torch.split(theta, [shape.numel() for shape in self.shapes.values()])
        values = {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return F.cross_entropy(
            functional_call(self.net, values, self.x if x is None else x), self.y if y is None else y
        )

    def along(self, u: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """Return u^T H u / ||u||^2 by double backward."""
        product = grad(lambda theta: grad(self.risk)(theta, x, y) @ u)(self.here)
        return product @ u / (u @ u)

    def _update(self, optimiser: torch.optim.Optimizer) -> Tensor:
        """Return what the optimiser subtracts next, at learning rate 1, from its own state in float64."""
        group = optimiser.param_groups[0]
        twin = type(optimiser)(self.net.parameters(), **{k: group[k] for k in ("lr", "eps") if k in group})
        for p, own in zip(self.net.parameters(), optimiser.param_groups[0]["params"], strict=True):
            if own in optimiser.state:
                twin.state[p] = {k: v.clone() if k == "step" else v.double() for k, v in optimiser.state[own].items()}
        pieces = torch.split(self.gradient, [p.numel() for p in self.net.parameters()])
        for p, piece in zip(self.net.parameters(), pieces, strict=True):
            p.grad = piece.reshape(p.shape)
        twin.step()
        there = torch.cat([p.detach().flatten() for p in self.net.parameters()])
        return (self.here - there) / optimiser.param_groups[0]["lr"]

    def critical(self) -> float:
        """Return 2 / eta, eta the first zero of the risk's change along the update; NaN where it rises at once."""
        if not float(self.update @ self.gradient) > 0:
            return math.nan
        here, slope = self.risk(self.here), float(self.update @ self.gradient)
        steps = slope / max(abs(float(self.along(self.update) * (self.update @ self.update))), 1e-12)
        steps = steps * torch.logspace(-2, 3, 500, dtype=torch.float64)
        for _ in range(4):  # the first rise, and between its neighbours again
            rises = vmap(self.risk, chunk_size=100)(self.here - steps[:, None] * self.update) > here
            if not bool(rises.any()):
                return 0.0
            first = int(rises.to(torch.uint8).argmax())
            steps = torch.linspace(
                float(steps[first - 1]) if first else 0.0, float(steps[first]), 100, dtype=torch.float64
            )
        return 2 / float(steps[-1])

    def batches(self) -> Tensor:
        """Return g_B^T H_B g_B / ||g_B||^2 of many batches."""
        draw = torch.Generator().manual_seed(7)
        rows = torch.stack([torch.randperm(SAMPLES, generator=draw)[:BATCH] for _ in range(TRUE_BATCHES)])

        def one(x: Tensor, y: Tensor) -> Tensor:
            return self.along(grad(self.risk)(self.here, x, y), x, y)

        return vmap(one, chunk_size=100)(self.x[rows], self.y[rows])

    def worst(self) -> float:
        """Return the largest rise in the ball, by ascent from 6 starts at once."""
        draw = torch.Generator().manual_seed(9)
        starts = torch.cat([self.gradient[None], torch.randn(5, len(self.here), generator=draw, dtype=torch.float64)])
        e, best, both = RHO * F.normalize(starts), -math.inf, vmap(torch.func.grad_and_value(self.risk))
        for step in range(STEPS):
            g, value = both(self.here + e)
            best = max(best, float(value.max()))
            e = e + RHO * min(1.0, 2 - 2 * step / STEPS) * F.normalize(g)
            e = e * (RHO / e.norm(dim=1, keepdim=True).clamp(min=RHO))
        return best - float(self.risk(self.here))


def held(name: str, found: fl.Estimate, truth: Truth) -> tuple[bool, float]:
    """Return whether the interval of a measure holds its value in float64, and that value."""
    if name == "worst_sharpness":
        true = truth.worst()
        return found.value <= true * (1 + ASCENT), true
    if name == "batch_sharpness":
        values = truth.batches()
        true, own = float(values.mean()), float(values.std()) / len(values) ** 0.5
        return abs(found.value - true) <= 1.96 * math.hypot(found.stderr, own), true
    true = truth.critical() if name == "critical_sharpness" else float(truth.along(truth.update))
    return abs(found.value - true) <= max(found.margin, EXACT * abs(true)), true


def case(name: str, way: str, short: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield the results of one training."""
    for step, net, optimiser in trained(name, way, short):
        lens = fl.Lens(fl.Problem(net, "cross_entropy", data()), optimiser=optimiser)
        asked = [measure + OPTIONS.get(measure, "") for measure in MEASURES]
        report = fl.measure(lens, asked, generator=torch.Generator().manual_seed(step))
        truth = Truth(net, optimiser)
        for measure, key in zip(MEASURES, report.measures(), strict=True):
            found = report[key]
            holds, true = held(measure, found, truth) if found.kind != "undefined" else (False, math.nan)
            yield {"network": name, "way": way, "short": str(short).removeprefix("torch."), "step": step,
                   "measure": measure, "value": found.value, "margin": found.margin, "kind": found.kind,
                   "true": true, "off": abs(found.value - true), "holds": holds, "note": found.note}  # fmt: skip


def summary(rows: pd.DataFrame) -> str:
    """Return by way, precision and measure how many intervals hold the value in float64, and how wide they are."""
    lines = [
        "| how | measure | sets of weights | undefined | held | error, % | half-width, % |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (way, short, measure), own in rows.groupby(["way", "short", "measure"], sort=False):
        there = own[own["kind"] != "undefined"]
        off, width = ((there[of] / there["true"].abs()).median() for of in ("off", "margin"))
        held = f"{int(there['holds'].sum())} of {len(there)}"
        sizes = f"{len(own)} | {len(own) - len(there)} | {held} | {100 * off:.2g} | {100 * width:.2g}"
        lines.append(f"| {short}, {way} | `{measure}` | {sizes} |")
    there = rows[rows["kind"] != "undefined"]
    return "\n".join([*lines, f"All: {there['holds'].mean():.3f} of {len(there)}."])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="words of the networks, ways and precisions to run")
    options.add_argument("--rows", type=Path, default=ROWS, help="file whose rows of the same cases are replaced")
    options.add_argument("--no-run", action="store_true", help="only show what was measured")
    chosen, found = options.parse_args(), list[dict[str, Any]]()
    torch.set_num_threads(1)
    cases = [(name, way, short) for way in WAYS for short in SHORT for name in CASES]
    for name, way, short in [] if chosen.no_run else cases:
        spelled = f"{name} {way} {str(short).removeprefix('torch.')}"
        if set(chosen.only.split()) <= set(spelled.split()):
            print(spelled, file=sys.stderr)
            found += case(name, way, short)
    rows = machine.merged(chosen.rows, pd.DataFrame(found), ["network", "way", "short"])
    order = [*CASES, *WAYS, *(str(short).removeprefix("torch.") for short in SHORT)]
    rows = rows.sort_values(["way", "short", "network"], key=lambda own: own.map(order.index), kind="stable")
    rows.to_csv(chosen.rows, index=False)
    print(summary(rows))


if __name__ == "__main__":
    main()
