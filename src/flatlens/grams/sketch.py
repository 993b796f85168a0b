"""The sketch: random combinations of the outputs, for networks with many of them; few backward passes in place of N.

With random signs u, E[u u^T] = I, so ||u^T J||^2 has the mean tr(J J^T). With C = R R^T the combination R u gives
tr(J^T C J) in the same way. Each probe is the exact pass of a network with the one output u^T f. So every trace,
diagonal and sum of squares is unbiased. Every sample has its own probes, which do not depend on its chunk.

With k probes of signs, the products u_a u_b of two outputs are equal in all probes with probability 2^(1-k). If few
outputs of one sample decide, the probes then have no spread at all: with k = 3, 95% intervals cover 0.75. Therefore few
probes are not signs but balanced normal numbers (`_balanced`).
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
    """Return independent +1 and -1, the probes with the least variance, with the dtype and device of `like`."""
    return torch.randint(0, 2, shape, generator=generator).mul_(2).sub_(1).to(like)


_FEW = 31
"""Largest number of probes for which signs are not used: a few outputs that move alike decide a form of signs, which
takes a handful of values, and 16 can miss the rare large one."""
_HELD = 2**15  #: most numbers of one sample: all probes are held at once, signs one by one
_VERY_FEW = 4  #: largest number of probes whose numbers are normal, and scaled until both sums are right
_ROUNDS = 20  #: number of times that these are scaled; for more probes once is enough


def _balanced(draws: Tensor, rounds: int) -> Tensor:
    """Return combinations (probes, n, N): random numbers, scaled to have the sums of squares that signs have.

    For each sample, the squares add up to the number of probes for each output, and to N for each probe. So the
    variance of means over probes is at most that of signs, and products of two outputs differ between probes.
    E[u u^T] = I, because the signs of the entries are random and the probes are exchangeable.
    """
    for _ in range(rounds):
        draws *= draws.square().mean(2, keepdim=True).rsqrt()
        draws *= draws.square().mean(0, keepdim=True).rsqrt()
    return draws


@dataclass(frozen=True)
class SampleStream:
    """Random numbers for samples: those of a sample do not depend on which other samples are drawn with it."""

    seed: int
    number: int

    def signs(self, first: int, n: int, each: int) -> Tensor:
        """Return +1 and -1, (n, each) float64, for n samples from number `first` on."""
        bits = np.unpackbits(self._raw(first, n, -(-each // 256)).view(np.uint8), axis=1)[:, :each]
        return torch.from_numpy(bits).to(torch.float64).mul_(2).sub_(1)

    def normal(self, first: int, n: int, each: int) -> Tensor:
        """Return standard normal numbers, (n, each) float64, for n samples from number `first` on."""
        normal: Tensor = torch.special.ndtri(self._shares(first, n, each))
        return normal

    def uniform(self, first: int, n: int, each: int) -> Tensor:
        """Return numbers in (-1, 1), (n, each) float64, for n samples from number `first` on."""
        return self._shares(first, n, each).mul_(2).sub_(1)

    def _shares(self, first: int, n: int, each: int) -> Tensor:
        high = (self._raw(first, n, -(-each // 4))[:, :each] >> np.uint64(12)).astype(np.float64)
        return torch.from_numpy(high).add_(0.5).mul_(2.0**-52)

    def _raw(self, first: int, n: int, blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        """Return raw bits, (n, 4 blocks); Philox makes blocks of four numbers and can start at any block."""
        drawn = np.random.Philox(key=(self.number << 64) + self.seed, counter=first * blocks)
        return drawn.random_raw(n * blocks * 4).reshape(n, blocks * 4)


@dataclass(frozen=True)
class Sketch:
    """The random combinations of the outputs.

    >>> Sketch(probes=4, seed=0, weighted=False).probes
    4
    """

    probes: int  #: number of combinations; each takes a pass
    seed: int
    weighted: bool  #: whether combinations are for traces with the loss's C; else for traces with I

    def views(self, loss: Loss, f: Tensor, y: Any, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each probe rows (n, r, N) and C (n, r, r): those of a network with r outputs, rows times f.

        `chunk` is the number of the chunk's first sample.
        """
        for u in self.combinations(chunk, len(f), f[0].numel()):
            u = u.reshape(f.shape).to(f.device)
            if self.weighted:
                yield loss.combine(f.detach(), y, u)
            else:
                yield u[:, None], u.new_ones(len(f), 1, 1)

    def combinations(self, first: int, n: int, outputs: int) -> Iterator[Tensor]:
        """Yield each probe's u, (n, N) float64, for n samples from number `first` on."""
        streams = [SampleStream(self.seed, probe) for probe in range(self.probes)]
        if self.probes > _FEW or (self.probes > _VERY_FEW and self.probes * outputs > _HELD):
            yield from (stream.signs(first, n, outputs) for stream in streams)
        elif self.probes > _VERY_FEW:
            yield from _balanced(torch.stack([stream.uniform(first, n, outputs) for stream in streams]), 1)
        else:
            yield from _balanced(torch.stack([stream.normal(first, n, outputs) for stream in streams]), _ROUNDS)
