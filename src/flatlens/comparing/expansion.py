"""fl.forgetting: how the loss of one task changes from one set of weights to another, and by which order of the step.

`comparing.compressing` takes the same terms along the changes that compression makes.

    L(theta + d) - L(theta) = g^T d + 1/2 d^T H d + rest,    g, H the gradient and the Hessian at theta

The rest is of third order in d where the network is smooth. All is computed in a float64 copy, and each number's error
is measured: weights are moved by one rounding of the coarsest arithmetic inside the network, and all is done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import pandas as pd
import torch
from torch import Tensor, nn

from flatlens.curvature import Hessian
from flatlens.curvature.optimiser_geometry import rate_of_a_step
from flatlens.curvature.probes import quantile
from flatlens.curvature.space import dot, module_of
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, Key, Report, undefined
from flatlens.measures import Lens, about
from flatlens.measures.steps import direction_of
from flatlens.memory import warn_of
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.perturbation.weights import rounded
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK
from flatlens.problem.eval_context import copy_of, device_of, differentiable, unwrapped
from flatlens.problem.forward import outcomes
from flatlens.progress import by_key, listed
from flatlens.result import Result

Merged: TypeAlias = Callable[[nn.Module], Mapping[str, Tensor]]
"""Weights of a network as functions of its parameters, each by the name of the parameter that it is added to."""

_PARTS = ("first_order", "second_order", "rest")
_WORDS = {"first_order": "first order (gradient)", "second_order": "second order (curvature)", "rest": "rest",
         "buffers": "buffers"}  # fmt: skip
_NETWORKS = 12  #: networks in float64 that are held at once, at most
_DRAWS = 2  #: roundings of the weights; their known mean, 0, makes Student's quantile that of three values
_NEGLIGIBLE = 0.1  #: share of the larger part below which a rest leaves both parts their meaning
_OPPOSED = 5.0  #: parts that are this many times the change cancel: shares of it would say nothing


class Forgetting(Report):
    """The change of a task's loss and its parts: `found["change"]`, `["first_order"]`, `["second_order"]`, `["rest"]`.

    `["first_order", "fc"]` is a layer's share, `["change"].samples` each sample's change of loss.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> data = (torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    >>> found = fl.forgetting(fl.Problem(net, "half_squared_error", data), {"weight": torch.zeros(1, 2)})
    >>> round(found["second_order"].value / found["first_order"].value, 9)  # to the minimum of a quadratic
    -0.5
    """

    _KIND = "forgetting"

    __repr__ = Result.__repr__
    _repr_html_ = Result._repr_html_

    def _displayed(self) -> pd.DataFrame:
        change = self["change"].value
        rows = [
            {"part": name, "layer": layer or "", "value": e.value, "95% ±": f"{e.margin:.1g}" if e.margin else "",
             "of the change": _share(e.value, change), "kind": e.kind}
            for (name, layer), e in self.items()
        ]  # fmt: skip
        return pd.DataFrame(rows)


def _share(value: float, change: float) -> str:
    """Return a part in percent of the change; nothing where it has none."""
    return f"{value / change:.0%}".replace("-0%", "0%") if change and math.isfinite(value) else ""


@dataclass(frozen=True, eq=False)
class RiskTerms:
    """The risk at some weights, and the terms of its expansion along a direction, by parameter."""

    risk: float
    first: dict[str, float]
    second: dict[str, float]

    def parts(self, change: float) -> Tensor:
        """Return (change, first order, second order, rest), float64."""
        first, second = sum(self.first.values()), sum(self.second.values())
        return torch.tensor([change, first, second, change - first - second], dtype=torch.float64)


def forgetting_memory(before: Lens | Problem) -> int:
    """Return the bytes that `forgetting` may take beside the network: an upper bound, known before it runs.

    Some twelve networks in float64, and half of the problem's memory for graphs.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)), memory="1MB")
    >>> forgetting_memory(problem)  # 12 networks of 8 numbers of 8 bytes
    500768
    """
    problem = before.problem if isinstance(before, Lens) else before
    return _NETWORKS * 8 * sum(p.numel() for p in problem.model.parameters()) + problem.memory // 2


def forgetting(
    before: Lens | Problem,
    after: nn.Module | Mapping[str, Tensor] | Lens | Problem | None = None,
    *,
    coordinates: Literal["parameters", "merged"] | Merged = "parameters",
) -> Forgetting:
    """Split the change of a task's loss between two sets of weights into first order, second order, and the rest.

    With d the change of the weights and g, H the gradient and the Hessian of the task's risk before: g^T d, d^T H d / 2
    (both also by layer), and the rest, the true change less both. On smooth networks the rest falls as the cube of d.
    Where it exceeds both parts, or the change and a tenth of the larger part, they explain nothing: they are undefined,
    and the change alone is given. All numbers are in the unit of the loss, computed in a float64 copy, and have the
    error of rounding. Buffers that differ, such as BatchNorm's statistics, have a row of their own. It takes three
    gradients, three Hessian products and five forward passes in float64, and the memory of some ten networks in float64
    (GPT-2 small: 11 GB); `forgetting_memory` says how much, and a warning comes if less is free.

    Args:
        before: The task's data and loss, with the network at its first weights; a `Lens`, or a `Problem`.
        after: The network at other weights, a lens or a problem on it, or values by name (a state dict). None is the
            next step of the lens's optimiser, which follows the gradient of `Lens(along=...)` if that is given: the
            task that is trained.
        coordinates: "parameters": as the network stores them, such as the factors A and B of LoRA. "merged": the sum
            W + s B A of each of peft's layers in place of its factors. For other implementations, a function of the
            network that returns merged weights, each by the name of the parameter that a change of it can be added to:
            `lambda net: {"fc.weight": net.fc.weight + net.fc.B @ net.fc.A}`.

    Raises:
        BadInput: The networks differ in more than values, or the merged weights do not give the loss of `after`.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    >>> problem = fl.Problem(net, "cross_entropy", (torch.eye(2).double(), torch.tensor([0, 1])))
    >>> found = fl.forgetting(problem, {name: 1.01 * p.detach() for name, p in net.named_parameters()})
    >>> abs(found["rest"].value) < 1e-3 * abs(found["first_order"].value)
    True
    """
    # the task in float64, the network there, and where it goes
    lens, problem = widened_task(before, "before", "forgetting")
    warn_of(forgetting_memory(problem), device_of(problem.model), "forgetting(...)")
    model = problem.measured()
    end, step = _end(lens, problem, model, after, coordinates)
    new = dict(end.named_buffers())
    differ = [name for name, b in model.named_buffers() if name in new and not torch.equal(b, new[name])]
    if not step and not differ:
        rows: dict[Key, Estimate] = {(part, None): Estimate(0.0, unit="loss") for part in ("change", *_PARTS)}
        return Forgetting(rows, about(lens), ["The weights are the same: the loss does not change."])

    # the expansion, and the losses: here, at the end of the step, there with the buffers after, of the network after
    (here,), moved = expanded(problem, model, [step]), _moved(model, step)
    starts, there = sample_losses(problem, model), sample_losses(problem, moved)
    for name in differ:
        moved.get_buffer(name).copy_(end.get_buffer(name))
    whole, truth = sample_losses(problem, moved) if differ else there, sample_losses(problem, end)
    # the same after roundings: as far as these move a number, it is not known
    inside = coarsest_inside(problem, model)
    parts, eps = here.parts(float((there - starts).mean())), torch.finfo(inside).eps
    off = []
    for seed in range(_DRAWS):
        draws = torch.Generator().manual_seed(seed)
        (near,) = expanded(problem, _moved(model, {}, eps, draws), [step])
        change = float(sample_losses(problem, _moved(model, step, eps, draws)).mean()) - near.risk
        off.append(near.parts(change) - parts)
    errors = torch.stack(off).square().mean(0).sqrt() * quantile(_DRAWS + 1)

    # the step and the buffers must be all that differs, and merged weights must act as their factors do
    off_by = float((truth - whole).mean())
    if abs(off_by) > 10 * float(errors[0]) + 64 * eps * float(starts.mean().abs() + truth.mean().abs()):
        if coordinates == "parameters":
            what = "the networks differ in more than their parameters and buffers"
            raise BadInput(what, argument="after", call="forgetting")
        what = f"the merged weights do not give the loss of `after`: it is off by {off_by:.2g}"
        raise BadInput(what, argument="coordinates", call="forgetting", remedy='coordinates="parameters" works')

    # the change and its parts; of a long step the second order is huge, and the rest nearly its negative: the change
    # shows it, and the parts are refused
    kind: Literal["exact", "estimate"] = "exact" if inside == torch.float64 else "estimate"
    whole_change, first, second, rest = (
        Estimate(float(value), float(error), kind, unit="loss") for value, error in zip(parts, errors, strict=True)
    )
    changes = truth - starts
    rows = {("change", None): replace(whole_change, value=float(changes.mean()), samples=changes)}
    named, larger = dict(zip(_PARTS, (first, second, rest), strict=True)), max(abs(first.value), abs(second.value))
    terms = {"first_order": here.first, "second_order": here.second}
    of_change = abs(rest.value) > max(abs(whole_change.value), _NEGLIGIBLE * larger)
    if abs(rest.value) > larger or of_change:
        exceeded = "the first order and the second" if abs(rest.value) > larger else "the change"
        why = (f"the rest, {rest.value:.3g}, exceeds {exceeded} (first order {first.value:.3g}, second order "
               f"{second.value:.3g}): the step is too long")  # fmt: skip
        named, terms = dict.fromkeys(_PARTS, undefined(why)), {}
    rows |= {(part, None): estimate for part, estimate in named.items()}
    if differ:
        outside = float((whole - there).mean())
        rows["buffers", None] = replace(whole_change, value=outside, note=f"{listed(differ, 4)} changed")
    # the parts by layer
    for name, of in terms.items():
        by_layer = by_key((module_of(parameter), term) for parameter, term in of.items())
        rows |= {(name, layer): replace(named[name], value=sum(each)) for layer, each in by_layer.items()}
    where = {"parameters": "the parameters as they are"}.get(str(coordinates), "the merged weights")
    return Forgetting(rows, {**about(lens), "coordinates": where}, _answer(rows, here.risk, where, lens.problem.n))


def widened_task(given: object, argument: str, call: str) -> tuple[Lens, Problem]:
    """Return the lens of what a call was given, and its problem in float64, whose network can be copied."""
    if not isinstance(given, Lens | Problem):
        raise BadInput(f"expected a Problem or a Lens, got {type(given).__name__}", argument=argument, call=call)
    lens = given if isinstance(given, Lens) else Lens(given)
    lens.require_fresh()
    problem = lens.problem.widened().changed(facts={})
    if problem.sharded or lens.model is problem.model:
        raise BadInput("the network cannot be copied apart from the loss, forward= or other processes that hold it",
                       argument=argument, call=call)  # fmt: skip
    return lens, problem


def _end(
    lens: Lens, problem: Problem, model: nn.Module, after: object, coordinates: object
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return (the network after, in float64; the change of each coordinate that changes, by parameter)."""
    if not (coordinates in ("parameters", "merged") or callable(coordinates)):
        raise BadInput('expected "parameters", "merged" or a function', argument="coordinates", value=coordinates,
                       call="forgetting")  # fmt: skip
    # the network after: a step away, at given values, or given itself
    if after is None:
        if lens.optimiser is None:
            raise BadInput("neither other weights nor an optimiser, whose next step it would be", argument="after",
                           call="forgetting", remedy="Lens(problem, optimiser=...)")  # fmt: skip
        chosen = direction_of(lens, "update")
        if isinstance(chosen, str):
            raise BadInput(chosen, argument="before", call="forgetting")
        rate = rate_of_a_step(lens.optimiser)
        end = _moved(model, {name: -rate * part.to(torch.float64) for name, part in chosen[0].items()})
    elif isinstance(after, Mapping):
        end = copy_of(model, "forgetting")
        known = {**dict(end.named_parameters()), **dict(end.named_buffers())}
        with torch.no_grad():
            for name, value in after.items():
                if name in known:
                    _require_alike(name, known[name], value)
                    known[name].copy_(value)
                elif name not in end.state_dict():
                    raise BadInput(f"the network has no {name!r}", argument="after", call="forgetting")
    else:
        of_lens = after.problem if isinstance(after, Lens) else after
        given = unwrapped(of_lens.model if isinstance(of_lens, Problem) else of_lens)
        if not isinstance(given, nn.Module):
            raise BadInput(f"expected a network or values by name, got {type(after).__name__}", argument="after",
                           call="forgetting")  # fmt: skip
        end = problem.changed(model=given).measured()
    # the coordinates: merged weights stand for all parameters that they are made of
    old, new = dict(model.named_parameters()), dict(end.named_parameters())
    step: dict[str, Tensor] = {}
    factors: set[str] = set()
    if coordinates != "parameters":
        merged = coordinates if callable(coordinates) else _of_peft
        (first, factors), (last, _) = _merged(merged, model), _merged(merged, end)
        for name, value in first.items():
            _require_alike(name, old.get(name), value)
            _require_alike(name, last.get(name), value)
            step[name] = last[name] - value
    for name in [name for name in old if name not in factors]:
        _require_alike(name, new.get(name), old[name])
        step[name] = new[name].detach() - old[name].detach()
    return end, {name: d for name, d in step.items() if bool(d.any())}


def _require_alike(name: str, given: object, known: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise BadInput(f"the network has no {name!r}", argument="after", call="forgetting")
    if given.shape != known.shape:
        shapes = f"{tuple(known.shape)} and {tuple(given.shape)}"
        raise BadInput(f"{name!r} has shape {shapes}", argument="after", call="forgetting")


def _merged(function: Merged, model: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """Return (merged weights by name; the names of the parameters that they are made of)."""
    with differentiable(model.parameters()), torch.enable_grad():
        found = dict(function(model))
        named = dict(model.named_parameters())
        total = torch.stack([value.sum() for value in found.values()]).sum() if found else torch.zeros(())
        used = torch.autograd.grad(total, list(named.values()), allow_unused=True) if total.requires_grad else ()
    made_of = {name for name, row in zip(named, used, strict=False) if row is not None}
    return {name: value.detach() for name, value in found.items()}, made_of


def _of_peft(model: nn.Module) -> dict[str, Tensor]:
    """Return the merged weight of each layer that keeps the change of its base layer's weight in factors."""
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        part: Any = layer
        if isinstance(getattr(part, "base_layer", None), nn.Module) and callable(getattr(part, "get_delta_weight", 0)):
            active = [] if part.merged else [one for one in part.active_adapters if one in part.lora_A]
            found[f"{name}.base_layer.weight"] = part.base_layer.weight + sum(map(part.get_delta_weight, active))
    if not found:
        raise BadInput("the network has no layer of peft", argument="coordinates", value="merged", call="forgetting",
                       remedy="give a function of the network that returns its merged weights")  # fmt: skip
    return found


def _moved(
    model: nn.Module, step: Mapping[str, Tensor], eps: float = 0.0, draws: torch.Generator | None = None
) -> nn.Module:
    """Return a copy of the network after a step, each weight moved by `eps` of its size if draws are given."""
    moved = copy_of(model, "forgetting")
    with torch.no_grad():
        for name, p in moved.named_parameters():
            if name in step:
                p.add_(step[name])
            if draws is not None:
                p.copy_(rounded(p, draws, eps))
    return moved


def sample_losses(problem: Problem, model: nn.Module) -> Tensor:
    """Return each sample's loss, (n,) float64, scaled so that their mean is the risk."""
    with problem.measuring(model):
        return outcomes(problem, problem.shared(FORWARD_CHUNK), lambda batch: problem.run(model, batch)).losses


def expanded(problem: Problem, model: nn.Module, steps: Sequence[Mapping[str, Tensor]]) -> list[RiskTerms]:
    """Return the terms of the risk along steps, each by parameter: one gradient for all, and a product for each."""
    names = list(dict.fromkeys(name for step in steps for name in step))
    if not names:  # buffers alone differ
        risk = float(sample_losses(problem, model).mean())
        return [RiskTerms(risk, {}, {}) for _ in steps]
    operator = Hessian(problem, names, model=model)
    risk, gradient = operator.risk_and_gradient()
    # as many products from one graph as there is memory for
    most, found = max(1, problem.memory // (32 * operator.size)), []
    for step, product in (
        (step, operator.space.named(row))
        for some in (steps[at : at + most] for at in range(0, len(steps), most))
        for step, row in zip(some, operator(torch.stack([operator.space.flat(one) for one in some])), strict=True)
    ):
        first = {name: dot([gradient[name]], [d]) for name, d in step.items()}
        found.append(RiskTerms(risk, first, {name: dot([product[name]], [d]) / 2 for name, d in step.items()}))
    return found


def _answer(rows: Mapping[Key, Estimate], risk: float, where: str, n: int) -> list[str]:
    """Return at most three sentences: the change and its parts, how certain, what to do."""
    change = rows["change", None]
    moves = f"The loss {'rises' if change.value > 0 else 'falls'} by {abs(change.value):.3g}, from {risk:.4g}"
    certain = f"On these {n:,} samples, with a rounding error below {change.margin + 1e-300:.1g}, in {where}."
    if abs(change.value) <= change.margin:
        return ["The change of the loss cannot be distinguished from rounding.", certain]
    if rows["rest", None].kind == "undefined":
        return [f"{moves}; which order explains it is open: {rows['rest', None].note}.", certain,
                "Split a shorter step: two checkpoints that are closer together."]  # fmt: skip
    parts = {part: rows[part, None].value for part in _WORDS if (part, None) in rows}
    shares = sorted(parts.items(), key=lambda part: -abs(part[1]))
    if abs(shares[0][1]) > _OPPOSED * abs(change.value):
        told = [f"{_WORDS[part]} {value:+.3g}" for part, value in shares]
        return [f"{moves}: {', '.join(told)} nearly cancel.", certain]
    told = [f"{_WORDS[part]} {_share(value, change.value)}" for part, value in shares]
    return [f"{moves}: {', '.join(told)}.", certain]
