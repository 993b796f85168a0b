"""Processes that share the samples of one measurement.

Every process (rank) gets the same network and all the data; chunk i goes to rank i mod size. Sums over samples are then
added up, and per-sample results are put in the data's order, so that all ranks continue with the same numbers. Each
rank does the work that is not shared, with the same result.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flatlens.errors import LostRank, typed_line

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

    def of_the_first(self, part: _T) -> _T:
        """Return the first rank's part."""
        held = [part]
        if self.size > 1:
            with _contact():
                dist.broadcast_object_list(held, 0)
        return held[0]

    def same_draws(self, generator: torch.Generator) -> None:
        """Let a generator draw what the first rank's will: seeds may differ between ranks."""
        if self.size > 1:
            generator.set_state(self.of_the_first(generator.get_state()))

    def apart(self, facts: Callable[[], Mapping[K, object]]) -> tuple[K, str] | None:
        """Return the first fact that differs between ranks, and where; a single process does not find them out."""
        if self.size == 1:
            return None
        with self.as_one():
            own = dict(facts())
        every = self.together(own)
        for name in dict.fromkeys(name for one in every for name in one):
            others = [str(rank) for rank, one in enumerate(every) if one.get(name) != every[0].get(name)]
            if others:
                return name, f"rank {', '.join(others)}"
        return None

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Raise on all ranks what one raises inside this context, in which none waits for another.

        Otherwise the others would wait for one that goes on with something else, such as the next measure.
        """
        if self.size == 1:
            yield
            return
        own: Exception | None = None
        try:
            yield
        except LostRank:
            raise
        except Exception as error:
            own = error
        # one number, as often nothing has failed: a product of a small network would take twice as long otherwise
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        if not self.total(torch.tensor(int(own is not None), device=device)):
            return
        every = self.together(None if own is None else _sendable(own))
        failed, first = next((rank, error) for rank, error in enumerate(every) if error is not None)
        raise own if own is not None and failed == self.rank else first


ALONE = Ranks()


def in_first_process() -> bool:
    """Return whether this process is the first of those that torch.distributed connects, or a single one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def claimed(name: str) -> bool:
    """Return whether this process was the first of those that torch.distributed connects to ask for a name.

    It waits for no other one: perhaps no other asks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return True
    try:
        store, me = dist.distributed_c10d._get_default_store(), str(dist.get_rank())
        return bool(store.compare_set(f"flatlens/{name}", "", me).decode() == me)
    except (AttributeError, RuntimeError):  # a backend without a store, or one that has gone with its process
        return True


def _sendable(error: Exception) -> Exception:
    """Return an error that another process can read: itself, or else its words."""
    try:
        return error if isinstance(pickle.loads(pickle.dumps(error)), type(error)) else RuntimeError(typed_line(error))
    except Exception:  # an error of the user's code may hold anything
        return RuntimeError(typed_line(error))


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
