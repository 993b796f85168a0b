"""An endless stream of batches, whose position can be saved; and their changes: crops, flips, mixing with others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from scipy.stats import beta as beta_law
from torch import Generator, Tensor
from torch.nn import functional as F

from flatlens.errors import BadData
from flatlens.settings_json import require_setting


@dataclass(frozen=True)
class Augmentation:
    """Random crops and flips: with probability `p` an image is padded with zeros and cropped, then perhaps flipped.

    The flip has probability 1/2. The standard choice for CIFAR is four pixels and horizontal flips (sharpening
    App. B.3). Images are (n, C, h, w).

    >>> from flatlens.training import SGD, Training
    >>> Training(SGD(lr=0.1), batch_size=16, max_epochs=5, augmentation=Augmentation(pad=2, flip=False)).augmentation.p
    1.0
    """

    p: float = 1.0
    pad: int = 4  #: pixels added at each side; 0 for no crop
    flip: bool = True

    def __post_init__(self) -> None:
        require_setting(self, "p", 0 <= self.p <= 1, "expected a probability")
        require_setting(self, "pad", self.pad >= 0, "it must not be negative")

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        """Return the batch with some of its images cropped and flipped."""
        if x.ndim != 4:
            raise BadData(f"Augmentation: expected images of shape (n, C, h, w), got {tuple(x.shape)}")
        chosen = torch.rand(len(x), generator=generator) < self.p
        corners = torch.randint(0, 2 * self.pad + 1, (2, len(x)), generator=generator)
        flipped = torch.rand(len(x), generator=generator) < 0.5
        moved = x
        if self.pad:
            n, channels, h, w = x.shape
            top, left = corners.to(x.device)
            sample = torch.arange(n, device=x.device)[:, None, None, None]
            channel = torch.arange(channels, device=x.device)[:, None, None]
            rows = top[:, None] + torch.arange(h, device=x.device)
            columns = left[:, None] + torch.arange(w, device=x.device)
            # All four indices, so that the crops lie in memory channels first. Channels last, torch 2.13 writes out of
            # bounds in the backward pass of a 1 x 1 convolution of stride 2 with fewer than 8 input channels (AVX2).
            moved = F.pad(x, [self.pad] * 4)[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
        if self.flip:
            moved = torch.where(_each(flipped, x), moved.flip(3), moved)
        return torch.where(_each(chosen, x), moved, x)


@dataclass(frozen=True)
class Mixup:
    """Mixup: theta (x, y) + (1 - theta) (x', y') with another sample (x', y') of the batch, theta ~ Beta(beta, beta).

    Each batch has one theta. With beta = 1 it is uniform; with beta = 0, the limit, it is 0 or 1 with probability 1/2
    each. Sources: Zhang et al. 2018; sharpening App. B.3.

    >>> from flatlens.training import SGD, Training
    >>> Training(SGD(lr=0.1), batch_size=16, max_epochs=5, mixup=Mixup(beta=1.0)).mixup
    Mixup(beta=1.0)
    """

    beta: float

    def __post_init__(self) -> None:
        require_setting(self, "beta", 0 <= self.beta < math.inf, "it must not be negative")

    def draw(self, generator: Generator) -> float:
        """Draw theta, by inverting its distribution function."""
        u = float(torch.rand((), generator=generator, dtype=torch.float64))
        return float(u < 0.5) if self.beta == 0 else float(beta_law.ppf(u, self.beta, self.beta))

    def apply(self, x: Tensor, targets: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return the batch mixed with a permutation of itself; targets are (n, N)."""
        theta = self.draw(generator)
        order = torch.randperm(len(x), generator=generator).to(x.device)
        return theta * x + (1 - theta) * x[order], theta * targets + (1 - theta) * targets[order]


def _each(which: Tensor, x: Tensor) -> Tensor:
    """Reshape one flag for each sample, (n,), to (n, 1, 1, 1), to broadcast over images."""
    return which.to(x.device)[:, None, None, None]


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
