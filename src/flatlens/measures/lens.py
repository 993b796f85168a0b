"""The Lens: one network at one moment, and the only thing with a cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

import torch
from torch import Tensor, nn

from flatlens.curvature.bending import bending_along
from flatlens.curvature.directions import Directions
from flatlens.errors import BadInput, StaleLens
from flatlens.estimate import Key, Progress
from flatlens.grams import ChunkGrams, LayerGrams, Layout, feature_spread, lay_out, one_pass
from flatlens.measures.card import Measure, Run
from flatlens.measures.registry import comes_along
from flatlens.problem import Problem, measuring
from flatlens.problem.data import checksum
from flatlens.problem.losses import correct
from flatlens.problem.problem import require_finite_weights
from flatlens.problem.state import fingerprint


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What the network makes of each sample of a data set."""

    losses: Tensor  #: (n,) float64, scaled so that their mean is the risk
    correct: Tensor | None  #: (n,) float64, 1 where right, NaN where ignored; None where targets are no classes


@final
class Lens:
    """Looks at a problem's network as it is now; per-sample values are kept, Grams are not.

    A pass serves all one-pass measures that read nothing more of it than those asked for; a later one that does runs
    another pass (`passes` counts them). A model changed since raises `StaleLens`. `after`: a lens on an earlier moment
    of the same network, whose leading eigenvectors are where the search for the new ones starts.
    """

    def __init__(self, problem: Problem, *, after: Lens | None = None) -> None:
        if not isinstance(problem, Problem):
            raise BadInput(
                f"Lens(...): a Problem is needed, got {type(problem).__name__}: Lens(Problem(model, loss, data))"
            )
        require_finite_weights(problem.model)
        self.problem = problem
        self.model = problem.measured()
        self.passes = 0
        self.products = 0  #: curvature-vector products over all the data, since the lens was made
        self.seconds: dict[str, float] = {}
        if after is not None and not isinstance(after, Lens):
            raise BadInput(f"Lens(after=...): an earlier Lens is needed, got {type(after).__name__}")
        self.eigenvectors: dict[Key, Tensor] = {} if after is None else dict(after.eigenvectors)
        self._values: dict[Key, Tensor] = {}
        self._outcomes: dict[str, Outcomes] = {}
        self._scale: dict[str, tuple[Tensor, int]] = {}
        self._versions = dict(_fingerprints(problem.model))

    @cached_property
    def layout(self) -> Layout:
        """Which parameter is explained by which layer."""
        return lay_out(self.problem, self.model)

    def per_sample(self, measures: Iterable[Measure], progress: Progress | None = None) -> Mapping[Key, Tensor]:
        """One number per sample, (n,) float64, for each measure and place: a layer, or None for the network's input.

        Of a measure that adds up its samples, the sum.
        """
        missing = [measure for measure in measures if measure.key not in self.seconds]
        if missing:
            self.require_fresh()
            missing += [measure for measure in comes_along(missing) if measure.key not in self.seconds]
            self._run(missing, progress)
        return self._values

    def _run(self, measures: list[Measure], progress: Progress | None) -> None:
        start = time.perf_counter()
        scale = (
            self.feature_scale()
            if any(m.needs_feature_scale and m.option(m.needs_feature_scale) for m in measures)
            else {}
        )
        gathered: dict[Key, list[Tensor]] = {}
        losses: list[Tensor] = []
        hits: list[Tensor | None] = []
        needs = frozenset().union(*(measure.needs for measure in measures))
        for chunk in one_pass(self.problem, self.model, self.layout, scale, progress, needs):
            losses.append(chunk.losses)
            hits.append(chunk.correct)
            for measure in measures:
                for place, grams in _places(measure, chunk):
                    gathered.setdefault((measure.key, place), []).append(measure.evaluate(grams).cpu())
        totals = {measure.key for measure in measures if measure.total}
        for key, parts in gathered.items():
            self._values[key] = sum(parts[1:], parts[0]) if key[0] in totals else torch.cat(parts)
        self._outcomes["data"] = _joined(losses, hits)
        self.passes += 1
        self.seconds |= dict.fromkeys([measure.key for measure in measures], time.perf_counter() - start)

    def outcomes(self, which: Literal["data", "test"]) -> Outcomes:
        """Losses and hits on the data (free once a pass has run) or on the held-out data."""
        if which not in self._outcomes:
            self.require_fresh()
            self._outcomes[which] = self._forward(which)
        return self._outcomes[which]

    def _forward(self, which: Literal["data", "test"]) -> Outcomes:
        test = self.problem.test
        if which == "data":
            state, batches = self.problem.measuring(self.model), self.problem.batches(1024)
        else:
            assert test is not None
            state, batches = measuring(self.model), test.chunks(1024)
        losses: list[Tensor] = []
        hits: list[Tensor | None] = []
        mass = 0.0
        with state, torch.no_grad():
            for raw in batches:
                f, y = self.problem.run(self.model, self.problem.place(raw))
                f = f.to(torch.float64)
                losses.append(self.problem.loss.values(f, y))
                hits.append(correct(f, y, self.problem.loss.ignore_index))
                mass += float(self.problem.loss.mass(f, y).sum())
        outcomes = _joined(losses, hits)
        return Outcomes(outcomes.losses * len(outcomes.losses) / mass, outcomes.correct)

    def feature_scale(self) -> Mapping[str, Tensor]:
        """The spread over the data of the features each linear layer reads, (g, m)."""
        if not self._scale:
            self._scale = feature_spread(self.problem, self.model, self.layout)
        return {layer: scale for layer, (scale, _) in self._scale.items()}

    def constant_features(self, layer: str) -> int:
        """How many of the features a layer reads never change over the data; 0 where nobody asked for their spread."""
        return self._scale[layer][1] if layer in self._scale else 0

    def bending(self, layer: str, directions: Directions, run: Run, *, each: bool = False) -> Tensor:
        """The network's own curvature along directions of a weight, weighted by the loss's slope: summed over
        directions, (n,), or with `each` summed over samples, (directions,)."""
        self.require_fresh()
        parts, products = [], 0
        for forms in bending_along(self.problem, self.model, self.layout, layer, directions, run.progress):
            parts.append(forms.sum(0 if each else 1).cpu())
            products = forms.shape[1]
        self.products += products
        return torch.stack(parts).sum(0) if each else torch.cat(parts)

    def require_fresh(self) -> None:
        """Refuse to mix numbers of two networks."""
        now = dict(_fingerprints(self.problem.model))
        changed = [name for name in {**now, **self._versions} if now.get(name) != self._versions.get(name)]
        if changed:
            raise StaleLens(
                f"{changed[0]!r} changed after the lens was made: make a new Lens(problem) for the model as it is now"
            )


def _fingerprints(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What tells a change: the modules themselves; a tensor's identity and values; a parameter's version and freezing.

    Values too, for writing to `.data` bumps no version; and no versions of buffers, which forward() may write to.
    """
    for name, module in model.named_modules():
        yield f"module {name}", (id(module),)
    for name, p in model.named_parameters():
        yield name, fingerprint(p)
    for name, b in model.named_buffers():
        yield name, (id(b), checksum(b))


def _places(measure: Measure, chunk: ChunkGrams) -> Iterator[tuple[str | None, LayerGrams]]:
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


def _joined(losses: list[Tensor], hits: list[Tensor | None]) -> Outcomes:
    known = [hit.cpu() for hit in hits if hit is not None]
    return Outcomes(torch.cat(losses).cpu(), torch.cat(known) if len(known) == len(hits) else None)
