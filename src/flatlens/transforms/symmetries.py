"""The symmetries of a network's attentions, norms and gates: found in autograd's graph, and tried.

What `operations.pair_finders` finds is tried on a few samples: weights are moved, and the outputs must
stay. What stays out says why. A network that torch.fx cannot trace has them as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from flatlens.errors import typed_line
from flatlens.grams.record import READ_ON, read_heads
from flatlens.operations.graph import Graph
from flatlens.operations.pair_finders import NormScale
from flatlens.operations.weight_pairs import HeadOrder, WeightPair
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK, take
from flatlens.problem.eval_context import size_of_parts
from flatlens.problem.forward import forwards

STAYS_WITHIN = 1e4  #: allowed difference of the outputs, in machine epsilons of the largest output, or of `terms`
OUTPUTS_CHANGE = "the outputs change: something else reads these features, or distinguishes the heads"
Symmetry: TypeAlias = WeightPair | HeadOrder | NormScale
_S = TypeVar("_S", WeightPair, HeadOrder, NormScale)


@dataclass(frozen=True, eq=False)
class OfKind:
    """The symmetries of one kind, and the places without, with the reason."""

    symmetries: tuple[Symmetry, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Symmetries:
    """The symmetries of one network, by kind."""

    queries: OfKind = OfKind()
    values: OfKind = OfKind()
    orders: OfKind = OfKind()
    norms: OfKind = OfKind()
    gates: OfKind = OfKind()


def read_symmetries(problem: Problem, model: nn.Module) -> Symmetries:
    """Return the symmetries of a network; its weights are moved and put back."""
    try:
        with read_heads(problem, model) as (heads, scales):
            graph = heads.graph
            read = [
                _Read(_alone(graph, model, _once(heads.queries)), heads.refused_queries),
                _Read(_alone(graph, model, _once(heads.values)), heads.refused_values),
                _Read(_alone(graph, model, _once(heads.orders)), heads.refused_queries | heads.refused_values),
                _Read(_alone(graph, model, _once(scales.norms)), scales.refused_norms),
                _Read(_alone(graph, model, _once(scales.gates)), scales.refused_gates, told=False),
            ]
    except Exception as error:  # the network's own forward() may do anything
        unread = OfKind(left={"": f"autograd's graph of the network cannot be read ({typed_line(error, 120)})"})
        return Symmetries(unread, unread, unread, unread, unread)
    trial = _Trial(problem, model)
    return Symmetries(*(trial.kept(one) for one in read))


def move_symmetry(model: nn.Module, one: Symmetry, generator: torch.Generator) -> None:
    """Move the weights of one symmetry by a random amount."""
    parameters = dict(model.named_parameters())
    if isinstance(one, HeadOrder):
        one.move(parameters, generator)
    else:
        one.move(parameters, one.drawn(generator))


@dataclass(frozen=True, eq=False)
class _Read:
    """The symmetries of one kind that the graph shows, before they are tried."""

    alone: tuple[Sequence[Symmetry], Mapping[str, str]]  #: symmetries, and those left because weights act elsewhere
    refused: Mapping[str, str]
    told: bool = True  #: whether one that changes the outputs is worth a line: not every product of two is a gate


def _once(found: Iterable[_S]) -> list[_S]:
    # Each set of weights once; where it acts several times, with all operations through which it does
    unique: dict[object, _S] = {}
    for one in found:
        known = unique.get(one.key)
        unique[one.key] = one if known is None else replace(known, nodes=known.nodes | one.nodes)
    return list(unique.values())


def _alone(graph: Graph, model: nn.Module, found: list[_S]) -> tuple[list[_S], dict[str, str]]:
    """Return the symmetries whose weights act nowhere else, and why the others are left."""
    parameters, kept, left = dict(model.named_parameters()), [], {}
    for one in found:
        for entries in one.entries:
            acting = graph.acting(parameters[entries.parameter])
            leaves = [graph.leaf_of(edge) for node, edge in acting if node not in one.nodes]
            if any(leaf is None or bool(torch.isin(entries.at, leaf[1]).any()) for leaf in leaves):
                left[str(one)] = f"{entries.parameter} acts elsewhere, too"
                break
        else:
            kept.append(one)
    return kept, left


class _Trial:
    """A network whose weights are moved and put back: do its outputs stay?"""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        self.problem, self.model = problem, model
        self.expected = list(self._outputs())

    @cached_property
    def terms(self) -> float:
        return terms(self.problem, self.model)  # of the weights as they are

    def kept(self, read: _Read) -> OfKind:
        found, left = read.alone
        stay = list(found)
        if not self._stays(stay):
            stay = [one for one in found if self._stays([one])]
        changed = {str(one): OUTPUTS_CHANGE for one in found if one not in stay and read.told}
        return OfKind(tuple(stay), {**read.refused, **left, **changed})

    def _stays(self, several: Sequence[Symmetry]) -> bool:
        # Whether the outputs stay when these symmetries are moved together
        if not several:
            return True
        generator, terms = torch.Generator().manual_seed(0), self.terms
        names = {entries.parameter for one in several for entries in one.entries}
        parameters = dict(self.model.named_parameters())
        before = {name: parameters[name].detach().clone() for name in names}
        try:
            for one in several:
                move_symmetry(self.model, one, generator)
            with closing(self._outputs()) as outputs:
                for f, expected in zip(outputs, self.expected, strict=False):
                    apart = float((f - expected).abs().max().nan_to_num(nan=float("inf")))
                    allowed = STAYS_WITHIN * torch.finfo(f.dtype).eps * max(float(expected.abs().max()), terms)
                    if apart > allowed:  # more than rounding
                        return False
                return True
        finally:
            with torch.no_grad():
                for name, values in before.items():
                    parameters[name].copy_(values)

    def _outputs(self) -> Generator[Tensor]:
        # On two samples, then on all that the memory holds: most of what changes shows on two
        few, left = take(self.problem.probes[0], 0, READ_ON), self.problem.memory // 16
        batches = chain([few], self.problem.batches(FORWARD_CHUNK))
        with closing(forwards(self.problem, self.model, batches)) as found:
            for f, _ in found:
                yield f
                left -= f.nbytes
                if left < 0:
                    return


def terms(problem: Problem, model: nn.Module) -> float:
    """Return the size of parts that may cancel in the outputs, on a few samples."""

    def outputs(moved: nn.Module) -> Tensor:
        with closing(forwards(problem, moved, [problem.probes[0]])) as found:
            return next(found)[0]

    return size_of_parts(model, "a transform", outputs)
