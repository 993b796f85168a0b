"""Which axis of an operation's output counts samples, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Samples lie along one axis, of size n w: w rows of each side by side ("outer"), or every n-th row ("inner")."""

    axis: int = 0
    order: Literal["outer", "inner"] = "outer"

    def by_sample(self, tensor: Tensor, n: int) -> Tensor:
        """(n, w, the other axes)."""
        front = tensor.movedim(self.axis, 0)
        if self.order == "outer":
            return front.reshape(n, -1, *front.shape[1:])
        return front.reshape(-1, n, *front.shape[1:]).transpose(0, 1)

    def in_front(self, tensor: Tensor, n: int) -> Tensor:
        """(n w, the other axes), each sample's rows side by side."""
        front = tensor.movedim(self.axis, 0)
        return front if self.order == "outer" else self.by_sample(tensor, n).flatten(0, 1)

    def put_back(self, tensor: Tensor, n: int) -> Tensor:
        """The inverse of `in_front`."""
        if self.order == "inner":
            tensor = tensor.reshape(n, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)
        return tensor.movedim(0, self.axis)

    def fit(self, shape: torch.Size, n: int) -> bool:
        """Whether a tensor of this shape can have its samples here."""
        return len(shape) > self.axis and shape[self.axis] > 0 and shape[self.axis] % n == 0


FRONT = Rows()
CANDIDATES = (FRONT, Rows(0, "inner"), Rows(1), Rows(1, "inner"))


def agrees(rows: Rows, once: Tensor, weighted: Tensor, weights: Tensor) -> bool:
    """Whether slopes `weighted`, of outputs times their sample's weight, are the slopes `once` with each sample's rows
    times its weight. They are not where samples lie elsewhere, or see each other."""
    n = len(weights)
    mine, other = (rows.by_sample(slope, n).reshape(n, -1) for slope in (once, weighted))
    apart = torch.linalg.vector_norm(other - weights.to(mine)[:, None] * mine, dim=1)
    size = torch.linalg.vector_norm(mine, dim=1)
    return bool((apart <= 1e5 * torch.finfo(mine.dtype).eps * size.max()).all())
