"""Small trained networks, and the loss between two of them written out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def drawn(
    widths: Sequence[int], seed: int, act: Callable[[], nn.Module] = nn.ReLU, norm: bool = False
) -> nn.Sequential:
    """A dense network with torch's initial weights, float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts: list[nn.Module] = []
        for m, d in pairwise(widths):
            parts += [nn.Linear(m, d), act()]
    return nn.Sequential(*parts[:-1]).double()


def samples(n: int = 60, inputs: int = 4, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three clusters that a small network can tell from each other."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    centres = 1.5 * torch.randn(classes, inputs, generator=generator, dtype=torch.float64)
    return centres[y] + torch.randn(n, inputs, generator=generator, dtype=torch.float64), y


def fitted(net: nn.Module, x: Tensor, y: Tensor, steps: int = 150, lr: float = 0.03) -> nn.Module:
    """The network, trained by Adam on all samples."""
    net.train()
    optimiser = torch.optim.Adam(net.parameters(), lr)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    net.zero_grad(set_to_none=True)
    return net.eval()


def between(a: nn.Module, b: nn.Module, t: float) -> nn.Module:
    """A network at (1 - t) a + t b."""
    net = copy.deepcopy(a)
    with torch.no_grad():
        for p, q in zip(net.parameters(), b.parameters(), strict=True):
            p.mul_(1 - t).add_(t * q)
    return net


@torch.no_grad()
def losses(a: nn.Module, b: nn.Module, x: Tensor, y: Tensor, points: int) -> Tensor:
    """The mean cross-entropy along the line, (points,)."""
    return torch.stack([F.cross_entropy(between(a, b, float(t))(x), y) for t in torch.linspace(0, 1, points)])


def barrier(loss: Tensor) -> float:
    """The largest loss less the chord between the ends."""
    t = torch.linspace(0, 1, len(loss), dtype=loss.dtype)
    return float((loss - (1 - t) * loss[0] - t * loss[-1]).max())
