"""Processes that share the samples of one measurement.

Every process (rank) gets the same network and all the data; chunk i goes to rank i mod size. Sums over samples are then
added up, and per-sample results are put in the data's order, so that all ranks continue with the same numbers. Each
rank does the work that is not shared, with the same result.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flatlens.errors import BadInput, LostRank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")
K = TypeVar("K", bound=Hashable)
GONE = "another process (rank) stopped before the work was finished: nothing was written; see its own message"
_PATIENCE = timedelta(hours=1)
"""Time that a rank waits for another one that is connected but sends nothing."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the samples, and which of them this process is; a single one unless it has `joined`.

    >>> ALONE.in_order({1: "b", 0: "a"}), float(ALONE.total(torch.tensor(3.0)))
    (['a', 'b'], 3.0)
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls, store: Store | None = None) -> Ranks:
        """Return the ranks that torchrun started; it tells each process its number by environment variables.

        CUDA tensors travel by NCCL, with one device per rank; everything else by gloo. A `torch.distributed` that is
        already set up is used as it is. `store`: where the processes meet, if they have met already.

        Raises:
            LostRank: not all of them came.
        """
        if not dist.is_initialized():
            with _contact():
                size = -1 if store is None else int(os.environ["WORLD_SIZE"])
                rank = -1 if store is None else int(os.environ["RANK"])
                dist.init_process_group(backend(), timeout=_PATIENCE, store=store, rank=rank, world_size=size)
            atexit.register(_leave)
        return cls(dist.get_rank(), dist.get_world_size())

    def takes(self, number: int) -> bool:
        """Return whether chunk `number` belongs to this rank."""
        return number % self.size == self.rank

    def total(self, part: Tensor) -> Tensor:
        """Return the sum over all ranks, with the same bits on each."""
        if self.size == 1:
            return part
        part = part.clone()
        with _contact():
            dist.all_reduce(part)
        return part

    def totals(self, parts: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return the sums by name; a rank without samples has no parts, and gets their shapes from the others."""
        if self.size == 1:
            return dict(parts)
        shapes = {name: (part.shape, part.dtype, part.device.type) for name, part in parts.items()}
        known = {name: shape for mine in self.together(shapes) for name, shape in mine.items()}
        found = {}
        for name, (shape, dtype, device) in known.items():
            found[name] = self.total(parts[name] if name in parts else torch.zeros(shape, dtype=dtype, device=device))
        return found

    def together(self, part: _T) -> list[_T]:
        """Return all ranks' parts, the first rank's first."""
        if self.size == 1:
            return [part]
        parts: list[_T | None] = [None] * self.size
        with _contact():
            dist.all_gather_object(parts, part)
        return parts  # type: ignore[return-value]  # each was filled

    def in_order(self, parts: Mapping[int, _T]) -> list[_T]:
        """Return all ranks' parts in the order of their numbers, which give the position in the data."""
        every = {number: part for mine in self.together(dict(parts)) for number, part in mine.items()}
        return [every[number] for number in sorted(every)]

    def require_same(self, value: Callable[[], object], what: str) -> None:
        """Refuse values that differ between ranks; a single process does not compute them."""
        if self.size == 1:
            return
        values = self.together(value())
        others = [str(rank) for rank, other in enumerate(values) if other != values[0]]
        if others:
            raise BadInput(
                f"Problem(ranks=...): the {what} of rank {', '.join(others)} differ from those of rank 0: give all "
                f"processes the same (set the seed before building the model)"
            )


ALONE = Ranks()


def _leave() -> None:
    """Take this process out of the group: gloo's threads that live at exit may abort it (`terminate called`)."""
    if dist.is_initialized():
        dist.destroy_process_group()


def backend() -> str:
    """Return the backend that tensors travel by."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


@contextmanager
def _contact() -> Iterator[None]:
    """Raise `LostRank`, in one line, when another rank is gone."""
    try:
        yield
    except RuntimeError as error:  # from any backend: a reset connection, a timeout, an abort
        raise LostRank(GONE) from error
