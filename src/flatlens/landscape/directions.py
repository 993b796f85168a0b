"""Directions of a plane through a network: random by filters, leading eigenvectors, components of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.curvature import Hessian, eigenspace
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Progress
from flatlens.landscape.ends import network_of
from flatlens.perturbation import Elsewhere

WhichDirections: TypeAlias = Literal["random", "eigenvectors"] | Sequence[nn.Module | Mapping[str, Tensor]]
OFFERED = ("random", "eigenvectors")


@dataclass(frozen=True, eq=False)
class Axes:
    """Two directions, their names, and how far a plane goes along each."""

    vectors: tuple[Tensor, Tensor]  #: (P,) each
    names: tuple[str, str]
    extents: tuple[float, float]  #: the largest |x| and |y| by default, in steps of a direction
    note: str
    trajectory: Tensor | None = None  #: of checkpoints: x, y and the distance from the plane, (k, 3) float64


def axes_of(
    elsewhere: Elsewhere,
    hessian: Hessian,
    kind: WhichDirections,
    scale: float,
    generator: torch.Generator,
    progress: Progress,
) -> Axes:
    """Return two directions of a kind; `scale` is a loss that a plane along eigenvectors should reach.

    Raises:
        UnknownName, BadInput: there is no such kind, or too few checkpoints, or they are of another architecture.
    """
    if isinstance(kind, str):
        if kind not in OFFERED:
            raise UnknownName.among("kind of directions", kind, OFFERED, argument="directions", call="plane")
        return _random(elsewhere, generator) if kind == "random" else _leading(hessian, scale, generator, progress)
    return _principal(elsewhere, kind)


def _random(elsewhere: Elsewhere, generator: torch.Generator) -> Axes:
    """Return two directions with the norm of the weights, filter by filter (Li et al. 2018, section 4)."""
    first, second = (by_filter(elsewhere, generator) for _ in range(2))
    note = "directions: random, each row or filter with the norm of the network's; biases and norms do not move"
    return Axes((first, second), ("random direction 1", "random direction 2"), (1.0, 1.0), note)


def by_filter(elsewhere: Elsewhere, generator: torch.Generator) -> Tensor:
    """Return a normal direction d, (P,), with ||d_j|| = ||theta_j|| for each row or filter j of each weight.

    Parameters of one dimension, such as biases and the scales of norms, are 0 in it.
    """
    parts = {}
    for name, p in elsewhere.space.parameters.items():
        if p.ndim < 2:
            continue
        theta = p.detach().to("cpu", torch.float64).flatten(1)
        d = torch.randn(theta.shape, generator=generator, dtype=torch.float64)
        d *= theta.norm(dim=1, keepdim=True) / d.norm(dim=1, keepdim=True).clamp(min=1e-300)
        parts[name] = d.reshape(p.shape)
    return elsewhere.space.flat(parts)


def _leading(hessian: Hessian, scale: float, generator: torch.Generator, progress: Progress) -> Axes:
    """Return the two leading eigenvectors of the Hessian, by value."""
    found = eigenspace(hessian, 2, rtol=1e-3, generator=generator, progress=progress)
    if len(found.values) < 2:
        raise BadInput("the Hessian has fewer than two eigenvalues that are not 0", argument="directions",
                       value="eigenvectors", call="plane", remedy='"random" needs none')  # fmt: skip
    values = [float(value) for value in found.values[:2]]
    reach = [(2 * scale / abs(value)) ** 0.5 for value in values]
    names = (f"eigenvector of {values[0]:.4g}", f"eigenvector of {values[1]:.4g}")
    if names[0] == names[1]:
        names = (f"first {names[0]}", f"second {names[1]}")
    space = "" if found.converged else "; the search for them has not converged"
    space += "; a multiplet: they are two directions of several" if found.extended else ""
    note = f"directions: the two leading eigenvectors of the Hessian, of length 1{space}"
    return Axes((found.vectors[0], found.vectors[1]), names, (reach[0], reach[1]), note)


def _principal(elsewhere: Elsewhere, given: object) -> Axes:
    """Return the two leading principal components of checkpoints less the network (Li et al. 2018, section 7)."""
    if not isinstance(given, Sequence) or len(given) < 2:
        raise BadInput('expected "random", "eigenvectors" or at least two checkpoints', argument="directions",
                       call="plane")  # fmt: skip
    rows = torch.stack([_difference(elsewhere, one, number) for number, one in enumerate(given)])
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    if not float(values[1]) > 1e-12 * float(values[0]):
        what = "the checkpoints and the network lie on one line"
        raise BadInput(what, argument="directions", call="plane", remedy="give more checkpoints")
    at = rows @ vectors[:2].T
    off = (rows - at @ vectors[:2]).norm(dim=1)
    shares = (values.square() / values.square().sum())[:2].tolist()
    reach = [1.2 * float(column.abs().max()) for column in at.T]
    note = (f"directions: principal components of {len(rows)} checkpoints, with {shares[0]:.0%} and {shares[1]:.0%} of "
            f"their squared distances; checkpoints lie up to {float(off.max()):.3g} off the plane")  # fmt: skip
    axes = tuple(vector.to(elsewhere.here) for vector in vectors[:2])
    names = ("principal component 1", "principal component 2")
    return Axes((axes[0], axes[1]), names, (reach[0], reach[1]), note, torch.cat([at, off[:, None]], 1))


def _difference(elsewhere: Elsewhere, given: object, number: int) -> Tensor:
    net = network_of(given)
    values = dict(net.named_parameters()) if net is not None else given
    parts = {}
    for name, p in elsewhere.space.parameters.items():
        value = values.get(name) if isinstance(values, Mapping) else None
        if not isinstance(value, Tensor) or value.shape != p.shape or not bool(torch.isfinite(value).all()):
            what = f"checkpoint {number} has no finite {name!r} of shape {tuple(p.shape)}"
            raise BadInput(what, argument="directions", call="plane")
        parts[name] = value.detach().to("cpu", torch.float64) - p.detach().to("cpu", torch.float64)
    return torch.cat([part.flatten() for part in parts.values()])
