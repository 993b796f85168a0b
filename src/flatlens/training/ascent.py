"""Sharpness-aware minimisation: a step with the gradient at nearby weights where the loss is largest.

    SAM    eps = rho g / ||g||                                      Foret et al. 2021, Eq. 2
    ASAM   eps = rho T^2 g / ||T g||,  T = diag(|theta| + eta)      Kwon et al. 2021, Eq. 8

g is the gradient at theta of what is minimised on this batch, with regularisers but without weight decay. The step uses
the gradient at theta + eps. Here T covers all trainable parameters; the authors of ASAM set T = 1 for biases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flatlens.errors import BadInput


@dataclass(frozen=True)
class SAM:
    """The largest loss in a ball of radius `rho`, to first order; with 0, plain descent."""

    rho: float = 0.05

    def __post_init__(self) -> None:
        _require_radius(self.rho, "SAM")

    def move(self, parameters: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
        """Return eps, one tensor per parameter."""
        length = norm(slopes)
        return [g * (self.rho / length) if length > 0 else torch.zeros_like(g) for g in slopes]


@dataclass(frozen=True)
class ASAM:
    """The largest loss in an ellipsoid whose axes grow with the parameters; with 0, plain descent."""

    rho: float = 0.5
    eta: float = 0.01

    def __post_init__(self) -> None:
        _require_radius(self.rho, "ASAM")
        if not 0 <= self.eta < math.inf:
            raise BadInput(f"ASAM(eta={self.eta}): it must not be negative")

    def move(self, parameters: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
        """Return eps, one tensor per parameter."""
        units = [p.detach().abs() + self.eta for p in parameters]
        scaled = [T * g for T, g in zip(units, slopes, strict=True)]
        length = norm(scaled)
        return [
            T * s * (self.rho / length) if length > 0 else torch.zeros_like(s)
            for T, s in zip(units, scaled, strict=True)
        ]


Ascent: TypeAlias = SAM | ASAM


def norm(parts: Sequence[Tensor]) -> float:
    """Return the norm of several tensors taken as one vector, summed in float64."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts))


def _require_radius(rho: float, name: str) -> None:
    if not 0 <= rho < math.inf:
        raise BadInput(f"{name}(rho={rho}): the radius must not be negative")
