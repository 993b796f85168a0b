"""The covering radius that given points reach on a distribution's support."""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.distributions.distribution import Distribution, check_whole, points
from flatlens.estimate import Estimate

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
    distances = torch.cat([_nearest(part, x) for part in torch.split(y, max(1, _ENTRIES // x.numel()))])
    note = f"the furthest of {len(y)} points of the support"
    furthest = y[int(distances.argmax())].cpu()
    return Estimate(
        float(distances.max()),
        kind="lower bound",
        note=note,
        arrays={"furthest": furthest},
        source="sharpening Def. 4.1",
    )


def _nearest(y: Tensor, x: Tensor) -> Tensor:
    """Return min_i ||y_j - x_i||, (len y,); from differences, as products of vectors would cancel."""
    return torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
