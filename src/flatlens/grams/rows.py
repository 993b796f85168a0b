"""Positions of samples in a tensor inside the network, and tests that no sample affects another one's outputs.

A network may put its samples on the first axis, on the second (tokens first), or may merge them with tokens into one
axis. A backward pass shows where they are: the Jacobian of a sample's outputs is 0 at all other samples' rows. This is
tested exactly, not to rounding (`independent_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatlens.operations.graph import Place


@dataclass(frozen=True)
class Rows:
    """The axis that holds the samples, and their order on it.

    The axis has size n w: w rows for each sample. In order "outer" a sample's rows are neighbours; in order "inner"
    sample i has rows i, i + n, i + 2n, ...
    """

    axis: int = 0
    order: Literal["outer", "inner"] = "outer"

    def by_sample(self, tensor: Tensor, n: int) -> Tensor:
        """Return the tensor as (n, w, the other axes)."""
        front = tensor.movedim(self.axis, 0)
        if self.order == "outer":
            return front.reshape(n, -1, *front.shape[1:])
        return front.reshape(-1, n, *front.shape[1:]).transpose(0, 1)

    def in_front(self, tensor: Tensor, n: int) -> Tensor:
        """Return the tensor as (n w, the other axes), with each sample's rows next to each other."""
        front = tensor.movedim(self.axis, 0)
        return front if self.order == "outer" else self.by_sample(tensor, n).flatten(0, 1)

    def fit(self, shape: torch.Size, n: int) -> bool:
        """Return whether a tensor of this shape can hold n samples in this way."""
        return len(shape) > self.axis and shape.numel() > 0 and shape[self.axis] % n == 0


FRONT = Rows()
CANDIDATES = (FRONT, Rows(0, "inner"), Rows(1), Rows(1, "inner"))


def splits(n: int) -> Iterator[Tensor]:
    """Yield masks of n samples: for every two samples i and j, some mask contains i and not j.

    >>> [mask.tolist() for mask in splits(3)]
    [[True, False, True], [False, True, False], [True, True, False], [False, False, True]]
    """
    numbers = torch.arange(n)
    for bit in range(max(1, (n - 1).bit_length())):
        mask = (numbers >> bit) % 2 == 0
        yield mask
        yield ~mask


def independent_rows(
    f: Tensor,
    at: Mapping[str, Place],
    allowed: Mapping[str, list[Rows]],
    generator: torch.Generator,
    moving: set[str] | None = None,
) -> dict[str, list[Rows]]:
    """Return for each place the arrangements under which no sample's outputs depend on another sample's rows.

    One backward pass for each mask of `splits`: the outputs of the samples in the mask are combined with random
    weights, and the derivative at all other samples' rows must be exactly 0. The masks separate every pair of samples.
    Rounding cannot change the result: a derivative of 0 is computed as 0.

    Args:
        f: outputs, (n, N).
        at: places in the graph of f, by name.
        allowed: candidate arrangements of each place.
        generator: draws the random weights.
        moving: gets the names of the places that move the outputs: elsewhere every arrangement is possible.
    """
    n, left = len(f), {name: list(rows) for name, rows in allowed.items()}
    u = torch.randn(f.shape, generator=generator).to(f)
    for mask in splits(n) if at else ():
        inside = mask.to(f.device)
        chosen = (u * inside.to(f)[:, None] * f).sum()
        derivatives = torch.autograd.grad(chosen, list(at.values()), retain_graph=True, allow_unused=True)
        for name, derivative in zip(at, derivatives, strict=True):
            if derivative is not None:
                # NaN shows nothing: it is 0 times the infinite derivative of a sample's own
                reached = (derivative != 0) & ~derivative.isnan()
                if moving is not None and name not in moving and bool(reached.any()):
                    moving.add(name)
                left[name] = [rows for rows in left[name] if not bool(rows.by_sample(reached, n)[~inside].any())]
    return left


def of_own_inputs(
    at: Place, like: Tensor, inputs: list[Tensor], allowed: list[Rows], n: int, generator: torch.Generator
) -> list[Rows]:
    """Return the arrangements of a place under which no sample's rows depend on another sample's inputs.

    `like` has the place's shape; `inputs` are the network's, samples in front. The test is that of `independent_rows`,
    one place further up.
    """
    left = list(allowed)
    for mask in splits(n) if inputs else ():
        for rows in list(left):
            u = torch.randn(like.shape, generator=generator).to(like)
            rows.by_sample(u, n)[~mask] = 0  # a view: an axis is only split
            derivatives = torch.autograd.grad([at], inputs, [u], retain_graph=True, allow_unused=True)
            if any(d is not None and bool(d[~mask].nan_to_num(0.0).any()) for d in derivatives):
                left.remove(rows)
    return left


def coupled_places(
    f: Tensor, at: Mapping[str, Place], planned: Mapping[str, Rows], generator: torch.Generator
) -> list[str]:
    """Return the places where samples do not lie as planned, or affect each other's outputs.

    Quick test with two backward passes: when sample i's outputs are multiplied by w_i, the derivative at its rows must
    be multiplied by w_i. Where this fails by more than rounding, `independent_rows` decides.
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
            mine, other = (planned[name].by_sample(derivative, n).reshape(n, -1) for derivative in (first, second))
            off = torch.linalg.vector_norm(other - weights.to(mine)[:, None] * mine, dim=1)
            if not bool((off <= 1e4 * torch.finfo(f.dtype).eps * mine.norm(dim=1).max()).all()):
                odd.append(name)
    left = independent_rows(f, {name: at[name] for name in odd}, {name: [planned[name]] for name in odd}, generator)
    return [name for name in odd if not left[name]]
