"""A fixed subset of every kind of data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from tracked_run import blobs, network

import flatlens as fl


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x, self.y = blobs()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return self.x[at], self.y[at]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self):
        return iter(zip(*blobs(), strict=True))


def as_dict(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows]), "name": "blobs"}


def fed(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]), batch["y"]


SOURCES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tensors": lambda: (blobs(), None),
    "arrays": lambda: (tuple(part.numpy() for part in blobs()), None),
    "tensor data set": lambda: (TensorDataset(*blobs()), None),
    "data set": lambda: (Pairs(), None),
    "loader": lambda: (DataLoader(Pairs(), batch_size=10, shuffle=True), None),
    "stream": lambda: (DataLoader(Stream(), batch_size=10), None),
    "dict": lambda: (dict(zip("xy", blobs(), strict=True)), fed),
    "dict batches": lambda: (DataLoader(Pairs(), batch_size=10, collate_fn=as_dict), fed),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_same_samples_whatever_holds_them(kind: str) -> None:
    data, forward = SOURCES[kind]()
    net, (x, y) = network(), blobs()
    problem = fl.Problem(net, "cross_entropy", data, forward=forward, test=(x, y) if forward is None else None)
    tracker = fl.Tracker(problem, ["loss", "sharpness"], samples=17, seed=3, live=False)
    assert tracker.problem.n == 17
    losses = fl.Lens(tracker.problem).outcomes("data").losses
    every = fl.Lens(fl.Problem(net, "cross_entropy", (x, y))).outcomes("data").losses
    at = [int((every - one).abs().argmin()) for one in losses]
    assert at == sorted(set(at))  # in the data's order, none twice
    expected = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x[at], y[at]))), ["loss", "sharpness"])
    report = tracker.step()
    assert report["loss"].value == pytest.approx(expected["loss"].value, rel=1e-6)
    assert report["sharpness"].value == pytest.approx(expected["sharpness"].value, rel=1e-4)
    again = fl.Tracker(problem, "loss", samples=17, seed=3, live=False)
    assert torch.equal(fl.Lens(again.problem).outcomes("data").losses, losses)
    other = fl.Tracker(problem, "loss", samples=17, seed=4, live=False)
    assert not torch.equal(fl.Lens(other.problem).outcomes("data").losses, losses)


def test_what_the_problem_was_told_stays() -> None:
    net, (x, y) = network(), blobs()
    problem = fl.Problem(
        net, "cross_entropy", (x, y), test=(x, y), parameters=["4.weight"], dtype=torch.float64, memory="1MB",
        batchnorm="train", ghost_batch=8,
    )  # fmt: skip
    small = fl.Tracker(problem, ["loss", "test_loss"], samples=16, live=False).problem
    for name in ("model", "loss", "test", "forward", "parameters", "dtype", "memory", "ghost_batch"):
        assert getattr(small, name) == getattr(problem, name), name


def test_batches_padded_to_lengths_of_their_own() -> None:
    """They do not go side by side: each stays a batch by itself."""

    def forward(net: nn.Module, tokens: Tensor) -> Tensor:
        there = (tokens > 0)[..., None]
        return net.head((net.embed(tokens) * there).sum(1) / there.sum(1))

    rows = [(torch.arange(1, 3 + at % 7), torch.tensor(at % 3)) for at in range(30)]

    def pad(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return nn.utils.rnn.pad_sequence([t for t, _ in batch], batch_first=True), torch.stack([y for _, y in batch])

    net = module_of(forward, embed=nn.Embedding(11, 6), head=(6, 3))
    problem = fl.Problem(net, "cross_entropy", DataLoader(rows, batch_size=4, collate_fn=pad))
    whole = fl.Tracker(problem, "loss", samples=30, live=False)
    assert whole.step()["loss"].value == pytest.approx(fl.measure(fl.Lens(problem), "loss")["loss"].value, rel=1e-6)
    assert fl.Tracker(problem, "loss", samples=9, live=False).problem.n == 9
