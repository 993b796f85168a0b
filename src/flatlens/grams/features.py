"""The features that weights multiply, and their means and standard deviations over the data."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from flatlens.grams.plan import Plan, PlanBroken, Weight, coupled_places
from flatlens.grams.record import Tape, record, run_recorded
from flatlens.operations.parameter_uses import Product
from flatlens.problem import Batch, Problem, measuring
from flatlens.problem.batches import FORWARD_CHUNK, size
from flatlens.problem.eval_context import differentiable

_DEAD_UNIT = 1e-15  #: unit of a feature that is always 0: its square is negligible, and float32 can represent it


def feature_spread(problem: Problem, model: nn.Module, plan: Plan) -> dict[str, tuple[Tensor, int]]:
    """Return for each layer the standard deviation of its features, (g, m), and the number of constant features.

    It is taken over samples and positions, in one forward pass. A constant feature has no spread: its unit is its
    absolute value, or `_DEAD_UNIT` if it is always 0, which leaves its weights out. So measures in these units do not
    change when features are rescaled.
    """
    moments = feature_moments(problem, model, plan)
    for name, part in plan.parts.items():
        if part.part_of in moments:
            count, mean, squares = moments[part.part_of]
            at = slice(None) if part.columns is None else part.columns.to(mean.device)
            moments[name] = count, mean[at], squares[at]
    found = {}
    for name, (count, mean, squares) in moments.items():
        spread = (squares / count).sqrt()
        constant = is_constant(mean, spread)
        units = torch.where(constant, mean.abs(), spread)
        units = torch.where(units == 0, _DEAD_UNIT, units)
        found[name] = plan.weight(name).adapter.per_feature(units), int(constant.sum())
    return found


Moments: TypeAlias = tuple[int, Tensor, Tensor]
"""Number of observations, mean (features,) and sum of squared deviations (features,), over samples and positions."""


def feature_moments(problem: Problem, model: nn.Module, plan: Plan) -> dict[str, Moments]:
    """Return the moments of each weight's features, from one forward pass.

    Chunks are merged with Chan's update in float64: a large mean causes no cancellation.
    """
    moments: dict[str, Moments] = {}
    graphs = bool(_at_products(plan))
    with measuring(model), differentiable(model.parameters()) if graphs else torch.no_grad():
        for raw in problem.data.chunks(256 if graphs else FORWARD_CHUNK):
            tape, found = features_read(problem, model, plan, problem.place(raw))
            there = tape.mask if plan.ignores_padding else None
            for layer, weight in plan.weights.items():
                keys = weight.calls or outside_keys(weight)
                for key in () if weight.unplaced or not found.keys() >= {*keys} else keys:
                    x, axis = found[key], -1 if weight.adapter.token_wise else 1
                    if there is not None and x.ndim == 3 and x.shape[:2] == there.shape:
                        x = x[there != 0]  # without padded tokens
                    x = x.movedim(axis, -1).reshape(-1, weight.adapter.features(weight.matrix.W)).to(torch.float64)
                    count, mean = len(x), x.mean(0)
                    squares = (x - mean).square().sum(0)
                    if layer in moments:
                        before, mean_before, squares_before = moments[layer]
                        step, total = mean - mean_before, before + count
                        squares = squares_before + squares + step.square() * before * count / total
                        count, mean = total, mean_before + step * count / total
                    moments[layer] = count, mean, squares
    return moments


def features_read(problem: Problem, model: nn.Module, plan: Plan, batch: Batch) -> tuple[Tape, dict[str, Tensor]]:
    """Return the record of a forward pass, and the features that weights multiply in it, a sample's rows side by side.

    They are by call of a linear layer, or by `outside_keys`: the call's input where the call multiplies just that, else
    what the product reads. This autograd alone keeps, so the pass must run with gradients on where there is any.

    Raises:
        PlanBroken: the batch is not computed as planned, or its samples do not lie as planned where they are folded.
    """
    n, at_products = size(batch), _at_products(plan)
    if at_products:
        tape, *_ = run_recorded(problem, model, batch)
    else:
        with record(model, problem.mask(batch)) as tape:
            problem.run(model, batch)
    if tape.linear.keys() - plan.structure.varying_calls != plan.structure.calls.keys():
        raise PlanBroken([batch])
    found: dict[str, Tensor] = {}
    for key, rows in plan.call_rows.items():
        if key not in plan.structure.altered:
            x = tape.linear[key].read
            if not rows.fit(x.shape, n):
                raise PlanBroken([batch], [f"x:{key}"])
            found[key] = rows.in_front(x, n)
    for key, (place, token_wise) in at_products.items():
        product = plan.operations(tape).get(place)
        if not isinstance(product, Product) or not plan.rows[place].fit(product.shape, n):
            raise PlanBroken([batch], [place])
        x = plan.rows[place].in_front(product.kept(), n)
        found[key] = x.reshape(n, -1, x.shape[-1]) if token_wise and len(x) > n else x
    return tape, found


def require_told_apart(problem: Problem, model: nn.Module, plan: Plan, batch: Batch) -> None:
    """Raise PlanBroken if some call's rows of samples, folded into one axis, do not lie as planned on a batch."""
    tape, _, f, _ = run_recorded(problem, model, batch)
    planned = {f"x:{key}": rows for key, rows in plan.call_rows.items() if key not in plan.structure.altered}
    at = {name: tape.linear[name.removeprefix("x:")].x for name in planned}
    folded = {name: x for name, x in at.items() if x.shape[planned[name].axis] != len(f)}
    if folded and (apart := coupled_places(f, folded, planned, torch.Generator().manual_seed(0))):
        raise PlanBroken([batch], apart)


def outside_keys(weight: Weight) -> tuple[str, ...]:
    """Return the keys of the products of a weight outside layers, as the calls of a layer have them."""
    return tuple(weight.layer + (f":{k}" if k else "") for k in range(len(weight.products)))


def _at_products(plan: Plan) -> dict[str, tuple[str, bool]]:
    """Return the products whose own inputs are features, by call or outside key, each with whether it is token-wise."""
    found = {}
    for weight in plan.weights.values():
        own = {key: f"z:{key}" for key in weight.calls} or dict(zip(outside_keys(weight), weight.products, strict=True))
        for key, place in own.items():
            known = key in plan.call_rows and key not in plan.structure.altered
            if place in plan.rows and not known:
                found[key] = place, weight.adapter.token_wise
    return found


def is_constant(mean: Tensor, spread: Tensor) -> Tensor:
    """Return for each feature whether it is constant over the data, so that its spread is mere rounding."""
    return spread <= 1e-12 * mean.abs()
