"""A measure is one short function with a card: what it means, where it stands, what it costs, what leaves it
unchanged."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Progress
from flatlens.measures.reduce import Reduced, mean

if TYPE_CHECKING:
    from flatlens.grams import Weight
    from flatlens.measures.lens import Lens

LAYERWISE = "layerwise"  #: one layer times a, another divided by it
NEURONWISE = "neuronwise"  #: a neuron's incoming weights times a, its outgoing ones divided by it
PERMUTATION = "permutation"  #: neurons of a layer in another order
FUNCTION = frozenset({LAYERWISE, NEURONWISE, PERMUTATION})  #: a property of the function alone survives them all

Place: TypeAlias = Literal["input", "parameters", "weight", "network", "request"]
Need: TypeAlias = Literal["C", "G", "K", "R", "diagonal", "columns", "adaptive"]
Sketched: TypeAlias = Literal["probes", "top", "never"]
Answer: TypeAlias = Literal["input", "sum", "last"]
Option: TypeAlias = int | float | bool | str | None
Parts: TypeAlias = "Mapping[tuple[str, str | None], Estimate]"
"""By (dotted part, layer): ("", None) is the network's answer, ("max", "fc1") the row `name.max` of fc1."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one call of `measure` lends to measures that run products, searches or random draws."""

    generator: torch.Generator
    progress: Progress | None = None
    frozen: bool = False  #: whether layers whose weight is not measured have rows, too, and count in sums


@dataclass(frozen=True)
class Card:
    """What is known of a measure before it is run."""

    name: str
    id: str  #: the catalogue's row
    family: str
    symbol: str  #: LaTeX
    meaning: str  #: one line
    source: str
    unit: str
    cost: str
    invariant_under: frozenset[str]  #: function-preserving moves that leave the network's answer unchanged


@dataclass(frozen=True, eq=False)
class Measure:
    """A measure with its options: `local_volume` is one, `local_volume(top_k=3)` another."""

    card: Card
    compute: Callable[..., Any]
    reduce: Callable[[Tensor], Reduced]
    place: Place
    """Evaluated at inputs of layers, at parameters, at weights of linear layers, on the network as a whole, or there
    when asked for by name."""
    answer: Answer  #: the network's: at its input, summed over layers, or of the last linear layer
    options: tuple[tuple[str, Option], ...] = ()
    invariances: Mapping[tuple[str, Option], frozenset[str]] | None = None  #: where an option changes them
    needs: frozenset[Need] = frozenset()  #: what of the pass it reads: one that reads nothing new comes along for free
    sketched: Sketched = "never"
    """How it is had of a few combinations of many outputs: as a mean over random ones, from the largest eigenvalue of
    G alone, or not at all."""
    total: bool = False  #: a chunk gives a sum over its samples, of any shape, in place of one number per sample
    finish: Callable[[Tensor, Weight, Measure], Reduced] | None = (
        None  #: in place of `reduce`, where the weight is needed
    )
    curvature: Callable[[Lens, str, Measure, Run], Tensor] | None = None  #: to be added where the outputs curve in z
    works_coupled: bool = False  #: whether it is defined where BatchNorm couples the samples
    works_coarse: bool = True  #: whether it is defined of coarse products, or rests on small eigenvalues of G
    of_parameters: bool = True  #: whether it is about the parameters measured, and undefined without any
    needs_feature_scale: str | None = None  #: the option that asks for the spread of the features
    held_out: bool = False  #: whether it needs held-out data

    @cached_property
    def key(self) -> str:
        """The name with its options, as rows and the command line spell it; a default is never spelled."""
        spelled = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.card.name}({spelled})" if spelled else self.card.name

    @property
    def invariant_under(self) -> frozenset[str]:
        """The card's, unless an option changes them."""
        for option in self.options:
            if self.invariances and option in self.invariances:
                return self.invariances[option]
        return self.card.invariant_under

    def option(self, name: str) -> Option:
        """The value of an option, its default if not set."""
        default: Option = self._defaults()[name]
        return dict(self.options).get(name, default)

    def _defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.compute).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def __call__(self, **options: Option) -> Measure:
        """The same measure with options set."""
        defaults = self._defaults()
        for name in options:
            if name not in defaults:
                if not defaults:
                    raise BadInput(f"measure {self.card.name} takes no options, got {name!r}")
                raise UnknownName.among(f"option of {self.card.name}", name, defaults)
        merged = {**dict(self.options), **options}
        spelled = tuple((name, merged[name]) for name in defaults if name in merged and merged[name] != defaults[name])
        return replace(self, options=spelled)

    def evaluate(self, *arguments: Any) -> Any:
        """The function itself, on one place of one chunk."""
        return self.compute(*arguments, **dict(self.options))

    def __repr__(self) -> str:
        return self.key


def per_sample(
    *,
    id: str,
    family: str,
    symbol: str,
    source: str,
    unit: str,
    reduce: Callable[[Tensor], Reduced] = mean,
    place: Place,
    needs: Iterable[Need],
    sketched: Sketched = "never",
    total: bool = False,
    finish: Callable[[Tensor, Weight, Measure], Reduced] | None = None,
    answer: Answer = "sum",
    cost: str = "one pass",
    invariant_under: Iterable[str] = (),
    invariances: Mapping[tuple[str, Option], frozenset[str]] | None = None,
    curvature: Callable[[Lens, str, Measure, Run], Tensor] | None = None,
    needs_feature_scale: str | None = None,
    works_coarse: bool = True,
) -> Callable[[Callable[..., Any]], Measure]:
    """Make a function of one place and one chunk, giving a number per sample (or a total over them), a measure."""

    def decorate(function: Callable[..., Any]) -> Measure:
        card = Card(
            function.__name__, id, family, symbol, _meaning(function), source, unit, cost, frozenset(invariant_under)
        )
        return Measure(
            card,
            function,
            reduce,
            place,
            answer,
            invariances=invariances,
            needs=frozenset(needs),
            sketched=sketched,
            total=total,
            finish=finish,
            curvature=curvature,
            needs_feature_scale=needs_feature_scale,
            works_coarse=works_coarse,
        )

    return decorate


def on_lens(
    *,
    id: str,
    family: str,
    symbol: str,
    source: str,
    unit: str,
    cost: str = "one forward",
    invariant_under: Iterable[str] = (),
    invariances: Mapping[tuple[str, Option], frozenset[str]] | None = None,
    held_out: bool = False,
    works_coupled: bool = False,
    of_parameters: bool = True,
    on_request: bool = False,
) -> Callable[[Callable[..., Estimate | Parts]], Measure]:
    """Make a function of the whole network, giving an Estimate or several parts, a measure.

    The function takes the lens; with `on_request` the lens and the run: it costs products, searches or random draws,
    and is run when asked for by name.
    """

    def decorate(function: Callable[..., Estimate | Parts]) -> Measure:
        card = Card(
            function.__name__, id, family, symbol, _meaning(function), source, unit, cost, frozenset(invariant_under)
        )
        place: Place = "request" if on_request else "network"
        return Measure(
            card,
            function,
            mean,
            place,
            "input",
            invariances=invariances,
            held_out=held_out,
            works_coupled=works_coupled,
            of_parameters=of_parameters,
        )

    return decorate


def _meaning(function: Callable[..., Any]) -> str:
    """The docstring's first line."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def parse(spelling: str, known: Mapping[str, Measure]) -> Measure:
    """A measure from the way the command line spells it: `mls`, `local_volume(top_k=3)`."""
    try:
        tree = ast.parse(spelling.strip(), mode="eval").body
        name = tree.func if isinstance(tree, ast.Call) else tree
        if not isinstance(name, ast.Name) or (isinstance(tree, ast.Call) and tree.args):
            raise ValueError(spelling)
        options = (
            {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg} if isinstance(tree, ast.Call) else {}
        )
    except (SyntaxError, ValueError) as error:
        raise BadInput(
            f"measure {spelling!r}: write a name, or a name with options such as local_volume(top_k=3)"
        ) from error
    if name.id not in known:
        raise UnknownName.among("measure", name.id, known)
    return known[name.id](**options)
