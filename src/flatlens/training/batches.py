"""An endless stream of batches; its position can be saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

GATHERED = 64 * 2**20
"""Bytes of inputs that are reordered at a time: small batches are then views, and large data is never copied whole."""


@dataclass(frozen=True, eq=False)
class Taken:
    """A batch, and its position in the epoch."""

    x: Tensor
    targets: Tensor  #: (n, N)
    epoch: int  #: number of the epoch, from 0
    last: bool  #: whether it is the last batch of its epoch


class Batches:
    """The batches of all epochs: each epoch permutes the samples anew; its last batch may be smaller.

    With `size` None each batch holds all samples, in the data's order. `state_dict` is the position of the next batch.
    """

    def __init__(self, x: Tensor, targets: Tensor, size: int | None, generator: Generator) -> None:
        self.x, self.targets, self.size, self.generator = x, targets, size, generator
        self.epoch, self.taken = 0, 0  #: epoch, and number of its batches already used
        self._begun = generator.get_state()  #: state of the generator before this epoch's permutation

    def __iter__(self) -> Iterator[Taken]:
        """Yield batches from the current position on."""
        while True:
            for number, (x, targets, last) in enumerate(self._of_epoch(self.taken), start=self.taken):
                epoch = self.epoch
                self.stand(number + 1, over=last)
                yield Taken(x, targets, epoch, last)

    def order(self) -> Tensor:
        """Return the samples' numbers in the order of the current epoch, (n,)."""
        if self.size is None:
            return torch.arange(len(self.x), device=self.x.device)
        self.generator.set_state(self._begun)
        return torch.randperm(len(self.x), generator=self.generator).to(self.x.device)

    def stand(self, taken: int, *, over: bool) -> None:
        """Record that `taken` batches of the epoch were used; with `over`, the next epoch begins."""
        self.taken = taken
        if over:
            self.epoch, self.taken, self._begun = self.epoch + 1, 0, self.generator.get_state()

    def state_dict(self) -> dict[str, int | Tensor]:
        """Return the position of the next batch."""
        return {"epoch": self.epoch, "taken": self.taken, "begun": self._begun}

    def load_state_dict(self, state: dict[str, int | Tensor]) -> None:
        """Continue from the position in a `state_dict`."""
        self.epoch, self.taken = int(state["epoch"]), int(state["taken"])
        self._begun = torch.as_tensor(state["begun"])

    def _of_epoch(self, first: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        n = len(self.x)
        if self.size is None:
            yield self.x.clone(), self.targets, True  # a network may write to what it is fed
            return
        order = self.order()
        bytes_each = max(1, self.x.element_size() * self.x[:1].numel())
        block = self.size * max(1, GATHERED // (bytes_each * self.size))
        for begin in range(self.size * first - self.size * first % block, n, block):
            chosen = order[begin : begin + block]
            x, targets = self.x[chosen], self.targets[chosen]
            for start in range(max(0, self.size * first - begin), len(chosen), self.size):
                stop = start + self.size
                yield x[start:stop], targets[start:stop], begin + stop >= n
