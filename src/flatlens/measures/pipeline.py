"""fl.measure: a report from a lens and names of measures; the catalogue of all measures.

A measure registers itself when its module is imported.
"""

from __future__ import annotations

import ast
import math
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Key, Progress, Report, undefined
from flatlens.measures.definition import (
    MEASURE_MODULES,
    MEASURES,
    Card,
    Measure,
    NetworkMeasure,
    Parts,
    PassMeasure,
    Run,
)
from flatlens.measures.lens import Lens
from flatlens.measures.notes import NO_PARAMETER
from flatlens.measures.rows import assembled, finite_or_undefined, omitted, with_note
from flatlens.perturbation.autograd_check import other_derivative
from flatlens.problem import Problem, measuring
from flatlens.problem.arguments import drawing
from flatlens.problem.eval_context import device_of
from flatlens.progress import LIMIT, Watch, or_line
from flatlens.version import __version__

for _module in MEASURE_MODULES:  # each registers its measures
    import_module(f"flatlens.measures.{_module}")


def catalogue() -> list[Card]:
    """Return the cards of all measures.

    >>> [card.name for card in catalogue()][:3]
    ['interpolation_sharpness', 'ggn_trace', 'mls']
    """
    return [measure.card for measure in MEASURES.values()]


def named(measures: str | Measure | Iterable[str | Measure]) -> list[Measure]:
    """Return measures from names, spellings with options, or measures; one alone is enough."""
    return MEASURES.named(measures, "measure(...)", _read)


def _read(spelling: str) -> Measure:
    """Return the measure that is spelled as on the command line: `mls`, `local_volume(top_k=3)`."""
    try:
        tree = ast.parse(spelling.strip(), mode="eval").body
        name = tree.func if isinstance(tree, ast.Call) else tree
        if not isinstance(name, ast.Name) or (isinstance(tree, ast.Call) and tree.args):
            raise ValueError(spelling)
        options = (
            {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg} if isinstance(tree, ast.Call) else {}
        )
    except (SyntaxError, ValueError) as error:
        meant = [word for word in spelling.replace("-", "_").split() if word in MEASURES]
        hint = f"; did you mean {', '.join(meant)}?" if meant else ""
        raise BadInput(
            f"measure {spelling!r}: write a name, or a name with options such as local_volume(top_k=3){hint}"
        ) from error
    if name.id not in MEASURES:
        raise UnknownName.among("measure", name.id, MEASURES)
    return MEASURES[name.id](**options)


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

    A number that cannot be computed is undefined, and its note says why; the others are computed. An error is raised
    for wrong arguments, and for what would make every number wrong. A measure whose products, searches or draws are
    expected to take more than 10 minutes is refused, unless `anyway`.

    Args:
        lens: The network to measure, `Lens(problem)`.
        measures: Names, such as "mls" or "local_volume(top_k=3)", or Measure objects; one alone is enough. None is
            every exact measure of the pass. Measures that take curvature products (sharpness, Hessian trace, ...),
            searches or random draws run only when named. So do, in large convolutional networks and transformers,
            those that need every sample's own gradient; their rows say so.
        layers: Parts of the names of the layers that get curvature products, where a measure takes them layer by layer;
            the others' values are then undefined. None is all of them.
        anyway: Whether to do long work, too.
        generator: Draws the random numbers, in several processes the first one's; seeded with 0 if None.
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
    lens.require_fresh()
    return measure_with(lens, measures, Run(draws, watch, layers=_parts_of_names(lens, layers)))


def measure_with(lens: Lens, measures: str | Measure | Iterable[str | Measure] | None, run: Run) -> Report:
    """Return what `measure` does for a lens known to be fresh, with rows for frozen layers if the run includes them."""
    asked = measures is not None
    lens.problem.peers.same_draws(run.generator)
    if isinstance(measures, Iterable) and not isinstance(measures, str | Measure):
        measures = list(measures)
    chosen = named(measures) if measures is not None else _default(lens)
    lens.forget_failures()
    # also around measures of weights alone: in train mode, reading a spectral norm changes it
    with measuring(lens.model, twice=False):  # attention as it is: where there are second derivatives it is replaced
        defined = [m for m in chosen if not _not_defined(lens, m)]
        # one pass for all; where it fails, each measure has one of its own, and says why if that fails, too
        lens.attempted(partial(_one_pass, lens, defined, asked, run), "the pass")
        estimates: dict[Key, Estimate] = {}
        made: dict[Key, Measure] = {}  # rows that may underflow: shares may be 0
        derived: dict[Key, Measure] = {}  # rows that depend on derivatives of the outputs
        for one in chosen:
            if isinstance(run.progress, Watch):
                run.progress.begin(one.key)
            start, passed = time.perf_counter(), lens.pass_seconds
            found: dict[Key, Estimate] | str = _not_defined(lens, one)
            if one in defined:
                found = lens.attempted(partial(_rows_of, lens, one, asked, run), one.key)
            rows = {(one.key, None): undefined(found)} if isinstance(found, str) else found
            seconds = time.perf_counter() - start - (lens.pass_seconds - passed)
            for key, estimate in rows.items():
                unit = estimate.unit or one.card.unit
                estimates[key] = replace(
                    finite_or_undefined(lens, estimate), source=one.card.source, unit=unit, seconds=seconds
                )
                seconds = 0.0  # that of all rows of the measure stands in the first
            made |= dict.fromkeys(rows, one) if one.card.unit != "share" else {}
            if isinstance(one, PassMeasure) or (isinstance(one, NetworkMeasure) and one.differentiates):
                derived |= {key: one for key in rows if estimates[key].kind != "undefined"}
        said = lens.attempted(partial(_doubts, lens), "the checks of derivatives") if derived else ()
        if isinstance(said, str):
            said = ((f"derivatives were not checked: {said}",) * 2,)
    estimates |= _underflowing(lens, estimates, made)
    for key, one in derived.items():
        for words in said:
            estimates[key] = with_note(estimates[key], words[of_inputs(one)])
    return Report(estimates, about(lens) | _spellings(measures, chosen))


def _underflowing(lens: Lens, estimates: Mapping[Key, Estimate], made: Mapping[Key, Measure]) -> dict[Key, Estimate]:
    """Return the rows without a value because numbers underflow, or squares of derivatives: they are 0, or rounding.

    The reason is looked for only where a row is 0, or hardly more.
    """
    least = 1e-140 if lens.problem.dtype == torch.float64 else 1e-60
    there = {key: abs(estimates[key].value) for key in made if estimates[key].kind != "undefined"}
    small = {key for key, size in there.items() if size < (least if _squares(made[key]) else sys.float_info.min)}
    why = lens.attempted(lambda: lens.vanishing, "the search for underflow") if small else ""
    places = {key[1] for key in small if _reads_grams(made[key])}
    lost = [key for key in made if why and (key in small or (_reads_grams(made[key]) and key[1] in places))]
    return {key: replace(undefined(why), source=estimates[key].source, unit=estimates[key].unit) for key in lost}


def _squares(one: Measure) -> bool:
    """Return whether a measure squares derivatives of the outputs, and does not only take slopes along something."""
    if isinstance(one, NetworkMeasure) and not one.differentiates:
        return False
    read = [one.needs] if isinstance(one, PassMeasure) else [other.needs for other in getattr(one, "reads", ())]
    return not read or bool(frozenset().union(*read) - {"along"})


def _reads_grams(one: Measure) -> bool:
    """Return whether a measure reads eigenvalues of J J^T, of any size, such as their ratios."""
    return isinstance(one, PassMeasure) and "G" in one.needs


def _rows_of(lens: Lens, one: Measure, asked: bool, run: Run) -> dict[Key, Estimate]:
    """Return all rows of a measure, with what is to be said of their kind."""
    found = lens.planned(partial(_answers, lens, one, asked, run))
    if lens.problem.arithmetic != "full" and isinstance(one, PassMeasure) and one.needs_full_precision:
        why = f"rounding in {lens.problem.arithmetic} hides small eigenvalues: arithmetic='full' is needed"
        found = dict.fromkeys(found, undefined(why))
    if isinstance(one, NetworkMeasure) and one.differentiates and _all_zero(found) and lens.underflow:
        found = dict.fromkeys(found, undefined(lens.underflow))
    if _of_curvature(one) and _all_zero(found):
        found = {key: with_note(estimate, lens.linear_loss) for key, estimate in found.items()}
    return found


def _doubts(lens: Lens) -> tuple[tuple[str, str], ...]:
    """Return what speaks against autograd's derivatives in the weights, and in the inputs; empty words if nothing."""
    return other_derivative(lens.problem, lens.model), lens.rounding


def _of_curvature(one: Measure) -> bool:
    """Return whether the number contains the loss's second derivative in the outputs."""
    if isinstance(one, PassMeasure):
        return "C" in one.needs
    return isinstance(one, NetworkMeasure) and one.differentiates and one.of_parameters


def _all_zero(found: Mapping[Key, Estimate]) -> bool:
    """Return whether every value of a measure is 0, as far as it is defined, and one is."""
    values = [estimate.value for estimate in found.values() if estimate.kind != "undefined"]
    return bool(values) and not any(values)


def _spellings(measures: str | Measure | Iterable[str | Measure] | None, chosen: list[Measure]) -> dict[str, Any]:
    """Return the names of the report's rows by the names that the user gave, where they differ."""
    given = [measures] if isinstance(measures, str | Measure) else measures or []
    other = {
        each: one.key for each, one in zip(given, chosen, strict=False) if isinstance(each, str) and each != one.key
    }
    return {"spelled": other} if other else {}


def of_inputs(measure: Measure) -> bool:
    """Return whether a measure takes derivatives in the inputs, of the network or of a layer; else in the weights.

    >>> of_inputs(MEASURES["mls"]), of_inputs(MEASURES["hessian_trace"])
    (True, False)
    """
    if isinstance(measure, PassMeasure):
        return measure.place == "input"
    return isinstance(measure, NetworkMeasure) and not measure.of_parameters


def _one_pass(lens: Lens, measures: list[Measure], asked: bool, run: Run) -> None:
    """Compute what one pass gives for some measures."""
    lens.per_sample(_in_one_pass(lens, measures, asked), run.progress, run.generator, partly=True)


def _in_one_pass(lens: Lens, measures: list[Measure], asked: bool) -> list[PassMeasure]:
    """Return what one pass computes for some measures: if there is a pass at all, also what others read from one."""
    found = [m for m in measures if isinstance(m, PassMeasure) and not omitted(lens, m, asked)]
    if found and lens.probes is None:
        reads = [one for m in measures if isinstance(m, NetworkMeasure) for one in m.reads]
        found += [one for one in reads if not _not_defined(lens, one)]
    return found


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


def _answers(lens: Lens, one: Measure, asked: bool, run: Run) -> dict[Key, Estimate]:
    """Return all rows of a measure."""
    if isinstance(one, PassMeasure):
        return dict(assembled(lens, one, asked, run))
    assert isinstance(one, NetworkMeasure)
    if not one.on_request:
        return _parts(one, one.evaluate(lens))
    if one.of_parameters and not lens.problem.parameters:
        return {(one.key, None): undefined(NO_PARAMETER)}
    return _parts(one, one.evaluate(lens, run))


COUPLED = "batchnorm='train' couples the samples of a batch: measures of single samples are not defined"
SHARDED = "its parameters are spread over processes: on such networks only {} are measured"
NO_SOFTMAX = "outputs of several heads, or of images that a function takes whole, have no one softmax"


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
        **_plan(lens),
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


def _plan(lens: Lens) -> dict[str, Any]:
    """Return what the pass knows of the layers; nothing if no measure needed its plan, which takes some backwards."""
    if not lens.laid_out:
        heads = {"shown": lens.attention_heads, "not_told": {}}
        return {"layers": [], "piecewise_affine_above": [], "by_autograd": [], "attention_heads": heads}
    layout = lens.layout
    return {
        "layers": list(layout.weights),
        "piecewise_affine_above": sorted(layout.affine),
        "by_autograd": list(layout.unexplained),
        "attention_heads": {"shown": lens.attention_heads, "not_told": dict(layout.not_parted)},
    }


def _origin(problem: Problem) -> dict[str, str]:
    """Return the origin of a problem that was made in Python: the class of the network, and the data in words."""
    kind = type(problem.model)
    test = {} if problem.test is None else {"test": problem.test.told}
    return {"model": f"{kind.__module__}.{kind.__qualname__}", "data": problem.data.told, **test}
