"""A known distribution of data, and the covering radius that given points reach on its support.

The covering radius delta(N, eps), by three rules: how close N samples come to every point of their support.

Let Phi(r) = min_x P[B(x, r)], the measure of the smallest ball about a point of the support. If some y of the support
has no sample within R, then no z within s of y has a sample within R - s. So the points of the support without a sample
within R - s have measure Phi(s) at least. The expectation of that measure is at most (1 - Phi(R - s))^N. By Markov's
inequality, for every s,

    P[rho(X_N) > R] <= Phi(s)^-1 (1 - Phi(R - s))^N.          (*)

With s = t and R = 2t it is the paper's Eq. 16 (sharpening, proof of Thm 4.2). The paper's own argument counts a largest
set of points with distances of t at least; its Eq. 15 takes the balls of radius t about them as disjoint, and on a
circle the measures of these balls sum to 2, not to 1. Its conclusion, Eq. 19, also needs log(N/eps) >= 1: for eps = 0.9
it says that one sample covers [0, 1] within 0.21, which is false. So nothing is called an upper bound here unless (*)
confirms it.

How densely samples cover the support of an unknown distribution, from held-out samples, is an approximation. Let rho be
the largest distance of a held-out sample from the N samples, over M of them. With probability 1 - eta the points of the
support that lie further away have measure at most p = log(1/eta) / M, whatever the distribution. If some y of the
support had no sample within rho + s, the ball B(y, s) would lie among them, so that its measure is at most p. Hence the
covering radius is at most rho + Phi^-1(p). Phi is not known: Phi^-1(p) is taken as the largest distance of a held-out
sample from its k-th neighbour among the others, k = p M rounded up. This is where the approximation lies: a ball about
a point that was not drawn may hold less.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined

Rule: TypeAlias = Literal["exact", "published", "tight"]
RULES: tuple[Rule, ...] = ("exact", "published", "tight")

_KNOWN = 1e-10  #: error of log Phi: a ball of larger log measure is treated as one of this little less than all
THEOREM = "sharpening Thm 4.2"
_STEP = 2**-0.5  #: ratio of each value of s to the one before
FRACTIONS = [0.75 * _STEP**k for k in range(20)]
"""Values of s / R tried before the best is refined; (*) holds for each."""


@dataclass(frozen=True)
class SmallestBall:
    """Phi: the measure of the smallest ball of a radius about a point of the support."""

    log_measure: Callable[[float], float]  #: log Phi(r), r > 0, non-decreasing; 0 from the diameter on
    diameter: float

    def radius(self, log_measure: float) -> float:
        """Return Phi^-1 of a measure given by its log; at most the diameter."""
        if log_measure >= -_KNOWN:
            return self.diameter
        top = math.log(self.diameter)
        if self.log_measure(math.exp(top)) <= log_measure:  # only rounding, in very many dimensions
            return self.diameter
        reach = 1.0
        while self.log_measure(math.exp(top - reach)) > log_measure:
            reach *= 2
        missed = brentq(lambda log_r: self.log_measure(math.exp(log_r)) - log_measure, top - reach, top, xtol=1e-13)
        return math.exp(float(missed))

    def log_failure(self, R: float, samples: int) -> float:
        """Return the log of an upper bound of P[rho(X_N) > R]: (*) of this module, at the best of some s."""
        if self.diameter <= R:
            return -math.inf
        bounds = [0.0]
        for s in (R * fraction for fraction in FRACTIONS):
            held = math.exp(min(self.log_measure(R - s), -_KNOWN))
            bounds.append(samples * math.log1p(-held) - self.log_measure(s))
        return min(bounds)

    def proves(self, R: float, samples: int, failure: float) -> bool:
        """Return whether (*) shows P[rho(X_N) > R] <= eps for some s; searches for s if the first few fail."""
        return self.log_failure(R, samples) <= math.log(failure) or tight_radius(self, samples, failure).value <= R


def checked(samples: int, failure: float, rule: str) -> None:
    """Raise if the arguments are outside what the rules can answer."""
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= 1e300:
        raise BadInput(f"covering_radius(samples={samples!r}): expected a whole number from 1 to 1e300")
    if isinstance(failure, bool) or not isinstance(failure, float) or not 0 < failure < 1:
        raise BadInput(f"covering_radius(failure={failure!r}): expected a probability, above 0 and below 1")
    if rule not in RULES:
        raise BadInput(f"choose from {', '.join(RULES)}", argument="rule", value=rule, call="covering_radius")


def log_share(samples: int, failure: float) -> float:
    """Return the log of log(N / eps) / N, the measure that Eq. 19 requires of a ball."""
    return math.log(math.log(samples) - math.log(failure)) - math.log(samples)


def exact_radius(ball: SmallestBall, samples: int, failure: float) -> Estimate:
    """Return 2 Phi^-1(log(N/eps) / N), sharpening Eq. 19 with Phi exact; `tight_radius` where (*) does not prove it."""
    R = 2 * ball.radius(log_share(samples, failure))
    if ball.proves(R, samples, failure):
        return _bound(R, ball, "Eq. 19, exact measure of the smallest ball", f"{THEOREM}, Eq. 19")
    note = f"Eq. 19 gives {R:.6g}, but its proof needs log(N/eps) >= 1: rule 'tight' instead"
    return replace(tight_radius(ball, samples, failure), note=note)


def tight_radius(ball: SmallestBall, samples: int, failure: float) -> Estimate:
    """Return min over s of s + Phi^-1(1 - (eps Phi(s))^(1/N)): the smallest radius that (*) of this module proves."""

    def reaches(log_s: float) -> float:
        s = math.exp(log_s)
        return s + ball.radius(math.log(-math.expm1((math.log(failure) + ball.log_measure(s)) / samples)))

    start = math.log(min(ball.diameter, 2 * ball.radius(log_share(samples, failure))))
    tried = [start + math.log(fraction) for fraction in FRACTIONS]
    best = min(tried, key=reaches)
    width = -math.log(_STEP)
    refined = minimize_scalar(reaches, bounds=(best - width, best + width), method="bounded", options={"maxiter": 20})
    R = min(reaches(best), float(refined.fun))
    return _bound(R, ball, "best split of the radius, exact measures", f"{THEOREM}, Eq. 16 with the best split")


COMPUTED = {"exact": exact_radius, "tight": tight_radius}  #: the rules that need no printed formula


def published_radius(R: float, equation: str, ball: SmallestBall, samples: int, failure: float) -> Estimate:
    """Return the radius of a printed formula, if (*) confirms it; else undefined."""
    if not ball.proves(R, samples, failure):
        small = f"which is too small to be proven for N = {samples}, eps = {failure:g}"
        return undefined(f"{equation} says {R:.6g}, {small}")
    note, full = f"{equation} as published", 2 * ball.radius(log_share(samples, failure))
    if full * (1 - 1e-9) > R:
        note += f"; the proof it comes with would need {full:.6g}, Eq. 19 with the exact measure of the smallest ball"
    return _bound(R, ball, note, f"{THEOREM}, {equation}")


def _bound(R: float, ball: SmallestBall, note: str, source: str) -> Estimate:
    """Return the estimate, at most the diameter: one sample already covers the support within the diameter."""
    if ball.diameter <= R:
        note += f"; cut at the support's diameter, {ball.diameter:.6g}: N is too small to say anything"
    return Estimate(min(R, ball.diameter), kind="upper bound", note=note, source=source)


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
        raise BadInput(f"{argument}(generator=...): expected a torch.Generator, got {type(generator).__name__}")


def check_whole(number: int, argument: str) -> None:
    """Raise for anything but a whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise BadInput(f"{argument}={number!r}): expected a whole number of at least 1")


def points(x: Tensor, dimension: int, argument: str) -> Tensor:
    """Return the points in float64, (n, dimension); raise if the shape is wrong or an entry is not finite."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != dimension or x.is_complex():
        got = f"{(*x.shape,)}" if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"{argument}: expected a real tensor of shape (n, {dimension}), got {got}")
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
    distances = nearest(y, x, 1)[:, 0]
    furthest = {"furthest": y[int(distances.argmax())].cpu()}
    return Estimate(float(distances.max()), kind="lower bound", note=f"the furthest of {len(y)} points of the support",
                    arrays=furthest, source="sharpening Def. 4.1")  # fmt: skip


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
    # From differences, as products of vectors would cancel
    parts = torch.split(y, max(1, _ENTRIES // x.numel()))
    found = [torch.cdist(part, x, compute_mode="donot_use_mm_for_euclid_dist").topk(k, largest=False) for part in parts]
    return torch.cat([one.values for one in found])


def _points(x: Tensor, argument: str) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 2 or len(x) == 0 or not bool(torch.isfinite(x).all()):
        got = f"{(*x.shape,)}" if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"{argument}: expected a tensor of shape (n, m) with finite entries, got {got}")
    return x.to(torch.float64)
