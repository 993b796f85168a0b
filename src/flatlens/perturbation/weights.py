"""The network at other weights, without changing it: its risk, and the risk's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor, nn

from flatlens.curvature.graphs import bytes_saved, samples_at_once
from flatlens.curvature.space import space_of
from flatlens.errors import BadInput, FlatlensError
from flatlens.grams.sketch import random_signs
from flatlens.grams.unexplained import Runner
from flatlens.operations.graph import Graph
from flatlens.problem import Batch, Problem
from flatlens.problem.outcomes import Outcomes, outcomes
from flatlens.problem.samples import FORWARD_CHUNK, size, take
from flatlens.problem.state import differentiable

_INSIDE = "the coarsest dtype inside"


def coarsest_inside(problem: Problem, model: nn.Module) -> torch.dtype:
    """Return the coarsest dtype among the operations that make the outputs of a network, if it is coarser than its own.

    Looked for once for a problem, on a few samples. Operations that nothing differentiates do not count.
    """
    if problem.arithmetic != "full" or problem.sharded:
        return problem.dtype
    if _INSIDE not in problem.facts:
        problem.facts[_INSIDE] = problem.dtype
        with suppress(RuntimeError, FlatlensError):  # the outputs have no derivative
            problem.facts[_INSIDE] = _coarsest(problem, model)
    found: torch.dtype = problem.facts[_INSIDE]
    return found


def _coarsest(problem: Problem, model: nn.Module) -> torch.dtype:
    batch = problem.place(problem.probes[0])
    with problem.measuring(model), differentiable(model.parameters()):
        if isinstance(batch, tuple) and isinstance(batch[0], Tensor) and batch[0].is_floating_point():
            batch = (batch[0].clone().requires_grad_().clone(), *batch[1:])
        f, _ = problem.run(model, batch)
        every = {made.dtype for node in Graph(f).nodes for made in node._input_metadata}
    made = {dtype for dtype in every if dtype.is_floating_point or dtype.is_complex}
    return max(made, key=lambda dtype: torch.finfo(dtype).eps, default=problem.dtype)


def rounded(values: Tensor, generator: torch.Generator, eps: float) -> Tensor:
    """Return the values, each moved up or down by one rounding, `eps` times its own size."""
    return values + eps * values.abs() * random_signs(values.shape, values, generator)


@final
class Elsewhere:
    """The problem's network at other values of some named parameters (all measured ones if None).

    Values travel as one vector theta, (P,). Nothing is ever written to the network.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
    >>> Elsewhere(problem).outcomes(torch.tensor([1.0, 0.0])).risk
    4.5
    """

    def __init__(
        self, problem: Problem, parameters: str | Iterable[str] | None = None, *, model: nn.Module | None = None
    ) -> None:
        self.problem = problem
        self.model = problem.measured() if model is None else model
        self.space = space_of(problem, self.model, parameters)
        self.here = self.space.point()  #: the network's own values
        self._runner = Runner(problem, self.model)
        self._most: int | None = None

    def run(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        """Return (outputs, targets) of a placed batch at theta; differentiable in theta."""
        if theta.shape != self.here.shape:
            raise BadInput(f"theta: shape ({self.space.size},) is needed, got {tuple(theta.shape)}")
        return self._runner.at(self.space.named(theta.to(self.here)), batch)

    def outcomes(self, theta: Tensor) -> Outcomes:
        """Return losses and correctness of every sample of the data at theta."""
        problem = self.problem
        with problem.measuring(self.model):
            return outcomes(problem, problem.shared(FORWARD_CHUNK), lambda batch: self.run(theta, batch))

    def rounding(self) -> float:
        """Return the risk's own rounding error: its change when parameters and outputs move by one rounding each.

        Every number moves up or down. The outputs' own rounding counts where they are far from 0 whatever the weights
        are, such as by a constant that forward() adds.
        """
        here, problem = self.outcomes(self.here).risk, self.problem
        eps = torch.finfo(coarsest_inside(problem, self.model)).eps
        of_weights, of_outputs = (torch.Generator().manual_seed(seed) for seed in (0, 1))

        def risk() -> float:
            theta = rounded(self.here, of_weights, eps)

            def run(batch: Batch) -> tuple[Tensor, Any]:
                f, y = self.run(theta, batch)
                return rounded(f, of_outputs, eps), y

            with problem.measuring(self.model):
                return outcomes(problem, problem.shared(FORWARD_CHUNK), run).risk

        return max(abs(risk() - here) for _ in range(4))

    def slope(self, theta: Tensor, batches: Iterable[Batch], mass: float) -> tuple[float, Tensor]:
        """Return (sum of losses / mass, its gradient (P,)) over some batches; only one chunk's graph is held."""
        risk, slope = 0.0, torch.zeros_like(theta)
        with self.problem.measuring(self.model):
            for raw in batches:
                at = theta.detach().clone().requires_grad_()
                f, y = self.run(at, self.problem.place(raw))
                part = self.problem.loss.total(f, y) / mass
                slope += torch.autograd.grad(part, at)[0]
                risk += float(part.detach())
        return risk, slope

    def mass(self, group: Batch | None) -> float:
        """Return the mass in the risk of a group of samples, or of all the data."""
        if group is None:
            return self.problem.mass
        with self.problem.measuring(self.model), torch.no_grad():
            found = (self.problem.run(self.model, self.problem.place(raw)) for raw in self.chunks(group))
            return sum(float(self.problem.loss.mass(f, y).sum()) for f, y in found)

    def chunks(self, group: Batch | None = None) -> Iterator[Batch]:
        """Yield a group of samples, or all the data, in pieces whose graph fits in the problem's memory."""
        if group is None:
            yield from self.problem.batches(self._fitting())
        else:
            for start in range(0, size(group), self._fitting()):
                yield take(group, start, min(start + self._fitting(), size(group)))

    def _fitting(self) -> int:
        """Return how many samples' graphs fit in half the problem's memory."""
        if self._most is None:
            probe = self.problem.place(self.problem.probes[0])
            at = self.here.clone().requires_grad_()
            with self.problem.measuring(self.model):
                each = bytes_saved(self.model, size(probe), lambda: self.run(at, probe))
            self._most = samples_at_once(self.problem, each)
        return self._most
