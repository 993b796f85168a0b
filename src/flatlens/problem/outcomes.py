"""What a network makes of each sample: its loss, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flatlens.problem.data import Batch
from flatlens.problem.problem import Problem

Run: TypeAlias = Callable[[Batch], tuple[Tensor, Any]]
"""From a placed batch to (outputs (n, N), targets)."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What the network makes of each sample of a data set."""

    losses: Tensor  #: (n,) float64, scaled so that their mean is the risk
    correct: Tensor | None  #: (n,) float64, 1 where right, NaN where ignored; None where targets are no classes

    @property
    def risk(self) -> float:
        """The mean loss."""
        return float(self.losses.mean())


def outcomes(problem: Problem, batches: Iterable[Batch], run: Run) -> Outcomes:
    """Of every sample of the batches, under the problem's loss."""
    losses: list[Tensor] = []
    hits: list[Tensor | None] = []
    mass = 0.0
    with torch.no_grad():
        for raw in batches:
            f, y = run(problem.place(raw))
            f = f.to(torch.float64)
            losses.append(problem.loss.values(f, y))
            hits.append(problem.loss.correct(f, y))
            mass += float(problem.loss.mass(f, y).sum())
    found = joined(losses, hits)
    return Outcomes(found.losses * len(found.losses) / mass, found.correct)


def joined(losses: list[Tensor], hits: list[Tensor | None]) -> Outcomes:
    """Chunks one after another; no hits where one chunk has none."""
    known = [hit.cpu() for hit in hits if hit is not None]
    return Outcomes(torch.cat(losses).cpu(), torch.cat(known) if len(known) == len(hits) else None)
