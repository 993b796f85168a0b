"""Measures of a network whose parameters are spread over the processes of torchrun; rank 0 writes the numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatlens as fl

NOISE = "gradient_noise_scale(batches=5)"
TOPS = ["sharpness(rtol=1e-05)", "preconditioned_sharpness(rtol=1e-05)"]
MEASURES = ["loss", "critical_sharpness", "directional_sharpness", NOISE, *TOPS, "mls"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(20, 6, generator=generator, dtype=torch.float64), torch.arange(20) % 3


def measured(net: nn.Module) -> dict[str, float | str]:
    """The numbers after three steps of Adam, and whether the weights are the very ones from before measuring."""
    x, y = data()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    before = [p.detach().clone() for p in net.parameters()]
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), optimiser=optimiser), MEASURES)
    same = all(bool((a - p.detach()).abs().max() == 0) for a, p in zip(before, net.parameters(), strict=True))
    values = {name: report[name].value for name in (*MEASURES, f"{NOISE}.covariance", f"{NOISE}.gradient")}
    notes = {"by": report[TOPS[0]].note.partition(";")[0], "note": report["mls"].note}
    return values | notes | {"stderr": report[NOISE].stderr, "unchanged": float(same)}


def main(out: str, how: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net: nn.Module = network()
    if how == "fsdp2":
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh)
    else:
        net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = measured(net)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
