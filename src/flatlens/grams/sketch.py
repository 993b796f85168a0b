"""For many outputs: random combinations of them in place of all N, a few backward passes in place of N.

With u of random signs, E[u u^T] = I, so that ||u^T J||^2 has the mean tr(J J^T); with C = R R^T the combination
R u gives tr(J^T C J) in the same way. Each is the exact pass of a network with one output, u^T f: every trace,
diagonal and sum of squares the pass makes comes out unbiased, and every sample has probes of its own, the same whatever
chunk it comes in.

The products u_a u_b of two outputs agree in all of k probes of signs with probability 2^(1-k). Where few outputs of one
sample decide, the probes then show no spread at all: with k = 3 intervals cover 0.75. So few probes are `balanced`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatlens.problem import Loss


def random_signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent +1 and -1, the probes of least variance."""
    return torch.randint(0, 2, shape, generator=generator).mul_(2).sub_(1).to(like)


_FEW = 4  #: probes up to which signs too often agree
_ROUNDS = 20  #: of scaling rows and columns


def _balanced(normal: Tensor) -> Tensor:
    """Combinations (probes, n, N) from normal numbers: an output's squares add up over probes, a probe's over outputs,
    as those of signs do.

    So means over the probes have the variance of signs, or less, and no products of theirs that agree. Signs of rows
    being random and probes exchangeable, E[u u^T] = I.
    """
    for _ in range(_ROUNDS):
        normal = normal / normal.square().mean(2, keepdim=True).sqrt()
        normal = normal / normal.square().mean(0, keepdim=True).sqrt()
    return normal


@dataclass(frozen=True)
class _Stream:
    """Random numbers by sample: those of a sample are the same whichever samples are asked for beside it."""

    seed: int
    number: int

    def signs(self, first: int, n: int, each: int) -> Tensor:
        """(n, each) float64 of +1 and -1, for samples from `first` on."""
        bits = np.unpackbits(self._raw(first, n, -(-each // 256)).view(np.uint8), axis=1)[:, :each]
        return torch.from_numpy(bits).to(torch.float64).mul_(2).sub_(1)

    def normal(self, first: int, n: int, each: int) -> Tensor:
        """(n, each) float64, standard normal."""
        high = (self._raw(first, n, -(-each // 4))[:, :each] >> np.uint64(12)).astype(np.float64)
        normal: Tensor = torch.special.ndtri((torch.from_numpy(high) + 0.5) * 2.0**-52)
        return normal

    def _raw(self, first: int, n: int, blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        """(n, 4 blocks): Philox counts in blocks of four, and begins at any of them."""
        drawn = np.random.Philox(key=(self.number << 64) + self.seed, counter=first * blocks)
        return drawn.random_raw(n * blocks * 4).reshape(n, blocks * 4)


@dataclass(frozen=True)
class Sketch:
    """How the outputs are combined."""

    probes: int  #: independent combinations, each a pass of its own
    seed: int
    weighted: bool  #: whether by the loss's C, for traces with it; else for traces with I

    def views(self, loss: Loss, f: Tensor, y: Any, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows (n, r, N), C (n, r, r)) of each probe: the chunk, that begins at a sample's number, seen as one of a
        network with r outputs rows f."""
        for u in self.combinations(chunk, len(f), f[0].numel()):
            u = u.reshape(f.shape).to(f.device)
            if self.weighted:
                yield loss.combine(f.detach(), y, u)
            else:
                yield u[:, None], u.new_ones(len(f), 1, 1)

    def combinations(self, first: int, n: int, outputs: int) -> Iterator[Tensor]:
        """u of each probe, (n, N) float64, for samples from `first` on."""
        streams = [_Stream(self.seed, probe) for probe in range(self.probes)]
        if self.probes > _FEW:
            yield from (stream.signs(first, n, outputs) for stream in streams)
        else:
            yield from _balanced(torch.stack([stream.normal(first, n, outputs) for stream in streams]))
