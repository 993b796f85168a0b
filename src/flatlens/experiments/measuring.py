"""Measurement of one network of a study: during training, at the end, and after transforms of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from flatlens.bounds import check_bounds
from flatlens.column import Column
from flatlens.comparing.direction import RISK_FAMILY
from flatlens.data import Split
from flatlens.distributions import RULES
from flatlens.estimate import Estimate, Key, Report
from flatlens.experiments.settings import NetworkSettings
from flatlens.measures import Lens, Measure, about, measure
from flatlens.measures.registry import named
from flatlens.plain import digest
from flatlens.problem import Problem, measuring
from flatlens.problem.state import copy_of
from flatlens.progress import no_progress
from flatlens.tracking import Tracker
from flatlens.transforms.registry import TRANSFORMS


def measure_network(model: nn.Module, split: Split, settings: NetworkSettings) -> Report:
    """Measure a network on the training data, with weights and data converted to `settings.dtype`.

    Loss, accuracy and gap use all data, other measures `settings.samples` samples. The side of a bound has a row
    "mls_chain.lhs"; a measure of the transformed network, "relative_flatness@layerwise". If the data's distribution is
    known, the covering radius is computed by every rule: "jacobian_generalisation.rhs@tight".
    """
    problem = _problem(copy_of(model, "measuring").to(getattr(torch, settings.dtype)), split, settings)
    found, lens = _measured(problem, settings)
    if settings.bounds:
        found |= dict(_sides(lens, settings.bounds, split))
    for name in settings.moved:
        generator = torch.Generator().manual_seed(_own_seed(settings))
        moved = TRANSFORMS[name].apply(problem, generator).problem
        after, _ = _measured(moved, settings)
        found |= {(Column.of(row).after(name).row, layer): e for (row, layer), e in after.items()}
    return Report(found, about(lens))


def _measured(problem: Problem, settings: NetworkSettings) -> tuple[dict[Key, Estimate], Lens]:
    """Return the estimates that the settings name, and the lens on the samples."""
    if settings.samples is None:
        lens = Lens(problem)
        return dict(_quietly(lens, list(settings.measures)).items()), lens
    lens = Lens(problem.subset(settings.samples, torch.Generator().manual_seed(settings.data.seed)))
    chosen = named(settings.measures)
    risk = [one for one in chosen if one.card.family == RISK_FAMILY]
    rest = [one for one in chosen if one.card.family != RISK_FAMILY]
    parts = [_quietly(seen, mine) for seen, mine in ((lens, rest), (Lens(problem), risk)) if mine]
    return {key: e for part in parts for key, e in part.items()}, lens


def _quietly(lens: Lens, measures: list[Measure] | list[str]) -> Report:
    """Return what `measure` does, without limit and line: a study has its own progress."""
    return measure(lens, measures, anyway=True, progress=no_progress)


def _own_seed(settings: NetworkSettings) -> int:
    """Return a seed that only this network has: by its own seed, networks of one seed would all move alike."""
    return int(digest((settings.data, settings.model, settings.training)), 16)


def graph_of(model: nn.Module, split: Split) -> dict[str, torch.Tensor]:
    """Return test inputs and outputs, "input" and "output", shape (k,), of a network from R to R; else nothing."""
    if split.x.shape[1:] != (1,) or split.y.shape[1:] != (1,):
        return {}
    with measuring(model), torch.no_grad():
        return {"input": split.test_x.flatten(), "output": model(split.test_x).flatten()}


def tracker_of(model: nn.Module, split: Split, settings: NetworkSettings) -> Tracker | None:
    """Return the tracker of the training, in the training's dtype; None if nothing is followed."""
    if (followed := settings.followed) is None:
        return None
    problem = _problem(model, split, settings)
    every = followed.every if isinstance(followed.every, int) else list(followed.every)
    assert settings.training.seed is not None  # the settings of a training here have one
    return Tracker(problem, followed.measures, every, samples=followed.samples, seed=settings.training.seed, live=False)


def _problem(model: nn.Module, split: Split, settings: NetworkSettings) -> Problem:
    dtype = next(model.parameters()).dtype
    return Problem(
        model,
        loss=settings.training.objective.measured(),
        data=(_in_dtype(split.x, dtype), split.y),
        test=(_in_dtype(split.test_x, dtype), split.test_y) if len(split.test_x) else None,
    )


def _in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return inputs in a dtype; indices, such as tokens, as they are."""
    return x.to(dtype) if x.is_floating_point() else x


def _sides(lens: Lens, bounds: tuple[str, ...], split: Split) -> Iterator[tuple[Key, Estimate]]:
    law, target = split.distribution, split.target
    assume = () if law is None else ("iid_samples",)
    for rule in RULES[:1] if law is None else RULES:
        other = "" if rule == RULES[0] else rule
        for verdict in check_bounds(
            lens, bounds, assume=assume, distribution=law, target=target, rule=rule, progress=no_progress
        ):
            note = verdict.status + (f": {verdict.assumption}" if verdict.assumption else "")
            about = Estimate(verdict.lhs, source=verdict.source, note=note)
            bound = Column.parse(verdict.bound)
            yield (bound.of_side("lhs", other).row, verdict.layer), about
            yield (bound.of_side("rhs", other).row, verdict.layer), replace(about, value=verdict.rhs)
