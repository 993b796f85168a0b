"""The outputs that the first check saw: chunks of other sizes must give every sample the same.

A gate on a mean over the batch may be open in all parts that the check compared, and shut in a smaller chunk. Kept is
one number for each sample, a fixed combination of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.problem.data import MOST_IN_BATCH
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.samples import FORWARD_CHUNK, Batch
from flatlens.problem.state import size_of_parts

_AT_ONCE = 2**13  #: outputs of a sample that are combined together: many have no float64 copy
_ROUNDING = 1e4  #: differences in units of machine epsilon that are rounding


class Runs(Protocol):
    """The part of a Problem that gives outputs."""

    def shared(self, most: int, ranks: Ranks | None = None) -> Iterator[tuple[int, Batch]]:
        """See `Problem.shared`."""

    def place(self, batch: Batch) -> Batch:
        """See `Problem.place`."""

    def run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """See `Problem.run`."""


@final
class Seen:
    """A combination of each sample's outputs, by the sample's place in the data."""

    def __init__(self) -> None:
        self._parts: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}  #: of whole batches of the source

    def note(self, number: int, f: Tensor) -> None:
        """Keep the outputs (n, N) of the chunk whose first sample has this number."""
        self._parts[number] = combined(f).cpu()

    def join(self, ranks: Ranks) -> None:
        """Put all chunks together, those of all processes."""
        every = {number: part for mine in ranks.together(self._parts) for number, part in mine.items()}
        for number in sorted(every):
            source = number // MOST_IN_BATCH
            held = self._rows.get(source)
            self._rows[source] = every[number] if held is None else torch.cat([held, every[number]])
        self._parts = {}

    def off(self, number: int, f: Tensor) -> Tensor:
        """Return how far the outputs of a chunk are from those seen, as a share of their size; 0 if it was not seen."""
        start, held = number % MOST_IN_BATCH, self._rows.get(number // MOST_IN_BATCH)
        if held is None or start + len(f) > len(held):
            return f.new_zeros((), dtype=torch.float64)
        known = held[start : start + len(f)].to(f.device)
        return (combined(f.detach()) - known).abs().max() / _size(f)

    def require_same(self, problem: Runs, model: nn.Module, batch: Batch, number: int, f: Tensor, off: Tensor) -> None:
        """Refuse outputs that are `off` by more than rounding from those of the same network in larger chunks.

        The network may have been trained since: then it is run once more.

        Raises:
            BadModel: they are.
        """
        allowed = _ROUNDING * torch.finfo(f.dtype).eps
        (share,) = off[None].tolist()
        if share <= allowed:
            return
        self._rows = {}
        with torch.no_grad():
            for first, raw in problem.shared(FORWARD_CHUNK, ALONE):
                self.note(first, problem.run(model, problem.place(raw))[0])
        self.join(ALONE)
        apart = float(self.off(number, f))
        if apart > allowed:
            parts = size_of_parts(model, "a check", lambda moved: problem.run(moved, batch)[0].detach())
            if apart * float(f.detach().abs().max()) > allowed * parts:
                raise BadModel(
                    f"Problem(model=...): outputs of the samples in a chunk of {len(f)} differ from those in larger "
                    f"chunks (by {apart:.2g} of their size), so per-sample derivatives do not exist: does forward() "
                    f"gate, sort or count over the batch? Make the whole batch one sample, or gate each sample alone"
                )


def combined(f: Tensor) -> Tensor:
    """Return a fixed combination of each sample's outputs, (n,) float64; outputs of 0 at the end change nothing."""
    weights = (1.7 * torch.arange(1, f.shape[1] + 1, dtype=torch.float64)).cos().to(f.device)
    parts = zip(torch.split(f, _AT_ONCE, 1), torch.split(weights, _AT_ONCE), strict=True)
    return torch.stack([torch.mv(part.to(torch.float64), own) for part, own in parts]).sum(0)


def _size(f: Tensor) -> Tensor:
    return f.detach().abs().max().to(torch.float64) * math.sqrt(f.shape[1]) + 1e-300
