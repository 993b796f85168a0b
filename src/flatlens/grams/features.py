"""How far the features feeding each linear layer spread over the data."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from flatlens.grams.broken import PlanBroken
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.record import record
from flatlens.operations.layers import by_sample
from flatlens.problem import Problem, measuring

_DEAD_UNIT = 1e-15  #: its square is nothing beside any weight, and float32 still holds it


def feature_spread(problem: Problem, model: nn.Module, layout: Layout) -> dict[str, tuple[Tensor, int]]:
    """Standard deviation of each feature over samples and positions, per layer: ((g, m), how many are constant).

    A constant feature has none: its unit is its absolute value, and `_DEAD_UNIT` where it is always 0, which leaves its
    weights out, so that what rests on this scale does not move when features are rescaled. One forward pass.
    """
    moments = feature_moments(problem, model, layout)
    return {layer: _scale(layout.weights[layer], *moments[layer]) for layer in moments}


Moments: TypeAlias = tuple[int, Tensor, Tensor]
"""(observations, mean (features,), sum of squared deviations (features,)), over samples and positions."""


def feature_moments(problem: Problem, model: nn.Module, layout: Layout) -> dict[str, Moments]:
    """Moments of the features each linear layer reads; one forward pass.

    They are merged chunk by chunk (Chan's update in float64: no cancellation for a large mean).
    """
    moments: dict[str, Moments] = {}
    with measuring(model), torch.no_grad():
        for raw in problem.data.chunks(1024):
            batch = problem.place(raw)
            with record(model, batch) as tape:
                problem.run(model, batch)
            if tape.linear.keys() - layout.structure.varying_calls != layout.structure.calls.keys():
                raise PlanBroken([batch])
            for layer, weight in layout.weights.items():
                for key in () if weight.unplaced else weight.calls:
                    x = by_sample(tape.linear[key].read, layout.batch_axis[key])
                    there = tape.mask if layout.ignores_padding else None
                    moments[layer] = _merge(moments.get(layer), _by_feature(weight, x, there))
    return moments


def is_constant(mean: Tensor, spread: Tensor) -> Tensor:
    """Which features never change over the data: their spread is rounding."""
    return spread <= 1e-12 * mean.abs()


def _by_feature(weight: Weight, x: Tensor, there: Tensor | None) -> Tensor:
    """(observations, features); padded tokens are none."""
    if there is not None and x.ndim == 3 and x.shape[:2] == there.shape:
        x = x[there != 0]
    axis = -1 if weight.adapter.token_wise else 1
    return x.movedim(axis, -1).reshape(-1, weight.adapter.features(weight.matrix.W)).to(torch.float64)


def _merge(so_far: Moments | None, x: Tensor) -> Moments:
    """(count, mean, sum of squared deviations) with x's rows added."""
    count, mean = len(x), x.mean(0)
    squares = (x - mean).square().sum(0)
    if so_far is None:
        return count, mean, squares
    before, mean_before, squares_before = so_far
    step = mean - mean_before
    total = before + count
    return total, mean_before + step * count / total, squares_before + squares + step.square() * before * count / total


def _scale(weight: Weight, count: int, mean: Tensor, squares: Tensor) -> tuple[Tensor, int]:
    spread = (squares / count).sqrt()
    constant = is_constant(mean, spread)
    units = torch.where(constant, mean.abs(), spread)
    return weight.adapter.per_feature(torch.where(units == 0, _DEAD_UNIT, units)), int(constant.sum())
