"""The spread of the gradients of groups of samples around the gradient of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.curvature.space import as_one_vector
from flatlens.estimate import Progress
from flatlens.perturbation.steps import Landscape


@dataclass(frozen=True, eq=False)
class Spread:
    """Gradients g_k of groups of n_k samples, by their distances from their mean g."""

    sizes: Tensor  #: n_k, (m,) float64
    squares: Tensor  #: ||g_k - g||^2, (m,)
    along: Tensor  #: <g_k - g, g>, (m,)
    square: float  #: ||g||^2

    @property
    def covariance(self) -> float:
        """Return tr Sigma: g_k varies around its mean by tr Sigma / n_k."""
        return float(self.sizes @ self.squares) / (len(self.sizes) - 1)

    def without_each(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tr Sigma, ||g||^2 and the number of samples without each one of the groups, (m,)."""
        n = self.sizes.sum()
        left = n - self.sizes
        totals = self.sizes @ self.squares - self.sizes * self.squares * n / left
        moved = self.sizes / left  # the mean moves by this share of g - g_k
        squares = self.square - 2 * moved * self.along + moved.square() * self.squares
        return totals / max(len(self.sizes) - 2, 1), squares, left


def spread_of(
    landscape: Landscape,
    gradient: Mapping[str, Tensor],
    groups: int,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Spread:
    """Return the spread of the gradients of `groups` groups of about equal size, dealt at random.

    `gradient` is that of all the data. The data is read once for each group.
    """
    problem, g = landscape.problem, as_one_vector(gradient)
    parts = torch.randperm(problem.n, generator=generator).tensor_split(min(groups, problem.n))
    found: dict[int, tuple[int, float, float]] = {}
    with landscape.differentiated(), problem.ranks.as_one():
        for number, part in enumerate(parts):
            if not problem.ranks.takes(number):
                continue
            own = torch.zeros_like(g)
            for raw in problem.data.picked(part).chunks(landscape.fitting):
                own += as_one_vector(landscape.gradient_of(raw, problem.mass)[1])
            apart = own * (problem.n / len(part)) - g
            found[number] = len(part), float(apart.square().sum()), float(apart @ g)
            if progress is not None:
                progress("gradients of groups", number + 1, len(parts))
    rows = torch.tensor(problem.ranks.in_order(found), dtype=torch.float64)
    return Spread(rows[:, 0], rows[:, 1], rows[:, 2], float(g.square().sum()))
