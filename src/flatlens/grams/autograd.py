"""What the N backward passes do not give: per-sample gradients by autograd alone, and derivatives that do not exist.

Parameters that the plan does not explain get per-sample gradients (slow). `require_second_derivative` finds operations
that cannot be differentiated again, and `singular` those without a finite derivative at some samples.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_map

from flatlens.errors import FlatlensError, LossFailed, NotDifferentiable, one_line, out_of_memory
from flatlens.grams.record import run_recorded
from flatlens.operations.graph import Graph, sources_of, walk
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
        self._places: dict[str, list[str]] = {}  #: by parameter, found at the first call

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        """Return (outputs, targets)."""
        return self.problem.run(self.model, batch)

    def at(self, values: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Any]:
        """(outputs, targets) at other values of some named parameters."""
        self._places = self._places or all_places(self.model)
        places = {f"model.{place}": value for name, value in values.items() for place in self._places[name]}
        found: tuple[Tensor, Any] = functional_call(self, places, (batch,), tie_weights=False)
        return found


def places_of(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of named parameters as `functional_call(..., tie_weights=False)` takes them.

    A parameter of several modules is replaced in each. A module with several names is given under one: torch 2.13
    restores it name by name, and leaves the values in place of the parameters that it met first.
    """
    found = all_places(model)
    return {place: value for name, value in values.items() for place in found[name]}


def all_places(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter in all modules that hold it, by its first name."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for where, module in model.named_modules():
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False):
            found[names[id(p)]].append(f"{where}.{own}" if where else own)
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
    chosen = {name: p for name, p in model.named_parameters() if name in names}
    found: dict[str, list[Tensor]] = {name: [] for name in chosen}
    n = size(batch)
    with differentiable(chosen.values()):
        for i in range(n):
            f = problem.run(model, take(batch, i, i + 1))[0][0]
            for output in f if rows is None else rows[i].to(f) @ f:
                row = torch.autograd.grad(output, list(chosen.values()), retain_graph=True, allow_unused=True)
                for (name, p), slope in zip(chosen.items(), row, strict=True):
                    slope = torch.zeros_like(p) if slope is None else slope.to_dense() if slope.is_sparse else slope
                    found[name].append(slope.flatten().to(torch.float64))
    return {name: torch.stack(slopes).reshape(n, len(slopes) // n, -1) for name, slopes in found.items()}


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
    return {name: found[name].detach().reshape(*found[name].shape[:2], -1).to(torch.float64) for name in names}


_IN_PLACE = "do not change tensors or frozen parameters in place"
_MENDS = {
    "inplace operation": _IN_PLACE,
    "in-place operation": _IN_PLACE,
    "torch.utils.checkpoint": "use checkpoint(..., use_reentrant=False)",
    "derivative for": "write this operation with others, which torch can differentiate often enough",
    "implement either the backward or vjp": "give the autograd.Function a backward() of torch operations",
    "functorch": "write this part of forward() without torch.func",
}
"""Ways to mend autograd's own errors, by parts of their messages; other errors come from the network."""


@contextmanager
def clear_autograd_errors() -> Iterator[None]:
    """Raise errors of autograd as one clear line, `NotDifferentiable`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FlatlensError) or not any(word in str(error) for word in _MENDS):
            raise
        if "loss" in str(error):  # a kernel of torch's for a loss
            raise LossFailed(
                f"the loss cannot be differentiated often enough ({one_line(error, 160)})",
                remedy="write it as a function of plain operations, (outputs, targets) -> losses of shape (n,)",
            ) from error
        mend = next(mend for word, mend in _MENDS.items() if word in str(error))
        raise NotDifferentiable(
            f"the network cannot be differentiated ({one_line(error, 160)})", argument="model", remedy=mend
        ) from error


def require_second_derivative(gradients: Iterable[Tensor | None]) -> None:
    """Raise RuntimeError if an operation in the graph of these gradients is marked `once_differentiable`.

    Autograd may not raise for such an operation, but silently leave its branch out.
    """
    starts = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    if any(node.name().endswith("Error") for node in walk(starts, sources_of)):
        raise RuntimeError("an operation of the network is marked once_differentiable")


_Rows: TypeAlias = list[Tensor]
_NAMED = 3  #: samples that the words list
_PRODUCTS = ("linear", "piecewise linear", "bilinear")  #: roles of operations whose derivatives are finite


def singular(problem: Problem, model: nn.Module) -> str:
    """Return in words which operation has no finite derivative, or second derivative, and at which samples.

    Empty if all are finite on all data, or if smaller numbers make them finite: those overflow.
    """
    with problem.measuring(model), differentiable(model.parameters()):
        for order, name in enumerate(("derivative", "second derivative"), 1):
            start, met, samples = 0, "", list[int]()
            for raw in problem.batches(FORWARD_CHUNK):
                if culprit := _culprit(problem, model, raw, order):
                    met = met or culprit
                    # the first samples without a finite derivative, by halving; none where samples are coupled
                    parts = [] if problem.coupled else [(0, size(raw))]
                    while parts and len(samples) <= _NAMED:
                        low, high = parts.pop()
                        middle = (low + high) // 2
                        if not _culprit(problem, model, take(raw, low, high), order):
                            continue
                        if high - low == 1:
                            samples.append(start + low)
                        else:
                            parts += [(middle, high), (low, middle)]
                start += size(raw)
                if len(samples) > _NAMED:
                    break
            if met:
                listed = ", ".join(map(str, samples[:_NAMED])) + (", ..." if len(samples) > _NAMED else "")
                at = f" at sample{'s' * (len(samples) > 1)} {listed}" if samples else ""
                return (
                    f"the {name} of {met} is NaN or infinite{at}: keep its argument away from there (add a small "
                    f"number, or clamp it), or leave out such samples"
                )
    return ""


def _culprit(problem: Problem, model: nn.Module, raw: Batch, order: int) -> str:
    """Return the first operation that makes a derivative of some samples not finite; empty if all are finite."""
    _, inputs, f, y = run_recorded(problem, model, problem.place(raw))
    at: _Rows = [p for p in (*model.parameters(), *inputs) if p.requires_grad]
    u = 0.5 + torch.rand(f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f)
    small = torch.finfo(f.dtype).tiny ** 0.5  # what overflows is finite for combinations as small as this
    losses = problem.loss.values(f.to(torch.float64), y)
    found = (_named(small * of.sum(), at, order) for of in (u * f, losses) if of.requires_grad)
    return next(filter(None, found), "")


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
