"""Which axis of an operation's output counts samples, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatlens.operations.graph import Place


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

    def fit(self, shape: torch.Size, n: int) -> bool:
        """Return whether a tensor of this shape can have its samples here."""
        return len(shape) > self.axis and shape.numel() > 0 and shape[self.axis] % n == 0


FRONT = Rows()
CANDIDATES = (FRONT, Rows(0, "inner"), Rows(1), Rows(1, "inner"))


def splits(n: int) -> Iterator[Tensor]:
    """Masks of n samples, such that for every two samples some mask has the first and not the second.

    >>> [mask.tolist() for mask in splits(3)]
    [[True, False, True], [False, True, False], [True, True, False], [False, False, True]]
    """
    numbers = torch.arange(n)
    for bit in range(max(1, (n - 1).bit_length())):
        mask = (numbers >> bit) % 2 == 0
        yield mask
        yield ~mask


def independent_rows(
    f: Tensor, at: Mapping[str, Place], allowed: Mapping[str, list[Rows]], generator: torch.Generator
) -> dict[str, list[Rows]]:
    """Return, by place, the arrangements under which no sample's outputs respond to another sample's rows.

    The outputs of some samples alone are combined at random: the slopes at all others' rows must be exactly 0. With the
    masks of `splits` no pair of samples is left out, and rounding cannot change the result.
    """
    n, left = len(f), {name: list(rows) for name, rows in allowed.items()}
    u = torch.randn(f.shape, generator=generator).to(f)
    for mask in splits(n) if at else ():
        inside = mask.to(f.device)
        chosen = (u * inside.to(f)[:, None] * f).sum()
        slopes = torch.autograd.grad(chosen, list(at.values()), retain_graph=True, allow_unused=True)
        for name, slope in zip(at, slopes, strict=True):
            if slope is not None:
                left[name] = [rows for rows in left[name] if not bool(rows.by_sample(slope, n)[~inside].any())]
    return left


def coupled_places(
    f: Tensor, at: Mapping[str, Place], planned: Mapping[str, Rows], generator: torch.Generator
) -> list[str]:
    """The places where samples do not lie as planned, or see each other.

    Two backward passes: each sample's rows must follow a weight given to its outputs. Where they do not, to rounding,
    `apart` decides.
    """
    n, weights = len(f), 1 + torch.arange(len(f)).to(f) / len(f)
    u = torch.randn(f.shape, generator=generator).to(f)
    once, weighted = (
        torch.autograd.grad((v * f).sum(), list(at.values()), retain_graph=True, allow_unused=True)
        for v in (u, u * weights[:, None])
    )
    odd = []
    for name, first, second in zip(at, once, weighted, strict=True):
        if first is not None and second is not None:
            mine, other = (planned[name].by_sample(slope, n).reshape(n, -1) for slope in (first, second))
            off = torch.linalg.vector_norm(other - weights.to(mine)[:, None] * mine, dim=1)
            if not bool((off <= 1e4 * torch.finfo(f.dtype).eps * mine.norm(dim=1).max()).all()):
                odd.append(name)
    left = independent_rows(f, {name: at[name] for name in odd}, {name: [planned[name]] for name in odd}, generator)
    return [name for name in odd if not left[name]]
