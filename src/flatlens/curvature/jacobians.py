"""The outputs' first derivatives as rectangular matrices, known by their products on either side.

>>> from flatlens import Problem
>>> net = nn.Linear(2, 1, bias=False)
>>> problem = Problem(net, "mse", (torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.zeros(2, 1)))
>>> ParameterJacobian(problem).times(torch.tensor([1.0, 0.0])).flatten().tolist()
[3.0, 5.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from flatlens.curvature.graphs import Graphs
from flatlens.curvature.operators import Product, jacobian_products
from flatlens.curvature.space import space_of
from flatlens.errors import BadInput
from flatlens.grams.record import run_recorded
from flatlens.grams.twice import require_second_derivative
from flatlens.problem import Batch, Problem


def _require_shape(what: str, got: Tensor, shape: tuple[int, ...]) -> None:
    if got.shape != shape:
        raise BadInput(f"{what}: shape {shape} is needed, got {tuple(got.shape)}")


@final
class ParameterJacobian:
    """df/dtheta, (n N) x P."""

    def __init__(
        self, problem: Problem, parameters: str | Iterable[str] | None = None, *, model: nn.Module | None = None
    ) -> None:
        self.problem = problem
        self.model = problem.measured() if model is None else model
        self.space = space_of(problem, self.model, parameters)
        self.products = 0
        self._graphs: Graphs[tuple[int, Product, Product]] = Graphs(problem, self.model, self.space.tensors, self._open)

    def _open(self, batch: Batch, number: int) -> tuple[int, Product, Product]:
        f, _ = self.problem.run(self.model, batch)
        return (len(f), *jacobian_products(f, self.space))

    def times(self, v: Tensor) -> Tensor:
        """J v, (n, N), for v (P,)."""
        _require_shape("ParameterJacobian.times(v)", v, (self.space.size,))
        self.products += 1
        v = v.to(self.space.device, self.space.dtype)
        return torch.cat([forward(v).detach() for _, forward, _ in self._graphs])

    def transposed_times(self, w: Tensor) -> Tensor:
        """J^T w, (P,), for w (n, N)."""
        _require_shape("ParameterJacobian.transposed_times(w)", w, (self.problem.n, self.problem.outputs))
        self.products += 1
        w = w.to(self.space.device, self.space.dtype)
        total, start = torch.zeros(self.space.size, dtype=w.dtype, device=w.device), 0
        for n, _, backward in self._graphs:
            total += backward(w[start : start + n])
            start += n
        return total


@dataclass(frozen=True, eq=False)
class _Blocks:
    """One batch: its inputs as leaves of a kept graph, its outputs, and df/dx^T w as a function of w."""

    inputs: list[Tensor]
    f: Tensor
    w: Tensor
    rows: tuple[Tensor | None, ...]

    @property
    def width(self) -> int:
        return sum(x[0].numel() for x in self.inputs)

    def times(self, v: Tensor) -> Tensor:
        parts = torch.split(v, [x[0].numel() for x in self.inputs], dim=1)
        live = [(g, part) for g, part in zip(self.rows, parts, strict=True) if g is not None and g.requires_grad]
        if not live:
            return torch.zeros_like(self.f)
        onto = [part.reshape(g.shape) for g, part in live]
        (out,) = torch.autograd.grad([g for g, _ in live], self.w, onto, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.f) if out is None else out

    def transposed_times(self, w: Tensor) -> Tensor:
        if not self.f.requires_grad:
            return w.new_zeros(len(w), self.width)
        back = torch.autograd.grad(self.f, self.inputs, w, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(x) if g is None else g for g, x in zip(back, self.inputs, strict=True)]
        return torch.cat([g.reshape(len(w), -1) for g in filled], 1)


@final
class InputJacobian:
    """df/dx of every sample: n blocks N x M, one below the other on the diagonal."""

    def __init__(self, problem: Problem, *, model: nn.Module | None = None) -> None:
        if problem.coupled:
            raise BadInput(
                "InputJacobian(...): with batchnorm='train' samples are coupled: there is no block per sample"
            )
        self.problem = problem
        self.model = problem.measured() if model is None else model
        self.products = 0
        self._graphs: Graphs[_Blocks] = Graphs(problem, self.model, [], self._open)

    def _open(self, batch: Batch, number: int) -> _Blocks:
        _, inputs, f, _ = run_recorded(self.problem, self.model, batch)
        if not inputs:
            raise BadInput("InputJacobian(...): the network has no floating input and no embedding to differentiate to")
        w = torch.zeros_like(f).requires_grad_()
        if not f.requires_grad:
            return _Blocks(inputs, f, w, (None,) * len(inputs))
        rows = torch.autograd.grad(f, inputs, w, create_graph=True, allow_unused=True)
        require_second_derivative(rows)
        return _Blocks(inputs, f, w, rows)

    def times(self, v: Tensor) -> Tensor:
        """J_i v_i of every sample, (n, N), for v (n, M)."""
        return self._each(v, _Blocks.times, lambda blocks: blocks.width)

    def transposed_times(self, w: Tensor) -> Tensor:
        """J_i^T w_i of every sample, (n, M), for w (n, N)."""
        return self._each(w, _Blocks.transposed_times, lambda blocks: blocks.f.shape[1])

    def _each(
        self, vectors: Tensor, product: Callable[[_Blocks, Tensor], Tensor], width: Callable[[_Blocks], int]
    ) -> Tensor:
        if len(vectors) != self.problem.n:
            raise BadInput(f"InputJacobian: {self.problem.n} vectors are needed, one a sample, got {len(vectors)}")
        vectors = vectors.to(self.problem.dtype)
        parts, start = [], 0
        for blocks in self._graphs:
            n = len(blocks.f)
            _require_shape("InputJacobian: a batch of vectors", vectors[start : start + n], (n, width(blocks)))
            parts.append(product(blocks, vectors[start : start + n]).detach())
            start += n
        self.products += 1
        return torch.cat(parts)
