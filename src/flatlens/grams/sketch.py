"""For many outputs: random combinations of them in place of all N, a few backward passes in place of N.

With u of independent signs, E[u u^T] = I, so that ||u^T J||^2 has the mean tr(J J^T); with C = R R^T the combination
R u gives tr(J^T C J) in the same way. Each is the exact pass of a network with one output, u^T f: every trace,
diagonal and sum of squares the pass makes comes out unbiased, and every sample has probes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatlens.problem import Loss


def signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent +1 and -1, the probes of least variance."""
    return torch.randint(0, 2, shape, generator=generator).mul_(2).sub_(1).to(like)


@dataclass(frozen=True)
class Sketch:
    """How the outputs are combined."""

    probes: int  #: independent combinations, each a pass of its own
    seed: int
    weighted: bool  #: whether by the loss's C, for traces with it; else for traces with I

    def views(self, loss: Loss, f: Tensor, y: Any, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows (n, r, N), C (n, r, r)) of each probe: the chunk seen as one of a network with r outputs rows f."""
        generator = torch.Generator().manual_seed(self.seed + chunk)
        for _ in range(self.probes):
            u = signs(tuple(f.shape), f.detach().to(torch.float64), generator)
            if self.weighted:
                yield loss.combine(f.detach(), y, u)
            else:
                yield u[:, None], u.new_ones(len(f), 1, 1)
