"""Samples at which the network or the loss has no finite derivative, and the operation that has none there."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.grams.record import run_recorded
from flatlens.operations.graph import Graph
from flatlens.operations.table import role_of
from flatlens.problem import Batch, Problem
from flatlens.problem.samples import FORWARD_CHUNK, size, take
from flatlens.problem.state import differentiable

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
