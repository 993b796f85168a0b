"""The space of curvature vectors: some named parameters, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, UnknownName
from flatlens.problem import Problem
from flatlens.problem.ranks import ALONE, Ranks

CACHED = 1 << 16  #: entries whose products are summed at once


def module_of(parameter: str) -> str:
    """Return the name of the module that has a parameter, "fc" for "fc.weight"; "w" for the network's own "w"."""
    module, parametrized, _ = parameter.partition(".parametrizations.")
    return (module if parametrized else parameter.rpartition(".")[0]) or parameter


@dataclass(frozen=True, eq=False)
class Space:
    """Named parameters as one long vector; `flat` and `named` convert between the two forms."""

    parameters: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """Return P, the number of entries."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Return the parameters themselves."""
        return list(self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the vectors."""
        return next(iter(self.parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the vectors."""
        return next(iter(self.parameters.values())).device

    def point(self) -> Tensor:
        """Return the values of the parameters, (P,)."""
        return self.flat({name: p.detach() for name, p in self.parameters.items()})

    def flat(self, named: Mapping[str, Tensor | None]) -> Tensor:
        """Return one vector (P,); a part that is missing or None is zero."""
        for name in named:
            if name not in self.parameters:
                raise UnknownName.among("parameter", name, self.parameters, where="of this operator")
        parts = []
        for name, p in self.parameters.items():
            part = named.get(name)
            if part is not None and part.shape != p.shape:
                raise BadInput(f"a vector's part {name!r} must have shape {tuple(p.shape)}, got {tuple(part.shape)}")
            parts.append(p.new_zeros(p.numel()) if part is None else part.detach().to(p).reshape(-1))
        return torch.cat(parts)

    def named(self, v: Tensor) -> dict[str, Tensor]:
        """Return views of a vector (P,), or of k vectors (k, P), in the shapes of the parameters."""
        parts = torch.split(v, [p.numel() for p in self.parameters.values()], dim=-1)
        return {
            name: part.reshape((*v.shape[:-1], *p.shape))
            for (name, p), part in zip(self.parameters.items(), parts, strict=True)
        }

    def total(
        self, shares: Iterable[tuple[float, dict[str, Tensor]]], ranks: Ranks = ALONE
    ) -> tuple[float, dict[str, Tensor]]:
        """Return sums over batches and processes of numbers and of gradients by parameter, in float64 if of several."""
        number, total = 0.0, dict[str, Tensor]()
        with ranks.as_one():
            for turn, (share, parts) in enumerate(shares):
                number += share
                if turn == 1:  # copies: autograd may return one tensor as the gradient in two parameters
                    total = {name: part.to(torch.float64, copy=True) for name, part in total.items()}
                total = {name: part.add_(parts[name]) for name, part in total.items()} or parts
        if not total:
            total = self.named(torch.zeros(self.size, dtype=torch.float64, device=self.device))
        if ranks.size == 1:
            return number, total
        own = as_one_vector(total)
        whole = ranks.total(torch.cat([own, own.new_tensor([number])]))
        return float(whole[-1]), self.named(whole[:-1])

    def slices(self) -> dict[str, slice]:
        """Return the slice of each parameter."""
        ends = [*accumulate((p.numel() for p in self.parameters.values()), initial=0)]
        return dict(zip(self.parameters, starmap(slice, pairwise(ends)), strict=True))


def as_one_vector(gradient: Mapping[str, Tensor]) -> Tensor:
    """Return a gradient by parameter as one vector, (P,) float64."""
    return torch.cat([part.to(torch.float64).flatten() for part in gradient.values()])


def inner(u: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> float:
    """Return <u, v> over the names of both, with products in float64."""
    both = [name for name in u if name in v]
    return dot([u[name] for name in both], [v[name] for name in both])


def dot(u: Iterable[Tensor], v: Iterable[Tensor]) -> float:
    """Return the sum of <u_i, v_i>, with products in float64."""
    # piece by piece: whole vectors in float64 take ten times as long, as they do not fit in a core's cache
    total = torch.zeros((), dtype=torch.float64)
    for pair in zip(u, v, strict=True):
        for x, y in zip(*(torch.split(w.reshape(-1), CACHED) for w in pair), strict=True):
            total += (x.to(torch.float64) @ y.to(torch.float64)).cpu()
    return float(total)


def norm(parts: Iterable[Tensor]) -> float:
    """Return the norm of several tensors taken as one vector, summed in float64."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts))


def uphill(
    slopes: Sequence[Tensor], rho: float, units: Sequence[Tensor] | None = None
) -> tuple[Sequence[Tensor], float]:
    """Return SAM's step, to first order: T^2 g and its factor rho / ||T g||, or 0; T is 1, or ASAM's `units`."""
    scaled = slopes if units is None else [T * g for T, g in zip(units, slopes, strict=True)]
    length = norm(scaled)
    direction = slopes if units is None else [T * s for T, s in zip(units, scaled, strict=True)]
    return direction, rho / length if length > 0 else 0.0


def space_of(problem: Problem, model: nn.Module, names: str | Iterable[str] | None = None) -> Space:
    """Return the space of the named parameters, each once, a module's name for all of its own; None: all measured."""
    known = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if names is None:
        chosen = {name: p for name, p in known.items() if name in problem.parameters}
        if not chosen:
            raise BadInput(
                "no parameter to measure: Problem(parameters=...) selects none, or all are frozen "
                "(requires_grad=False); parameters='all' measures frozen ones, too"
            )
        return Space(chosen)
    wanted: dict[str, Tensor] = {}
    for name in [names] if isinstance(names, str) else names:
        inside = {key: p for key, p in known.items() if key == name or key.startswith(f"{name}.")}
        if not inside:
            raise UnknownName.among("parameter or module", name, known)
        wanted |= inside
    return Space({name: p for name, p in known.items() if name in wanted})
