"""What the N backward passes do not give: per-sample gradients by autograd alone, and derivatives that do not exist.

Parameters that the plan does not explain get per-sample gradients (slow). `require_second_derivative` finds operations
that cannot be differentiated again, and `singular` those without a finite derivative at some samples.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_map

from flatlens.errors import out_of_memory
from flatlens.grams.record import run_recorded
from flatlens.operations.graph import Graph
from flatlens.operations.table import role_of
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import FORWARD_CHUNK, counts_samples, has_lists, is_list, size, take
from flatlens.problem.eval_context import differentiable


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
        """(outputs, targets) at other values of some named parameters."""
        places = {f"model.{place}": value for place, value in places_of(self.model, values).items()}
        found: tuple[Tensor, Any] = functional_call(self, places, (batch,), tie_weights=False)
        return found


def places_of(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of named parameters as `functional_call(..., tie_weights=False)` takes them.

    A parameter of several modules is replaced in each. A module with several names is given under one: torch 2.13
    restores it name by name, and leaves the values in place of the parameters that it met first.
    """
    known = dict(model.named_parameters())
    given = {id(known[name]): value for name, value in values.items()}
    return {
        f"{where}.{name}" if where else name: given[id(p)]
        for where, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in given
    }


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


_ERROR_SUFFIX = "Error"  #: end of the names of autograd's nodes for a derivative that is not implemented


def has_second_derivative(gradients: Iterable[Tensor | None]) -> bool:
    """Return whether no operation in the graph of these gradients is marked `once_differentiable`.

    Autograd may not raise for such an operation, but silently leave its branch out.
    """
    seen: set[Any] = set()
    waiting: list[Any] = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith(_ERROR_SUFFIX):
            return False
        waiting.extend(parent for parent, _ in node.next_functions)
    return True


def require_second_derivative(gradients: Iterable[Tensor | None]) -> None:
    """Raise RuntimeError if second derivatives would be silently wrong."""
    if not has_second_derivative(gradients):
        raise RuntimeError("an operation of the network is marked once_differentiable")


_Rows: TypeAlias = list[Tensor]
_NAMED = 3  #: samples that the words list
_PRODUCTS = ("linear", "piecewise linear", "bilinear")  #: roles of operations whose derivatives are finite
_ORDERS = ("derivative", "second derivative")


def singular(problem: Problem, model: nn.Module) -> str:
    """Return in words which operation has no finite derivative, or second derivative, and at which samples.

    Empty if all are finite on all data, or if smaller numbers make them finite: those overflow.
    """
    search = _Search(problem, model)
    with problem.measuring(model), differentiable(model.parameters()):
        for order, name in enumerate(_ORDERS, 1):
            start, met, samples = 0, "", list[int]()
            for raw in problem.batches(FORWARD_CHUNK):
                culprit = search.culprit(raw, order)
                if culprit:
                    met = met or culprit
                    samples += search.samples(raw, order, start, _NAMED + 1 - len(samples))
                start += size(raw)
                if len(samples) > _NAMED:
                    break
            if met:
                return _words(name, met, samples)
    return ""


def _words(order: str, operation: str, samples: list[int]) -> str:
    named = ", ".join(map(str, samples[:_NAMED])) + (", ..." if len(samples) > _NAMED else "")
    at = f" at sample{'s' * (len(samples) > 1)} {named}" if samples else ""
    return (
        f"the {order} of {operation} is NaN or infinite{at}: keep its argument away from there (add a small number, or "
        f"clamp it), or leave out such samples"
    )


@dataclass(frozen=True, eq=False)
class _Search:
    """The search for operations and samples without a finite derivative."""

    problem: Problem
    model: nn.Module

    def culprit(self, raw: Batch, order: int) -> str:
        """Return the first operation that makes a derivative of some samples not finite; empty if all are finite."""
        _, inputs, f, y = run_recorded(self.problem, self.model, self.problem.place(raw))
        at: _Rows = [p for p in (*self.model.parameters(), *inputs) if p.requires_grad]
        u = 0.5 + torch.rand(f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f)
        small = torch.finfo(f.dtype).tiny ** 0.5  # what overflows is finite for combinations as small as this
        losses = self.problem.loss.values(f.to(torch.float64), y)
        found = (_named(small * of.sum(), at, order) for of in (u * f, losses) if of.requires_grad)
        return next(filter(None, found), "")

    def samples(self, raw: Batch, order: int, start: int, most: int) -> list[int]:
        """Return the first samples without a finite derivative, found by halving; none where samples are coupled."""
        if self.problem.coupled:
            return []
        found: list[int] = []
        parts = [(0, size(raw))]
        while parts and len(found) < most:
            low, high = parts.pop()
            if not self.culprit(take(raw, low, high), order):
                continue
            middle = (low + high) // 2
            if high - low == 1:
                found.append(start + low)
            else:
                parts += [(middle, high), (low, middle)]
        return found


def _named(of: Tensor, at: _Rows, order: int) -> str:
    """Return the operation that makes the derivative of this order not finite; empty if there is none.

    Derivatives of a product are its factors: where products alone give no finite number, they overflow.
    """
    if order == 2:
        rows = [row for row in _gradients(of, at, create_graph=True) if row.requires_grad]
        of = torch.stack([row.sum() for row in rows]).sum() if rows else of.detach()
    if not of.requires_grad or all(bool(row.isfinite().all()) for row in _gradients(of, at)):
        return ""
    met: list[str] = []

    def watching(name: str) -> Callable[[Any, Any], None]:
        def look(after: Any, before: Any) -> None:
            if _finite(before) and not _finite(after):
                met.append(name)

        return look

    with ExitStack() as hooks:
        for node in Graph(of).nodes:
            if role_of(node) not in _PRODUCTS:
                hooks.callback(node.register_hook(watching(node.name())).remove)
        _gradients(of, at)
    return _spoken(met[0]) if met else ""


def _gradients(of: Tensor, at: _Rows, *, create_graph: bool = False) -> _Rows:
    found = torch.autograd.grad(of, at, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return [row.to_dense() if row.is_sparse else row for row in found if row is not None]


def _finite(rows: Any) -> bool:
    return all(row is None or bool(row.isfinite().all()) for row in rows)


def _spoken(node: str) -> str:
    """Return the name of an operation from that of its node in autograd's graph.

    >>> _spoken("SqrtBackward0"), _spoken("LinalgVectorNormBackward0")
    ('sqrt', 'linalg_vector_norm')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"Backward\d*$", "", node)).lower()
