"""The definition of a transform: it changes a copy's weights, and proves on the data that the outputs are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import nn

from flatlens.deprecated_names import FORMER_TRANSFORMS
from flatlens.errors import BadInput, BadModel, FunctionChanged
from flatlens.operations.weight_pairs import factors
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK
from flatlens.problem.eval_context import copy_of
from flatlens.problem.ranks import ALONE
from flatlens.progress import by_key
from flatlens.registry import Registry, first_line
from flatlens.transforms.symmetries import STAYS_WITHIN, terms
from flatlens.transforms.wiring import Wiring, read_wiring


@dataclass(frozen=True, eq=False)
class Offer:
    """The links of one network where a transform is valid, and why not elsewhere."""

    links: tuple[Any, ...]  #: links, or symmetries of heads, norms and gates
    left: Mapping[str, str]  #: layers whose features do not move, with the reason

    @classmethod
    def of(cls, found: Mapping[str, tuple[Any, str]]) -> Offer:
        """Return the offer of links by layer, each with the reason why it is left, or without one."""
        links = tuple(link for link, why in found.values() if not why)
        return cls(links, {name: why for name, (_, why) in found.items() if why})

    @property
    def refused(self) -> str:
        """Return why nothing can be moved; empty if something can."""
        if self.links:
            return ""
        reasons = by_key((why, layer) for layer, why in self.left.items())
        told = [f"{', '.join(layers) + ': ' if all(layers) else ''}{why}" for why, layers in reasons.items()]
        return "; ".join(told) or "no layer reads another one's features"


@dataclass(frozen=True, eq=False)
class Moving:
    """The input of a move: a copy of the network, and the links where it may be moved."""

    problem: Problem  #: the original network, its loss and data
    model: nn.Module  #: the copy
    links: tuple[Any, ...]
    generator: torch.Generator

    def factors(self, size: int) -> torch.Tensor:
        """Return random factors, (size,) float64."""
        return factors(size, self.generator)

    def module(self, name: str) -> nn.Module:
        """Return a module of the copy."""
        return self.model.get_submodule(name)


_Move: TypeAlias = Callable[[Moving], str | None]  #: changes the copy's weights in place; may return a note


@dataclass(frozen=True, eq=False)
class Moved:
    """The network with other weights and the same function.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> moved = fl.transforms.permutation.apply(problem)
    >>> moved.difference < 1e-5, moved.model is net
    (True, False)
    """

    transform: str
    problem: Problem  #: the copy, with the same loss and data
    difference: float  #: max |f' - f| over the data
    links: tuple[str, ...]  #: links whose features were moved, as `fc1 -> fc2`
    left: Mapping[str, str] = field(default_factory=dict)  #: layers whose features did not move, with the reason
    note: str = ""

    @property
    def model(self) -> nn.Module:
        """Return the moved copy."""
        return self.problem.model


@final
@dataclass(frozen=True, eq=False)
class Transform:
    """A change of the weights that keeps the network's function.

    >>> import flatlens as fl
    >>> fl.transforms.TRANSFORMS["permutation"].declared_as
    'permutation'
    """

    name: str
    id: str  #: the catalogue's row
    meaning: str  #: one line
    source: str
    declared_as: str | None  #: the transform's name in cards of measures; None if they say nothing about it
    default: bool  #: whether `check_invariance` applies it by default
    where: Callable[[Wiring], Offer]
    move: _Move
    traced: bool = True  #: whether it reads the network as torch.fx traces it; else autograd's graph

    def offer(self, wiring: Wiring) -> Offer:
        """Return where it is valid in the network of this wiring."""
        return Offer((), {"": wiring.unreadable}) if wiring.unreadable and self.traced else self.where(wiring)

    def apply(self, problem: Problem, generator: torch.Generator | None = None) -> Moved:
        """Return a copy of the network, in the measured dtype, with other weights.

        Outputs are compared on all the data.

        Raises `BadModel` where the network has no place for it, `FunctionChanged` where the outputs differ by more
        than rounding: that is an error in flatlens.
        """
        if not isinstance(problem, Problem):
            raise BadInput(f"{self.name}.apply(...): expected a Problem, got {type(problem).__name__}")
        model = copied(problem)
        offer = self.offer(read_wiring(problem, model))
        if offer.refused:
            what = f"cannot be applied to this network: {offer.refused}"
            raise BadModel(what, argument=f"transform {self.name}", call="")
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        note = self.move(Moving(problem, model, offer.links, generator)) or ""
        difference = change_of_outputs(self.name, problem, model)
        links = tuple(map(str, offer.links))
        return Moved(self.name, with_model(problem, model), difference, links, offer.left, note)

    def __repr__(self) -> str:
        return self.name


TRANSFORMS: Registry[Transform] = Registry("transform", Transform, rows="R", former=FORMER_TRANSFORMS)
"""Every transform of the catalogue, by name; each module of transforms adds its own."""


def transform(
    *, id: str, source: str, where: Callable[[Wiring], Offer], declared_as: str | None, name: str = "",
    default: bool = True, traced: bool = True,
) -> Callable[[_Move], Transform]:  # fmt: skip
    """Make a transform from a function that moves weights in place; its docstring's first line is the meaning."""

    def decorate(move: _Move) -> Transform:
        made = Transform(name or move.__name__, id, first_line(move), source, declared_as, default, where, move, traced)
        TRANSFORMS.add(made.name, id, made)
        return made

    return decorate


def copied(problem: Problem) -> nn.Module:
    """Return a copy of the measured network."""
    return copy_of(problem.measured(), "a transform")


def with_model(problem: Problem, model: nn.Module, dtype: torch.dtype | None = None) -> Problem:
    """Return the same problem with another network; a layer's new bias counts if its weight does."""
    known = {name for name, _ in model.named_parameters()}
    before = {name for name, _ in problem.model.named_parameters()}
    added = {name for name in known - before if f"{name.rpartition('.')[0]}.weight" in problem.parameters}
    wider = {} if dtype is None else {"dtype": dtype, "arithmetic": "full"}
    return problem.with_changes(model, parameters=(problem.parameters & known) | added, ranks=ALONE, **wider)


def change_of_outputs(name: str, problem: Problem, moved: nn.Module) -> float:
    """Return max |f' - f| over the data; raise `FunctionChanged` if it is more than rounding."""
    original, difference, largest, eps = problem.measured(), 0.0, 0.0, 0.0
    with problem.measuring(original), problem.measuring(moved), torch.no_grad():
        for raw in problem.batches(FORWARD_CHUNK):
            f, g = (problem.run(model, problem.place(raw))[0] for model in (original, moved))
            difference = max(difference, float((f - g).abs().max().nan_to_num(nan=float("inf"))))
            largest, eps = max(largest, float(f.abs().max())), torch.finfo(f.dtype).eps
    allowed = STAYS_WITHIN * eps
    if difference > allowed * largest and difference > allowed * terms(problem, original):
        changed = f"the outputs changed by {difference:.2g} (largest output: {largest:.2g}), but must not change"
        mend = "This is an error in flatlens: leave the transform out, and please report it"
        raise FunctionChanged(f"transform {name}: {changed}. {mend}")
    return difference
