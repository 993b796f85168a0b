"""Each sample's loss, and whether it is classified correctly."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.problem.batches import FORWARD_CHUNK, Batch
from flatlens.problem.problem import Problem
from flatlens.problem.ranks import ChunkBuffer

_Run: TypeAlias = Callable[[Batch], tuple[Tensor, Any]]
"""Maps a placed batch to (outputs (n, N), targets)."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The loss and the correctness of every sample of a data set."""

    losses: Tensor  #: (n,) float64, scaled so that their mean is the risk
    correct: Tensor | None  #: (n,) float64, 1 where correct, NaN where ignored; None if targets are no classes
    weights: Tensor | None = None  #: masses over their mean, (n,) float64; None where they were not kept

    @property
    def risk(self) -> float:
        """Return the mean loss."""
        return float(self.losses.mean())


def forwards(
    problem: Problem, model: nn.Module, batches: Iterable[Batch] | None = None, *, twice: bool = True
) -> Generator[tuple[Tensor, Any]]:
    """Yield outputs (n, N) and targets of each batch, by default of all the data, without a graph.

    The network is in the state of `measuring`, with `twice` as there, from the first batch on; a caller that stops
    early closes the generator.
    """
    with problem.measuring(model, twice=twice):
        for raw in problem.batches(FORWARD_CHUNK) if batches is None else batches:
            with torch.no_grad():
                found = problem.run(model, problem.place(raw))
            yield found


def outcomes(problem: Problem, shared: Iterable[tuple[int, Batch]], run: _Run) -> Outcomes:
    """Return every sample's outcome under the problem's loss, from this rank's chunks of the data."""
    kept: ChunkBuffer[str] = ChunkBuffer()
    with torch.no_grad(), problem.ranks.as_one():
        for number, raw in shared:
            f, y = run(problem.place(raw))
            f = f.to(torch.float64)
            rows = as_rows(problem.loss.values(f, y), problem.loss.correct(f, y))
            kept.add(number, rows | {"mass": problem.loss.mass(f, y)})
    found = kept.joined(problem.ranks)
    seen, mean = from_rows(found), found["mass"].sum() / len(found["mass"])
    return Outcomes(seen.losses / mean, seen.correct, found["mass"] / mean)


def slopes(problem: Problem, f: Tensor, y: object) -> Tensor:
    """Return the losses' slopes in the outputs, dl_i/df over the mass of all samples: (n, N), f's dtype, no graph."""
    return slopes_of_each(problem, f, y, problem.mass).to(f.dtype)


def slopes_of_each(problem: Problem, f: Tensor, y: object, over: float = 1.0) -> Tensor:
    """Return each sample's slope in its outputs, dl_i/df / over: (n, N) float64, no graph."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.detach().to(torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(problem.loss.values(leaf, y).sum() / over, leaf)
    return slope


def fisher_slopes(problem: Problem, f: Tensor, y: object) -> Tensor:
    """Return g_i, (n, N) float64: mean_i g_i g_i^T is the empirical Fisher matrix of the outputs.

    They are the slopes of the samples' own losses, times the root of the weight that the risk gives to a sample. They
    are NaN where a sample has a slope and no weight, as smoothed labels have of a class with the weight 0.
    """
    f = f.detach().to(torch.float64)
    slope, mass = slopes(problem, f, y), problem.loss.mass(f, y)
    rows = slope * (problem.n * problem.mass / mass.clamp(min=1e-300)).sqrt()[:, None]
    return torch.where((mass == 0)[:, None] & (slope != 0), torch.nan, rows)


def as_rows(losses: Tensor, hits: Tensor | None) -> dict[str, Tensor]:
    """Return the rows of one chunk that are kept."""
    return {"losses": losses} if hits is None else {"losses": losses, "hits": hits}


def from_rows(found: Mapping[str, Tensor]) -> Outcomes:
    """Return the outcomes of all chunks; no correctness if one chunk has none."""
    losses, hits = found["losses"], found.get("hits")
    return Outcomes(losses, hits if hits is not None and len(hits) == len(losses) else None)
