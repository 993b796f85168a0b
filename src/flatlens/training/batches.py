"""Batches without end, in an order that can be taken up again anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

GATHERED = 64 * 2**20
"""Bytes of inputs put in order at a time: small batches are then mere views, and large data is never held twice."""


@dataclass(frozen=True, eq=False)
class Taken:
    """A batch, and where it stands."""

    x: Tensor
    targets: Tensor  #: (n, N)
    epoch: int  #: from 0
    last: bool  #: of its epoch


class Batches:
    """Every epoch a fresh permutation of the samples, cut into batches, the last one smaller where it does not divide.

    `size` None is all samples in their own order, every time. `state_dict` says where to go on.
    """

    def __init__(self, x: Tensor, targets: Tensor, size: int | None, generator: Generator) -> None:
        self.x, self.targets, self.size, self.generator = x, targets, size, generator
        self._epoch, self._taken = 0, 0  #: of this epoch: batches handed out
        self._begun = generator.get_state()  #: of the generator, before this epoch's permutation

    def __iter__(self) -> Iterator[Taken]:
        """From where the state says."""
        while True:
            self.generator.set_state(self._begun)
            for number, (x, targets, last) in enumerate(self._of_epoch(self._taken), start=self._taken):
                self._taken = number + 1
                epoch = self._epoch
                if last:
                    self._epoch, self._taken, self._begun = epoch + 1, 0, self.generator.get_state()
                yield Taken(x, targets, epoch, last)

    def state_dict(self) -> dict[str, int | Tensor]:
        """Where the next batch comes from."""
        return {"epoch": self._epoch, "taken": self._taken, "begun": self._begun}

    def load_state_dict(self, state: dict[str, int | Tensor]) -> None:
        """Go on where `state_dict` was taken."""
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._begun = torch.as_tensor(state["begun"])

    def _of_epoch(self, first: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        n = len(self.x)
        if self.size is None:
            yield self.x.clone(), self.targets, True  # a network may write to what it is fed
            return
        order = torch.randperm(n, generator=self.generator).to(self.x.device)
        bytes_each = max(1, self.x.element_size() * self.x[:1].numel())
        block = self.size * max(1, GATHERED // (bytes_each * self.size))
        for begin in range(self.size * first - self.size * first % block, n, block):
            chosen = order[begin : begin + block]
            x, targets = self.x[chosen], self.targets[chosen]
            for start in range(max(0, self.size * first - begin), len(chosen), self.size):
                stop = start + self.size
                yield x[start:stop], targets[start:stop], begin + stop >= n
