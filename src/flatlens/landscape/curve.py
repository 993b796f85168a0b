"""Curves between two sets of weights: the straight line, and a Bezier curve whose bends are trained.

    B(t) = sum_j C(m, j) t^j (1 - t)^(m - j) p_j,   p_0 and p_m the ends, m - 1 bends

One bend gives the quadratic curve of Garipov et al. 2018, section 3. The bends minimise the mean loss over t, uniform
in [0, 1], by Adam; they start on the line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flatlens.errors import BadInput
from flatlens.estimate import Progress
from flatlens.perturbation import Elsewhere

_GOLDEN = (math.sqrt(5) - 1) / 2  #: multiples of it spread evenly over [0, 1)


@dataclass(frozen=True, eq=False)
class Curve:
    """A Bezier curve of weights; with two points it is the line between them.

    >>> line = Curve((torch.tensor([0.0, 0.0]), torch.tensor([2.0, 4.0])))
    >>> line.at(0.25), line.velocity(0.25)
    (tensor([0.5000, 1.0000]), tensor([2., 4.]))
    """

    points: tuple[Tensor, ...]  #: the ends and the bends between them, (P,) each

    @property
    def bends(self) -> int:
        """Return the number of bends."""
        return len(self.points) - 2

    def at(self, t: float) -> Tensor:
        """Return the weights at t, (P,): exactly the ends at 0 and 1, and exactly a where all points are a."""
        return _between(list(self.points), t)

    def velocity(self, t: float) -> Tensor:
        """Return the derivative of the weights in t, (P,)."""
        differences = [q - p for p, q in pairwise(self.points)]
        return len(differences) * _between(differences, t)


def _between(points: list[Tensor], t: float) -> Tensor:
    while len(points) > 1:  # de Casteljau
        points = [torch.lerp(p, q, t) for p, q in pairwise(points)]
    return points[0]


def trained(
    elsewhere: Elsewhere,
    a: Tensor,
    b: Tensor,
    *,
    bends: int,
    steps: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator,
    progress: Progress,
) -> Curve:
    """Return the curve from a to b with its bends trained on the loss along it, by Adam with a cosine schedule.

    Each step takes the gradient of `batch_size` samples at one t; the values of t are spread evenly over [0, 1].
    """
    m, problem = bends + 1, elsewhere.problem
    inner = [torch.lerp(a, b, j / m).clone().requires_grad_() for j in range(1, m)]
    optimiser = torch.optim.Adam(inner, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    start, order = float(torch.rand((), generator=generator)), torch.empty(0, dtype=torch.int64)
    size = min(batch_size, problem.n, problem.ghost_batch or problem.n)
    for step in range(steps):
        # the next samples of a random order, and the next t
        if len(order) < size:
            order = torch.randperm(problem.n, generator=generator)
        rows, order = order[:size], order[size:]
        t = (start + step * _GOLDEN) % 1.0
        # the gradient in the weights at t is that in each bend, times its coefficient
        with torch.no_grad():
            theta = Curve((a, *(p.detach() for p in inner), b)).at(t)
        group = problem if size == problem.n else problem.changed(data=problem.data.picked(rows), seen=None)
        batches = group.batches(elsewhere.fitting)
        risk, gradient = elsewhere.slope(theta, batches, problem.mass * size / problem.n)
        if not math.isfinite(risk) or not bool(torch.isfinite(gradient).all()):
            what = f"the training of the curve diverged at step {step}"
            raise BadInput(what, argument="lr", value=lr, call="path", remedy="take a smaller one")
        for j, p in enumerate(inner, 1):
            p.grad = gradient.to(p) * (math.comb(m, j) * t**j * (1 - t) ** (m - j))
        optimiser.step()
        schedule.step()
        progress("steps of the curve", step + 1, steps)
    return Curve((a, *(p.detach() for p in inner), b))
