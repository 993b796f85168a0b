"""What a network makes of each sample: its loss, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def outcomes(problem: Problem, shared: Iterable[tuple[int, Batch]], run: Run) -> Outcomes:
    """Of every sample, under the problem's loss, from this rank's chunks of the data."""
    seen: dict[int, tuple[Tensor, Tensor | None, Tensor]] = {}
    with torch.no_grad():
        for number, raw in shared:
            f, y = run(problem.place(raw))
            f = f.to(torch.float64)
            hits = problem.loss.correct(f, y)
            mass = problem.loss.mass(f, y).sum().cpu()
            seen[number] = problem.loss.values(f, y).cpu(), None if hits is None else hits.cpu(), mass
    losses, hits_of, masses = zip(*problem.ranks.in_order(seen), strict=True)
    found = joined(losses, hits_of)
    return Outcomes(found.losses * len(found.losses) / float(sum(masses)), found.correct)


def joined(losses: Sequence[Tensor], hits: Sequence[Tensor | None]) -> Outcomes:
    """Chunks one after another; no hits where one chunk has none."""
    known = [hit for hit in hits if hit is not None]
    return Outcomes(torch.cat(list(losses)), torch.cat(known) if len(known) == len(hits) else None)
