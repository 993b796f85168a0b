"""The two ends of a path: one network's architecture at two sets of weights, and the risk anywhere between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatlens.errors import BadInput
from flatlens.measures import Lens
from flatlens.perturbation import Elsewhere
from flatlens.problem import Problem
from flatlens.problem.eval_context import copy_of, unwrapped
from flatlens.problem.ranks import ALONE

MOST_TOGETHER = 512  #: samples that a BatchNorm normalises together, at most
_CALL = "path"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def network_of(given: object) -> nn.Module | None:
    """Return the network of a lens, a problem or a network itself; None for anything else."""
    of = given.problem if isinstance(given, Lens) else given
    inner = unwrapped(of.model if isinstance(of, Problem) else of)
    return inner if isinstance(inner, nn.Module) else None


def lens_of(given: object, argument: str, call: str) -> Lens:
    """Return the lens of a problem, or a lens itself; refuse networks that cannot be moved."""
    if not isinstance(given, Lens | Problem):
        got = type(given).__name__
        raise BadInput(f"expected a Problem or a Lens, got {got}", argument=argument, call=call)
    lens = given if isinstance(given, Lens) else Lens(given)
    lens.require_fresh()
    if lens.problem.sharded:
        raise BadInput("the network's parameters are spread over processes", argument=argument, call=call)
    return lens


def statistics_anew(problem: Problem) -> tuple[Problem, str]:
    """Return the problem with BatchNorm's statistics those of the data at any weights, and what was done in words.

    BatchNorms with running statistics then normalise over all samples at once, or over parts of equal size of at most
    `MOST_TOGETHER` samples. Between two networks the running statistics of neither are those of the network.
    """
    normalised = [m for m in problem.model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if problem.coupled:
        return problem, f"BatchNorm normalises over {problem.ghost_batch} samples at a time at every point"
    if not normalised:
        return problem, ""
    parts = math.ceil(problem.n / MOST_TOGETHER)
    size = math.ceil(problem.n / parts)
    while problem.n % size == 1:
        size -= 1
    over = f"all {problem.n:,} samples" if parts == 1 else f"{size} samples at a time"
    anew = problem.in_ghost_batches(size)
    return anew, f"BatchNorm's statistics are computed anew at every point, over {over}"


@dataclass(frozen=True, eq=False)
class Ends:
    """A network at two sets of weights, with one loss on one data set."""

    problem: Problem  #: the first end's, with BatchNorm's statistics computed anew
    elsewhere: Elsewhere  #: the risk at any weights theta, (P,)
    a: Tensor  #: the first end, (P,)
    second: nn.Module  #: a copy of the first network with the second one's values
    note: str  #: what was done with BatchNorm's statistics

    @property
    def b(self) -> Tensor:
        """Return the second end, (P,), in the order of the first."""
        return self.elsewhere.space.flat(dict(self.second.named_parameters()))

    @classmethod
    def of(cls, lens: Lens, b: object) -> Ends:
        """Return the ends of a path from a lens's network to another one that differs from it in values alone."""
        problem, note = statistics_anew(lens.problem.changed(ranks=ALONE, facts={}))
        model = lens.model if problem.model is lens.problem.model and lens.model is not None else problem.measured()
        second = copy_of(model, "a path")
        # the values of another network, or of a state dict, are written into the copy
        given = network_of(b)
        if given is None and not isinstance(b, Mapping):
            what = f"expected a network, a lens or values by name, got {type(b).__name__}"
            raise BadInput(what, argument="b", call=_CALL)
        values: dict[str, Any] = {}
        if isinstance(b, Mapping):
            values = dict(b)
        elif given is not None:
            values = {**dict(given.named_parameters()), **dict(given.named_buffers())}
        parameters, buffers = dict(second.named_parameters()), dict(second.named_buffers())
        known = parameters | buffers
        tied = second.state_dict().keys() - known.keys()  # further names of a parameter of several modules
        foreign = [name for name in values if name not in known and name not in tied]
        missing = [name for name in parameters if name not in values]
        if foreign or missing:
            first = f"only the second has {foreign[0]!r}" if foreign else f"only the first has {missing[0]!r}"
            raise BadInput(f"the architectures differ: {first}", argument="b", call=_CALL)
        with torch.no_grad():
            for name, own in known.items():
                value = values.get(name, own)
                if not isinstance(value, Tensor) or value.shape != own.shape:
                    shapes = f"{tuple(own.shape)} and {tuple(getattr(value, 'shape', ()))}"
                    raise BadInput(f"the shapes differ: {name!r} has {shapes}", argument="b", call=_CALL)
                if name in parameters and not bool(torch.isfinite(value).all()):
                    raise BadInput(f"{name!r} has entries that are NaN or inf", argument="b", call=_CALL)
                norm = name.rpartition(".")[2] in _STATISTICS
                if name in buffers and not norm and not torch.equal(value.to(own), own):
                    raise BadInput(f"the buffers differ: {name!r}", argument="b", call=_CALL)
                own.copy_(value)
        # the risk at any weights; a network that is given must be the same function of its parameters
        names = [name for name, p in model.named_parameters() if p.is_floating_point()]
        elsewhere = Elsewhere(problem, names, model=model)
        ends = cls(problem, elsewhere, elsewhere.here, second, note)
        if given is None:
            return ends
        batch = problem.place(problem.probes[0])
        other = problem.changed(model=given, seen=None).measured()
        with torch.no_grad():
            with problem.measuring(elsewhere.model):
                f = elsewhere.run(ends.b, batch)[0]
            with problem.measuring(other):
                g = problem.run(other, batch)[0]
        apart = float((f - g).detach().abs().max()) if f.shape == g.shape else math.inf
        if not apart <= 1e4 * torch.finfo(f.dtype).eps * max(float(g.detach().abs().max()), 1e-300):
            what = "the networks are different functions of the same parameters"
            raise BadInput(what, argument="b", call=_CALL, remedy="give two checkpoints of one architecture")
        return ends
