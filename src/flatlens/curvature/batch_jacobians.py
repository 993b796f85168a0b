"""Norms of the Jacobian of a whole batch, which BatchNorm in train mode couples (sharpening A.1).

There the outputs f(X) of a batch are one function of all its inputs X, whose Jacobian has a block for every pair of
samples. Lanczos runs on J J^T, with products by backward passes. Between ghost batches, and between samples where
nothing couples them, there is nothing: the norm is the largest of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.curvature.jacobian_norms import squared_jacobian
from flatlens.curvature.krylov import lanczos
from flatlens.estimate import Progress
from flatlens.grams.record import run_recorded
from flatlens.problem import Problem
from flatlens.problem.samples import size
from flatlens.problem.sequences import Tokens
from flatlens.problem.state import differentiable

_CHUNK = 64  #: samples taken together where nothing couples them


@dataclass(frozen=True)
class JacobianNorm:
    """The largest norm over the batches, found by Lanczos."""

    value: float
    residual: float  #: residual of the value: an eigenvalue of J J^T has a root within about this of it
    exact: bool
    products: int


def batch_jacobians(
    problem: Problem,
    model: nn.Module,
    places: Sequence[str | None],
    *,
    softmax: bool,
    rtol: float,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> dict[str | None, JacobianNorm]:
    """Return ||df(X)/dX||_2 for the network's input (None), or for the output of a linear layer's call, by its name."""
    problem = problem.as_asked()
    found = dict.fromkeys(places, JacobianNorm(0.0, 0.0, True, 0))
    done = 0
    with problem.measuring(model), differentiable(model.parameters()):
        for raw in problem.batches(_CHUNK):
            tape, inputs, f, y = run_recorded(problem, model, problem.place(raw))
            for place in places:
                at = inputs if place is None else [tape.linear[place].z]
                found[place] = _larger(found[place], _norm(f, y, at, softmax, rtol, generator))
            done += size(raw)
            if progress is not None:
                progress("Jacobians of batches", done, problem.n)
    return found


def _norm(
    f: Tensor, y: object, at: list[Tensor], softmax: bool, rtol: float, generator: torch.Generator
) -> JacobianNorm:
    of_all, shape = squared_jacobian(f, at, softmax, y if isinstance(y, Tokens) else None, in_front=False)

    def apply(u: Tensor) -> Tensor:
        return of_all(u.reshape(shape)).flatten()

    start = torch.randn(f.numel(), dtype=torch.float64, generator=generator).to(f.device)
    pairs = lanczos(apply, start, top_k=1, rtol=rtol)
    value = max(0.0, pairs.largest) ** 0.5
    residual = float(pairs.residuals[0]) / (2 * value) if value else 0.0
    return JacobianNorm(value, residual, pairs.exact, pairs.products)


def _larger(one: JacobianNorm, other: JacobianNorm) -> JacobianNorm:
    top = max(one, other, key=lambda found: found.value)
    return JacobianNorm(top.value, top.residual, one.exact and other.exact, one.products + other.products)
