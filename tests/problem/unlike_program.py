"""What test_ranks.py runs in two processes that differ: `torchrun unlike_program.py FOLDER`.

Each leaves what came out as JSON.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flatlens as fl
from flatlens.curvature.krylov import Remembered
from flatlens.errors import FlatlensError
from flatlens.tracking import CSVLog

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(24) % 3
DRAWN = ["sharpness(rtol=1e-08)", "hessian_trace(probes=4)", "average_sharpness"]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()


def numbers(lens, seed):
    report = fl.measure(lens, DRAWN, generator=torch.Generator().manual_seed(seed))
    return [report[name].value for name in DRAWN]


def refused(work):
    try:
        work()
    except FlatlensError as error:
        return f"{type(error).__name__} {error}"
    return "no error"


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class Routed(nn.Module):
    """The samples with the largest first features go through an operation without a second derivative."""

    def __init__(self):
        super().__init__()
        self.net, self.fails = network(), False

    def forward(self, x):
        h, large = self.net(x).clone(), x[:, 0] > X[:, 0].median()
        if self.fails and bool(large.any()):
            raise ValueError("a large feature")
        if bool(large.any()):
            h[large] = OnceOnly.apply(h[large])
        return h


def unlike(ranks):
    """What is refused, by what differs between the ranks."""
    me, net, other = ranks.rank, network(), X.clone()
    other[20] += me
    whole = TensorDataset(X, Y)

    def problem(data=(X, Y), model=net, **more):
        return fl.Problem(model, "cross_entropy", data, ranks=ranks, **more)

    moved = network()
    lens, tracker = (make(problem(model=moved)) for make in (fl.Lens, partial(fl.Tracker, measures="loss", live=False)))
    moved[1].running_mean += me
    return {
        "weights": refused(lambda: problem(model=network(me))),
        "running statistics": refused(lambda: fl.Lens(lens.problem)),
        "tracked": tracker.step(0)["loss"].note,
        "values": refused(lambda: problem((other, Y))),
        "held-out values": refused(lambda: problem(test=(other, Y))),
        "shapes": refused(lambda: problem((X[: 24 - me], Y[: 24 - me]))),
        "sampler": refused(lambda: problem(DataLoader(whole, batch_size=4, sampler=DistributedSampler(whole)))),
        "first batch": refused(lambda: problem(DataLoader(TensorDataset(X + me, Y), batch_size=4))),
        "length": refused(lambda: problem(DataLoader(TensorDataset(X[: 24 - me], Y[: 24 - me]), batch_size=4))),
        "budget": refused(lambda: fl.Tracker(problem(), "loss", budget=0.5)),
    }


def failing(ranks):
    """What both ranks tell of errors that the second one alone meets."""
    model, order = Routed(), X[:, 0].argsort()
    loader = DataLoader(TensorDataset(X[order], Y), batch_size=12)
    lens = fl.Lens(fl.Problem(model, "cross_entropy", loader, ranks=ranks))
    report = fl.measure(lens, ["sharpness", "mls", "loss"])
    model.fails = True
    return {
        "kinds": [report[name].kind for name in ("sharpness", "mls", "loss")],
        "why": report["sharpness"].note,
        "forward": fl.measure(fl.Lens(lens.problem), "loss")["loss"].note,
    }


def tracked(folder, rank):
    """How often the live line is shown where every process tracks alone, into one file and into one of its own."""
    problem, shown = fl.Problem(network(), "cross_entropy", (X, Y)), io.StringIO()
    logs = [CSVLog(folder / "one.csv"), CSVLog(folder / f"own{rank}.csv")]
    with redirect_stderr(shown):
        tracker = fl.Tracker(problem, "loss", every=1, log=logs)
        for step in range(2):
            tracker.step(step)
    return shown.getvalue().count("loss")


def main(folder):
    folder, ranks = Path(folder), fl.Ranks.joined()
    alone, shared = (fl.Lens(fl.Problem(network(), "cross_entropy", (X, Y), memory="40KB", **more))
                     for more in ({}, {"ranks": ranks}))  # fmt: skip
    found = {"alone": numbers(alone, seed=0), "shared": numbers(shared, seed=ranks.rank)}
    pairs = Remembered(torch.tensor([3.0 - ranks.rank]), torch.eye(1, 40) * (1 - 2 * ranks.rank))
    after = fl.Lens(shared.problem, after={("sharpness", None): pairs}).remembered["sharpness", None]
    found["remembered"] = [float(after.values), float(after.vectors[0, 0])]
    found |= unlike(ranks) | failing(ranks) | {"shown": tracked(folder, ranks.rank)}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    try:
        torch.distributed.barrier()
    finally:
        os._exit(0)  # as in tests/perturbation/sharded_program.py


if __name__ == "__main__":
    main(*sys.argv[1:])
