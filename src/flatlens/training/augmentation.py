"""Changes to a batch before each training step: crops, flips, and mixing with other samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.stats import beta as beta_law
from torch import Generator, Tensor
from torch.nn import functional as F

from flatlens.errors import BadData, BadInput


@dataclass(frozen=True)
class Augmentation:
    """Random crops and flips: with probability `p` an image is padded with zeros and cropped, then perhaps flipped.

    The flip has probability 1/2. The standard choice for CIFAR is four pixels and horizontal flips (sharpening
    App. B.3). Images are (n, C, h, w).
    """

    p: float = 1.0
    pad: int = 4  #: pixels added at each side; 0 for no crop
    flip: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise BadInput(f"Augmentation(p={self.p}): a probability is needed")
        if self.pad < 0:
            raise BadInput(f"Augmentation(pad={self.pad}): it must not be negative")

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        """Return the batch with some of its images cropped and flipped."""
        if x.ndim != 4:
            raise BadData(f"Augmentation: images of shape (n, C, h, w) are needed, got {tuple(x.shape)}")
        chosen = torch.rand(len(x), generator=generator) < self.p
        corners = torch.randint(0, 2 * self.pad + 1, (2, len(x)), generator=generator)
        flipped = torch.rand(len(x), generator=generator) < 0.5
        moved = self._cropped(x, *corners.to(x.device))
        if self.flip:
            moved = torch.where(_each(flipped, x), moved.flip(3), moved)
        return torch.where(_each(chosen, x), moved, x)

    def _cropped(self, x: Tensor, top: Tensor, left: Tensor) -> Tensor:
        if self.pad == 0:
            return x
        n, channels, h, w = x.shape
        sample = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[:, None, None]
        rows = top[:, None] + torch.arange(h, device=x.device)
        columns = left[:, None] + torch.arange(w, device=x.device)
        # All four indices, so that the crops lie in memory channels first. Channels last, torch 2.13 writes out of
        # bounds in the backward pass of a 1 x 1 convolution of stride 2 with fewer than 8 input channels (AVX2).
        return F.pad(x, [self.pad] * 4)[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class Mixup:
    """Mixup: theta (x, y) + (1 - theta) (x', y') with another sample (x', y') of the batch, theta ~ Beta(beta, beta).

    Each batch has one theta. With beta = 1 it is uniform; with beta = 0, the limit, it is 0 or 1 with probability 1/2
    each. Sources: Zhang et al. 2018; sharpening App. B.3.
    """

    beta: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise BadInput(f"Mixup(beta={self.beta}): it must not be negative")

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
