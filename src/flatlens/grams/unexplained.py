"""Per-sample gradients by autograd, for parameters that the plan does not explain; slow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_map

from flatlens.errors import out_of_memory
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import counts_samples
from flatlens.problem.samples import has_lists, is_list, size, take
from flatlens.problem.state import differentiable


@contextmanager
def ignore_slow_batching_warning() -> Iterator[None]:
    """Ignore torch's warning about operations that it batches by a loop: they are slower, but right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


class Runner(nn.Module):
    """The problem's forward at other values of the parameters, which functions of torch.func can differentiate."""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        super().__init__()
        self.problem = problem
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        """Return (outputs, targets)."""
        return self.problem.run(self.model, batch)

    def at(self, values: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Any]:
        """Return (outputs, targets) at other values of some named parameters.

        A parameter of several modules is replaced in each. A module with several names is given under one: torch 2.13
        restores it name by name, and leaves the values in place of the parameters that it met first.
        """
        known = dict(self.model.named_parameters())
        given = {id(known[name]): value for name, value in values.items()}
        places = {
            f"model.{where}.{name}" if where else f"model.{name}": given[id(p)]
            for where, module in self.model.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in given
        }
        found: tuple[Tensor, Any] = functional_call(self, places, (batch,), tie_weights=False)
        return found


def sample_axes(batch: Batch, n: int) -> Batch:
    """Return the axis of samples of each part of a batch, for torch.vmap: 0, or None where there is none."""
    return tree_map(lambda leaf: 0 if counts_samples(leaf, n) else None, batch, is_leaf=is_list)


def as_batch(sample: Batch) -> Batch:
    """Return one sample as a batch."""
    return tree_map(lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf, sample, is_leaf=is_list)


def per_sample_gradients(
    problem: Problem, model: nn.Module, batch: Batch, names: tuple[str, ...], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Return df/dtheta for each named parameter, (n, N, size) float64; with `rows` (n, r, N), that of rows f."""
    if not names:
        return {}
    if has_lists(batch):
        return each_sample_alone(problem, model, batch, names, rows)
    try:
        return _batched(problem, model, batch, names, rows)
    except Exception as error:  # any error: data-dependent control flow, or an operation without a batching rule
        if out_of_memory(error):
            raise
        return each_sample_alone(problem, model, batch, names, rows)


def each_sample_alone(
    problem: Problem, model: nn.Module, batch: Batch, names: tuple[str, ...], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the same from one forward pass for each sample and one backward pass for each of its outputs."""
    each = [
        _single_sample(problem, model, take(batch, i, i + 1), names, None if rows is None else rows[i])
        for i in range(size(batch))
    ]
    return {name: torch.stack([row[name] for row in each]) for name in names}


def _batched(
    problem: Problem, model: nn.Module, batch: Batch, names: tuple[str, ...], rows: Tensor | None
) -> dict[str, Tensor]:
    """Return the same for all samples at once with torch.vmap, which is wrong for some operations."""
    runner = Runner(problem, model)
    batch = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)
    values = {name: p.detach() for name, p in model.named_parameters() if name in names}

    def one(sample: Batch, row: Tensor | None, parameters: dict[str, Tensor]) -> Tensor:
        outputs = runner.at(parameters, as_batch(sample))[0][0]
        return outputs if row is None else row.to(outputs) @ outputs

    def jacobian(sample: Batch, row: Tensor | None) -> dict[str, Tensor]:
        result: dict[str, Tensor] = jacrev(one, argnums=2)(sample, row, values)
        return result

    with ignore_slow_batching_warning():
        found = vmap(
            jacobian, in_dims=(sample_axes(batch, size(batch)), None if rows is None else 0), randomness="error"
        )(batch, rows)
    return {name: _rows(found[name].detach()) for name in names}


def _rows(gradients: Tensor) -> Tensor:
    """Return gradients (n, N, ...) as (n, N, size) in float64."""
    return gradients.reshape(*gradients.shape[:2], -1).to(torch.float64)


def _single_sample(
    problem: Problem, model: nn.Module, sample: Batch, names: tuple[str, ...], combined: Tensor | None
) -> dict[str, Tensor]:
    """Return df/dtheta of a batch of one sample, (N, size) each; with `combined` (r, N), that of combined f."""
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
    """Return one row of a Jacobian in float64; zeros if the output does not depend on the parameter."""
    dense = torch.zeros_like(p) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
    return dense.flatten().to(torch.float64)
