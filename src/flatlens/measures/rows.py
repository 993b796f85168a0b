"""The rows of a measure of the pass: the network's answer, its parts, and every layer's value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.probes import largest_of, mean_of_forms
from flatlens.estimate import Estimate, Key, Kind, undefined
from flatlens.measures.accumulate import BY_ROUNDING
from flatlens.measures.definition import GRADIENTS_OF_SAMPLES, PassMeasure, Run
from flatlens.measures.leading_eigenvalues import rounded_up
from flatlens.measures.lens import Lens
from flatlens.measures.notes import (
    LARGEST_OF_NOISY,
    NO_PARAMETER,
    left_out,
    needs_every_output,
    no_input,
    no_linear_layer,
    which_layer,
)
from flatlens.measures.reductions import Reduced, by_probes
from flatlens.problem.batches import finite
from flatlens.progress import Watch


def assembled(lens: Lens, one: PassMeasure, asked: bool, run: Run) -> Iterator[tuple[Key, Estimate]]:
    """Yield the network's answer, its parts and every layer's value."""
    if why := omitted(lens, one, asked):
        yield (one.key, None), undefined(why)
        return
    values = lens.per_sample([one], run.progress, run.generator, partly=True)
    unmeasured = one.place == "weight" and not run.frozen
    every = lens.layout.weights | lens.layout.parts
    frozen = {name for name, w in lens.layout.weights.items() if unmeasured and not w.measured}
    left = {name for name, w in every.items() if unmeasured and not w.measured}
    places = [at for key, at in list(values) if key == one.key and at is not None and at not in left]
    layers, largest = {}, {}
    if isinstance(run.progress, Watch) and one.products is not None and asked:
        curved = [at for at in places if at not in lens.layout.affine and run.chosen(at)]
        run.progress.expect(sum(one.products(every[at]) for at in curved))
    for at in places:
        found = lens.attempted(partial(_at_layer, lens, one, at, asked, run), one.key)
        layers[at], largest[at] = (undefined(found), None) if isinstance(found, str) else found
    failed = {at: undefined(why) for (key, at), why in lens.failed.items() if key == one.key}
    layers |= {at: found for at, found in failed.items() if at is not None and at not in left}
    parts = {name: layers.pop(name) for name in lens.layout.parts if name in layers}
    if one.place == "weight":
        missing = {name: w for name, w in lens.layout.weights.items() if name not in layers and name not in frozen}
        made = "the weight is made from other parameters, by more than the layer's own call"
        unseen = "the outputs depend differentiably on no call of the layer"
        layers |= {
            name: undefined((lens.layout.unread(w) or unseen) if w.has_derivative else made)
            for name, w in missing.items()
        }
        layers = {name: layers[name] for name in lens.layout.weights if name in layers}
    if one.place == "input":
        layers |= {key: undefined(why) for key, why in lens.layout.unplaced.items()}
    if one.answer == "input":
        at_input = values.get((one.key, None))
        nothing = failed.get(None, undefined(no_input(lens)))
        yield (one.key, None), nothing if at_input is None else _of_input(lens, _at_input(lens, one, at_input))
    elif not layers:
        why = NO_PARAMETER if one.place == "parameters" else no_linear_layer(lens)
        yield (one.key, None), undefined(f"every linear layer is frozen: {ALL}" if frozen else why)
    elif one.answer == "last":
        last = _last(lens, layers)
        yield (one.key, None), with_note(layers[last], which_layer(lens, last, layers))
        yield (f"{one.key}.sum", None), _without(frozen, _over_layers(layers, sum), left_out(lens, layers))
        yield (f"{one.key}.max", None), _without(frozen, _over_layers(layers, max))
    else:
        others = left_out(lens, layers) if one.place == "weight" else ""
        yield (one.key, None), _without(frozen, _over_layers(layers, sum), others)
        peaks = {name: peak for name in layers if (peak := largest.get(name)) is not None}
        if one.place != "input":
            yield (f"{one.key}.max", None), _without(frozen, _over_layers({**layers, **peaks}, max))
        peaks |= {name: peak for name in parts if (peak := largest.get(name)) is not None}
        yield from (((f"{one.key}.max", name), replace(peak, arrays={})) for name, peak in peaks.items())
    if one.place != "input" or one.answer == "input":  # the layers of `nmls` are the rows of `mls`
        yield from (((one.key, name), estimate) for name, estimate in (layers | parts).items())


SHARED_PRODUCTS = 200_000_000
"""Multiplications a sample for the gradients of shared weights; with more, measures that need them run when named."""


def omitted(lens: Lens, one: PassMeasure, asked: bool) -> str:
    """Return why a measure is not computed; empty if it is.

    It cannot be estimated from combinations of outputs, or nobody has named it and it takes too long.
    """
    if not asked and one.needs & GRADIENTS_OF_SAMPLES:
        products = lens.layout.shared_products(lens.problem.outputs if lens.probes is None else lens.probes)
        if products > SHARED_PRODUCTS:
            return (
                f"ask for it by name: it needs every sample's own gradient in shared weights, {products:.1e} "
                "multiplications a sample, which takes about as long as the rest of the report"
            )
    if lens.probes is None or one.sketched == "probes":
        return ""
    if one.sketched == "never":
        return needs_every_output(lens)
    return "" if asked or one.answer == "input" else "ask for it by name: many outputs need a search at every layer"


def _at_input(lens: Lens, one: PassMeasure, values: Tensor) -> Estimate:
    """Return the network's answer at its own input."""
    if lens.probes is not None and one.sketched == "probes":
        return _estimate(lens, by_probes(one.reduce, values))
    return _bounded(lens, (one.key, None), _estimate(lens, _reduced(lens, one, None, values)))


def _bounded(lens: Lens, key: Key, estimate: Estimate) -> Estimate:
    """Return the estimate as a lower bound, with a note, if a spectral norm is a Ritz value."""
    residuals = lens.residuals.get(key)
    if residuals is None or estimate.kind == "undefined":
        return estimate
    note = f"squared norms to residuals of {rounded_up(float(residuals.max()))} of their size at most"
    return replace(with_note(estimate, note), kind="lower bound", arrays={"residuals": residuals})


def _of_input(lens: Lens, estimate: Estimate) -> Estimate:
    """Return the estimate with a note if the input is not the user's own."""
    if not lens.layout.input_is_embedded:
        return estimate
    return with_note(estimate, "to the first embedding's output")


def with_note(estimate: Estimate, note: str) -> Estimate:
    """Return the estimate with a further note."""
    return replace(estimate, note="; ".join(part for part in (estimate.note, note) if part))


ALL = "Problem(parameters='all') measures frozen ones, too"


def _without(frozen: set[str], estimate: Estimate, others: str = "") -> Estimate:
    """Return the estimate with a note if layers or other matrices were left out."""
    estimate = with_note(estimate, f"{len(frozen)} frozen layers left out" if frozen else "")
    return estimate if estimate.kind == "undefined" else with_note(estimate, others)


def _last(lens: Lens, layers: dict[str, Estimate]) -> str:
    last = lens.layout.last()
    return last if last in layers else next(reversed(layers))


def _at_layer(lens: Lens, one: PassMeasure, layer: str, asked: bool, run: Run) -> tuple[Estimate, Estimate | None]:
    """Return a layer's value, and the largest of its terms if the measure has `.max`."""
    before = lens.products
    values = lens.per_sample([one], run.progress, run.generator, partly=True)[one.key, layer]
    if one.curvature is not None and layer not in lens.layout.affine:
        assert one.products is not None
        if not asked:
            return undefined(_by_name(lens, one.products(lens.layout.weight(layer)))), None
        if not run.chosen(layer):
            return undefined("it takes curvature products, and is not among layers=..."), None
        bent = one.curvature(lens, layer, one, run)
        values = values + (bent / lens.problem.n if one.total else bent)
    if lens.probes is not None and one.sketched == "probes":
        reduced = by_probes(lambda mean_of: _reduced(lens, one, layer, mean_of), values)
    else:
        reduced = _reduced(lens, one, layer, values)
    estimate = replace(_estimate(lens, reduced), products=lens.products - before)
    peak = None if reduced.terms is None else _peak(estimate, reduced.terms, reduced.terms_probes)
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


def _peak(whole: Estimate, terms: Tensor, probes: Tensor | None) -> Estimate:
    """Return the largest term of a sum; `probes`, (probes, terms), are kept for the largest of several sums."""
    if whole.kind == "undefined":
        return whole
    if probes is None:
        return replace(whole, value=float(terms.max()), arrays={})
    value, stderr = largest_of(*mean_of_forms(probes), len(probes))
    found = replace(whole, value=value, stderr=stderr, arrays={"probes": probes})
    return with_note(found, LARGEST_OF_NOISY) if probes.shape[1] > 1 else found


def _reduced(lens: Lens, one: PassMeasure, layer: str | None, values: Tensor) -> Reduced:
    if one.finish is None or layer is None:
        moved = lens.per_sample([one], partly=True).get((one.key + BY_ROUNDING, layer))
        return one.reduce(values) if moved is None else one.reduce(values, moved)
    weight = lens.layout.weight(layer)
    if not (finite(values) and finite(weight.matrix.W.square())):  # no finite values to minimise over
        return Reduced(math.nan, None)
    return one.finish(values, weight, one)


def _noted(lens: Lens, one: PassMeasure, layer: str, estimate: Estimate) -> Estimate:
    """Return the estimate with a note on constant features, which are in units of their value."""
    constant = lens.constant_features(layer) if one.needs_feature_scale and one.option(one.needs_feature_scale) else 0
    if not constant:
        return estimate
    note = f"{constant} features constant over the data, in units of their value (left out where it is 0)"
    return with_note(estimate, note)


def _estimate(lens: Lens, reduced: Reduced) -> Estimate:
    arrays = {**reduced.arrays, **({} if reduced.probes is None else {"probes": reduced.probes})}
    found = Estimate(reduced.value, reduced.stderr, reduced.kind, reduced.note, reduced.samples, arrays)
    return finite_or_undefined(lens, found)


def lost_at(layers: Mapping[str, Estimate]) -> str:
    """Return at how many layers there is no value, and why at the first of them; empty if all have one."""
    missing = [name for name, e in layers.items() if e.kind == "undefined"]
    if not missing:
        return ""
    return f"undefined at {len(missing)} of {len(layers)} layers, the first {missing[0]}: {layers[missing[0]].note}"


def _over_layers(layers: dict[str, Estimate], combine: Callable[[list[float]], float]) -> Estimate:
    """Return the sum or maximum of the layers' values."""
    if lost := lost_at(layers):
        return undefined(lost)
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
            terms = torch.cat([each.reshape(len(each), -1) for each in probes], 1)
            value, stderr = largest_of(*mean_of_forms(terms), len(terms))
            best, note = max(layers.values(), key=lambda e: e.value), dict.fromkeys([*notes, LARGEST_OF_NOISY])
            return replace(best, value=value, stderr=stderr, samples=None, note="; ".join(note), arrays={})
        together = torch.stack(probes).sum(0)
        stderr = float(mean_of_forms(together)[1])
        return Estimate(value, stderr, "estimate", "; ".join(notes), samples, {"probes": together}, products=products)
    stderr = combine([e.stderr for e in layers.values()])
    if stderr and combine is max and {e.kind for e in layers.values()} <= {"exact", "estimate"}:
        means, errors = torch.tensor([(e.value, e.stderr) for e in layers.values()], dtype=torch.float64).T
        value, stderr = largest_of(means, errors)
    if stderr and "lower bound" in {e.kind for e in layers.values()}:
        value, stderr, kind = combine([e.value - 1.96 * e.stderr for e in layers.values()]), 0.0, "lower bound"
    return Estimate(value, stderr, kind, "; ".join(notes), samples, products=products)


def finite_or_undefined(lens: Lens, estimate: Estimate) -> Estimate:
    """Return undefined, with the cause, where the value is NaN or infinite."""
    if estimate.kind == "undefined" or (math.isfinite(estimate.value) and math.isfinite(estimate.stderr)):
        return estimate
    mend = "smaller weights" if lens.problem.dtype == torch.float64 else "dtype=torch.float64, or smaller weights,"
    met = f"{estimate.value} +- {estimate.stderr}" if math.isfinite(estimate.value) else estimate.value
    note = lens.singular or f"the result is {met}, because an intermediate number overflows: {mend} may help"
    return replace(estimate, value=math.nan, stderr=0.0, kind="undefined", note=note)
