"""fl.measure: a report from a lens and names of measures.

Each measure is answered (a measure of the pass is reduced from its samples at every place, and over the layers), its
rows are adjusted (precision, underflow, a linear loss), and the report notes what is known of derivatives.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn

from flatlens.curvature.functional_hessian import curved_parameters
from flatlens.curvature.probes import largest_of, mean_of_forms
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Key, Kind, Report, joined_notes, undefined, with_note
from flatlens.measures.answer import answer, state_of
from flatlens.measures.definition import (
    GRADIENTS_OF_SAMPLES,
    MEASURES,
    SAME_ALWAYS,
    SAME_WHERE_AFFINE,
    SAME_WITHOUT_CURVATURE,
    Asked,
    Choice,
    Measure,
    NetworkMeasure,
    Parts,
    PassMeasure,
    Reduced,
    Run,
    asked_for,
    by_probes,
    drawing,
)
from flatlens.measures.leading_eigenvalues import rounded_up
from flatlens.measures.lens import BY_ROUNDING, Lens
from flatlens.measures.notes import (
    ALL,
    LARGEST_OF_NOISY,
    NO_PARAMETER,
    left_out,
    lost_at,
    needs_every_output,
    no_input,
    no_linear_layer,
    which_layer,
)
from flatlens.perturbation.autograd_check import other_derivative
from flatlens.problem import Problem
from flatlens.problem.batches import finite
from flatlens.problem.eval_context import device_of
from flatlens.problem.forward import Forward
from flatlens.problem.loss import Loss
from flatlens.problem.losses import OWN_LOSSES, LossFunction
from flatlens.progress import LIMIT, Shown, Watch, progress_shown
from flatlens.version import __version__

BUDGET = 4e9
"""Size of the products of one measure of the summary: samples times multiplications of a forward pass, summed."""

SHARED_PRODUCTS = 200_000_000
"""Multiplications a sample for the gradients of shared weights; with more, measures that need them run when named."""

COUPLED = "batchnorm='train' couples the samples of a batch: measures of single samples are not defined"
SHARDED = "its parameters are spread over processes: on such networks only {} are measured"
NO_SOFTMAX = "outputs of several heads, or of images that a function takes whole, have no one softmax"
MADE_ELSEWHERE = "the weight is made from other parameters, by more than the layer's own call"
NO_CALL = "the outputs depend differentiably on no call of the layer"


@overload
def measure(
    model: Lens, measures: Choice = None, /, *, layers: str | Iterable[str] | None = None, anyway: bool = False,
    generator: torch.Generator | None = None, progress: Shown = None,
) -> Report: ...  # fmt: skip


@overload
def measure(
    model: Lens, /, *, measures: Choice, layers: str | Iterable[str] | None = None, anyway: bool = False,
    generator: torch.Generator | None = None, progress: Shown = None,
) -> Report: ...  # fmt: skip


@overload
def measure(
    model: nn.Module, loss: AnyLoss, data: Any, *, measures: Choice = None, test: Any = None,
    forward: Forward | None = None, layers: str | Iterable[str] | None = None, anyway: bool = False,
    generator: torch.Generator | None = None, progress: Shown = None,
) -> Report: ...  # fmt: skip


def measure(
    model: Lens | nn.Module,
    loss: AnyLoss | Choice = None,
    data: Any = None,
    *,
    measures: Choice = None,
    test: Any = None,
    forward: Forward | None = None,
    layers: str | Iterable[str] | None = None,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> Report:
    """Measure a network: 8 to 14 numbers, or the measures that are asked for.

    `measure(model, loss, data)` takes a network, `measure(lens)` a lens; `measure(lens, ["mls"])` names measures.
    A number without a value is undefined, and its note says why. What was not computed has no row. An error is raised
    for wrong arguments, and for what would make every number wrong. A measure whose products, searches or draws are
    expected to take more than 10 minutes is refused, unless `anyway`.

    Args:
        model: The network, or a lens on it: `Lens(problem)`, which has its loss and data.
        loss: The loss of a network, as for `Problem`; after a lens, the measures.
        data: The training data of a network, as for `Problem`.
        measures: A preset, or names, such as "mls" or "local_volume(top_k=3)", or Measure objects. The presets:
            "summary" (or None), 8 to 14 numbers (`SUMMARY` in `measures.definition`), whose searches and probes stop at
            a fixed amount of work; "pass", every exact measure of one pass over the data; "all", every measure but
            those that run by name alone; "family:NAME", those of a family. Of measures with the same numbers on this
            network, a preset has one, and its note names the other.
        test: Held-out data of a network, as for `Problem`: gap, loss and accuracy.
        forward: Called with (network, batch); returns (outputs, targets), as for `Problem`.
        layers: Parts of the names of the layers that get curvature products, where a measure takes them layer by layer;
            the others then have no row. None is all of them.
        anyway: Whether to do long work, too.
        generator: Draws the random numbers, in several processes the first one's; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.

    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = net.weight.copy_(torch.tensor([[3.0, 4.0]]))
    >>> report = measure(net, "half_squared_error", (torch.ones(1, 2), torch.zeros(1, 1)))
    >>> print(f"{report['relative_flatness_ggn.sum']:.4g} {report['sharpness']:.4g}")  # ||w||^2 ||x||^2, ||x||^2
    50 2
    """
    given = {"data": data, "test": test, "forward": forward}
    if isinstance(model, Lens):
        # what stands beside a lens are the measures; it has a loss and data of its own
        remedy = "leave it out, or give the network: measure(model, loss, data)"
        for name, value in given.items():
            if value is not None:
                raise BadInput("a Lens has its loss, data and forward", argument=name, remedy=remedy, call="measure")
        is_loss = isinstance(loss, Loss | nn.Module) or (isinstance(loss, str) and loss in OWN_LOSSES)
        if is_loss or (loss is not None and measures is not None):
            raise BadInput("a Lens has its loss", argument="loss", value=loss, remedy=remedy, call="measure")
        lens, measures = model, measures if loss is None else loss  # type: ignore[assignment]  # checked by asked_for()
    else:
        if not isinstance(model, nn.Module):
            remedy = "measure(model, loss, data), or measure(Lens(problem))"
            raise BadInput(f"expected a network or a Lens, got {type(model).__name__}", remedy=remedy, call="measure")
        for name, value in {"loss": loss, "data": data}.items():
            if value is None:
                example = 'measure(model, "cross_entropy", (x, y))'
                raise BadInput(f"{name} is missing for {type(model).__name__}", remedy=example, call="measure")
        lens = Lens(Problem(model, loss, **given))  # type: ignore[arg-type]  # checked by Problem()
    draws = drawing(generator, progress, "measure")
    lens.require_fresh()
    with progress_shown(progress) as line:
        watch = Watch(line, math.inf if anyway else LIMIT)
        parts = None if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
        for part in parts or ():
            known = (name for name, _ in (*lens.model.named_modules(), *lens.model.named_parameters()) if name)
            if not any(str(part) in name for name in known):
                raise UnknownName.among("layer", part, lens.plan.weights)
        asked = asked_for(measures, held_out=lens.problem.test is not None)
        estimates, details = _measured(lens, asked, Run(draws, watch, layers=parts))
        if asked.preset:
            details |= state_of(lens, estimates)
    return Report(estimates, details, answer)


AnyLoss: TypeAlias = "str | nn.Module | Loss | LossFunction | Mapping[str, Any] | Sequence[Any]"


def measure_with(lens: Lens, measures: Choice, run: Run) -> Report:
    """Return what `measure` does for a lens known to be fresh, with rows for frozen layers if the run includes them."""
    return Report(*_measured(lens, asked_for(measures, held_out=lens.problem.test is not None), run))


def _measured(lens: Lens, asked: Asked, run: Run) -> tuple[dict[Key, Estimate], dict[str, Any]]:
    """Return the estimates of a report, and what it is about."""
    lens.problem.peers.same_draws(run.generator)
    # the summary's products are limited; it and the pass take none at single layers, and no gradients of samples in
    # large shared weights
    brief = asked.preset == "summary"
    run = replace(run, asked=asked.preset not in ("summary", "pass"), budget=BUDGET if brief else math.inf)
    if brief and isinstance(run.progress, Watch):
        run.progress.limit = math.inf  # its work is limited otherwise
    chosen = list(asked.measures)
    lens.forget_failures()
    estimates: dict[Key, Estimate] = {}
    measured: dict[Key, Measure] = {}
    # also around measures of weights alone: in train mode, reading a spectral norm changes it
    # attention as it is: where there are second derivatives it is replaced
    with lens.problem.measuring(lens.model, twice=False, plain=True):
        # one pass for all; where it fails, each measure has one of its own, and says why if that fails, too
        lens.attempted(partial(_one_pass, lens, chosen, run), "the pass")
        for one in chosen:
            rows = _rows(lens, one, run)
            estimates |= rows
            measured |= dict.fromkeys(rows, one)
        derived = [key for key, one in measured.items() if one.differentiates and estimates[key].kind != "undefined"]
        doubts = lens.attempted(partial(_doubts, lens), "the checks of derivatives") if derived else ("", "")
        if isinstance(doubts, str):
            doubts = (f"derivatives were not checked: {doubts}",) * 2
    # these need the rows of every measure: one that is 0 tells what the others have lost
    estimates |= _underflowing(lens, estimates, measured)
    for key in derived:
        estimates[key] = with_note(estimates[key], doubts[not measured[key].of_parameters])
    # a preset: no number twice, and of the summary's measures one number each
    spelled = dict(asked.spelled)
    if asked.preset:
        estimates = {key: estimate for key, estimate in estimates.items() if asked.shows(*key)}
        estimates, same = _without_twins(lens, estimates)
        spelled |= same
    return estimates, about(lens) | ({"spelled": spelled} if spelled else {})


def _without_twins(lens: Lens, estimates: dict[Key, Estimate]) -> tuple[dict[Key, Estimate], dict[str, str]]:
    """Leave out rows that repeat another measure by theorem; return the kept measure of each, whose note names it."""
    kept: dict[str, str] = {}
    rows: dict[Key, str] = {key: key[0].partition(".")[0] for key in estimates}  # presets set no options
    # pairs of measures that have the same numbers on this network, by theorem
    pairs = [*SAME_ALWAYS.items()]
    if lens.has_plan and lens.plan.affine.issuperset(lens.plan.weights):
        pairs += SAME_WHERE_AFFINE.items()
    if lens.has_plan and not curved_parameters(lens.problem, lens.plan).names:
        pairs += SAME_WITHOUT_CURVATURE.items()
    for twins in pairs:
        there = [name for name in twins if name in rows.values()]
        if there:
            kept |= {name: there[-1] for name in twins if name != there[-1]}
    alike = {mine: " = ".join([mine, *(other for other, one in kept.items() if one == mine)]) for mine in kept.values()}
    found = {key: e for key, e in estimates.items() if rows[key] not in kept}
    for name in dict.fromkeys(rows.values()):
        answers = [key for key in found if rows[key] == name and key[1] is None]
        for key in [(name, None)] if (name, None) in answers else answers:
            told = f"{alike[name]} here" if name in alike else _beyond(lens, name)
            found[key] = found[key] if found[key].kind == "undefined" else with_note(found[key], told)
    return found, kept


def _beyond(lens: Lens, name: str) -> str:
    """Return the note on a Gauss-Newton part: whose part it is, and what the whole takes. Empty for other measures."""
    whole = next((one for one, part in (SAME_WHERE_AFFINE | SAME_WITHOUT_CURVATURE).items() if part == name), None)
    if whole is None or not lens.has_plan:
        return ""
    one, weights = MEASURES[whole], lens.plan.weights
    takes = "additional curvature products"
    if isinstance(one, PassMeasure) and one.products is not None:
        bent = [w for at, w in weights.items() if at not in lens.plan.affine and w.has_derivative]
        takes = f"{sum(one.products(weight) for weight in bent):,} more curvature products"
    return f"the Gauss-Newton part of {whole}; the whole takes {takes}"


def _not_defined(lens: Lens, one: Measure) -> str:
    """Return why a measure has no value whatever the network computes; empty if it may have one."""
    if lens.problem.coupled and not one.works_coupled:
        return COUPLED
    if lens.problem.sharded and not one.works_sharded:
        return SHARDED.format(", ".join(name for name, known in MEASURES.items() if known.works_sharded))
    if isinstance(one, PassMeasure) and "C" in one.needs and lens.problem.loss.no_curvature:
        return lens.problem.loss.no_curvature
    if dict(one.options).get("softmax") and not lens.problem.loss.one_softmax:
        return NO_SOFTMAX
    return ""


def _one_pass(lens: Lens, chosen: list[Measure], run: Run) -> None:
    """Compute what one pass gives for some measures: if there is a pass at all, also what others read from one."""
    possible = [one for one in chosen if not _not_defined(lens, one)]
    wanted = [one for one in possible if isinstance(one, PassMeasure) and not _omitted(lens, one, run)]
    if wanted and lens.probes is None:
        reads = [other for one in possible if isinstance(one, NetworkMeasure) for other in one.reads]
        wanted += [other for other in reads if not _not_defined(lens, other)]
    lens.per_sample(wanted, run.progress, run.generator, partly=True)


def _rows(lens: Lens, one: Measure, run: Run) -> dict[Key, Estimate]:
    """Return all rows of a measure: finite or undefined, with its source, its unit and the time that it took."""
    if isinstance(run.progress, Watch):
        run.progress.begin(one.key)
    start, passed = time.perf_counter(), lens.pass_seconds
    found: dict[Key, Estimate] | str = _not_defined(lens, one)
    found = found or lens.attempted(partial(lens.planned, partial(_adjusted, lens, one, run)), one.key)
    rows = {(one.key, None): undefined(found)} if isinstance(found, str) else found
    seconds = time.perf_counter() - start - (lens.pass_seconds - passed)
    return {
        key: replace(
            _finite(lens, estimate),
            source=one.card.source,
            unit=estimate.unit or one.card.unit,
            # the first has the time of all rows; a trial of a long measure says what the whole would take
            seconds=0.0 if number else max(seconds, estimate.seconds),
        )
        for number, (key, estimate) in enumerate(rows.items())
    }


def _adjusted(lens: Lens, one: Measure, run: Run) -> dict[Key, Estimate]:
    """Return a measure's rows: undefined where arithmetic hides them, with a note where a linear loss makes them 0."""
    rows: dict[Key, Estimate]
    if isinstance(one, PassMeasure) and _omitted(lens, one, run):
        rows = {(one.key, None): undefined(needs_every_output(lens))} if run.asked else {}
    elif isinstance(one, PassMeasure):
        rows = dict(_PassRows(lens, one, run).rows())
    else:
        assert isinstance(one, NetworkMeasure)
        if one.on_request and one.of_parameters and not lens.problem.parameters:
            return {(one.key, None): undefined(NO_PARAMETER)}
        result = one.evaluate(lens, run) if one.takes_run else one.evaluate(lens)
        parts: Parts = {("", None): result} if isinstance(result, Estimate) else result
        in_order = sorted(parts.items(), key=lambda row: row[0][1] is not None)  # the network's rows first
        rows = {(f"{one.key}.{part}" if part else one.key, layer): estimate for (part, layer), estimate in in_order}
    # precision: in coarse arithmetic, small eigenvalues are rounding
    if lens.problem.arithmetic != "full" and isinstance(one, PassMeasure) and one.needs_full_precision:
        why = f"rounding in {lens.problem.arithmetic} hides small eigenvalues: arithmetic='full' is needed"
        rows = dict.fromkeys(rows, undefined(why))
    # underflow: of the loss's slopes, which a measure of the whole network takes itself
    if isinstance(one, NetworkMeasure) and one.differentiates and _all_zero(rows) and lens.underflow:
        rows = dict.fromkeys(rows, undefined(lens.underflow))
    # loss: without a second derivative in the outputs, its curvature is 0
    of_curvature = "C" in one.needs if isinstance(one, PassMeasure) else one.differentiates and one.of_parameters
    if of_curvature and _all_zero(rows):
        rows = {key: with_note(estimate, lens.linear_loss) for key, estimate in rows.items()}
    return rows


def _omitted(lens: Lens, one: PassMeasure, run: Run) -> bool:
    """Return whether a measure is not computed.

    It has no estimate from combinations of outputs, or nobody has named it and it takes about as long as all others.
    """
    if not run.asked and one.needs & GRADIENTS_OF_SAMPLES:
        outputs = lens.problem.outputs if lens.probes is None else lens.probes
        if lens.plan.shared_products(outputs) > SHARED_PRODUCTS:
            return True
    if lens.probes is None or one.sketched == "probes":
        return False
    # many outputs take a search at every layer
    return one.sketched == "never" or not (run.asked or one.answer == "input")


class _PassRows:
    """The rows of a measure of the pass: the network's answer, its parts, and every layer's value."""

    def __init__(self, lens: Lens, one: PassMeasure, run: Run) -> None:
        self.lens, self.one, self.run = lens, one, run
        values, plan = lens.per_sample([one], run.progress, run.generator, partly=True), lens.plan
        self.values: dict[str | None, Tensor] = {at: each for (key, at), each in values.items() if key == one.key}
        # the weights that have no value because they are frozen, and parts of such weights
        weights = plan.weights | plan.parts if one.place == "weight" and not run.frozen else {}
        self.frozen = {name for name, weight in weights.items() if not weight.measured}
        self.frozen_layers = len(self.frozen & plan.weights.keys())
        # the layers whose curvature products nobody asked for: they have no row
        bent = () if one.curvature is None else self.values.keys() - plan.affine - self.frozen - {None}
        self.not_run = {at for at in bent if at is not None and not (run.asked and run.chosen(at))}

    def rows(self) -> Iterator[tuple[Key, Estimate]]:
        """Yield the network's answer, its parts and every layer's value."""
        lens, one = self.lens, self.one
        layers, parts, largest = self._by_layer()
        # the network's answer, and what is beside it; a sum needs every layer
        if one.answer == "input" and None in self.values:
            found, _ = self._estimate(None, self.values[None])
            yield (one.key, None), with_note(found, "to the first embedding's output" * lens.plan.input_is_embedded)
        elif one.answer == "input":
            yield (one.key, None), undefined(lens.failed_at(one).get(None) or no_input(lens))
        elif self.not_run:
            last = lens.plan.last()
            if one.answer == "last" and last in layers and last not in self.not_run:
                yield (one.key, None), with_note(layers[last], which_layer(lens, last, layers))
        elif not layers:
            why = NO_PARAMETER if one.place == "parameters" else no_linear_layer(lens)
            yield (one.key, None), undefined(f"every linear layer is frozen: {ALL}" if self.frozen_layers else why)
        elif one.answer == "last":
            last = lens.plan.last()
            last = last if last is not None and last in layers else next(reversed(layers))
            yield (one.key, None), with_note(layers[last], which_layer(lens, last, layers))
            yield (f"{one.key}.sum", None), self._without(_over_layers(layers, sum), left_out(lens, layers))
            yield (f"{one.key}.max", None), self._without(_over_layers(layers, max))
        else:
            others = left_out(lens, layers) if one.place == "weight" else ""
            yield (one.key, None), self._without(_over_layers(layers, sum), others)
            if one.place != "input":
                peaks = {name: largest.get(name, layer) for name, layer in layers.items()}
                yield (f"{one.key}.max", None), self._without(_over_layers(peaks, max))
        for name in (*layers, *parts):
            if name in largest:
                yield (f"{one.key}.max", name), replace(largest[name], arrays={})
        if one.place != "input" or one.answer == "input":  # the layers of `nmls` are the rows of `mls`
            yield from (((one.key, name), estimate) for name, estimate in (layers | parts).items())

    def _by_layer(self) -> tuple[dict[str, Estimate], dict[str, Estimate], dict[str, Estimate]]:
        """Return the values of layers, of parts of weights (attention heads), and the largest terms of either."""
        lens, one, plan = self.lens, self.one, self.lens.plan
        weights = plan.weights | plan.parts
        places = [at for at in self.values if at is not None and at not in self.frozen | self.not_run]
        if isinstance(self.run.progress, Watch) and one.products is not None and self.run.asked:
            curved = [at for at in places if at not in plan.affine]
            self.run.progress.expect(sum(one.products(weights[at]) for at in curved))
        layers: dict[str, Estimate] = {}
        largest: dict[str, Estimate] = {}
        for at in places:
            found = lens.attempted(partial(self._at_layer, at), one.key)
            layers[at], peak = (undefined(found), None) if isinstance(found, str) else found
            largest |= {} if peak is None else {at: peak}
        # the layers without a value, each with its reason
        failed = {at: why for at, why in lens.failed_at(one).items() if at is not None and at not in self.frozen}
        layers |= {at: undefined(why) for at, why in failed.items()}
        parts = {name: layers.pop(name) for name in plan.parts if name in layers}
        if one.place == "weight":
            for name, w in plan.weights.items():
                if name not in layers and name not in self.frozen | self.not_run:
                    layers[name] = undefined((plan.unread(w) or NO_CALL) if w.has_derivative else MADE_ELSEWHERE)
            layers = {name: layers[name] for name in plan.weights if name in layers}
        if one.place == "input":
            layers |= {call: undefined(why) for call, why in plan.unplaced.items()}
        return layers, parts, largest

    def _at_layer(self, layer: str) -> tuple[Estimate, Estimate | None]:
        """Return a layer's value, and the largest of its terms if the measure has `.max`."""
        lens, one, values = self.lens, self.one, self.values[layer]
        before = lens.products
        # the term of the literal definition where the outputs are curved in the pre-activation takes products
        if one.curvature is not None and layer not in lens.plan.affine:
            bent = one.curvature(lens, layer, one, self.run)
            values = values + (bent / lens.problem.n if one.total else bent)
        found, reduced = self._estimate(layer, values)
        estimate = replace(found, products=lens.products - before)
        peak = None if reduced.terms is None else _peak(estimate, reduced.terms, reduced.terms_probes)
        constant = lens.constant_features(layer) if one.scales_features else 0
        units = f"{constant} features constant over the data, in units of their value (left out where it is 0)"
        return with_note(estimate, units if constant else ""), peak

    def _of_samples(self, place: str | None, values: Tensor) -> Reduced:
        one = self.one
        if one.finish is None or place is None:
            moved = self.lens.per_sample([one], partly=True).get((one.key + BY_ROUNDING, place))
            return one.reduce(values) if moved is None else one.reduce(values, moved)
        weight = self.lens.plan.weight(place)
        if not (finite(values) and finite(weight.matrix.W.square())):  # no finite values to minimise over
            return Reduced(math.nan, None)
        return one.finish(values, weight, one)

    def _estimate(self, place: str | None, values: Tensor) -> tuple[Estimate, Reduced]:
        """Reduce samples to an estimate: finite or undefined, and a lower bound if it is of Ritz values."""
        of_probes = self.lens.probes is not None and self.one.sketched == "probes"
        reduce = partial(self._of_samples, place)
        reduced = by_probes(reduce, values) if of_probes else reduce(values)
        arrays = {**reduced.arrays, **({} if reduced.probes is None else {"probes": reduced.probes})}
        found = Estimate(reduced.value, reduced.stderr, reduced.kind, reduced.note, reduced.samples, arrays)
        found, residuals = _finite(self.lens, found), self.lens.residuals.get((self.one.key, place))
        if residuals is None or found.kind == "undefined":
            return found, reduced
        note = f"squared norms to residuals of {rounded_up(float(residuals.max()))} of their size at most"
        return replace(with_note(found, note), kind="lower bound", arrays={"residuals": residuals}), reduced

    def _without(self, estimate: Estimate, others: str = "") -> Estimate:
        frozen = f"{self.frozen_layers} frozen layers left out" if self.frozen_layers else ""
        return with_note(with_note(estimate, frozen), "" if estimate.kind == "undefined" else others)


def _peak(whole: Estimate, terms: Tensor, probes: Tensor | None) -> Estimate:
    """Return the largest term of a sum; `probes`, (probes, terms), are kept for the largest of several sums."""
    if whole.kind == "undefined":
        return whole
    if probes is None:
        return replace(whole, value=float(terms.max()), arrays={})
    value, stderr = largest_of(*mean_of_forms(probes), len(probes))
    found = replace(whole, value=value, stderr=stderr, arrays={"probes": probes})
    return with_note(found, LARGEST_OF_NOISY) if probes.shape[1] > 1 else found


def _over_layers(layers: dict[str, Estimate], combine: Callable[[list[float]], float]) -> Estimate:
    """Return the sum or maximum of the layers' values."""
    if lost := lost_at(layers):
        return undefined(lost)
    each = list(layers.values())
    # one note if all layers have the same, else each with its layer
    said = {name: e.note for name, e in layers.items() if e.note}
    alike = len(said) == len(layers) and len(set(said.values())) == 1
    notes = list(said.values())[:1] if alike else [f"{name}: {note}" for name, note in said.items()]
    products = sum(e.products for e in each)
    of_samples = [e.samples for e in each if e.samples is not None]
    samples = torch.stack(of_samples).sum(0) if combine is sum and len(of_samples) == len(each) else None
    # the layers share the probes, so their errors are correlated
    probes = [e.arrays["probes"] for e in each if "probes" in e.arrays]
    if len(probes) == len(each):
        if combine is max:
            terms = torch.cat([rows.reshape(len(rows), -1) for rows in probes], 1)
            value, stderr = largest_of(*mean_of_forms(terms), len(terms))
            best, note = max(each, key=lambda e: e.value), dict.fromkeys([*notes, LARGEST_OF_NOISY])
            return replace(best, value=value, stderr=stderr, samples=None, note="; ".join(note), arrays={})
        together = torch.stack(probes).sum(0)
        stderr = float(mean_of_forms(together)[1])
        value = combine([e.value for e in each])
        return Estimate(value, stderr, "estimate", "; ".join(notes), samples, {"probes": together}, products=products)
    kinds = [e.kind for e in each]
    kind: Kind = next((kind for kind in kinds if kind != "exact"), "exact")
    value, stderr = combine([e.value for e in each]), combine([e.stderr if e.margin else 0.0 for e in each])
    # the largest of noisy values is biased; of lower bounds with errors, the ends of the intervals remain
    if stderr and combine is max and {*kinds} <= {"exact", "estimate"}:
        means, errors = torch.tensor([(e.value, e.stderr) for e in each], dtype=torch.float64).T
        value, stderr = largest_of(means, errors)
    if stderr and "lower bound" in kinds:
        value, kind = combine([e.value - e.margin for e in each]), "lower bound"
    return Estimate(value, stderr, kind, "; ".join(notes), samples, products=products)


def _finite(lens: Lens, estimate: Estimate) -> Estimate:
    """Return undefined, with the cause, where the value is NaN or infinite."""
    if estimate.kind == "undefined" or (math.isfinite(estimate.value) and math.isfinite(estimate.margin)):
        return estimate
    mend = "smaller weights" if lens.problem.dtype == torch.float64 else "dtype=torch.float64, or smaller weights,"
    met = f"{estimate.value} +- {estimate.stderr}" if math.isfinite(estimate.value) else estimate.value
    why, each = f"the result is {met}, because an intermediate number overflows", estimate.samples
    if each is not None and math.isnan(estimate.value) and bool(each.isfinite().any()):
        lost = int((~each.isfinite()).sum())
        why = f"{lost} of {len(each)} samples have no value: the definition divides 0 by 0 there, or a number overflows"
    note = lens.singular or f"{why}: {mend} may help"
    return replace(estimate, value=math.nan, kind="undefined", note=note)


def _all_zero(rows: Mapping[Key, Estimate]) -> bool:
    """Return whether every value of a measure is 0, as far as it is defined, and one is."""
    values = [estimate.value for estimate in rows.values() if estimate.kind != "undefined"]
    return bool(values) and not any(values)


def _underflowing(
    lens: Lens, estimates: Mapping[Key, Estimate], measured: Mapping[Key, Measure]
) -> dict[Key, Estimate]:
    """Rows that are 0, or rounding, because numbers or squares of derivatives underflow: without a value."""
    least = 1e-140 if lens.problem.dtype == torch.float64 else 1e-60
    rows = {key: one for key, one in measured.items() if one.card.unit != "share"}
    there = {key: abs(estimates[key].value) for key in rows if estimates[key].kind != "undefined"}
    small = set[Key]()
    for key, size in there.items():
        one = rows[key]
        # it squares derivatives of the outputs, unless it takes slopes along something alone
        read = [one] if isinstance(one, PassMeasure) else list(getattr(one, "reads", ()))
        squares = one.differentiates and (not read or any(other.needs - {"along"} for other in read))
        if size < (least if squares else sys.float_info.min):
            small.add(key)
    why = lens.attempted(lambda: lens.vanishing, "the search for underflow") if small else ""
    if not why:
        return {}
    # with them all that reads eigenvalues of J J^T there, of any size, such as their ratios
    reads_grams = {key for key, one in rows.items() if isinstance(one, PassMeasure) and "G" in one.needs}
    places = {place for _, place in small & reads_grams}
    lost = small | {key for key in reads_grams if key[1] in places}
    return {
        key: replace(undefined(why), source=estimates[key].source, unit=estimates[key].unit)
        for key in rows
        if key in lost
    }


def _doubts(lens: Lens) -> tuple[str, str]:
    """Return what speaks against autograd's derivatives in the weights, and in the inputs; empty words if nothing."""
    in_weights, in_inputs = zip(other_derivative(lens.problem, lens.model), lens.rounding, strict=True)
    return joined_notes(*in_weights), joined_notes(*in_inputs)


def about(lens: Lens) -> dict[str, Any]:
    """Return what was measured, where, and with which versions."""
    problem, kind = lens.problem, type(lens.problem.model)
    plan = lens.plan if lens.has_plan else None  # the plan takes some backwards: not made for this alone
    test = {} if problem.test is None else {"test": problem.test.told}
    made_in_python = {"model": f"{kind.__module__}.{kind.__qualname__}", "data": problem.data.told, **test}
    return {
        "model": kind.__name__,
        "parameters": sum(p.numel() for name, p in problem.model.named_parameters() if name in problem.parameters),
        "origin": dict(problem.origin) or made_in_python,
        "loss": problem.loss.description,
        "n": problem.n,
        "outputs": problem.outputs,
        "constant": None if problem.constant is None else asdict(problem.constant),
        "layers": [] if plan is None else list(plan.weights),
        "piecewise_affine_above": [] if plan is None else sorted(plan.affine),
        "by_autograd": [] if plan is None else list(plan.unexplained),
        "attention_heads": {
            "shown": lens.attention_heads,
            "not_told": {} if plan is None else dict(plan.not_parted),
        },
        "batchnorm": f"train, in batches of {problem.ghost_batch}" if problem.coupled else "eval",
        "dtype": str(problem.dtype).removeprefix("torch."),
        "arithmetic": problem.arithmetic,
        **({} if problem.casts is None else {"casts": str(problem.casts).removeprefix("torch.")}),
        "device": str(device_of(problem.model)),
        "combinations_of_outputs": lens.probes,
        "passes": lens.passes,
        "versions": {"flatlens": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "seconds": {"pass": lens.pass_seconds},
    }
