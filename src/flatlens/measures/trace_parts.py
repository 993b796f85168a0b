"""The parts of a trace of the Hessian, Gauss-Newton and functional, and the number of probes that the second takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.probes import mean_of_forms
from flatlens.curvature.trace import (
    curved_parameters,
    exact_functional_hessian_trace,
    exact_products,
    functional_hessian_trace,
)
from flatlens.errors import BadOption
from flatlens.estimate import Estimate, Kind, undefined
from flatlens.measures.card import PassMeasure, Run
from flatlens.measures.left_out import NO_PARAMETER
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_positive
from flatlens.measures.reduce import by_probes, mean
from flatlens.progress import Watch

_FIRST = 8  #: probes of the pilot: fewer do not show their own spread
_FEW = 64  #: number of directions up to which all are taken: probes of few directions are far from normal
_SURE = 16  #: number of probes that do not all agree by chance: a form that varies takes no value more often than 3/4
_MOST = 4096  #: largest number of probes
_ALIKE = 1e-5  #: spread of few probes, relative to the largest, below which they may agree by chance


@dataclass(frozen=True)
class Effort:
    """The accuracy that a trace estimate aims at, and its method."""

    rtol: float  #: standard error wanted, relative to the value
    probes: int | None  #: this many, whatever the error
    exact: bool  #: whether to use every direction and no probes

    def __post_init__(self) -> None:
        require_positive(rtol=self.rtol)
        if self.exact and self.probes is not None:
            raise BadOption("options exact=True and probes=...: choose one")
        if self.probes is not None and not (isinstance(self.probes, int) and self.probes >= 2):
            raise BadOption(f"option probes={self.probes!r}: None or a whole number of at least 2 is needed")


def sampled(
    draw: Callable[[int], Tensor], effort: Effort, size: float, everything: int, run: Run
) -> tuple[Tensor, int | None] | None:
    """Return (probes, number of them in the pilot); None if all `everything` directions cost less, or are requested.

    `draw(m)` returns m rows whose sums are the values; `size` is the number that the values are added to.
    """
    few = _FEW if effort.probes is None else max(_SURE, effort.probes)
    if effort.exact or everything <= few:
        return None
    if effort.probes is not None:
        rows = draw(effort.probes)
        more = _SURE - effort.probes
        return (torch.cat([rows, draw(more)]) if more > 0 and _some_agree(rows) else rows), None
    start = time.perf_counter()
    rows = draw(_FIRST)
    each = (time.perf_counter() - start) / _FIRST
    pilot = of_probes(rows.sum(1), _FIRST)
    if pilot.stderr == 0:  # equal values show nothing of their spread
        return None
    allowed = effort.rtol * abs(size + pilot.value)
    enough = allowed > 0 and pilot.stderr < allowed * _MOST
    needed = min(_MOST, max(_SURE, math.ceil(_FIRST * (pilot.stderr / allowed) ** 2))) if enough else _MOST
    if isinstance(run.progress, Watch):
        fits = int(run.progress.limit / 2 / each) if run.progress.limit < math.inf else needed
        less = f"probes={fits} take half of that time, with a wider interval; " if fits >= _FIRST else ""
        run.progress.allow(min(needed, everything), min(needed, everything) * each, mend=less)
    if needed >= everything:
        return None
    return torch.cat([rows, draw(needed - _FIRST)]), _FIRST


def _some_agree(rows: Tensor) -> bool:
    """Return whether the rows' sums, or a column, are nearly one number that is not 0: signs can agree by chance."""
    values = torch.cat([rows, rows.sum(1, keepdim=True)], 1)
    size = values.abs().amax(0)
    return bool(((values.amax(0) - values.amin(0) <= _ALIKE * size) & (size > 0)).any())


def of_probes(values: Tensor, pilot: int | None) -> Estimate:
    """Return the mean of the probes as an estimate.

    The spread of the pilot gives the error (Stein's two stages): if the spread of all probes decided how many to draw,
    the interval would cover too little. That of all probes counts where it is larger: where few parameters decide, the
    pilot's signs can agree by chance, and of these parameters alone when their number was drawn for all.
    """
    mean, stderr = (float(v) for v in mean_of_forms(values))
    if pilot is not None:
        stderr = max(stderr, float(mean_of_forms(values[:pilot])[1]) * (pilot / len(values)) ** 0.5)
    note = "" if stderr > 0 else f"all {len(values)} probes agree"
    return Estimate(mean, stderr, "estimate", note, arrays={"probes": values}, products=len(values))


@dataclass(frozen=True, eq=False)
class FunctionalHessianPart:
    """The part of a trace beyond its Gauss-Newton part, by parameter: numbers, or probes."""

    names: tuple[str, ...]
    values: Tensor  #: (names,), or (m, names) for m probes
    pilot: int | None
    products: int
    unknown: str = ""  #: why all values are 0 and should not be

    def over(self, names: Collection[str]) -> Estimate:
        """Return the sum over some parameters: they share their probes, so the sum is taken per probe."""
        chosen = [number for number, name in enumerate(self.names) if name in names]
        if chosen and self.unknown:
            return undefined(self.unknown)
        total = self.values[..., chosen].sum(-1)
        if self.values.ndim == 1:
            return Estimate(float(total), products=self.products if chosen else 0)
        return of_probes(total, self.pilot) if chosen else Estimate(0.0)


def functional_hessian_part(lens: Lens, run: Run, effort: Effort, weighted: bool, size: float) -> FunctionalHessianPart:
    """Return the part of every curved parameter; `size` is the Gauss-Newton part that it is added to."""
    problem, model, layout = lens.problem, lens.model, lens.layout
    curved = curved_parameters(problem, layout)
    if not curved.names:
        return FunctionalHessianPart((), torch.zeros(0), None, 0)

    def draw(probes: int) -> Tensor:
        values = functional_hessian_trace(
            problem, model, layout, curved,
            probes=probes, weighted=weighted, generator=run.generator, progress=run.progress,
        )  # fmt: skip
        return torch.stack([values[name] for name in curved.names], 1)

    sizes = {name: p.numel() for name, p in model.named_parameters()}
    drawn = sampled(draw, effort, size, exact_products(layout, curved, sizes), run)
    if drawn is not None:
        found = FunctionalHessianPart(curved.names, *drawn, len(drawn[0]))
    else:
        values, products = exact_functional_hessian_trace(
            problem, model, layout, curved, weighted=weighted, progress=run.progress
        )
        exact = torch.tensor([values[name] for name in curved.names], dtype=torch.float64)
        found = FunctionalHessianPart(curved.names, exact, None, products)
    lens.count(found.products)
    return found if found.values.any() else replace(found, unknown=lens.underflow)


def traced(
    lens: Lens, run: Run, gauss_newton: PassMeasure, effort: Effort, weighted: bool
) -> dict[tuple[str, str | None], Estimate]:
    """Return the Gauss-Newton part plus the functional Hessian's, at every place and in total."""
    places = passed(lens, run, gauss_newton)
    if not places:
        return {("", None): undefined(NO_PARAMETER)}
    whole = mean_over_samples(lens, sum(places.values()))
    beyond = lens.attempted(
        partial(functional_hessian_part, lens, run, effort, weighted, whole.value), gauss_newton.key
    )
    if isinstance(beyond, str):
        names = curved_parameters(lens.problem, lens.layout).names
        beyond = FunctionalHessianPart(tuple(names), torch.zeros(len(names)), None, 0, unknown=beyond)
    mine = {name: layer for layer, w in lens.layout.weights.items() for name in (w.parameter, w.bias) if name}
    parts: dict[tuple[str, str | None], Estimate] = {}
    for at, v in places.items():
        here = beyond.over([name for name in beyond.names if mine.get(name, name) == at])
        parts["", at] = replace(plus(mean_over_samples(lens, v), here), arrays={})
    all_of_it = beyond.over(beyond.names)
    return {
        ("", None): plus(whole, all_of_it),
        ("gauss_newton", None): whole,
        ("functional_hessian", None): replace(all_of_it, arrays={}),
        **parts,
    }


def passed(lens: Lens, run: Run, measure: PassMeasure) -> dict[str, Tensor]:
    """Return the values that the pass gives for a measure at each of its places."""
    values = lens.per_sample([measure], run.progress, run.generator)
    return {at: v for (key, at), v in list(values.items()) if key == measure.key and at is not None}


def mean_over_samples(lens: Lens, values: Tensor | int) -> Estimate:
    """Return the mean over samples, and over the probes of a sketch."""
    assert isinstance(values, Tensor)
    if lens.probes is None:
        return Estimate(float(values.mean()))
    found = by_probes(mean, values)
    return Estimate(found.value, found.stderr, "estimate")


def plus(a: Estimate, b: Estimate) -> Estimate:
    """Return the sum of estimates with independent errors; the probes of b are shifted to the sum."""
    if b.kind == "undefined":
        return b
    arrays = {"probes": a.value + b.arrays["probes"]} if b.arrays else {}
    kind: Kind = "exact" if a.kind == b.kind == "exact" else "estimate"
    return replace(b, value=a.value + b.value, stderr=math.hypot(a.stderr, b.stderr), kind=kind, arrays=arrays)
