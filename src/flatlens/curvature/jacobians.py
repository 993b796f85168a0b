"""Jacobians of the outputs, known by their products J v and J^T w.

>>> from flatlens import Problem
>>> net = nn.Linear(2, 1, bias=False)
>>> problem = Problem(net, "mse", (torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.zeros(2, 1)))
>>> ParameterJacobian(problem).times(torch.tensor([1.0, 0.0])).flatten().tolist()
[3.0, 5.0]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, final

import torch
from torch import Tensor, nn

from flatlens.curvature.graphs import Graphs
from flatlens.curvature.operators import VectorProduct, derivative_of, jacobian_products
from flatlens.curvature.space import space_of
from flatlens.errors import BadInput
from flatlens.grams.record import run_recorded
from flatlens.problem import Batch, Problem


def _require_shape(what: str, got: Tensor, shape: tuple[int, ...]) -> None:
    if got.shape != shape:
        raise BadInput(f"{what}: shape {shape} is needed, got {tuple(got.shape)}")


@final
class ParameterJacobian:
    """The Jacobian df/dtheta of all samples, (n N) x P."""

    def __init__(
        self, problem: Problem, parameters: str | Iterable[str] | None = None, *, model: nn.Module | None = None
    ) -> None:
        self.problem = problem.as_asked()
        self.model = problem.measured() if model is None else model
        self.space = space_of(problem, self.model, parameters)
        self.products = 0
        self._graphs: Graphs[tuple[int, VectorProduct, VectorProduct]] = Graphs(
            problem, self.model, self.space.tensors, self._open
        )

    def _open(self, batch: Batch, number: int) -> tuple[int, VectorProduct, VectorProduct]:
        f, _ = self.problem.run_chunk(self.model, batch, number)
        return (len(f), *jacobian_products(f, self.space))

    def times(self, v: Tensor) -> Tensor:
        """Return J v, (n, N), for v (P,)."""
        _require_shape("ParameterJacobian.times(v)", v, (self.space.size,))
        self.products += 1
        v = v.to(self.space.device, self.space.dtype)
        return torch.cat([forward(v).detach() for _, forward, _ in self._graphs])

    def transposed_times(self, w: Tensor) -> Tensor:
        """Return J^T w, (P,), for w (n, N)."""
        _require_shape("ParameterJacobian.transposed_times(w)", w, (self.problem.n, self.problem.outputs))
        self.products += 1
        w = w.to(self.space.device, self.space.dtype)
        total, start = torch.zeros(self.space.size, dtype=w.dtype, device=w.device), 0
        for n, _, backward in self._graphs:
            total += backward(w[start : start + n])
            start += n
        return total


@final
class InputJacobian:
    """The Jacobians df_i/dx_i of all samples: a block-diagonal matrix of n blocks N x M."""

    def __init__(self, problem: Problem, *, model: nn.Module | None = None) -> None:
        if problem.coupled:
            raise BadInput(
                "InputJacobian(...): with batchnorm='train' samples depend on each other, so there is no Jacobian per "
                "sample: use batchnorm='eval'"
            )
        self.problem = problem.as_asked()
        self.model = problem.measured() if model is None else model
        self.products = 0
        self._graphs: Graphs[tuple[int, VectorProduct, VectorProduct]] = Graphs(problem, self.model, [], self._open)

    def _open(self, batch: Batch, number: int) -> tuple[int, VectorProduct, VectorProduct]:
        _, inputs, f, _ = run_recorded(self.problem, self.model, batch)
        if not inputs:
            raise BadInput(
                "InputJacobian(...): the inputs are not floating numbers and there is no embedding: there is nothing "
                "to differentiate with respect to"
            )
        n, widths = len(f), [x[0].numel() for x in inputs]
        times, transposed_times = derivative_of(f, inputs)

        def forward(v: Tensor) -> Tensor:
            _require_shape("InputJacobian.times(v): a batch of vectors", v, (n, sum(widths)))
            parts = torch.split(v, widths, dim=1)
            return times([part.reshape(x.shape) for part, x in zip(parts, inputs, strict=True)])

        def backward(w: Tensor) -> Tensor:
            _require_shape("InputJacobian.transposed_times(w): a batch of vectors", w, tuple(f.shape))
            back = zip(transposed_times(w), inputs, strict=True)
            return torch.cat([(torch.zeros_like(x) if g is None else g).reshape(n, -1) for g, x in back], 1)

        return n, forward, backward

    def times(self, v: Tensor) -> Tensor:
        """Return J_i v_i of every sample, (n, N), for v (n, M)."""
        return self._each(v, 0)

    def transposed_times(self, w: Tensor) -> Tensor:
        """Return J_i^T w_i of every sample, (n, M), for w (n, N)."""
        return self._each(w, 1)

    def _each(self, vectors: Tensor, side: Literal[0, 1]) -> Tensor:
        if len(vectors) != self.problem.n:
            raise BadInput(f"InputJacobian: {self.problem.n} vectors are needed, one a sample, got {len(vectors)}")
        vectors = vectors.to(self.problem.dtype)
        parts, start = [], 0
        for n, *products in self._graphs:
            parts.append(products[side](vectors[start : start + n]).detach())
            start += n
        self.products += 1
        return torch.cat(parts)
