"""A known distribution of data, and the covering radius that given points reach on its support."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flatlens.distributions.covering import Rule
from flatlens.errors import BadInput
from flatlens.estimate import Estimate


class Distribution(ABC):
    """A distribution P of inputs x in R^m, m = `dimension`. Classes derived from it are final.

    >>> from flatlens.distributions import Cube
    >>> Cube(3).dimension
    3
    """

    support_is_convex = False  #: whether the support is known to be convex, as sharpening Thm 4.3 needs

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Return m, the dimension of the space that holds the samples."""

    @property
    def intrinsic(self) -> int:
        """Return the dimension of the support: covering it within delta takes about delta^-intrinsic samples."""
        return self.dimension

    @property
    @abstractmethod
    def diameter(self) -> float:
        """Return the largest distance between two points of the support; infinite where it is unbounded."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return independent samples, (n, dimension) float64, on the generator's device."""

    @abstractmethod
    def log_density(self, x: Tensor) -> Tensor:
        """Return log p of points x (n, dimension): (n,) float64; -inf outside the support.

        The density is with respect to Lebesgue's measure; on a manifold, to the manifold's own volume.
        """

    @abstractmethod
    def covering_radius(self, samples: int, failure: float, *, rule: Rule = "exact") -> Estimate:
        """Return delta(N, eps), N = `samples`, eps = `failure`: the distance within which N samples cover the support.

        With probability >= 1 - eps, supp(P) lies in the union of the balls B(x_i, delta) (sharpening Def. 4.1). In
        the unit of x. `rule` chooses: "exact" is Eq. 19 with the exact measure of the smallest ball; "published" is the
        printed formula, Eq. 6 or 7, undefined where its condition fails; "tight" is the smallest radius that (*)
        of `covering` proves. All are upper bounds, and at most the diameter.
        """

    def extreme_points(self, most: int, generator: torch.Generator) -> Tensor:
        """Return points of the support that samples are slow to reach, (k, dimension), 0 <= k <= most; none by default.

        A sphere has none, as all its points are alike, nor has R^m: there is always a point further out.
        """
        return torch.zeros(0, self.dimension, dtype=torch.float64, device=generator.device)


def drawable(n: int, generator: torch.Generator, argument: str) -> None:
    """Raise if no samples can be drawn with these arguments."""
    check_whole(n, f"{argument}(n")
    if not isinstance(generator, torch.Generator):
        raise BadInput(f"{argument}(generator=...): a torch.Generator is needed, got {type(generator).__name__}")


def check_whole(number: int, argument: str) -> None:
    """Raise for anything but a whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise BadInput(f"{argument}={number!r}): a whole number of at least 1 is needed")


def points(x: Tensor, dimension: int, argument: str) -> Tensor:
    """Return the points in float64, (n, dimension); raise if the shape is wrong or an entry is not finite."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != dimension or x.is_complex():
        got = f"{(*x.shape,)}" if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"{argument}: a real tensor of shape (n, {dimension}) is needed, got {got}")
    if not bool(torch.isfinite(x).all()):
        raise BadInput(f"{argument}: some entries are NaN or inf")
    return x.to(torch.float64)


_ENTRIES = 2**22  #: differences held in memory at a time


def covering_radius_of(
    x: Tensor, distribution: Distribution, *, probes: int = 10_000, generator: torch.Generator | None = None
) -> Estimate:
    """Return the covering radius of points x (n, dimension), from below: max over probes y of min_i ||y - x_i||.

    rho(x) is the supremum over the whole support (sharpening Def. 4.1, and the proof of Thm 4.2). Here it is searched
    among `probes` samples and at most as many extreme points. In the unit of x. The furthest probe is in
    `arrays["furthest"]`.

    >>> from flatlens.distributions import Cube
    >>> centre = torch.full((1, 2), 0.5)
    >>> round(covering_radius_of(centre, Cube(2)).value ** 2, 12)  # the corners
    0.5
    """
    x = points(x, distribution.dimension, "covering_radius_of(x)")
    check_whole(len(x), "covering_radius_of(number of points")
    check_whole(probes, "covering_radius_of(probes")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    y = torch.cat([distribution.extreme_points(probes, generator), distribution.sample(probes, generator)]).to(x)
    # From differences, as products of vectors would cancel
    parts = torch.split(y, max(1, _ENTRIES // x.numel()))
    distances = torch.cat([torch.cdist(part, x, compute_mode="donot_use_mm_for_euclid_dist").amin(1) for part in parts])
    furthest = {"furthest": y[int(distances.argmax())].cpu()}
    return Estimate(float(distances.max()), kind="lower bound", note=f"the furthest of {len(y)} points of the support",
                    arrays=furthest, source="sharpening Def. 4.1")  # fmt: skip
