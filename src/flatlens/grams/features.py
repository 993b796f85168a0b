"""Means and standard deviations of the features of each linear layer over the data."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from flatlens.grams.broken import PlanBroken
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.record import record
from flatlens.operations.layers import by_sample
from flatlens.problem import Problem, measuring

_DEAD_UNIT = 1e-15  #: unit of a feature that is always 0: its square is negligible, and float32 can represent it


def feature_spread(problem: Problem, model: nn.Module, layout: Layout) -> dict[str, tuple[Tensor, int]]:
    """Return for each layer the standard deviation of its features, (g, m), and the number of constant features.

    It is taken over samples and positions, in one forward pass. A constant feature has no spread: its unit is its
    absolute value, or `_DEAD_UNIT` if it is always 0, which leaves its weights out. So measures in these units do not
    change when features are rescaled.
    """
    moments = feature_moments(problem, model, layout)
    return {layer: _scale(layout.weights[layer], *moments[layer]) for layer in moments}


Moments: TypeAlias = tuple[int, Tensor, Tensor]
"""Number of observations, mean (features,) and sum of squared deviations (features,), over samples and positions."""


def feature_moments(problem: Problem, model: nn.Module, layout: Layout) -> dict[str, Moments]:
    """Return the moments of each linear layer's features, from one forward pass.

    Chunks are merged with Chan's update in float64: a large mean causes no cancellation.
    """
    moments: dict[str, Moments] = {}
    with measuring(model), torch.no_grad():
        for raw in problem.data.chunks(1024):
            batch = problem.place(raw)
            with record(model, problem.mask(batch)) as tape:
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
    """Return for each feature whether it is constant over the data, so that its spread is mere rounding."""
    return spread <= 1e-12 * mean.abs()


def _by_feature(weight: Weight, x: Tensor, there: Tensor | None) -> Tensor:
    """Return the inputs of a layer as (observations, features), without padded tokens."""
    if there is not None and x.ndim == 3 and x.shape[:2] == there.shape:
        x = x[there != 0]
    axis = -1 if weight.adapter.token_wise else 1
    return x.movedim(axis, -1).reshape(-1, weight.adapter.features(weight.matrix.W)).to(torch.float64)


def _merge(so_far: Moments | None, x: Tensor) -> Moments:
    """Return the moments with the rows of x added."""
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
