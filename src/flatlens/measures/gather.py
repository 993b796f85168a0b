"""From a pass to numbers per sample: every measure at every place, exactly, by probes, or by largest eigenvalues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flatlens.curvature.jacobian_norms import Place, jacobian_norms
from flatlens.estimate import Key, Progress
from flatlens.grams import ChunkGrams, LayerGrams, Layout, Sketch, one_pass
from flatlens.measures.card import Measure
from flatlens.problem import Problem
from flatlens.problem.outcomes import Outcomes, joined

TOLERANCE = 0.03  #: relative residual of a squared spectral norm sought matrix-free: 1.5% of the norm


@dataclass(eq=False)
class Gathered:
    """What a walk over the data gave."""

    values: dict[Key, Tensor]  #: (n,) a place, or the sum over samples; of a sketch (probes, ...)
    outcomes: Outcomes | None = None
    residuals: dict[Key, Tensor] = field(default_factory=dict)  #: of largest eigenvalues, relative to them, (n,)
    products: int = 0


@dataclass(eq=False)
class _Seen:
    """What one chunk gave."""

    losses: Tensor
    hits: Tensor | None
    values: dict[Key, list[Tensor]] = field(default_factory=dict)  #: of each probe, or one

    def on_cpu(self) -> _Seen:
        """Where the numbers of all chunks meet; not before the walk is over, for a device would wait for each copy."""
        values = {key: [part.cpu() for part in parts] for key, parts in self.values.items()}
        return _Seen(self.losses.cpu(), None if self.hits is None else self.hits.cpu(), values)


@dataclass(frozen=True, eq=False)
class Gatherer:
    """One network whose measures are to be gathered."""

    problem: Problem
    model: nn.Module
    layout: Layout
    scale: Mapping[str, Tensor]  #: the features' spread, where a measure asks for it
    progress: Progress | None

    def by_pass(self, measures: list[Measure], sketch: Sketch | None = None) -> Gathered:
        """Of every output, or of a sketch's combinations of them, each a pass of its own."""
        probes = 1 if sketch is None else sketch.probes
        seen: dict[int, _Seen] = {}
        totals: dict[tuple[Key, int], Tensor] = {}  # added up as they come: each may be as large as a weight
        needs = frozenset().union(*(measure.needs for measure in measures))
        ranks = self.problem.ranks
        chunks = one_pass(self.problem, self.model, self.layout, self.scale, self.progress, needs, sketch, ranks)
        for turn, chunk in enumerate(chunks):
            here = seen.setdefault(chunk.number, _Seen(chunk.losses, chunk.correct))
            for measure in measures:
                for place, grams in places(measure, chunk):
                    key, value = (measure.key, place), measure.evaluate(grams)
                    if measure.total:
                        at = (key, turn % probes)
                        totals[at] = totals[at].add_(value) if at in totals else value.clone()
                    else:
                        here.values.setdefault(key, []).append(value)
        every = ranks.in_order({number: one.on_cpu() for number, one in seen.items()})
        by_probe = {
            key: [torch.cat(parts) for parts in zip(*(one.values[key] for one in every), strict=True)]
            for key in every[0].values
        }
        for (key, _), total in sorted(ranks.totals(totals).items(), key=lambda item: item[0][1]):
            by_probe.setdefault(key, []).append(total.cpu())
        values = {key: each[0] if sketch is None else torch.stack(each) for key, each in by_probe.items()}
        return Gathered(values, joined([one.losses for one in every], [one.hits for one in every]))

    def by_top(self, measures: list[Measure], generator: torch.Generator) -> Iterator[Gathered]:
        """Of the largest eigenvalue of each G, for the logits and for the softmax in turn."""
        for softmax in (False, True):
            mine = [m for m in measures if bool(dict(m.options).get("softmax")) == softmax]
            wanted = list(dict.fromkeys(at for measure in mine for at in self._sought(measure)))
            if wanted:
                yield self._top(mine, wanted, softmax, generator)

    def _sought(self, measure: Measure) -> list[Place]:
        """The network's input, or every call of a layer where the measure adds them up."""
        if measure.answer == "input":
            return [None] if self.layout.inputs else []
        return [call for call in self.layout.batch_axis if call not in self.layout.norms]

    def _top(self, measures: list[Measure], wanted: list[Place], softmax: bool, generator: torch.Generator) -> Gathered:
        seen: dict[int, dict[Key, tuple[Tensor, Tensor]]] = {}
        products = 0
        walk = jacobian_norms(
            self.problem, self.model, self.layout, wanted,
            softmax=softmax, tolerance=TOLERANCE, generator=generator, progress=self.progress,
        )  # fmt: skip
        for chunk in walk:
            products = max(products, chunk.products)
            seen[chunk.number] = {
                (measure.key, place): (measure.evaluate(chunk.grams[place]).cpu(), chunk.residuals[place])
                for measure in measures
                for place in self._sought(measure)
            }
        every = self.problem.ranks.in_order(seen)
        values, residuals = (
            {key: torch.cat([one[key][which] for one in every]) for key in every[0]} for which in (0, 1)
        )
        return Gathered(values, residuals=residuals, products=max(self.problem.ranks.together(products)))


def places(measure: Measure, chunk: ChunkGrams) -> Iterator[tuple[str | None, LayerGrams]]:
    """Where a measure is evaluated."""
    if measure.place == "input":
        if measure.answer == "input" and chunk.input is not None:
            yield None, chunk.input
        yield from ((name, g) for name, g in chunk.layers.items() if g.input_gram is not None)
    elif measure.place == "weight":
        yield from ((name, g) for name, g in chunk.layers.items() if g.weight is not None and g.explained)
    else:
        yield from ((name, g) for name, g in chunk.layers.items() if g.counts_weight or g.counts_bias)
        yield from chunk.others.items()


def frames(measures: Iterable[Measure]) -> Iterator[tuple[bool, list[Measure]]]:
    """(whether weighted by the loss, measures) of each kind of combination asked for."""
    for weighted in (False, True):
        mine = [measure for measure in measures if ("C" in measure.needs) == weighted]
        if mine:
            yield weighted, mine
