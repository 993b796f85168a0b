"""Measures of networks whose parameters are spread over the processes of torchrun; rank 0 writes the numbers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatlens as fl

NOISE = "gradient_noise_scale(batches=5)"
TOPS = ["sharpness(rtol=1e-05)", "preconditioned_sharpness(rtol=1e-05)"]
DIRECTIONAL = ["critical_sharpness", "directional_sharpness"]
MEASURES = ["loss", *DIRECTIONAL, "directional_sharpness(along='gradient')", NOISE, *TOPS, "mls"]
KINDS = {
    "tanh, float64": (nn.Tanh, torch.float64),
    "relu, float64": (nn.ReLU, torch.float64),
    "relu, float32": (nn.ReLU, torch.float32),
}
WRAPPED = {"fsdp2": (0, 2), "fsdp2, the head in the outermost": (0,), "fsdp2, all in the outermost": ()}
"""Layers with a group of their own; the outermost module, which stays whole after a forward, has the others."""


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    activation, dtype = KINDS[kind]
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 3)).to(dtype)


def data(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(20, 6, generator=generator, dtype=KINDS[kind][1]), torch.arange(20) % 3


def validated(net: nn.Module, x: Tensor) -> None:
    """A forward without a backward, after which the outermost module of FSDP2 keeps its parameters whole."""
    with torch.no_grad():
        net(x)


def measured(net: nn.Module, kind: str) -> dict[str, Any]:
    """The numbers after three steps of Adam, and whether the weights are the very ones from before measuring."""
    x, y = data(kind, seed=1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    before = [p.detach().clone() for p in net.parameters()]
    validated(net, x)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    report = fl.measure(fl.Lens(problem, optimiser=optimiser), MEASURES)
    along = {"a vector": {name: torch.ones(p.shape, dtype=p.dtype) for name, p in net.named_parameters()},
             "another loss": fl.Problem(net, "half_squared_error", data(kind, seed=2))}  # fmt: skip
    aside = dict[str, float]()
    validated(net, x)
    for what, direction in along.items():
        found = fl.measure(fl.Lens(problem, along=direction), DIRECTIONAL)
        aside |= {f"{name} along {what}": found[name].value for name in DIRECTIONAL}
    same = all(bool((a - p.detach()).abs().max() == 0) for a, p in zip(before, net.parameters(), strict=True))
    values = {name: report[name].value for name in (*MEASURES, f"{NOISE}.covariance", f"{NOISE}.gradient")}
    notes = {"by": report[TOPS[0]].note.partition(";")[0], "note": report["mls"].note}
    return values | aside | notes | {"margin": report[NOISE].margin, "unchanged": float(same)}


def while_accumulating(net: Any, kind: str) -> dict[str, float]:
    """A measure before and while a gradient waits to be added up, and the change of that gradient by measuring."""
    x, y = data(kind, seed=1)
    problem, name = fl.Problem(net, "cross_entropy", (x, y)), "directional_sharpness(along='gradient')"

    def gradient(between: Callable[[], object]) -> list[Tensor]:
        net.zero_grad()
        for part in range(2):
            net.set_requires_gradient_sync(part == 1)
            nn.functional.cross_entropy(net(x[10 * part :][:10]), y[10 * part :][:10]).backward()
            if part == 0:
                between()
        return [p.grad.full_tensor() for p in net.parameters()]

    seen = [fl.measure(fl.Lens(problem), name)[name].value]
    plain = gradient(lambda: None)
    measured = gradient(lambda: seen.append(fl.measure(fl.Lens(problem), name)[name].value))
    moved = max(float((a - b).abs().max()) for a, b in zip(plain, measured, strict=True))
    return {"accumulating": seen[1] / seen[0], "gradient moved": moved}


def narrowed(mesh: DeviceMesh) -> dict[str, list[Any]]:
    """(value, half-width, its value in float64, note) of a network whose parameters are gathered in bfloat16."""
    (x, y), found = data("tanh, float64", seed=1), []
    for dtype, policy in ((torch.float32, MixedPrecisionPolicy(torch.bfloat16, torch.float32)), (torch.float64, None)):
        net = network("tanh, float64").float().to(dtype)
        for layer in [net[0], net[2], net] if policy is not None else []:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        lens = fl.Lens(fl.Problem(net, "cross_entropy", (x.to(dtype), y)), optimiser=optimiser)
        found.append(fl.measure(lens, DIRECTIONAL))
    coarse, fine = found
    return {key: [coarse[key].value, coarse[key].margin, fine[key].value, coarse[key].note] for key in DIRECTIONAL}


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """What is said of processes that differ, of networks on part of them, and of trackers that came before."""
    me, (x, y) = dist.get_rank(), data("tanh, float64", seed=1)
    other, alone = x.clone(), init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "parts"))
    other[12] += me

    def spread(over: DeviceMesh = mesh) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        fully_shard(net, mesh=over)
        return net

    def problem(net: nn.Module, samples: Tensor = x, **more: Any) -> fl.Problem:
        return fl.Problem(net, "cross_entropy", (samples, y[: len(samples)]), **more)

    def of_its_own() -> fl.Lens:
        net = spread()
        known = problem(net)
        net[1].running_var += me
        return fl.Lens(known)

    def late() -> object:
        net = nn.Sequential(nn.Linear(6, 3)).double()
        tracker = fl.Tracker(problem(net), "loss", budget=0.5, live=False)
        fully_shard(net, mesh=mesh)
        return tracker.step(0)

    cases: dict[str, Callable[[], object]] = {
        "the buffers of rank 1 differ from those of rank 0, the first in '1.running_var'": of_its_own,
        "the values of rank 1 differ": lambda: problem(spread(), other),
        "the shapes of rank 1 differ": lambda: problem(spread(), x[: 20 - me]),
        "spread over 1 of the 2 processes": lambda: problem(spread(alone["parts"])),
        "the network's parameters are spread": lambda: problem(spread(), ranks=fl.Ranks.joined()),
        "processes that measure together would skip": late,
    }
    found = {}
    for words, work in cases.items():
        try:
            work()
            found[words] = "no error"
        except fl.FlatlensError as error:
            found[words] = str(error)
    return found


def of_case(how: str, kind: str, mesh: DeviceMesh) -> dict[str, Any]:
    """What is found of one kind of network, spread in one way."""
    net: nn.Module = network(kind)
    if how in WRAPPED:
        for layer in [net[number] for number in WRAPPED[how]] + [net]:
            fully_shard(layer, mesh=mesh)
    else:
        net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = measured(net, kind)
    told: list[object] = []
    tracker = fl.Tracker(fl.Problem(net, "cross_entropy", data(kind, seed=1)), "loss", live=False, log=told.append)
    assert tracker.step(0) is not None
    later = nn.Sequential(nn.Linear(6, 3)).to(KINDS[kind][1])
    tracker = fl.Tracker(fl.Problem(later, "cross_entropy", data(kind, seed=1)), "loss", live=False, log=told.append)
    fully_shard(later, mesh=mesh)
    assert tracker.step(0) is not None
    found["told"] = [0] * dist.get_world_size()
    dist.all_gather_object(found["told"], len(told))
    return found | while_accumulating(net, kind) if how in WRAPPED else found


def main(out: str, cases: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {f"{how}, {kind}": of_case(how, kind, mesh) for how, kind in json.loads(cases)}
    found |= {"refused": refused(mesh), "narrowed": narrowed(mesh)}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    try:
        dist.barrier()  # nobody leaves while another still sends
    finally:
        os._exit(0)  # gloo's threads that live at exit, or while their group is destroyed, may abort the process


if __name__ == "__main__":
    main(*sys.argv[1:])
