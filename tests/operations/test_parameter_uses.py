"""How parameters act, read off autograd's graph: what is known by name, and what is not taken for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.operations.graph import Graph
from flatlens.operations.parameter_uses import reads_of

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def kinds(parameter: nn.Parameter, act: Callable[[nn.Parameter], Tensor]) -> list[str] | None:
    found = reads_of(Graph(act(parameter)), parameter)
    return None if found is None else [type(read).__name__ for read in found]


def square() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def row() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))


KNOWN: dict[str, tuple[Callable[[], nn.Parameter], Callable[[nn.Parameter], Tensor], list[str]]] = {
    "a linear layer's": (square, lambda W: F.linear(X, W), ["Product"]),
    "in reverse": (square, lambda W: X @ W, ["Product"]),
    "transposed by name": (square, lambda W: X @ W.mT, ["Product"]),
    "used twice": (square, lambda W: F.linear(F.linear(X, W), W), ["Product", "Product"]),
    "a bias": (row, lambda b: F.linear(X, torch.ones(4, 4).double(), b), ["Bias"]),
    "added": (row, lambda b: X + b, ["Entrywise"]),
    "taken away": (row, lambda b: b - X, ["Entrywise"]),
    "a scale": (row, lambda g: g * X, ["Entrywise"]),
    "a norm's": (row, lambda g: F.layer_norm(X, (4,), g, None), ["Entrywise"]),
    "expanded": (row, lambda t: torch.cat([t.expand(3, 4).exp(), X], 1), ["Entrywise"]),
    "looked up": (square, lambda E: F.embedding(torch.tensor([0, 2, 2]), E), ["Lookup"]),
    "looked up and multiplied": (square, lambda E: F.embedding(torch.tensor([1, 2]), E) @ E.mT, ["Lookup", "Product"]),
    "not at all": (row, lambda t: X, []),
}
UNKNOWN: dict[str, tuple[Callable[[], nn.Parameter], Callable[[nn.Parameter], Tensor]]] = {
    "sliced": (square, lambda W: F.linear(X, W[:3])),
    "made into another weight": (square, lambda W: F.linear(X, W.exp())),
    "a bias of one entry": (
        lambda: nn.Parameter(torch.ones(1).double()),
        lambda b: F.linear(X, torch.ones(4, 4).double(), b),
    ),
    "a complex product": (square, lambda W: (torch.fft.fft(X) @ W.to(torch.complex128)).abs()),
    "a gain on frequencies": (
        lambda: nn.Parameter(torch.ones(3).double()),
        lambda g: torch.fft.irfft(torch.fft.rfft(X) * g, n=4),
    ),
    "one known read and one that is not": (square, lambda W: F.linear(X, W) / W.norm()),
    "divided by": (row, lambda t: X / t),
    "a factor of its own sum": (row, lambda b: torch.add(X, b, alpha=3)),
    "scaled before it is added": (square, lambda W: torch.addmm(X, X, W, alpha=2)),
    "on the left": (square, lambda W: W @ X.mT),
    "split": (square, lambda W: F.linear(X, W.chunk(2)[1])),
    "indexed": (row, lambda t: X + t[torch.tensor([3, 2, 1, 0])]),
    "counted by frequency": (
        square,
        lambda E: F.embedding(torch.tensor([0, 2, 2]), E, scale_grad_by_freq=True),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known(name: str) -> None:
    make, act, expected = KNOWN[name]
    assert kinds(make(), act) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_taken_for_known(name: str) -> None:
    make, act = UNKNOWN[name]
    assert kinds(make(), act) is None


CURVED = {
    "a matrix product": (lambda p: F.linear(X, p), False),
    "behind kinks": (lambda p: F.linear(X, p).relu().abs(), False),
    "squared": (lambda p: F.linear(X, p) ** 2, True),
    "times itself": (lambda p: F.linear(X, p) * F.linear(X, p), True),
    "times what does not hold it": (lambda p: F.linear(X, p) * X.sin(), False),
    "in a branch that is shut": (lambda p: torch.where(X > 99, F.linear(X, p).exp(), X), True),
    "below a division": (lambda p: X / F.linear(X, p), True),
    "above a division": (lambda p: F.linear(X, p) / (1 + X**2), False),
    "normalised": (lambda p: F.layer_norm(F.linear(X, p), (4,)), True),
}


@pytest.mark.parametrize("name", CURVED)
def test_where_outputs_curve(name: str) -> None:
    act, expected = CURVED[name]
    W = square()
    graph = Graph(act(W))
    assert bool(graph.curved_in({graph.leaves[id(W)]: 1})) == expected
