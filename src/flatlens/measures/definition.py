"""What a measure is: a function, a card with its meaning, source, cost and invariances, and a reduction from samples.

A family of measures gives its decorator defaults, `of_input = partial(per_sample, place="input", ...)`, so that a
measure is a function and the line above it. It registers itself when its module is imported.

Measures are asked for by name, or by a preset: the summary, all of the pass, all but what runs by name, a family.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from flatlens.curvature.probes import mean_of_forms
from flatlens.deprecated_names import FORMER_OPTIONS, present_options
from flatlens.errors import BadInput, BadOption, UnknownName
from flatlens.estimate import Estimate, Kind, Progress
from flatlens.grams import Weight
from flatlens.problem import Problem
from flatlens.registry import Registry, first_line, spelled

LAYERWISE = "layerwise"  #: one layer times a, another one divided by a
NEURONWISE = "neuronwise"  #: a neuron's incoming weights times a, its outgoing ones divided by a
PERMUTATION = "permutation"  #: neurons of a layer in another order
HEADWISE = "headwise"  #: queries and keys of an attention head, or its values and what reads them, in another basis
RESCALINGS = frozenset({LAYERWISE, NEURONWISE})
UNITS_AND_ORDER = RESCALINGS | {PERMUTATION}  #: neurons in other units and in another order, but not in another basis
FUNCTION = UNITS_AND_ORDER | {HEADWISE}  #: all transforms: a property of the function alone is invariant under them

RISK_FAMILY = "generalisation"  #: the family of quantities that one would like to predict: shown, but not ranked

Where: TypeAlias = Literal["input", "parameters", "weight", "outputs"]
Need: TypeAlias = Literal["C", "G", "squares", "K", "R", "CK", "CR", "diagonal", "columns", "adaptive", "along"]
Sketched: TypeAlias = Literal["probes", "top", "never"]
Answer: TypeAlias = Literal["input", "sum", "last"]
Option: TypeAlias = int | float | bool | str | None
Invariances: TypeAlias = Mapping[tuple[str, Option], frozenset[str]]
Parts: TypeAlias = "Mapping[tuple[str, str | None], Estimate]"
"""By (dotted part, layer): ("", None) is the network's answer, ("max", "fc1") the row `name.max` of fc1."""

GRADIENTS_OF_SAMPLES: frozenset[Need] = frozenset({"diagonal", "columns", "adaptive"})
"""What takes every sample's own gradient in a shared weight."""

INPUT_SIDE: frozenset[Need] = frozenset({"G", "squares"})
"""What a pass has without the loss, and without anything of parameters."""

MEASURE_MODULES = (
    "sensitivity", "traces", "flatness", "norms", "hessian", "normalised", "moved_weights", "moved_features",
    "generalisation", "heads", "steps", "learning_coefficient",
)  # fmt: skip
"""The modules of measures, in the order in which a catalogue row with several measures lists them."""


@dataclass(frozen=True, eq=False)
class Run:
    """The generator, the progress callback and the options of one call of `measure`, for measures that need a run.

    >>> import torch
    >>> Run(torch.Generator()).asked
    True
    """

    generator: torch.Generator
    progress: Progress | None = None
    frozen: bool = False  #: whether layers whose weights are not measured get rows and count in sums
    layers: tuple[str, ...] | None = None  #: parts of the names of the layers that get curvature products; None: all
    asked: bool = True  #: whether the measures were named
    thorough: bool = False  #: whether `rtol` is that of THOROUGH_RTOL where it is not given
    budget: float = math.inf
    """The size of the products of one measure: samples times the multiplications of a forward pass, summed."""

    def chosen(self, layer: str) -> bool:
        """Return whether a layer gets curvature products."""
        return self.layers is None or any(part in layer for part in self.layers)

    def counted(self, what: str, total: int) -> Iterator[int]:
        """Yield the numbers below `total`; report each when its work is done."""
        for number in range(total):
            yield number
            if self.progress is not None:
                self.progress(what, number + 1, total)


def drawing(generator: object, progress: object, where: str) -> torch.Generator:
    """Return the generator to draw from (seed 0 for None); refuse other types, and a progress that cannot be called."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise BadInput(f"{where}(progress={progress!r}): expected a function of (what, done, total), None or False")
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise BadInput(f"{where}(generator=...): expected a torch.Generator, got {type(generator).__name__}")
    return generator


@dataclass(frozen=True)
class Card:
    """The description of a measure, known before it is run.

    >>> import flatlens as fl
    >>> fl.measures.mls.card.source
    'compression Def. 3.7'
    """

    name: str
    id: str  #: the catalogue's row
    family: str
    symbol: str  #: LaTeX
    meaning: str  #: one line
    source: str
    unit: str
    cost: str
    invariant_under: frozenset[str]  #: transforms that leave the network's answer unchanged


@dataclass(frozen=True, eq=False)
class Reduced:
    """A number reduced from samples, with their values and a note.

    >>> import torch
    >>> Reduced(2.0, torch.tensor([1.0, 3.0])).value
    2.0
    """

    value: float
    samples: Tensor | None
    note: str = ""
    kind: Kind = "exact"
    stderr: float = 0.0
    probes: Tensor | None = None  #: the value from each of a sketch's probes, (probes,); their mean is the value
    terms: Tensor | None = None  #: the terms of the sum, for measures with a `.max` at each layer
    terms_probes: Tensor | None = None  #: the terms from each of a sketch's probes, (probes, terms)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


def mean(values: Tensor) -> Reduced:
    """Return the mean over samples."""
    return Reduced(float(values.mean()), values)


def largest(values: Tensor) -> Reduced:
    """Return the maximum over samples."""
    return Reduced(float(values.max()), values)


def by_probes(reduce: Callable[[Tensor], Reduced], values: Tensor) -> Reduced:
    """Return the reduced mean over a sketch's probes, (probes, ...), with the probes' own error.

    The error is a jackknife: a probe's share is the change when it is left out. For a measure linear in the probes that
    is the probe's own value; for a root or a minimum it also removes the bias of first order.
    """
    k = len(values)
    whole, total = reduce(values.mean(0)), values.sum(0)
    if whole.kind == "undefined":
        return whole
    left_out = [reduce((total - value) / (k - 1)) for value in values]

    probes = torch.tensor([k * whole.value - (k - 1) * part.value for part in left_out], dtype=torch.float64)
    value, stderr = mean_of_forms(probes)
    found = replace(whole, value=float(value), stderr=float(stderr), kind="estimate", probes=probes, arrays={})
    if whole.terms is None:
        return found
    each = [k * whole.terms - (k - 1) * part.terms for part in left_out if part.terms is not None]
    return replace(found, terms_probes=torch.stack(each))


def mean_of_finite(values: Tensor, why: str) -> Reduced:
    """Return the mean over the samples with a value, of all samples' values (n,); the note counts the others.

    As a measure's `reduce`: `partial(mean_of_finite, why="without any response")`.

    >>> mean_of_finite(torch.tensor([1.0, 3.0, torch.nan]), "without any response").note
    '1 of 3 samples without any response, left out'
    """
    there = torch.isfinite(values)
    if not bool(there.any()):
        return Reduced(math.nan, values, f"every sample is {why}", "undefined")
    return Reduced(float(values[there].mean()), values, number_of(~there, f"{why}, left out"))


def number_of(chosen: Tensor, what: str) -> str:
    """Return a note on how many samples are something; empty if none is."""
    return f"{int(chosen.sum())} of {len(chosen)} samples {what}" if bool(chosen.any()) else ""


@dataclass(frozen=True, eq=False)
class Measure:
    """A measure with its options: `local_volume` is one, `local_volume(top_k=3)` another.

    >>> import flatlens as fl
    >>> fl.measures.local_volume(top_k=3).key
    'local_volume(top_k=3)'
    """

    card: Card
    compute: Callable[..., Any]
    options: tuple[tuple[str, Option], ...] = ()
    invariances: Invariances | None = None  #: values of options that change the card's `invariant_under`
    on_request: bool = False  #: whether it runs only when named, or with the presets all and family:NAME
    by_name: bool = False  #: whether no preset runs it
    held_out: bool = False  #: whether it needs held-out data
    works_coupled: bool = False  #: whether it is defined where BatchNorm couples the samples
    works_sharded: bool = False  #: whether it is measured where parameters are spread over processes
    differentiates: bool = True  #: whether its values depend on derivatives of the outputs
    of_parameters: bool = True  #: whether it takes derivatives in the weights, or is a property of them

    @cached_property
    def key(self) -> str:
        """Return the name with its options, as in rows and on the command line; defaults are left out."""
        spelled = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.card.name}({spelled})" if spelled else self.card.name

    @property
    def invariant_under(self) -> frozenset[str]:
        """Return the card's transforms, or those of the options."""
        of_options = self.invariances or {}
        return next((of_options[option] for option in self.options if option in of_options), self.card.invariant_under)

    def option(self, name: str) -> Option:
        """Return the value of an option, its default if not set."""
        default: Option = self.defaults()[name]
        return dict(self.options).get(name, default)

    def defaults(self) -> dict[str, Any]:
        """Return the options with their default values."""
        parameters = inspect.signature(self.compute).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def __call__(self, **options: Option) -> Self:
        """Return the same measure with options set; former names of options are accepted with a warning."""
        options = present_options(f"measure {self.card.name}", options, FORMER_OPTIONS.get(self.card.name, {}))
        defaults = self.defaults()
        for name in options:
            if not defaults:
                raise BadInput(f"measure {self.card.name} takes no options, got {name!r}")
            if name not in defaults:
                raise UnknownName.among("option", name, defaults, where=f"of {self.card.name}")
        for name, value in options.items():
            if isinstance(defaults[name], bool) != isinstance(value, bool):
                needed = "True or False" if isinstance(defaults[name], bool) else "a value other than True and False"
                raise BadOption(f"measure {self.card.name}: option {name}={value!r}: expected {needed}")
        merged = {**dict(self.options), **options}
        spelled = tuple((name, merged[name]) for name in defaults if name in merged and merged[name] != defaults[name])
        return replace(self, options=spelled)

    def evaluate(self, *arguments: Any) -> Any:
        """Return the function's value with these options: at one place of one chunk, or of a lens (and a run).

        Raises:
            BadOption: an option cannot be used.
        """
        try:
            return self.compute(*arguments, **dict(self.options))
        except BadOption as error:
            raise BadOption(f"measure {self.card.name}: {error}") from error.__cause__

    def __repr__(self) -> str:
        return self.key


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PassMeasure(Measure):
    """A measure computed from the Gram matrices of the pass: one number for each sample and place.

    >>> import flatlens as fl
    >>> fl.measures.mls.place
    'input'
    """

    place: Where  #: evaluated at inputs of layers, at parameters, at weights of linear layers, or at the outputs
    answer: Answer = "sum"  #: the network's answer: at its input, summed over layers, or the last linear layer's
    reduce: Callable[..., Reduced] = mean
    """The number of all samples, from theirs, (n,), and how far rounding may move each if the function returns both.

    A function that returns both has no estimate from a sketch.
    """
    needs: frozenset[Need] = frozenset()  #: the quantities that it reads from the pass
    sketched: Sketched = "never"
    """The estimate from random combinations of many outputs.

    Either a mean over them, or from the largest eigenvalue of G alone, or not at all.
    """
    total: bool = False  #: whether the function returns a sum over the chunk (of any shape), not one number per sample
    finish: Callable[[Tensor, Weight, Measure], Reduced] | None = None  #: replaces `reduce` where the weight is needed
    curvature: Callable[..., Tensor] | None = None
    """(lens, layer, measure, run) -> the term to add where the outputs are curved in a layer's pre-activation."""
    products: Callable[[Weight], int] | None = None  #: the number of curvature products of that term
    needs_full_precision: bool = False  #: whether it depends on small eigenvalues of G
    needs_feature_scale: tuple[str, ...] = ()  #: the options that ask for the spread of the features

    @property
    def scales_features(self) -> bool:
        """Return whether its options ask for the spread of the features."""
        return any(self.option(name) for name in self.needs_feature_scale)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NetworkMeasure(Measure):
    """A measure of the whole network, computed from a lens.

    >>> import flatlens as fl
    >>> isinstance(fl.measures.sharpness, NetworkMeasure), fl.measures.sharpness.on_request
    (True, True)
    """

    reads: tuple[
        PassMeasure, ...
    ] = ()  #: numbers that it takes from a pass that had them; else it computes them itself
    networks: int | Callable[[Measure], int] = 0
    """The copies of the measured weights that it holds at most, beside the problem's memory; 0: not stated."""

    @cached_property
    def takes_run(self) -> bool:
        """Return whether its function takes the run beside the lens."""
        parameters = inspect.signature(self.compute).parameters.values()
        return sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters) > 1

    def memory(self, problem: Problem) -> int | None:
        """Return the bytes that it may take beside the network: an upper bound, known before it runs; None: not stated.

        >>> import torch, flatlens as fl
        >>> problem = fl.Problem(torch.nn.Linear(3, 2), "mse", (torch.ones(4, 3), torch.zeros(4, 2)), memory="1MB")
        >>> fl.measures.critical_sharpness.memory(problem)  # 16 networks of 8 numbers of 4 bytes
        1000512
        """
        networks = self.networks if isinstance(self.networks, int) else self.networks(self)
        return networks * problem.bytes_of_weights + problem.memory if networks else None


_M = TypeVar("_M", PassMeasure, NetworkMeasure)


def per_sample(
    *,
    id: str,
    family: str,
    symbol: str,
    source: str,
    unit: str,
    place: Where,
    needs: Iterable[Need],
    cost: str = "one pass",
    invariant_under: Iterable[str] = (),
    **how: Any,
) -> Callable[[Callable[..., Any]], PassMeasure]:
    """Make a measure from a function of one place and one chunk that returns a number per sample (or their sum).

    `how` sets further fields of `PassMeasure`: `answer` ("sum" if not given), `reduce` (`mean`), `sketched` ("never"),
    `total`, `finish`, `curvature`, `products`, `invariances`, `needs_feature_scale`, `needs_full_precision`.

    With an `id` outside the catalogue, such as "own", it is not registered: a user's own measure, or numbers that a
    measure of the whole network reads.
    """
    card = partial(Card, id=id, family=family, symbol=symbol, source=source, unit=unit, cost=cost)
    how |= {"place": place, "needs": frozenset(needs), "of_parameters": place != "input"}
    return _definition(PassMeasure, card, invariant_under, **how)


def on_lens(
    *,
    id: str,
    family: str,
    symbol: str,
    source: str,
    unit: str,
    cost: str = "one forward",
    invariant_under: Iterable[str] = (),
    **how: Any,
) -> Callable[[Callable[..., Estimate | Parts]], NetworkMeasure]:
    """Make a measure from a function of the whole network that returns an Estimate or several parts.

    The function takes the lens, or the lens and the run. With `on_request=True` it is run only when named, as it costs
    products, searches or random draws. `how` sets further fields of `NetworkMeasure`: `on_request`, `by_name`,
    `held_out`, `works_coupled`, `works_sharded` (False if not given), `of_parameters`, `differentiates` (True),
    `reads`, `invariances`, `networks`.
    """
    card = partial(Card, id=id, family=family, symbol=symbol, source=source, unit=unit, cost=cost)
    return _definition(NetworkMeasure, card, invariant_under, **how)


def _definition(
    kind: type[_M], card: Callable[..., Card], invariant_under: Iterable[str], **how: Any
) -> Callable[[Callable[..., Any]], _M]:
    def decorate(function: Callable[..., Any]) -> _M:
        stated = card(name=function.__name__, meaning=first_line(function), invariant_under=frozenset(invariant_under))
        measure = kind(stated, function, **how)
        MEASURES.add(stated.name, stated.id, measure)
        return measure

    return decorate


def _family(measure: Measure) -> int:
    module = measure.compute.__module__.rpartition(".")[2]
    return MEASURE_MODULES.index(module) if module in MEASURE_MODULES else len(MEASURE_MODULES)


MEASURES: Registry[Measure] = Registry("measure", Measure, rows="MHPD", order=_family)
"""Every measure of the catalogue, by name; each module of measures adds its own."""


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
        name, options = spelled(spelling)
    except ValueError as error:
        meant = [word for word in spelling.replace("-", "_").split() if word in MEASURES]
        hint = f"; did you mean {', '.join(meant)}?" if meant else ""
        raise BadInput(
            f"measure {spelling!r}: write a name, or a name with options such as local_volume(top_k=3){hint}"
        ) from error
    if name not in MEASURES:
        raise UnknownName.among("measure", name, MEASURES)
    return MEASURES[name](**options) if options else MEASURES[name]


THOROUGH_RTOL = {"sharpness": 1e-3, "hessian_trace": 0.01, "adaptive_sharpness": 0.01}
"""The `rtol` of these measures in studies, trackers, bounds and tables of invariance, where it is not given."""


def as_studied(one: Measure) -> Measure:
    """Return a measure as studies and trackers name it: without an `rtol` that is their own.

    >>> as_studied(MEASURES["sharpness"](rtol=0.001)), as_studied(MEASURES["sharpness"](rtol=0.01))
    (sharpness, sharpness(rtol=0.01))
    """
    own = "rtol", THOROUGH_RTOL.get(one.card.name)
    return replace(one, options=tuple(option for option in one.options if option != own))


def require_tolerance(rtol: object) -> None:
    """Refuse a tolerance outside (0, 1)."""
    if not (isinstance(rtol, int | float) and 0 < rtol < 1):
        raise BadOption(f"option rtol={rtol!r}: expected a number between 0 and 1")


def require_positive(call: str = "", /, **options: object) -> None:
    """Refuse anything but positive finite numbers: options of a measure, or arguments of a call."""
    for name, value in options.items():
        if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
            raise _unfit("expected a positive number", name, value, call)


def require_count(least: int, call: str = "", /, **options: object) -> None:
    """Refuse anything but whole numbers of at least `least`: options of a measure, or arguments of a call."""
    for name, value in options.items():
        if isinstance(value, bool) or not (isinstance(value, int) and value >= least):
            raise _unfit(f"expected a whole number of at least {least}", name, value, call)


def _unfit(what: str, name: str, value: object, call: str) -> BadInput:
    if call:
        return BadInput(what, argument=name, value=value, call=call)
    return BadOption(f"option {name}={value!r}: {what}")


def require_one_of(known: Iterable[str], **options: object) -> None:
    """Refuse anything but the known words."""
    words = tuple(known)
    for name, value in options.items():
        if value not in words:
            raise BadOption(f"option {name}={value!r}: expected one of {', '.join(map(repr, words))}")


PAPERS = {
    "compression": (
        "Chen et al., A Simple Connection from Loss Flatness to Compressed Representations in Neural Networks, "
        "arXiv 2310.01770, 2023"
    ),
    "sharpening": "MacDonald et al., On Progressive Sharpening, Flat Minima and Generalisation, arXiv 2305.14683, 2023",
    "density2019": (
        "Ghorbani, Krishnan and Xiao, An Investigation into Neural Net Optimization via Hessian Eigenvalue Density, "
        "ICML 2019"
    ),
    "learning2025": (
        "Lau, Furman, Wang, Murfet and Wei, The Local Learning Coefficient: A Singularity-Aware Complexity Measure, "
        "AISTATS 2025, arXiv 2308.12108"
    ),
    "reparam2019": (
        "Petzka, Adilova, Kamp and Sminchisescu, A Reparameterization-Invariant Flatness Measure for Deep Neural "
        "Networks, NeurIPS workshop Science meets Engineering of Deep Learning, 2019"
    ),
    "adaptive2022": "Cohen et al., Adaptive Gradient Methods at the Edge of Stability, arXiv 2207.14484, 2022",
    "critical2026": (
        "Kalra et al., A Scalable Measure of Loss Landscape Curvature for Analyzing the Training Dynamics of LLMs, "
        "arXiv 2601.16979, 2026"
    ),
    "batches2024": "Andreyev and Beneventano, Edge of Stochastic Stability, arXiv 2412.20553, 2024",
    "noise2018": "McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162, 2018",
    "norms2026": (
        "Islamov, Crawshaw, Cohen and Gower, Non-Euclidean Gradient Descent Operates at the Edge of Stability, "
        "arXiv 2603.05002, 2026"
    ),
    "relative2021": (
        "Petzka, Kamp, Adilova, Sminchisescu and Boley, Relative Flatness and Generalization, NeurIPS 2021"
    ),
    "symmetries2025": (
        "da Silva, Dangel and Oore, Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian Geometry Finds "
        "It, ICML 2025"
    ),
}
"""The papers that cards cite, by their short names."""


Choice: TypeAlias = "str | Measure | Iterable[str | Measure] | None"
"""The argument `measures=`: a preset, names, or measures; None is the summary."""

SUMMARY = (
    "loss", "accuracy", "test_loss", "test_accuracy", "generalisation_gap",
    "sharpness", "hessian_trace", "relative_flatness_ggn.sum", "adaptive_sharpness_ggn",
    "mls", "jacobian_norm", "log_volume", "local_dimension", "weight_norm",
)  # fmt: skip
"""The network's numbers in the summary, by row."""

PRESETS = ("summary", "pass", "all")
FAMILY = "family:"  #: begins a preset: all measures of a family, "family:flatness"

SAME_ALWAYS = {"parameter_jacobian_frobenius": "interpolation_sharpness"}
SAME_WHERE_AFFINE = {"relative_flatness": "relative_flatness_ggn", "neuron_flatness": "neuron_flatness_ggn"}
SAME_WITHOUT_CURVATURE = {"hessian_trace": "ggn_trace", "adaptive_sharpness": "adaptive_sharpness_ggn"}
"""Measures with the value of another one: always; where the outputs are affine in each layer's weight; where they are
affine in each parameter. A preset has the second one alone."""


@dataclass(frozen=True)
class Asked:
    """The measures that a call asks for.

    >>> asked_for("family:compression").preset, [one.key for one in asked_for("mls").measures]
    ('family:compression', ['mls'])
    """

    measures: tuple[Measure, ...]
    preset: str = ""  #: empty for names
    spelled: Mapping[str, str] = field(default_factory=dict)  #: the name of a row, by the caller's spelling

    @property
    def answers(self) -> dict[str, Measure]:
        """The row of each measure's number of the network."""
        if self.preset == "summary":
            found = {row: MEASURES[row.partition(".")[0]] for row in SUMMARY}
            return {row: one for row, one in found.items() if one in self.measures}
        return {one.key: one for one in self.measures}

    def shows(self, row: str, layer: str | None) -> bool:
        """Return whether the report has this row: the summary has one number of each measure, and its layers."""
        return self.preset != "summary" or (row in SUMMARY if layer is None else row in _STEMS)


_STEMS = frozenset(row.partition(".")[0] for row in SUMMARY)


def asked_for(measures: Choice, held_out: bool = True) -> Asked:
    """Return the measures of a preset, or the named ones.

    Args:
        measures: "summary", "pass", "all", "family:NAME", names or measures; None is "summary".
        held_out: Whether there is held-out data, without which a preset leaves out the measures that need it.

    Raises:
        UnknownName: no preset, family or measure has this name.
    """
    given = "summary" if measures is None else measures
    each = [given] if isinstance(given, str | Measure) else list(given) if isinstance(given, Iterable) else []
    for text in [one for one in each if isinstance(one, str)]:
        if text.startswith(FAMILY):
            families = dict.fromkeys(one.card.family for one in MEASURES.values())
            if text.removeprefix(FAMILY) not in families:
                raise UnknownName.among("family", text.removeprefix(FAMILY), families)
        elif text not in PRESETS:
            # a name that is not spelled like a measure; its options are read below
            if text not in MEASURES and (text.isidentifier() or ":" in text.partition("(")[0]):
                raise UnknownName.among("measure", text, [*MEASURES, *PRESETS])
            continue
        if len(each) > 1:
            raise BadInput("a preset cannot be combined with names", argument="measures", value=text,
                           remedy="give it alone, or name every measure", call="measure")  # fmt: skip
    if len(each) == 1 and isinstance(preset := each[0], str) and (preset in PRESETS or preset.startswith(FAMILY)):
        possible = (one for one in MEASURES.values() if held_out or not one.held_out)
        return Asked(tuple(one for one in possible if in_preset(one, preset)), preset)
    found = named(each or given)
    pairs = zip(each, found, strict=False)
    spelled = {text: one.key for text, one in pairs if isinstance(text, str) and text != one.key}
    return Asked(tuple(found), spelled=spelled)


def in_preset(one: Measure, preset: str) -> bool:
    """Return whether a measure belongs to a preset.

    >>> [in_preset(MEASURES["sharpness"], preset) for preset in ("summary", "pass", "all", "family:hessian")]
    [True, False, True, True]
    """
    if one.by_name:
        return False
    if preset == "summary":
        return one.card.name in _STEMS
    if preset == "pass":
        return not one.on_request and one.card.name not in SAME_ALWAYS | SAME_WHERE_AFFINE
    return preset == "all" or one.card.family == preset.removeprefix(FAMILY)
