"""The buffer for the results of chunks: few allocations, however many chunks there are."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flatlens.problem.ranks import Ranks

Name = TypeVar("Name", bound=Hashable)
_Value = TypeVar("_Value")


class ChunkBuffer(Generic[Name]):
    """Rows of every chunk by name, (rows of the chunk, ...), one buffer per name that doubles when it is full.

    Separate small tensors for each chunk would lie on the heap between the large buffers of the pass. The memory freed
    around them would be too small for the next chunk, and the process would grow by some buffers with every chunk.
    """

    def __init__(self) -> None:
        self._buffers: dict[Name, Tensor] = {}
        self._filled: dict[Name, int] = {}
        self._chunks: dict[int, dict[Name, slice]] = {}

    def add(self, number: int, parts: Mapping[Name, Tensor]) -> None:
        """Add rows of chunk `number`; the parts of one chunk may come one after another."""
        places = self._chunks.setdefault(number, {})
        for name, part in parts.items():
            start = self._filled.get(name, 0)
            stop = self._filled[name] = start + len(part)
            buffer = self._buffers.get(name)
            if buffer is None or stop > len(buffer):
                wider = part.new_empty(2 * stop, *part.shape[1:])
                if buffer is not None:
                    wider[:start] = buffer[:start]
                buffer = self._buffers[name] = wider
            assert buffer.shape[1:] == part.shape[1:], (name, buffer.shape, part.shape)
            buffer[start:stop] = part
            places[name] = slice(start, stop)

    def joined(self, ranks: Ranks) -> dict[Name, Tensor]:
        """Return the rows of all ranks by name, in the data's order, on the host; the buffers are empty afterwards."""
        if ranks.size == 1:  # one name at a time, so that the rows are never held twice
            places = [self._chunks[number] for number in sorted(self._chunks)]
            return {
                name: torch.cat([buffer[at[name]] for at in places if name in at]).cpu()
                for name, buffer in emptied(self._buffers)
            }
        whole = {name: buffer[: self._filled[name]].cpu() for name, buffer in self._buffers.items()}
        every = ranks.in_order(
            {
                number: {name: whole[name][at].clone() for name, at in at_each.items()}
                for number, at_each in self._chunks.items()
            }
        )
        names = dict.fromkeys(name for one in every for name in one)
        return {name: torch.cat([one[name] for one in every if name in one]) for name in names}


def emptied(entries: dict[Name, _Value]) -> Iterator[tuple[Name, _Value]]:
    """Yield the entries one by one, and release each, so that none is held longer than it is used."""
    for name in list(entries):
        yield name, entries.pop(name)
