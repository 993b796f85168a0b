"""How densely samples cover the support of an unknown distribution: from held-out samples, an approximation.

Let rho be the largest distance of a held-out sample from the N samples, over M of them. With probability 1 - eta the
points of the support that lie further away have measure at most p = log(1/eta) / M, whatever the distribution. If some
y of the support had no sample within rho + s, the ball B(y, s) would lie among them, so that its measure is at most p.
Hence the covering radius is at most rho + Phi^-1(p), Phi(s) the measure of the smallest ball of radius s. Phi is not
known: Phi^-1(p) is taken as the largest distance of a held-out sample from its k-th neighbour among the others, k = p M
rounded up. This is where the approximation lies: a ball about a point that was not drawn may hold less.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatlens.distributions.distribution import check_whole
from flatlens.errors import BadInput
from flatlens.estimate import Estimate

_ENTRIES = 2**22  #: differences held in memory at a time


def intrinsic_dimension(x: Tensor, *, neighbours: int = 20) -> Estimate:
    """Return the dimension of the set near which points x (n, m) lie, by the distances of their nearest neighbours.

    The maximum-likelihood estimate of Levina and Bickel (2004), with inverses averaged over the points (MacKay and
    Ghahramani): 1 / d = mean_i sum_{j<k} log(T_k / T_j) / (k - 2), T_j the distance to the j-th neighbour, k =
    `neighbours`. Points that occur twice count once. It is too small where the density changes within k neighbours,
    which it does in many dimensions. The error counts one point in k, as neighbours share their distances.

    >>> line = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)) @ torch.ones(1, 7)
    >>> abs(intrinsic_dimension(line).value - 1) < 0.1
    True
    """
    apart: Tensor = torch.unique(_points(x, "intrinsic_dimension(x)"), dim=0)
    check_whole(neighbours, "intrinsic_dimension(neighbours")
    if not 3 <= neighbours < len(apart):
        needed = f"expected 3 to {len(apart) - 1}, fewer than the {len(apart)} different points"
        raise BadInput(f"intrinsic_dimension(neighbours={neighbours}): {needed}")
    T = nearest(apart, apart, neighbours + 1)[:, 1:]
    inverse = (T[:, -1:] / T[:, :-1]).log().sum(1) / (neighbours - 2)
    d = 1 / float(inverse.mean())
    stderr = d * d * float(inverse.std()) * math.sqrt(neighbours / len(apart))
    return Estimate(d, stderr, "estimate", note=f"of {neighbours} neighbours", source="Levina and Bickel 2004")


def empirical_covering_radius(x: Tensor, held_out: Tensor, failure: float = 0.05) -> Estimate:
    """Return an approximation of the distance within which samples x (n, m) cover the support, from held-out samples.

    In the unit of x. `arrays` has `reached`, the largest distance of a held-out sample from x, a lower bound; and
    `further`, what is added for points of the support that were not drawn. Half of `failure` is the probability that
    more of the support than said lies beyond `reached`. The note has the intrinsic dimension d: the radius falls with
    the number of samples as (log(N/eps) / N)^(1/d) (sharpening Thm 4.2).

    >>> x, y = torch.rand(2, 400, 2, generator=torch.Generator().manual_seed(0))
    >>> found = empirical_covering_radius(x, y)
    >>> found.kind, bool(found.arrays["reached"] < found.value)
    ('estimate', True)
    """
    x, y = _points(x, "empirical_covering_radius(x)"), _points(held_out, "empirical_covering_radius(held_out)")
    if x.shape[1] != y.shape[1]:
        raise BadInput(f"empirical_covering_radius: {x.shape[1]} entries of x and {y.shape[1]} of held_out")
    if isinstance(failure, bool) or not isinstance(failure, float) or not 0 < failure < 1:
        raise BadInput(f"empirical_covering_radius(failure={failure!r}): expected a probability, above 0 and below 1")
    k = math.ceil(math.log(2 / failure))
    if len(y) < k + 2:
        raise BadInput(f"empirical_covering_radius: expected at least {k + 2} held-out samples, got {len(y)}")
    reached = nearest(y, x.to(y), 1).max()
    further = nearest(y, y, k + 1)[:, -1].max()
    share = math.log(2 / failure) / len(y)
    told = f"an approximation: {share:.2g} of the support may lie beyond {float(reached):.4g}"
    together = torch.unique(torch.cat([x.to(y), y]), dim=0)
    if len(together) > 3:
        d = intrinsic_dimension(together, neighbours=min(20, len(together) - 1))
        told += f"; intrinsic dimension {d.value:.3g} +- {1.96 * d.stderr:.2g}"
    arrays = {"reached": reached.cpu(), "further": further.cpu()}
    return Estimate(float(reached + further), math.nan, "estimate", note=told, arrays=arrays, source="flatlens")


def nearest(y: Tensor, x: Tensor, k: int) -> Tensor:
    """Return the distances of each y (n, m) from its k nearest x (N, m), (n, k) ascending."""
    parts = torch.split(y, max(1, _ENTRIES // x.numel()))
    found = [torch.cdist(part, x, compute_mode="donot_use_mm_for_euclid_dist").topk(k, largest=False) for part in parts]
    return torch.cat([one.values for one in found])


def _points(x: Tensor, argument: str) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 2 or len(x) == 0 or not bool(torch.isfinite(x).all()):
        got = f"{(*x.shape,)}" if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"{argument}: expected a tensor of shape (n, m) with finite entries, got {got}")
    return x.to(torch.float64)
