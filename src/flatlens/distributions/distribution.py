"""What it takes for a distribution of data to be known: its samples, its density, and how soon samples cover it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flatlens.distributions.covering import Rule
from flatlens.errors import BadInput
from flatlens.estimate import Estimate


class Distribution(ABC):
    """A distribution P of inputs x in R^m, m = `dimension`. What derives from it is final."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """m, of the space that the samples are vectors of."""

    @property
    @abstractmethod
    def intrinsic(self) -> int:
        """The dimension of the support: covering it within delta takes some delta^-intrinsic samples."""

    @property
    @abstractmethod
    def diameter(self) -> float:
        """No two points of the support are further apart; infinite where it is unbounded."""

    @property
    @abstractmethod
    def support_is_convex(self) -> bool:
        """Whether the support is known to be convex, as sharpening Thm 4.3 needs."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples, (n, dimension) float64, on the generator's device."""

    @abstractmethod
    def log_density(self, x: Tensor) -> Tensor:
        """log p of points x (n, dimension): (n,) float64; -inf outside the support.

        It is a density with respect to Lebesgue's measure; on a manifold, to the manifold's own volume.
        """

    @abstractmethod
    def covering_radius(self, samples: int, failure: float, *, rule: Rule = "exact") -> Estimate:
        """delta(N, eps), N = `samples`, eps = `failure`: so near do N samples come to all of the support at once.

        With probability >= 1 - eps, supp(P) lies in the union of the balls B(x_i, delta) (sharpening Def. 4.1). In
        the unit of x. By `rule`: "exact" is Eq. 19 with the exact measure of the smallest ball; "published" the
        printed formula, Eq. 6 or 7, undefined where its condition fails; "tight" the smallest radius that the proof's
        union bound gives. All of them are upper bounds, none exceeds the diameter.
        """

    @abstractmethod
    def extreme_points(self, most: int, generator: torch.Generator) -> Tensor:
        """Points of the support that samples are slow to reach, (k, dimension), k <= most; none if none stand out."""


def drawable(n: int, generator: torch.Generator, argument: str) -> None:
    """Refuse what no samples can be drawn with."""
    whole(n, f"{argument}(n")
    if not isinstance(generator, torch.Generator):
        raise BadInput(f"{argument}(generator=...): a torch.Generator is needed, got {type(generator).__name__}")


def whole(number: int, argument: str) -> None:
    """Refuse anything but a whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise BadInput(f"{argument}={number!r}): a whole number of at least 1 is needed")


def points(x: Tensor, dimension: int, argument: str) -> Tensor:
    """The points in float64, (n, dimension); refused if of another shape, or not finite."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != dimension or x.is_complex():
        got = f"{(*x.shape,)}" if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"{argument}: a real tensor of shape (n, {dimension}) is needed, got {got}")
    if not bool(torch.isfinite(x).all()):
        raise BadInput(f"{argument}: every entry must be finite")
    return x.to(torch.float64)
