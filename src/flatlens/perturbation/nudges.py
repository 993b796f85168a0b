"""A network that rounds inside, seen at weights and inputs moved by less than one unit in the last place.

Where forward() computes in a half type that no copy in float32 removes, a repetition gives the same digits, and the
same error. At a nudge every operation inside rounds anew: the spread over nudges is the rounding. The square of a
rounded gradient holds the square of its rounding, a bias; the product of the gradients of two nudges does not. What
rounds alike at all nudges moves the mean of gradients by some 2%, where one nudge moves them by 4%: so the error of a
mean is not taken below that of one nudge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.curvature.probes import student
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.problem import Problem
from flatlens.problem.eval_context import moved_in_place
from flatlens.problem.forward import nudged
from flatlens.problem.problem import HALF

NUDGES = 8  #: times that weights and inputs are moved by less than one rounding, where a network rounds inside
LEAST_ALIKE = 0.5  #: mean cosine of the directions at two nudges below which they are mostly rounding


def rounds(problem: Problem, model: nn.Module) -> bool:
    """Return whether operations inside the network compute in a half type, and round as `nudges` shows."""
    return not problem.sharded and coarsest_inside(problem, model) in HALF


@contextmanager
def nudges(problem: Problem, model: nn.Module, seed: int) -> Iterator[Problem]:
    """Give the problem with weights and inputs moved at random by less than one unit in the last place.

    The unit is that of the coarsest type inside.
    """
    share = torch.finfo(coarsest_inside(problem, model)).eps / 2
    draw = torch.Generator().manual_seed(seed)
    tensors: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    with problem.measuring(model), moved_in_place(tensors) as (here, put):
        put([nudged(p, draw, share) for p in here])
        yield problem.changed(nudge=(seed, share), seen=None)


@dataclass(frozen=True, eq=False)
class Nudged:
    """Directions u_k, (K, P) of length 1, and products H u_k, found at K nudges of weights and inputs."""

    directions: Tensor
    products: Tensor

    @property
    def alike(self) -> float:
        """Return the mean cosine of two directions: 1 / (1 + their squared rounding)."""
        K = len(self.directions)
        return float((self.directions @ self.directions.mT).sum() - K) / (K * (K - 1))

    def bias(self, eps: float) -> float:
        """Return how far rounding that is alike at all nudges may move the form: as far as it moves one of them."""
        forms = (self.directions * self.products).sum(1)
        return math.hypot(float(forms.std()), eps / 2 * float(forms.abs().mean()))

    def form(self, keep: slice | Tensor = slice(None)) -> float:
        """Return u^T H u / ||u||^2 by products over two different nudges: none has the square of its own rounding."""
        u, Hu = self.directions[keep], self.products[keep]
        forms, squares = u @ Hu.mT, u @ u.mT
        return float((forms.sum() - forms.trace()) / (squares.sum() - squares.trace()))

    def with_error(self, eps: float) -> tuple[float, float]:
        """Return the form, and its error: a jackknife over nudges, and the bias."""
        K, whole = len(self.directions), self.form()
        without = [self.form(torch.arange(K) != k) for k in range(K)]
        _, stderr = student(K * whole - (K - 1) * torch.tensor(without, dtype=torch.float64))
        return whole, math.hypot(float(stderr), self.bias(eps))

    def lost(self, eps: float) -> str:
        """Return in words that the direction is mostly rounding; empty if not so."""
        if self.alike >= LEAST_ALIKE:
            return ""
        noise = math.sqrt(1 / max(self.alike, 1e-4) - 1)
        return (
            f"the direction is rounding: operations inside round to {eps:.1g}, and this moves it by {noise:.2g} of its "
            "length; compute inside in float32"
        )
