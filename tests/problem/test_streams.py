"""Data that is another when read again: every walk over it says so, and none averages over what is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

import flatlens as fl
from flatlens.errors import BadData
from flatlens.problem import Ranks
from flatlens.problem.data import Data

X = torch.randn(320, 3, generator=torch.Generator().manual_seed(0))


class Stream(IterableDataset):
    """Gives so many samples, and another number from some reading on."""

    def __init__(self, then: int, first: int = 320) -> None:
        self.first, self.then, self.ended = first, then, False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.then if self.ended else self.first):
            yield X[i % 320], X[i % 320, :2]
        self.ended = True


WALKS = {
    "loss": lambda lens: fl.measure(lens, "loss"),
    "mls": lambda lens: fl.measure(lens, "mls"),
    "sharpness": lambda lens: fl.measure(lens, "sharpness"),
    "hessian_trace": lambda lens: fl.measure(lens, "hessian_trace"),
    "average_sharpness": lambda lens: fl.measure(lens, "average_sharpness"),
    "feature_robustness": lambda lens: fl.measure(lens, "feature_robustness"),
    "output_norm": lambda lens: fl.measure(lens, "output_norm"),
    "subset": lambda lens: lens.problem.subset(5, torch.Generator()),
    "ghost batches": lambda lens: list(lens.problem.data.in_batches_of(50)),
    "batches": lambda lens: list(lens.problem.batches(7)),
}


@pytest.mark.parametrize("then", [0, 64, 70, 319, 321, 384, 640])
@pytest.mark.parametrize("walk", WALKS)
def test_every_walk_says_that_it_saw_others(walk: str, then: int) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    stream = Stream(320)
    problem = fl.Problem(net, "mse", DataLoader(stream, batch_size=64))
    assert problem.n == 320
    lens = fl.Lens(problem)
    stream.then = then
    with pytest.raises(BadData, match=r"samples instead of|samples now and had 320 at first") as caught:
        WALKS[walk](lens)
    assert "\n" not in str(caught.value)


def test_held_out_data_and_a_number_that_is_told() -> None:
    stream = Stream(128)
    problem = fl.Problem(nn.Linear(3, 2), "mse", (X, X[:, :2]), test=DataLoader(stream, batch_size=64))
    with pytest.raises(BadData, match=r"test=\.\.\..*the data has 128 samples now and had 320 at first"):
        fl.measure(fl.Lens(problem), "test_loss")


def test_a_shorter_last_batch() -> None:
    stream = Stream(100)
    problem = fl.Problem(nn.Linear(3, 2), "mse", DataLoader(stream, batch_size=64))
    with pytest.raises(BadData, match="batch 1 has 36 samples instead of 64 when read again"):
        fl.measure(fl.Lens(problem), "loss")


def test_a_stream_that_stays_the_same_may_be_left_early_and_read_again() -> None:
    data = Data(DataLoader(Stream(320), batch_size=64), "data=...")
    assert len(list(data.chunks(50))) == 10
    for _ in range(3):
        next(data.chunks(50))
        assert len(list(data.chunks(64))) == 5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_share_that_ends_early(rank: int) -> None:
    stream = Stream(64)
    data, ranks = Data(DataLoader(stream, batch_size=64), "data=..."), Ranks(rank, 2)
    stream.first, stream.ended = 320, False
    assert sum(len(batch[0]) for _, batch in data.shared(64, ranks)) == (192, 128)[rank]
    with pytest.raises(BadData, match=f"{(64, 0)[rank]} samples now and had {(192, 128)[rank]}"):
        list(data.shared(64, ranks))
    data.counted(320)
    with pytest.raises(BadData, match="64 samples now and had 320"):
        list(data.chunks(64))


@pytest.mark.parametrize(
    ("picking", "told"),
    [
        ({}, []),
        ({"batch_size": 4, "drop_last": True}, []),
        ({"batch_size": 5, "drop_last": True}, ["2 of the 12 samples are dropped in training (drop_last=True)"]),
        (
            {"sampler": WeightedRandomSampler([1.0] + [0.0] * 11, 12)},
            ["11 of the 12 samples are repeated", "11 of the 12 samples are not drawn by the loader's sampler"],
        ),
        (
            {"sampler": DistributedSampler(range(12), num_replicas=5, rank=4)},
            ["9 of the 12 samples are not drawn by the loader's sampler"],
        ),
    ],
)
def test_samples_that_a_loader_gives_otherwise_are_told(picking: dict[str, Any], told: list[str]) -> None:
    data = Data(DataLoader(TensorDataset(X[:12], X[:12, :2]), **picking), "data=...")
    assert len(data.remarks) == len(told)
    assert all(remark.startswith(words) for remark, words in zip(data.remarks, told, strict=True))
    assert all(words in data.told for words in told)


class Shared(IterableDataset):
    """A stream that its workers share, repeat, or repeat in part."""

    def __init__(self, n: int, way: str) -> None:
        self.n, self.way = n, way

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        k, w = (worker.id, worker.num_workers) if worker else (0, 1)
        ways = {"shared": range(k, self.n, w), "repeated": range(self.n), "repeated in part": range(self.n - k)}
        return ((X[i], X[i, :2]) for i in ways[self.way])


@pytest.mark.parametrize("way", ["shared", "repeated", "repeated in part"])
@pytest.mark.parametrize(("n", "workers", "size"), [(12, 2, 5), (7, 3, 7), (4, 2, 1), (5, 1, 2), (6, 0, 4)])
def test_workers_that_repeat_a_stream_are_told(way: str, n: int, workers: int, size: int) -> None:
    loader = DataLoader(Shared(n, way), batch_size=size, num_workers=workers)
    problem = fl.Problem(nn.Linear(3, 2), "mse", loader)
    note = fl.measure(fl.Lens(problem), "loss")["loss"].note
    if way == "repeated" and workers > 1:
        assert problem.n == n * workers
        assert f"the {workers} workers gave the same batches, so each sample appears {workers} times" in note
        assert note in problem.data.told
    else:
        assert note == ""
