"""What bounds are made from: a lens, what the user declares, and each assumption checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.quantities import TOGETHER
from flatlens.bounds.target import Target
from flatlens.curvature import Hessian, eigenpairs
from flatlens.distributions import Distribution, Rule
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Key, Progress, Report
from flatlens.grams import Weight
from flatlens.measures import Lens, PassMeasure, named
from flatlens.measures.card import Run
from flatlens.measures.measure import measure_with
from flatlens.perturbation import Elsewhere

T = TypeVar("T")

DECLARABLE = (
    "convex_support",
    "locally_constant_labels",
    "local_minimum",
    "iid_samples",
    "smooth_density",
    "bounded_loss",
    "large_sample",
)
"""Assumptions that no sample can check, or that the user may vouch for."""


@dataclass(eq=False)
class Context:
    """One network seen by all bounds."""

    lens: Lens
    declared: frozenset[str]
    distribution: Distribution | None
    generator: torch.Generator
    progress: Progress | None = None
    target: Target | None = None  #: what the network should compute, where it is known
    delta: float | None = None  #: the data's covering radius, on the user's word
    rule: Rule = "exact"  #: by which it is found, where the distribution is known
    _reports: dict[str, Report] = field(default_factory=dict)
    _kept: dict[Callable[[Context], Any], Any] = field(default_factory=dict)

    @property
    def layers(self) -> dict[str, Weight]:
        """Linear layers by name, in execution order."""
        return self.lens.layout.weights

    @property
    def first(self) -> str | None:
        """The layer that alone reads the network's input; None where it is read otherwise, as by a BatchNorm."""
        found = self.lens.layout.input_call
        return found if found in self.layers else None

    @cached_property
    def readable(self) -> dict[str, Weight]:
        """Layers called once whose weight acts through that call alone: both sides of theirs come out of the pass."""
        return {name: weight for name, weight in self.layers.items() if len(weight.calls) == 1 and weight.explained}

    @property
    def n(self) -> int:
        """Samples."""
        return self.lens.problem.n

    @property
    def outputs(self) -> int:
        """N."""
        return self.lens.problem.outputs

    @property
    def rounding(self) -> float:
        """Of the network's arithmetic, for slack."""
        return 1e-9 if self.lens.problem.dtype == torch.float64 else 1e-4

    @property
    def floor(self) -> float:
        """Below it slopes, or their squares, underflow."""
        return 1e-150 if self.lens.problem.dtype == torch.float64 else 1e-35

    def ask(self, *quantities: PassMeasure) -> Mapping[Key, Tensor]:
        """Numbers per sample at all places, of one pass where they are asked for together."""
        asked = {one.key: one for one in (*quantities, *TOGETHER)}
        return self.lens.per_sample(asked.values(), self.progress, self.generator)

    def each(self, quantity: PassMeasure, place: str | None = None) -> Tensor:
        """One number per sample at a place: a layer, or None for the network's input."""
        return self.ask(quantity)[quantity.key, place]

    def total(self, quantity: PassMeasure) -> Tensor:
        """The sum over all places of parameters, per sample."""
        found = [v for (key, at), v in list(self.ask(quantity).items()) if key == quantity.key and at is not None]
        return torch.stack(found).sum(0) if found else torch.zeros(self.n, dtype=torch.float64)

    def measured(self, key: str, layer: str | None = None, part: str = "") -> Estimate:
        """A measure's number or its dotted part, by its name with options, as `flatlens.measure` gives it; run once."""
        if key not in self._reports:
            # what holds of a layer holds of a frozen one
            self._reports[key] = measure_with(self.lens, key, Run(self.generator, self.progress, frozen=True))
        row = f"{named(key)[0].key}.{part}" if part else named(key)[0].key
        return self._reports[key][row, layer]

    def once(self, make: Callable[[Context], T]) -> T:
        """What several bounds read, made for the first of them."""
        if make not in self._kept:
            self._kept[make] = make(self)
        kept: T = self._kept[make]
        return kept

    def unshared(self, layer: str) -> Assumption:
        """The layer is applied once per sample."""
        weight = self.layers[layer]
        if weight.dense and weight.explained:
            return Assumption("unshared_weights", True)
        why = "is a convolution over one patch" if weight.positions == 1 else "acts at several positions"
        why = "is called several times" if len(weight.calls) > 1 else why
        why = why if weight.explained else "also acts outside its calls"
        return Assumption("unshared_weights", False, f"{layer} {why}")

    def unread(self, part: str = "") -> Claim:
        """What there is to say where no layer reads the network's input, or one whose gradient is not its own."""
        why = "no linear layer alone is seen to read the network's input"
        failing = Assumption("reads_the_input", False, why) if self.first is None else self.unshared(self.first)
        return Claim(math.nan, math.nan, self.first, part, (failing,))

    def all_unshared(self) -> Assumption:
        """Every linear layer is applied once per sample."""
        return next((a for a in map(self.unshared, self.layers) if not a.holds), Assumption("unshared_weights", True))

    def counted(self, layers: Collection[str]) -> Assumption:
        """These layers' weights are among the parameters measured, so that S has them."""
        missing = [name for name in layers if self.layers[name].parameter not in self.lens.problem.parameters]
        detail = f"{missing[0]} is not measured" if missing else ""
        return Assumption("weights_measured", not missing, detail)

    def nonzero(self, layer: str, norms2: Tensor) -> Assumption:
        """No sample's input to the layer is 0."""
        zero = int((norms2 < torch.finfo(norms2.dtype).tiny).sum())
        return Assumption(
            "nonzero_inputs", zero == 0, f"{zero} of {len(norms2)} inputs of {layer} are 0" if zero else ""
        )

    @property
    def half_squared_error(self) -> Assumption:
        """C = I."""
        loss = self.lens.problem.loss
        holds = loss.half_square
        return Assumption("half_squared_error", holds, "" if holds else f"the loss is {loss.name}")

    def declare(self, name: str) -> Assumption:
        """An assumption taken on the user's word."""
        return Assumption(name, True if name in self.declared else None, declared=True)

    @cached_property
    def local_minimum(self) -> Assumption:
        """The gradient is small beside what a step of its size in the worst direction would change; no Ritz value is
        clearly negative."""
        if "local_minimum" in self.declared:
            return Assumption("local_minimum", True, declared=True)
        elsewhere = Elsewhere(self.lens.problem, model=self.lens.model)
        _, slope = elsewhere.slope(elsewhere.here, elsewhere.chunks(), self.lens.problem.mass)
        pairs = eigenpairs(
            Hessian(self.lens.problem, model=self.lens.model), top=1, bottom=1, tolerance=0.05, generator=self.generator
        )
        high, low = float(pairs.values[0]), float(pairs.values[-1])
        size = float(elsewhere.here.norm())
        steep = float(slope.norm()) > 1e-3 * max(high, 0.0) * size
        if steep:
            return Assumption("local_minimum", False, f"the gradient's norm is {float(slope.norm()):.2g}")
        curved = low < -1e-3 * max(high, 0.0)
        return Assumption("local_minimum", not curved, f"a Ritz value of the Hessian is {low:.2g}" if curved else "")


def declared(names: Collection[str]) -> frozenset[str]:
    """What the user vouches for, each name known; one alone will do."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Collection):
        raise BadInput(f"check_bounds(assume={names!r}): names of assumptions are needed")
    for name in names:
        if name not in DECLARABLE:
            raise UnknownName.among("assumption that can be declared", name, DECLARABLE)
    return frozenset(names)
