"""What is measured on one network of a study: in training, at the end, and on the moved network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from flatlens.bounds import check_bounds
from flatlens.column import Column
from flatlens.comparing.direction import RISK
from flatlens.data import Split
from flatlens.distributions import RULES
from flatlens.estimate import Estimate, Key, Report
from flatlens.experiments.settings import NetworkSettings
from flatlens.measures import Lens, about, measure
from flatlens.measures.registry import named
from flatlens.plain import digest
from flatlens.problem import Problem, measuring
from flatlens.tracking import Tracker
from flatlens.transforms.registry import TRANSFORMS


def measure_network(model: nn.Module, split: Split, settings: NetworkSettings) -> Report:
    """Measure on the training data, in float64: the weights are taken as they are, and rounding plays no part.

    Loss, accuracy and gap are of all the data, the rest of `settings.samples` of it.
    A side of a bound is a row "mls_chain.lhs"; a measure of the network after a move is "relative_flatness@layerwise".
    Where the data's law is known the covering radius is found by every rule: "jacobian_generalisation.rhs@tight".
    """
    problem = _problem(copy.deepcopy(model).to(torch.float64), split, settings)
    found, lens = _measured(problem, settings)
    if settings.bounds:
        found |= dict(_sides(lens, settings.bounds, split))
    for name in settings.moved:
        generator = torch.Generator().manual_seed(_own_seed(settings))
        moved = TRANSFORMS[name].apply(problem, generator).problem
        after, _ = _measured(moved, settings)
        found |= {(replace(Column.of(row), transform=name).row, layer): e for (row, layer), e in after.items()}
    return Report(found, about(lens))


def _measured(problem: Problem, settings: NetworkSettings) -> tuple[dict[Key, Estimate], Lens]:
    """What was asked for, and the lens on the samples."""
    if settings.samples is None:
        lens = Lens(problem)
        return dict(measure(lens, list(settings.measures)).items()), lens
    lens = Lens(problem.subset(settings.samples, torch.Generator().manual_seed(settings.data.seed)))
    chosen = named(settings.measures)
    risk = [one for one in chosen if one.card.family == RISK]
    rest = [one for one in chosen if one.card.family != RISK]
    parts = [measure(seen, mine) for seen, mine in ((lens, rest), (Lens(problem), risk)) if mine]
    return {key: e for part in parts for key, e in part.items()}, lens


def _own_seed(settings: NetworkSettings) -> int:
    """A number of this network alone: with its seed instead, networks of one seed would all be moved alike."""
    return int(digest((settings.data, settings.model, settings.training)), 16)


def graph_of(model: nn.Module, split: Split) -> dict[str, torch.Tensor]:
    """What a network from R to R computes at the test inputs, "input" and "output", (k,); nothing of other networks."""
    if split.x.shape[1:] != (1,) or split.y.shape[1:] != (1,):
        return {}
    with measuring(model), torch.no_grad():
        return {"input": split.test_x.flatten(), "output": model(split.test_x).flatten()}


def tracker_of(model: nn.Module, split: Split, settings: NetworkSettings) -> Tracker | None:
    """What follows the training, in its own dtype; None where nothing is to be followed."""
    if (followed := settings.followed) is None:
        return None
    problem = _problem(model, split, settings)
    every = followed.every if isinstance(followed.every, int) else list(followed.every)
    return Tracker(problem, followed.measures, every, subset=followed.samples, seed=settings.training.seed, live=False)


def _problem(model: nn.Module, split: Split, settings: NetworkSettings) -> Problem:
    dtype = next(model.parameters()).dtype
    return Problem(
        model,
        loss=settings.training.objective.measured(),
        data=(split.x.to(dtype), split.y),
        test=(split.test_x.to(dtype), split.test_y),
    )


def _sides(lens: Lens, bounds: tuple[str, ...], split: Split) -> Iterator[tuple[Key, Estimate]]:
    law, target = split.distribution, split.target
    assume = () if law is None else ("iid_samples",)
    for rule in RULES[:1] if law is None else RULES:
        other = "" if rule == RULES[0] else rule
        for verdict in check_bounds(lens, bounds, assume=assume, distribution=law, target=target, rule=rule):
            note = verdict.status + (f": {verdict.assumption}" if verdict.assumption else "")
            about = Estimate(verdict.lhs, source=verdict.source, note=note)
            bound = Column.parse(verdict.bound)
            yield (bound.of_side("lhs", other).row, verdict.layer), about
            yield (bound.of_side("rhs", other).row, verdict.layer), replace(about, value=verdict.rhs)
