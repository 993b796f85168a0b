"""The curvature of a loss along its own gradient, from its value and gradient at two points: without a product.

With phi(t) the loss at a distance t down the gradient, its values and slopes at 0 and h determine a cubic:

    phi''(0) = 6 (phi(h) - phi(0)) / h^2 - (4 phi'(0) + 2 phi'(h)) / h + O(h^2)
    phi''(0) = (phi'(h) - phi'(0)) / h                                 + O(h)

The cubic has the smaller truncation error, of h^2. Both hold the rounding of the slopes, so that their distance exceeds
the cubic's error from both causes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from flatlens.curvature.space import inner
from flatlens.operations.graph import LEAF
from flatlens.operations.table import operation_of
from flatlens.perturbation.weights import Landscape
from flatlens.problem import Problem

_KINKS = "whether an operation has kinks"


@dataclass(frozen=True)
class AlongGradient:
    """A curvature along the gradient: the cubic's, and its distance from the difference of the two slopes."""

    value: float
    error: float


def has_kinks(problem: Problem, model: nn.Module) -> bool | None:
    """Return whether the gradient of the risk jumps somewhere, by its operations; None if one of them is unknown."""
    facts = problem.facts
    if _KINKS not in facts:
        kinds, foreign = Landscape(problem, model=model, few=problem.probes[:1]).operations()
        known = [operation_of(kind) for kind in kinds if kind != LEAF]
        certain = not foreign and all(op is not None for op in known)
        facts[_KINKS] = any(op is not None and op.kinks for op in known) or (False if certain else None)
    found: bool | None = facts[_KINKS]
    return found


@final
class OwnGradient:
    """The curvature of the mean loss of batches, each along its own gradient."""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        self._problem, self._model = problem, model
        self._longest = float(Landscape(problem, model=model).space.point().norm(dtype=torch.float64))
        self._share = 2 * torch.finfo(problem.dtype).eps ** (1 / 3)
        self.typical = 0.0  #: the size of the curvature in earlier batches; 0 if not known

    def __call__(self, samples: Tensor) -> AlongGradient | None:
        """Return the curvature of a batch; None where its gradient is zero, or its loss is."""
        landscape = Landscape(self._problem.part(samples), model=self._model)
        here, gradient = landscape.risk_and_gradient()
        size, mass = math.sqrt(inner(gradient, gradient)), landscape.mass
        if not (size > 0 and mass > 0 and here):
            return None
        # a share of the distance to the minimum of a parabola that reaches 0: of one with this slope, or with the
        # curvature of earlier batches; at most that share of the weights' length. The truncation error is its first
        # power, the error of rounding its power -2
        lengths = [2 * abs(here) / size, self._longest or math.inf]
        lengths += [math.sqrt(2 * abs(here) / (self.typical * mass))] if self.typical else []
        h = self._share * min(lengths)
        # the loss and its slope there
        with landscape.walk(gradient) as move:
            move(h / size)
            there, ahead = landscape.risk_and_gradient()
        slope, slope_there = -size, -inner(ahead, gradient) / size
        cubic = 6 * (there - here) / h**2 - (4 * slope + 2 * slope_there) / h
        return AlongGradient(cubic / mass, abs(cubic - (slope_there - slope) / h) / mass)
