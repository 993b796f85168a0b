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
        gathered: dict[Key, list[list[Tensor]]] = {}
        losses: list[Tensor] = []
        hits: list[Tensor | None] = []
        needs = frozenset().union(*(measure.needs for measure in measures))
        chunks = one_pass(self.problem, self.model, self.layout, self.scale, self.progress, needs, sketch)
        for number, chunk in enumerate(chunks):
            probe = number % probes
            if probe == 0:
                losses.append(chunk.losses)
                hits.append(chunk.correct)
            for measure in measures:
                for place, grams in places(measure, chunk):
                    lists = gathered.setdefault((measure.key, place), [[] for _ in range(probes)])
                    lists[probe].append(measure.evaluate(grams).cpu())
        totals = {measure.key for measure in measures if measure.total}
        values = {}
        for key, lists in gathered.items():
            each = [sum(parts[1:], parts[0]) if key[0] in totals else torch.cat(parts) for parts in lists]
            values[key] = each[0] if sketch is None else torch.stack(each)
        return Gathered(values, joined(losses, hits))

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
        gathered: dict[Key, list[Tensor]] = {}
        residuals: dict[Key, list[Tensor]] = {}
        products = 0
        walk = jacobian_norms(
            self.problem, self.model, self.layout, wanted,
            softmax=softmax, tolerance=TOLERANCE, generator=generator, progress=self.progress,
        )  # fmt: skip
        for chunk in walk:
            products = max(products, chunk.products)
            for measure in measures:
                for place in self._sought(measure):
                    key = (measure.key, place)
                    gathered.setdefault(key, []).append(measure.evaluate(chunk.grams[place]).cpu())
                    residuals.setdefault(key, []).append(chunk.residuals[place])
        return Gathered(
            {key: torch.cat(parts) for key, parts in gathered.items()},
            residuals={key: torch.cat(parts) for key, parts in residuals.items()},
            products=products,
        )


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
