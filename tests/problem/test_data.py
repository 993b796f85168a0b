"""Loaders of the user's: read as they are, and left as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import flatlens as fl

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
SAMPLERS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "loader": lambda g: {"batch_size": 8, "shuffle": True, "generator": g},
    "sampler": lambda g: {"batch_size": 8, "sampler": RandomSampler(X, generator=g)},
    "weighted": lambda g: {"batch_size": 8, "sampler": WeightedRandomSampler(X[:, 0].abs(), 40, generator=g)},
    "batches": lambda g: {"batch_sampler": BatchSampler(RandomSampler(X, generator=g), 8, drop_last=False)},
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_order_of_training_stays(kind: str) -> None:
    def seen(measured: bool) -> Tensor:
        loader = DataLoader(TensorDataset(X, Y), **SAMPLERS[kind](torch.Generator().manual_seed(5)))
        if measured:
            fl.measure(fl.Lens(fl.Problem(nn.Linear(3, 1), "mse", loader)), "loss")
        return torch.cat([x for x, _ in loader])

    assert torch.equal(seen(True), seen(False))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(X, Y, strict=True)


def test_workers_that_persist_go_on_with_the_training() -> None:
    """Torch resets their one reader whenever the loader is read again."""
    net = nn.Linear(3, 1)
    loader = DataLoader(Stream(), batch_size=8, num_workers=1, persistent_workers=True)
    tracker = fl.Tracker(fl.Problem(net, "mse", loader), "loss", every=1, live=False)
    assert [len(x) for step, (x, _) in enumerate(loader) if tracker.step(step) is not None] == [8] * 5


class Opened(Dataset[tuple[Tensor, Tensor]]):
    """Can be read where its worker has opened it."""

    held: Tensor | None = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        assert self.held is not None
        return self.held[index], Y[index]


def opened(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.held = X


def test_a_data_set_that_each_worker_opens() -> None:
    loader = DataLoader(Opened(), batch_size=8, num_workers=1, worker_init_fn=opened)
    problem = fl.Problem(nn.Linear(3, 1), "mse", loader)
    alike = fl.Problem(problem.model, "mse", (X, Y))
    assert fl.measure(fl.Lens(problem), "loss")["loss"].value == pytest.approx(
        fl.measure(fl.Lens(alike), "loss")["loss"].value
    )
