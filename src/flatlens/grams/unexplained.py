"""Per-sample gradients by autograd, for parameters that no known operation explains; slow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_map

from flatlens.problem import Batch, Problem
from flatlens.problem.data import size, take
from flatlens.problem.state import differentiable


@contextmanager
def ignore_slow_batching_warning() -> Iterator[None]:
    """Without torch's warning for each operation it batches by a loop: that is slower, and as right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


class Runner(nn.Module):
    """The problem's forward as a module, so that its parameters can be handed in from outside."""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        super().__init__()
        self.problem = problem
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        """(outputs, targets)."""
        return self.problem.run(self.model, batch)


def per_sample_gradients(
    problem: Problem, model: nn.Module, batch: Batch, names: tuple[str, ...], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """df/dtheta for each named parameter, (n, N, size), in float64; of `rows` f where rows (n, r, N) are given."""
    if not names:
        return {}
    try:
        return _batched(problem, model, batch, names, rows)
    except Exception as error:  # data-dependent control flow, no batching rule: whatever forward() makes of symbols
        if "memory" in str(error):
            raise
        return each_sample_alone(problem, model, batch, names, rows)


def each_sample_alone(
    problem: Problem, model: nn.Module, batch: Batch, names: tuple[str, ...], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """The same from a forward pass of each sample alone and a backward pass for each of its outputs."""
    each = [
        _single_sample(problem, model, take(batch, i, i + 1), names, None if rows is None else rows[i])
        for i in range(size(batch))
    ]
    return {name: torch.stack([row[name] for row in each]) for name in names}


def _batched(
    problem: Problem, model: nn.Module, batch: Batch, names: tuple[str, ...], rows: Tensor | None
) -> dict[str, Tensor]:
    """All samples at once, by torch's batching of single ones, whose rules are wrong for some operations."""
    runner = Runner(problem, model)
    batch = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)
    values = {f"model.{name}": p.detach() for name, p in model.named_parameters() if name in names}
    n = size(batch)

    def one(sample: Batch, row: Tensor | None, parameters: dict[str, Tensor]) -> Tensor:
        single = tree_map(lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf, sample)
        outputs: Tensor = functional_call(runner, parameters, (single,))[0][0]
        return outputs if row is None else row.to(outputs) @ outputs

    def jacobian(sample: Batch, row: Tensor | None) -> dict[str, Tensor]:
        result: dict[str, Tensor] = jacrev(one, argnums=2)(sample, row, values)
        return result

    counted = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n else None, batch)
    with ignore_slow_batching_warning():
        found = vmap(jacobian, in_dims=(counted, None if rows is None else 0), randomness="error")(batch, rows)
    return {name: _rows(found[f"model.{name}"].detach()) for name in names}


def _rows(gradients: Tensor) -> Tensor:
    """(n, N, size) float64 of (n, N, any shape, also none)."""
    return gradients.reshape(*gradients.shape[:2], -1).to(torch.float64)


def _single_sample(
    problem: Problem, model: nn.Module, sample: Batch, names: tuple[str, ...], combined: Tensor | None
) -> dict[str, Tensor]:
    """df/dtheta of a batch of one, (N, size) each; of its outputs combined by (r, N), where given."""
    chosen = {name: p for name, p in model.named_parameters() if name in names}
    with differentiable(chosen.values()):
        f = problem.run(model, sample)[0][0]
        f = f if combined is None else combined.to(f) @ f
        rows = [
            torch.autograd.grad(f[k], list(chosen.values()), retain_graph=True, allow_unused=True)
            for k in range(len(f))
        ]
    return {name: torch.stack([_flat(row[i], p) for row in rows]) for i, (name, p) in enumerate(chosen.items())}


def _flat(gradient: Tensor | None, p: Tensor) -> Tensor:
    """One row of a Jacobian in float64; zeros where nothing depends on the parameter."""
    dense = torch.zeros_like(p) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
    return dense.flatten().to(torch.float64)
