"""fl.measure: a report from a lens and names of measures."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatlens.curvature.probes import mean_of_forms
from flatlens.errors import BadInput, FlatlensError, NotDifferentiable, Overflows, UnknownName, one_line
from flatlens.estimate import Estimate, Key, Kind, Progress, Report, undefined
from flatlens.measures.card import Measure, NetworkMeasure, Parts, PassMeasure, Run
from flatlens.measures.left_out import left_out
from flatlens.measures.lens import Lens
from flatlens.measures.reduce import Reduced, by_probes
from flatlens.measures.registry import MEASURES, named
from flatlens.problem import Problem, measuring
from flatlens.problem.checks import drawing
from flatlens.problem.data import finite
from flatlens.problem.state import device_of
from flatlens.progress import LIMIT, Watch, or_line
from flatlens.version import __version__


def measure(
    lens: Lens,
    measures: str | Measure | Iterable[str | Measure] | None = None,
    *,
    layers: str | Iterable[str] | None = None,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure a network: every exact one-pass measure, or the ones named.

    A measure whose products, searches or draws are expected to take more than 10 minutes is refused, unless `anyway`.

    Args:
        lens: The network to measure, `Lens(problem)`.
        measures: Names, such as "mls" or "local_volume(top_k=3)", or Measure objects; one alone is enough. None is
            every exact measure of the pass. Measures that take curvature products (sharpness, Hessian trace, ...),
            searches or random draws run only when named. So do, in large convolutional networks and transformers,
            those that need every sample's own gradient; their rows say so.
        layers: Parts of the names of the layers that get curvature products, where a measure takes them layer by layer;
            the others' values are then undefined. None is all of them.
        anyway: Whether to do long work, too.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a line if stderr is a terminal.

    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = net.weight.copy_(torch.tensor([[3.0, 4.0]]))
    >>> from flatlens import Problem
    >>> problem = Problem(net, "half_squared_error", (torch.ones(1, 2), torch.zeros(1, 1)))
    >>> measure(Lens(problem), ["mls", "relative_flatness"])["relative_flatness"]  # ||w||^2 ||x||^2
    50 (exact)
    """
    if not isinstance(lens, Lens):
        raise BadInput(f"measure(...): a Lens is needed, got {type(lens).__name__}: measure(Lens(problem))")
    draws = drawing(generator, progress, "measure")
    watch = Watch(or_line(progress), math.inf if anyway else LIMIT)
    return measure_with(lens, measures, Run(draws, watch, layers=_parts_of_names(lens, layers)))


def measure_with(lens: Lens, measures: str | Measure | Iterable[str | Measure] | None, run: Run) -> Report:
    """Return what `measure` does, with rows for frozen layers if the run includes them."""
    lens.require_fresh()
    asked = measures is not None
    chosen = named(measures) if measures is not None else _default(lens)
    with measuring(
        lens.model
    ):  # also around measures of weights alone: in train mode, reading a spectral norm changes it
        defined = [m for m in chosen if m.works_coupled or not lens.problem.coupled]
        from_pass = [m for m in defined if isinstance(m, PassMeasure)]
        # overflowing Gram matrices are reported by each measure
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # torch has it, and does not list it
            lens.per_sample([m for m in from_pass if not _omitted(lens, m, asked)], run.progress, run.generator)
        estimates: dict[Key, Estimate] = {}
        for one in chosen:
            if isinstance(run.progress, Watch):
                run.progress.begin(one.key)
            start, passed = time.perf_counter(), lens.pass_seconds
            found: dict[Key, Estimate] = {(one.key, None): undefined(COUPLED)}
            if one in defined:
                found = lens.planned(partial(_answers, lens, one, asked, run))
            if lens.problem.arithmetic != "full" and isinstance(one, PassMeasure) and one.needs_full_precision:
                why = f"rounding in {lens.problem.arithmetic} hides small eigenvalues: arithmetic='full' is needed"
                found = dict.fromkeys(found, undefined(why))
            seconds = time.perf_counter() - start - (lens.pass_seconds - passed)
            for key, estimate in found.items():
                unit = estimate.unit or one.card.unit
                estimates[key] = replace(_finite(lens, estimate), source=one.card.source, unit=unit, seconds=seconds)
                seconds = 0.0  # that of all rows of the measure stands in the first
    return Report(estimates, about(lens))


def _answers(lens: Lens, one: Measure, asked: bool, run: Run) -> dict[Key, Estimate]:
    """Return all rows of a measure; undefined where the network lacks the derivatives that it needs."""
    try:
        if isinstance(one, PassMeasure):
            return dict(_assemble(lens, one, asked, run))
        assert isinstance(one, NetworkMeasure)
        if not one.on_request:
            return _parts(one, one.evaluate(lens))
        if one.of_parameters and not lens.problem.parameters:
            return {(one.key, None): undefined("no parameter is measured")}
        return _parts(one, one.evaluate(lens, run))
    except (RuntimeError, ArithmeticError) as error:
        if "memory" in str(error) or (
            isinstance(error, FlatlensError) and not isinstance(error, Overflows | NotDifferentiable)
        ):
            raise
        return {(one.key, None): undefined(_refused(error))}


def _finite(lens: Lens, estimate: Estimate) -> Estimate:
    """Return undefined where a number overflowed and made the value NaN or infinite."""
    if estimate.kind == "undefined" or (math.isfinite(estimate.value) and math.isfinite(estimate.stderr)):
        return estimate
    mend = "smaller weights" if lens.problem.dtype == torch.float64 else "dtype=torch.float64, or smaller weights,"
    met = f"{estimate.value} +- {estimate.stderr}" if math.isfinite(estimate.value) else estimate.value
    note = f"the result is {met}, because an intermediate number overflows: {mend} may help"
    return replace(estimate, value=math.nan, stderr=0.0, kind="undefined", note=note)


def _refused(error: Exception) -> str:
    return f"the network cannot be differentiated as this measure needs ({one_line(error, 120)})"


COUPLED = "batchnorm='train' couples the samples of a batch: measures of single samples are not defined"


def _default(lens: Lens) -> list[Measure]:
    """Return every measure that needs no products."""
    exact = [m for m in MEASURES.values() if not m.on_request]
    return [m for m in exact if lens.problem.test is not None or not m.held_out]


def _parts(one: Measure, result: Estimate | Parts) -> dict[Key, Estimate]:
    """Return the rows of a measure of the network as a whole."""
    if isinstance(result, Estimate):
        return {(one.key, None): result}
    rows = sorted(result.items(), key=lambda row: row[0][1] is not None)  # the network's row before the layers'
    return {(f"{one.key}.{part}" if part else one.key, layer): estimate for (part, layer), estimate in rows}


def about(lens: Lens) -> dict[str, Any]:
    """Return what was measured, where, and with which versions."""
    problem = lens.problem
    return {
        "model": type(problem.model).__name__,
        "parameters": sum(p.numel() for name, p in problem.model.named_parameters() if name in problem.parameters),
        "origin": dict(problem.origin) or _origin(problem),
        "loss": problem.loss.description,
        "n": problem.n,
        "outputs": problem.outputs,
        "layers": list(lens.layout.weights),
        "piecewise_affine_above": sorted(lens.layout.affine),
        "by_autograd": list(lens.layout.unexplained),
        "batchnorm": f"train, in batches of {problem.ghost_batch}" if problem.coupled else "eval",
        "dtype": str(problem.dtype).removeprefix("torch."),
        "arithmetic": problem.arithmetic,
        "device": str(device_of(problem.model)),
        "combinations_of_outputs": lens.probes,
        "passes": lens.passes,
        "versions": {
            "flatlens": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "threads": torch.get_num_threads(),
        "seconds": {"pass": lens.pass_seconds},
    }


def _origin(problem: Problem) -> dict[str, str]:
    """Return the origin of a problem that was made in Python: the class of the network, and the data in words."""
    kind = type(problem.model)
    test = {} if problem.test is None else {"test": problem.test.told}
    return {"model": f"{kind.__module__}.{kind.__qualname__}", "data": problem.data.told, **test}


def _assemble(lens: Lens, one: PassMeasure, asked: bool, run: Run) -> Iterator[tuple[Key, Estimate]]:
    """Return the network's answer, its parts and every layer's value."""
    if why := _omitted(lens, one, asked):
        yield (one.key, None), undefined(why)
        return
    values = lens.per_sample([one], run.progress, run.generator)
    unmeasured = one.place == "weight" and not run.frozen
    frozen = {name for name, w in lens.layout.weights.items() if unmeasured and not w.measured}
    places = [at for key, at in list(values) if key == one.key and at is not None and at not in frozen]
    layers, largest = {}, {}
    if isinstance(run.progress, Watch) and one.products is not None and asked:
        curved = [at for at in places if at not in lens.layout.affine and run.chosen(at)]
        run.progress.expect(sum(one.products(lens.layout.weights[at]) for at in curved))
    for at in places:
        layers[at], largest[at] = _at_layer(lens, one, at, asked, run)
    if one.place == "weight":
        missing = {name: w for name, w in lens.layout.weights.items() if name not in layers and name not in frozen}
        made = "the weight is made from other parameters, by more than the layer's own call"
        unseen = "the outputs depend differentiably on no call of the layer"
        layers |= {name: undefined((w.unplaced or unseen) if w.has_derivative else made) for name, w in missing.items()}
        layers = {name: layers[name] for name in lens.layout.weights if name in layers}
    if one.place == "input":
        layers |= {key: undefined(why) for key, why in lens.layout.unplaced.items()}
    if one.answer == "input":
        at_input = values.get((one.key, None))
        nothing = undefined("the outputs depend differentiably on no input: is it an index, or cut off by a detach()?")
        yield (one.key, None), nothing if at_input is None else _of_input(lens, _at_input(lens, one, at_input))
    elif not layers:
        why = "no parameter is measured" if one.place == "parameters" else "the network has no linear layer"
        yield (one.key, None), undefined(f"every linear layer is frozen: {ALL}" if frozen else why)
    elif one.answer == "last":
        last = _last(lens, layers)
        later = list(lens.layout.weights)[list(lens.layout.weights).index(last) + 1 :]
        yield (one.key, None), _with_note(layers[last], f"of {last}: {later[0]} is frozen" if later else "")
        yield (f"{one.key}.sum", None), _without(frozen, _over_layers(layers, sum), left_out(lens, layers))
        yield (f"{one.key}.max", None), _without(frozen, _over_layers(layers, max))
    else:
        others = left_out(lens, layers) if one.place == "weight" else ""
        yield (one.key, None), _without(frozen, _over_layers(layers, sum), others)
        peaks = {name: peak for name in layers if (peak := largest.get(name)) is not None}
        if one.place != "input":
            yield (f"{one.key}.max", None), _without(frozen, _over_layers({**layers, **peaks}, max))
        yield from (((f"{one.key}.max", name), peak) for name, peak in peaks.items())
    if one.place != "input" or one.answer == "input":  # the layers of `nmls` are the rows of `mls`
        yield from (((one.key, name), estimate) for name, estimate in layers.items())


SHARED_PRODUCTS = 200_000_000
"""Multiplications a sample for the gradients of shared weights; with more, measures that need them run when named."""


def _omitted(lens: Lens, one: PassMeasure, asked: bool) -> str:
    """Return why a measure is not computed; empty if it is.

    It cannot be estimated from combinations of outputs, or nobody has named it and it takes too long.
    """
    if not asked and one.needs & {"diagonal", "adaptive", "columns"}:
        products = lens.layout.shared_products(lens.problem.outputs if lens.probes is None else lens.probes)
        if products > SHARED_PRODUCTS:
            return (
                f"ask for it by name: it needs every sample's own gradient in shared weights, {products:.1e} "
                "multiplications a sample, which takes about as long as the rest of the report"
            )
    if lens.probes is None or one.sketched == "probes":
        return ""
    if one.sketched == "never":
        return f"it needs all {lens.problem.outputs} outputs: Lens(problem, outputs='exact')"
    return "" if asked or one.answer == "input" else "ask for it by name: many outputs need a search at every layer"


def _at_input(lens: Lens, one: PassMeasure, values: Tensor) -> Estimate:
    """Return the network's answer at its own input."""
    if lens.probes is not None and one.sketched == "probes":
        return _estimate(lens, by_probes(one.reduce, values))
    return _bounded(lens, (one.key, None), _estimate(lens, one.reduce(values)))


def _bounded(lens: Lens, key: Key, estimate: Estimate) -> Estimate:
    """Return the estimate as a lower bound, with a note, if a spectral norm is a Ritz value."""
    residuals = lens.residuals.get(key)
    if residuals is None or estimate.kind == "undefined":
        return estimate
    note = f"squared norms to residuals of {float(residuals.max()):.1%} at most"
    return replace(_with_note(estimate, note), kind="lower bound", arrays={"residuals": residuals})


def _of_input(lens: Lens, estimate: Estimate) -> Estimate:
    """Return the estimate with a note if the input is not the user's own."""
    if not lens.layout.input_is_embedded:
        return estimate
    return _with_note(estimate, "to the first embedding's output")


def _with_note(estimate: Estimate, note: str) -> Estimate:
    return replace(estimate, note="; ".join(part for part in (estimate.note, note) if part))


ALL = "Problem(parameters='all') measures frozen ones, too"


def _without(frozen: set[str], estimate: Estimate, others: str = "") -> Estimate:
    """Return the estimate with a note if layers or other matrices were left out."""
    estimate = _with_note(estimate, f"{len(frozen)} frozen layers left out" if frozen else "")
    return estimate if estimate.kind == "undefined" else _with_note(estimate, others)


def _last(lens: Lens, layers: dict[str, Estimate]) -> str:
    last = lens.layout.last()
    return last if last in layers else next(reversed(layers))


def _at_layer(lens: Lens, one: PassMeasure, layer: str, asked: bool, run: Run) -> tuple[Estimate, Estimate | None]:
    """Return a layer's value, and the largest of its terms if the measure has `.max`."""
    before = lens.products
    values = lens.per_sample([one], run.progress, run.generator)[one.key, layer]
    if one.curvature is not None and layer not in lens.layout.affine:
        assert one.products is not None
        if not asked:
            return undefined(_by_name(lens, one.products(lens.layout.weights[layer]))), None
        if not run.chosen(layer):
            return undefined("it takes curvature products, and is not among layers=..."), None
        try:
            bent = one.curvature(lens, layer, one, run)
            values = values + (bent / lens.problem.n if one.total else bent)
        except RuntimeError as error:
            if "memory" in str(error):
                raise
            return undefined(_refused(error)), None
    if lens.probes is not None and one.sketched == "probes":
        reduced = by_probes(lambda mean_of: _reduced(lens, one, layer, mean_of), values)
    else:
        reduced = _reduced(lens, one, layer, values)
    estimate = replace(_estimate(lens, reduced), products=lens.products - before)
    peak = None if reduced.largest is None else _peak(estimate, reduced.largest, reduced.largest_probes)
    return _noted(lens, one, layer, _bounded(lens, (one.key, layer), estimate)), peak


def _by_name(lens: Lens, products: int) -> str:
    """Return why a layer's value is not in a default report, and what it costs."""
    backwards = lens.problem.outputs if lens.probes is None else lens.probes
    work = 3 * products / backwards
    times = f"{work:,.0f} times" if work >= 2 else "at most twice"
    return (
        f"the outputs are curved in this layer's pre-activation: ask by name; it takes {products:,} curvature "
        f"products, {'about ' * (work >= 2)}{times} the work of this pass"
    )


def _parts_of_names(lens: Lens, layers: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the parts of layers' names; refuse one that no module or parameter has."""
    if layers is None:
        return None
    parts = (layers,) if isinstance(layers, str) else tuple(layers)
    known = [name for name, _ in (*lens.model.named_modules(), *lens.model.named_parameters()) if name]
    for part in parts:
        if not any(str(part) in name for name in known):
            raise UnknownName.among("layer", part, lens.layout.weights)
    return parts


def _peak(whole: Estimate, largest: float, probes: Tensor | None) -> Estimate:
    """Return the largest term of a sum."""
    if whole.kind == "undefined":
        return whole
    if probes is None:
        return replace(whole, value=largest, arrays={})
    return replace(whole, value=largest, stderr=float(mean_of_forms(probes)[1]), arrays={"probes": probes})


def _reduced(lens: Lens, one: PassMeasure, layer: str, values: Tensor) -> Reduced:
    if one.finish is None:
        return one.reduce(values)
    weight = lens.layout.weights[layer]
    if not (finite(values) and finite(weight.matrix.W.square())):  # no finite values to minimise over
        return Reduced(math.nan, None)
    return one.finish(values, weight, one)


def _noted(lens: Lens, one: PassMeasure, layer: str, estimate: Estimate) -> Estimate:
    """Return the estimate with a note on constant features, which get the unit 1."""
    constant = lens.constant_features(layer) if one.needs_feature_scale and one.option(one.needs_feature_scale) else 0
    if not constant:
        return estimate
    note = f"{constant} features constant over the data, in units of their value (left out where it is 0)"
    return _with_note(estimate, note)


def _estimate(lens: Lens, reduced: Reduced) -> Estimate:
    arrays = {**reduced.arrays, **({} if reduced.probes is None else {"probes": reduced.probes})}
    found = Estimate(reduced.value, reduced.stderr, reduced.kind, reduced.note, reduced.samples, arrays)
    return _finite(lens, found)


def _over_layers(layers: dict[str, Estimate], combine: Callable[[list[float]], float]) -> Estimate:
    """Return the sum or maximum of the layers' values."""
    missing = [name for name, e in layers.items() if e.kind == "undefined"]
    if missing:
        return undefined(
            f"undefined at {len(missing)} of {len(layers)} layers, the first {missing[0]}: {layers[missing[0]].note}"
        )
    said = {name: e.note for name, e in layers.items() if e.note}
    alike = len(said) == len(layers) and len(set(said.values())) == 1
    notes = list(said.values())[:1] if alike else [f"{name}: {note}" for name, note in said.items()]
    each = [e.samples for e in layers.values() if e.samples is not None]
    samples = torch.stack(each).sum(0) if combine is sum and len(each) == len(layers) else None
    products = sum(e.products for e in layers.values())
    kind: Kind = next((e.kind for e in layers.values() if e.kind != "exact"), "exact")
    value = combine([e.value for e in layers.values()])
    probes = [e.arrays["probes"] for e in layers.values() if "probes" in e.arrays]
    if len(probes) == len(layers):  # the layers share the probes, so their errors are correlated
        if combine is max:
            best = max(layers.values(), key=lambda e: e.value)
            return replace(best, samples=None, note="; ".join([*notes, "the largest of noisy values: biased upwards"]))
        together = torch.stack(probes).sum(0)
        stderr = float(mean_of_forms(together)[1])
        return Estimate(value, stderr, "estimate", "; ".join(notes), samples, {"probes": together}, products=products)
    return Estimate(value, kind=kind, samples=samples, note="; ".join(notes), products=products)
