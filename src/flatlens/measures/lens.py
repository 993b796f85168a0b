"""The Lens: one network at one moment, and the only thing with a cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, StaleLens
from flatlens.estimate import Key, Progress
from flatlens.grams import ChunkGrams, LayerGrams, Layout, curvature_along_weight, feature_spread, lay_out, one_pass
from flatlens.measures.card import Measure
from flatlens.measures.registry import ONE_PASS
from flatlens.problem import Problem, measuring
from flatlens.problem.data import checksum
from flatlens.problem.losses import correct
from flatlens.problem.problem import require_finite_weights


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What the network makes of each sample of a data set."""

    losses: Tensor  #: (n,) float64, scaled so that their mean is the risk
    correct: Tensor | None  #: (n,) float64, 1 where right, NaN where ignored; None where targets are no classes


@final
class Lens:
    """Looks at a problem's network as it is now; per-sample values are kept, Grams are not.

    The first one-pass measure asked for runs the pass for all cheap ones; a later one that was not planned runs
    another pass (`passes` counts them). A model changed since raises `StaleLens`.
    """

    def __init__(self, problem: Problem) -> None:
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
        self._values: dict[Key, Tensor] = {}
        self._outcomes: dict[str, Outcomes] = {}
        self._scale: dict[str, tuple[Tensor, int]] = {}
        self._versions = dict(_fingerprints(problem.model))

    @cached_property
    def layout(self) -> Layout:
        """Which parameter is explained by which layer."""
        return lay_out(self.problem, self.model)

    def per_sample(self, measures: Iterable[Measure], progress: Progress | None = None) -> Mapping[Key, Tensor]:
        """One number per sample, (n,) float64, for each measure and place: a layer, or None for the network's input."""
        missing = [measure for measure in measures if measure.key not in self.seconds]
        if missing:
            self.require_fresh()
            if self.passes == 0:
                keys = {measure.key for measure in missing}
                missing += [measure for measure in ONE_PASS if measure.key not in keys]
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
        for chunk in one_pass(self.problem, self.model, self.layout, scale, progress):
            losses.append(chunk.losses)
            hits.append(chunk.correct)
            for measure in measures:
                for place, grams in _places(measure, chunk):
                    gathered.setdefault((measure.key, place), []).append(measure.evaluate(grams).cpu())
        self._values |= {key: torch.cat(parts) for key, parts in gathered.items()}
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
        data = self.problem.data if which == "data" else self.problem.test
        assert data is not None
        losses: list[Tensor] = []
        hits: list[Tensor | None] = []
        mass = 0.0
        with measuring(self.model), torch.no_grad():
            for raw in data.chunks(1024):
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

    def curvature(self, layer: str, T: Tensor, scale: Tensor | None = None) -> Tensor:
        """The network's curvature along T_r (x) e_t / scale_t of a weight, weighted by the loss's slope, (n,)."""
        self.require_fresh()
        values, products = curvature_along_weight(self.problem, self.model, self.layout, layer, T, scale)
        self.products += products
        return values.cpu()

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
        yield name, (id(p), p.data_ptr(), p._version, p.requires_grad, checksum(p))
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
