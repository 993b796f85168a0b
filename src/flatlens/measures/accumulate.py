"""Values per sample for every measure at every place, from passes: exact, from probes, or from largest eigenvalues.

The rule of failures: what cannot be computed is undefined, with its reason, and takes no other number with it.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from flatlens.curvature.spectral_norms import CallOrInput, jacobian_norms
from flatlens.errors import OF_ONE_NUMBER, FlatlensError, Overflows, Unexpected, one_line, out_of_memory, typed_line
from flatlens.estimate import Key, Progress
from flatlens.grams import ChunkGrams, LayerGrams, Plan, PlanBroken, Sketch, agreed, one_pass
from flatlens.measures.definition import PassMeasure
from flatlens.problem import Problem
from flatlens.problem.forward import Outcomes, as_rows, from_rows
from flatlens.problem.ranks import ALONE, ChunkBuffer, Ranks, emptied
from flatlens.user_code import OURS, is_users, said

_T = TypeVar("_T")
_OF_DERIVATIVES = re.compile("deriv|differentiab|autograd|backward|grad|vmap|functorch|batching", re.IGNORECASE)


def attempted(work: Callable[[], _T], what: str, peers: Ranks = ALONE, singular: Callable[[], str] = str) -> _T | str:
    """Return the result of `work`, or why there is none; `what` names it, `singular` explains what is not finite.

    Errors that spoil all numbers are raised. So is, where several processes measure together, what one of them may meet
    alone: the others would wait for it.
    """
    try:
        return work()
    except Exception as error:
        spoils_all = isinstance(error, FlatlensError | PlanBroken) and not isinstance(error, OF_ONE_NUMBER)
        # torch's own errors are raised in all processes
        of_one_process = out_of_memory(error) or not isinstance(error, RuntimeError | ArithmeticError)
        if spoils_all or (peers.size > 1 and of_one_process):
            raise
        not_finite = isinstance(error, Overflows | torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        return (not_finite and singular()) or reason_of(error, what)


def reason_of(error: Exception, what: str) -> str:
    """Return why there is no number: the words of an error that was met on the way to `what`.

    One that flatlens did not foresee is a warning, too: `Unexpected`.
    """
    if out_of_memory(error):
        why = one_line(error, 160)  # with the bytes
        return f"memory ran out ({why}): give a smaller Problem(memory=...), fewer samples, outputs or parameters"
    if isinstance(error, FlatlensError):
        return one_line(error)
    if isinstance(error, RuntimeError | ArithmeticError):
        of_derivatives = _OF_DERIVATIVES.search(one_line(error))
        failed = "the network cannot be differentiated as this measure needs" if of_derivatives else "torch failed"
        return f"{failed} ({one_line(error, 120)})"
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames]
    # it arose in the user's file, or in what that file called
    last = next((file for file in reversed(files) if file.startswith(OURS) or is_users(file)), OURS)
    if not last.startswith(OURS):
        return f"the code that was given raised {said(error)}"
    at = frames[-1]
    told = f"an unexpected error, please report it ({typed_line(error, 120)}, in {at.name}, line {at.lineno})"
    warnings.warn(f"{what}: {told}", Unexpected, stacklevel=2)
    return told


BY_ROUNDING = ".rounding"  #: at the end of a measure's key: how far rounding may move each sample's number
TOLERANCE = 0.03  #: largest relative residual of a squared spectral norm found by products: 1.5% of the norm


@dataclass(eq=False)
class Gathered:
    """The results of one pass over the data."""

    values: dict[Key, Tensor]  #: (n,) per place, or the mean over samples; (probes, ...) for a sketch
    outcomes: Outcomes | None = None
    residuals: dict[Key, Tensor] = field(default_factory=dict)  #: relative residuals of largest eigenvalues, (n,)
    products: int = 0
    failed: dict[Key, str] = field(default_factory=dict)  #: why a measure has no values at a place


@dataclass(frozen=True, eq=False)
class Gatherer:
    """The values of measures on one network, computed pass by pass."""

    problem: Problem
    model: nn.Module
    plan: Plan
    scale: Mapping[str, Tensor]  #: the features' spread, if a measure needs it
    progress: Progress | None

    def by_pass(self, measures: list[PassMeasure], sketch: Sketch | None = None) -> Gathered:
        """Return the measures from one pass over every output, or over a sketch's combinations of outputs."""
        problem, ranks = self.problem, self.problem.ranks
        probes = 1 if sketch is None else sketch.probes
        kept: ChunkBuffer[tuple[Key, int]] = ChunkBuffer()
        ends: ChunkBuffer[str] = ChunkBuffer()  # losses, and whether samples are classified correctly
        totals: dict[tuple[Key, int], Tensor] = {}  # sums, added at once, as each may be as large as a weight
        failed: dict[Key, str] = {}
        needs = frozenset().union(*(measure.needs for measure in measures))
        walk = one_pass(problem, self.model, self.plan, self.scale, self.progress, needs, sketch, ranks)
        with agreed(ranks), closing(walk) as chunks:  # the generator is also closed when a measure raises
            for turn, chunk in enumerate(chunks):
                probe = turn % probes
                if probe == 0:
                    ends.add(chunk.number, as_rows(chunk.losses, chunk.correct))
                for measure in measures:
                    for key, value in _values(measure, chunk):
                        at = key, probe
                        if isinstance(value, str):
                            failed.setdefault(key, value)
                        elif measure.total:
                            totals[at] = totals[at].add_(value) if at in totals else value.clone()
                        else:
                            kept.add(chunk.number, {at: value})
        # what one process could not compute, none has
        for other in ranks.together(failed):
            failed = other | failed
        found = kept.joined(ranks) | {at: total.div_(problem.n).cpu() for at, total in ranks.totals(totals).items()}
        by_probe: dict[Key, list[Tensor]] = {}
        for (key, _), value in sorted(found.items(), key=lambda item: item[0][1]):
            if (key[0].removesuffix(BY_ROUNDING), key[1]) not in failed:
                by_probe.setdefault(key, []).append(value)
        del found, totals  # freed now: each may be as large as a weight, and is not held twice
        values = {key: each[0] if sketch is None else torch.stack(each) for key, each in emptied(by_probe)}
        return Gathered(values, from_rows(ends.joined(ranks)), failed=failed)

    def by_top(self, measures: list[PassMeasure], generator: torch.Generator) -> Iterator[Gathered]:
        """Yield the measures of the largest eigenvalue of each G, first for the logits, then for the softmax."""
        for softmax in (False, True):
            mine = [m for m in measures if bool(dict(m.options).get("softmax")) == softmax]
            wanted = list(dict.fromkeys(at for measure in mine for at in self._sought(measure)))
            if wanted:
                yield self._top(mine, wanted, softmax, generator)

    def _sought(self, measure: PassMeasure) -> list[CallOrInput]:
        # the network's input, or every call of a layer for measures that add layers up
        if measure.answer == "input":
            return [None] if self.plan.inputs else []
        return list(self.plan.batch_axis)

    def _top(
        self, measures: list[PassMeasure], wanted: list[CallOrInput], softmax: bool, generator: torch.Generator
    ) -> Gathered:
        kept: ChunkBuffer[tuple[Key, Literal["value", "residual"]]] = ChunkBuffer()
        products = 0
        walk = jacobian_norms(
            self.problem, self.model, self.plan, wanted,
            softmax=softmax, rtol=TOLERANCE, generator=generator, progress=self.progress,
        )  # fmt: skip
        with agreed(self.problem.ranks), closing(walk) as chunks:
            for chunk in chunks:
                products = max(products, chunk.products)
                for measure in measures:
                    for place in self._sought(measure):
                        value, residual = measure.evaluate(chunk.grams[place]), chunk.residuals[place]
                        key = (measure.key, place)
                        kept.add(chunk.number, {(key, "value"): value, (key, "residual"): residual})
        found = kept.joined(self.problem.ranks)
        values, residuals = (
            {key: rows for (key, what), rows in found.items() if what == which} for which in ("value", "residual")
        )
        return Gathered(values, residuals=residuals, products=max(self.problem.ranks.together(products)))


def _values(measure: PassMeasure, chunk: ChunkGrams) -> Iterator[tuple[Key, Tensor | str]]:
    """Yield a measure's value, or why there is none, at each of its places; and how far rounding may move it."""
    once: dict[int, Any] = {}  # the network's input may be that of its first layer
    for place, grams in _places(measure, chunk):
        if id(grams) not in once:
            once[id(grams)] = attempted(partial(measure.evaluate, grams), measure.key)
        value = once[id(grams)]
        if isinstance(value, tuple):
            value, moved = value
            yield (measure.key + BY_ROUNDING, place), moved
        yield (measure.key, place), value


def _places(measure: PassMeasure, chunk: ChunkGrams) -> Iterator[tuple[str | None, LayerGrams]]:
    if measure.place == "input":
        if measure.answer == "input" and chunk.input is not None:
            yield None, chunk.input
        yield from ((name, g) for name, g in chunk.layers.items() if g.input_side is not None)
    elif measure.place == "outputs":
        yield None, chunk.outputs
    elif measure.place == "weight":
        scaled = measure.scales_features
        for name, g in (*chunk.layers.items(), *chunk.parts.items()):
            if g.weight is not None and g.has_derivative and (g.feature_scale is not None or not scaled):
                yield name, g
    else:
        yield from ((name, g) for name, g in chunk.layers.items() if g.counts_weight or g.counts_bias)
        yield from chunk.others.items()


def by_weighting(measures: Iterable[PassMeasure]) -> Iterator[tuple[bool, list[PassMeasure]]]:
    """Yield (whether weighted by the loss, measures) for each kind of combination that is needed."""
    for weighted in (False, True):
        mine = [measure for measure in measures if ("C" in measure.needs) == weighted]
        if mine:
            yield weighted, mine
