"""The one pass beside its floor: `python -m benchmarks.one_pass [--repeats 7]`.

The floor is one `torch.autograd.grad(..., is_grads_batched=True)` to the network's input and all its weights, with
the N unit vectors as cotangents, in the same chunks: what autograd itself takes to touch every Jacobian once, its
weight gradients summed over the samples of a chunk. The pass gives, per sample and layer, G, K (weight and bias), R,
C and ||x||^2; `with diagonals` also the Gauss-Newton diagonal, the column sums and the adaptive sums. Peak
memory is the growth over the resident size just before, in a child process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import nn

import flatlens as fl
from benchmarks import machine
from flatlens.grams import lay_out, one_pass
from flatlens.grams.one_pass import ALL, CHUNK

N_SAMPLES, N_OUTPUTS = 2000, 10


def mlp() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, N_OUTPUTS))
    return net, torch.randn(N_SAMPLES, 784)


def lenet() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, N_OUTPUTS),
    )  # fmt: skip
    return net, torch.randn(N_SAMPLES, 3, 32, 32)


NETWORKS = {"MLP 784-512-512-10": mlp, "LeNet 3x32x32": lenet}


def contestants(name: str) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    net, x = NETWORKS[name]()
    y = torch.randint(0, N_OUTPUTS, (N_SAMPLES,))
    problem = fl.Problem(net, "cross_entropy", (x, y))
    layout = lay_out(problem, net)
    weights = [p for key, p in net.named_parameters() if key.endswith("weight")]

    def floor(chunk: int = CHUNK) -> None:
        for start in range(0, N_SAMPLES, chunk):
            batch = x[start : start + chunk].detach().requires_grad_()
            f = net(batch)
            units = torch.eye(N_OUTPUTS)[:, None].expand(N_OUTPUTS, len(f), N_OUTPUTS)
            torch.autograd.grad(f, [batch, *weights], units, is_grads_batched=True)

    def the_pass(diagonals: bool = False) -> None:
        for chunk in one_pass(
            problem, net, layout, needs=(*ALL, "diagonal", "columns", "adaptive") if diagonals else ALL
        ):
            for g in chunk.layers.values():
                _ = g.G, g.K, g.R, g.C, g.x_norm2
                if diagonals:
                    _ = g.linear.diagonal(), g.linear.columns(), g.adaptive

    def measures() -> None:
        fl.measure(fl.Lens(problem))

    return {
        "floor": floor,
        "floor in chunks of 128": lambda: floor(128),  # autograd's own batched call likes smaller ones on LeNet
        "pass": the_pass,
        "with diagonals": lambda: the_pass(True),
        "fl.measure": measures,
    }


def memory(name: str, who: str) -> int:
    """Growth of the resident size in bytes, in a child process of its own."""
    code = (
        "from benchmarks import machine, one_pass\n"
        f"run = one_pass.contestants({name!r})[{who!r}]\n"
        "print(machine.growth(run))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=7)
    repeats = options.parse_args().repeats
    rows = {}
    for name in NETWORKS:
        seconds = machine.interleaved(contestants(name), repeats)
        floor = statistics.median(seconds["floor"])
        rows[name] = {
            who: {
                **machine.spread(times),
                "ratio_to_floor": round(statistics.median(times) / floor, 3),
                "memory_growth_mib": round(memory(name, who) / 2**20, 1),
            }
            for who, times in seconds.items()
        }
    path = machine.save(
        "one_pass", {"n": N_SAMPLES, "outputs": N_OUTPUTS, "chunk": CHUNK, "repeats": repeats, "networks": rows}
    )
    print(json.dumps(rows, indent=1))
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
