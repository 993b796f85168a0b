"""Distributions on a cube: the uniform one, and standard normal latents, cut off entry by entry.

The measure of a ball about a corner of the unit cube, also where the ball reaches beyond the cube.

    F_d(x) = P(u_1^2 + ... + u_d^2 <= x),  u uniform on [0, 1]^d,  x = r^2

Up to x = 1 this is an orthant of a ball: Eq. 20. Beyond, in few dimensions, a recursion over d gives it,

    F_{d+1}(x) = int_0^1 F_d(x - u^2) du,

and in many dimensions the inverse of the Laplace transform M(z)^d / z, M(z) = int_0^1 exp(-z u^2) du. Where both can be
used they agree to 1e-12 of the value.

The truncation of GANs cuts off normal latents. Sharpening section 4 leaves Gaussian latents to future work: R^d is
covered by no finite sample. The cut-off cube [-c, c]^d is. With s = r / sqrt(d), a ball of radius r about any z of the
cube holds a box of side s that reaches from z towards the centre, in every coordinate. Its measure is least at a
corner, as the density falls with |z_i|, so

    Phi(r) >= ((F(c) - F(c - s)) / (F(c) - F(-c)))^d,    F the normal distribution function,

which is 1 at the diameter 2 c sqrt(d). For r <= c the ball also holds a whole orthant, of a density no less than the
corner's. The larger of the two is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import final

import numpy as np
import torch
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import erf, gammaln, log_ndtr
from torch import Tensor

from flatlens.distributions.distribution import (
    COMPUTED,
    Distribution,
    Rule,
    SmallestBall,
    check_whole,
    checked,
    drawable,
    log_share,
    points,
    published_radius,
)
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined

_Array = NDArray[np.float64]

_FEW = 20  #: most dimensions for the recursion; F, and so its error, grows by 2^(d/2) between x = 1 and 2
NODES = 40  #: nodes of the interpolation, in s = sqrt(x - k) on [k, k + 1]; exact for s^d, error about 4.6^-NODES
ALIAS = 45.0  #: the sampled integral has an error of about d exp(-ALIAS) F: below rounding
BLOCK = 512  #: number of terms summed at a time


def log_corner_measure(d: int, r: float) -> float:
    """Return the log of the volume of the unit cube [0, 1]^d within the distance r of a corner.

    No ball about a point of the cube holds less than the one about a corner: x -> vol(B(x, r) in the cube) is
    log-concave, as a convolution of two log-concave functions, so it is smallest at a corner, for every r.
    """
    x = r * r
    if x >= d:
        return 0.0
    if x <= 1:
        return log_orthant(d) + d * math.log(r)
    return min(0.0, _by_recursion(d, x) if d <= _FEW else _by_laplace(d, x))


def log_orthant(d: int) -> float:
    """Return the log of pi^(d/2) / (2^d Gamma(d/2 + 1)), one orthant of the unit ball: sharpening Eq. 20 at r = 1."""
    return d / 2 * math.log(math.pi) - d * math.log(2) - float(gammaln(d / 2 + 1))


def _by_recursion(d: int, x: float) -> float:
    # From the polynomial of F_d on [k, k + 1]
    k = min(math.floor(x), d - 1)
    angle = math.acos(2 * math.sqrt(x - k) - 1)
    return math.log(float(np.cos(angle * np.arange(NODES)) @ _coefficients(d)[k]))


@lru_cache(maxsize=64)
def _coefficients(d: int) -> _Array:
    """F_d on [k, k + 1] as a Chebyshev series in 2s - 1, k = 0..d-1: (d, nodes)."""
    return np.asarray(_values(d) @ _analysis().T)


@lru_cache(maxsize=64)
def _values(d: int) -> _Array:
    """F_d at x = k + s^2, s the nodes, k = 0..d-1: (d, nodes)."""
    s = _nodes()
    if d == 1:
        return s[None]
    below, before = _step()
    F = np.vstack([_values(d - 1), np.ones_like(s)])  # F_{d-1} is 1 from d - 1 on
    F = F @ below.T + np.vstack([np.zeros_like(s), F[:-1]]) @ before.T
    F[0] = math.exp(log_orthant(d)) * s**d
    return np.asarray(F)


@lru_cache(maxsize=1)
def _step() -> tuple[_Array, _Array]:
    """The recursion at x = k + xi^2 as two matrices on values.

    The first acts on the values on [k, k+1], where u < xi, the second on those on [k-1, k], where u > xi. The argument
    is k + s^2 on the first part and k - 1 + s^2 on the second, with (u, s) on a circle of radius xi or sqrt(1 + xi^2).
    In the angle everything is analytic, so Gauss's rule converges fast.
    """
    points, weights = np.polynomial.legendre.leggauss(NODES)
    xi = _nodes()[:, None]

    def arc(radius: _Array, start: _Array, end: _Array) -> _Array:
        angle = start + (end - start) * (points + 1) / 2
        s = radius * np.cos(angle)
        w = weights * (end - start) / 2 * s  # du = radius cos(angle) d angle
        interpolation = chebyshev.chebvander(2 * s - 1, NODES - 1) @ _analysis()  # from values at the nodes to s
        return np.asarray(np.einsum("iq,iqj->ij", w, interpolation))

    wide = np.sqrt(1 + xi**2)
    quarter = np.full_like(xi, math.pi / 2)
    return arc(xi, 0 * xi, quarter), arc(wide, np.arcsin(xi / wide), np.arcsin(1 / wide))


@lru_cache(maxsize=1)
def _nodes() -> _Array:
    # Chebyshev's points on [0, 1]
    return np.asarray((chebyshev.chebpts1(NODES) + 1) / 2)


@lru_cache(maxsize=1)
def _analysis() -> _Array:
    # From values at the nodes to Chebyshev coefficients
    return np.asarray(np.linalg.inv(chebyshev.chebvander(chebyshev.chebpts1(NODES), NODES - 1)), dtype=np.float64)


def _by_laplace(d: int, x: float) -> float:
    """Log F_d(x) = log (1/pi) int_0^inf Re[exp(z x) M(z)^d / z] dy, z = c + iy, summed at steps h.

    By Poisson's formula the sum is F(x) + sum_{k > 0} F(x + 2 pi k / h) exp(-2 pi k c / h), with F <= 1; h follows
    from the error wanted. c is the saddle point, where no terms cancel.
    """

    def slope(c: float) -> float:
        return x - 1 / c + d * (math.exp(-c) / float(_transform(c).real) - 1) / (2 * c)

    c = float(brentq(slope, 1 / x, (d + 2) / x))
    top = c * x + d * math.log(float(_transform(c).real)) - math.log(c)
    h = 2 * math.pi / max(d, (ALIAS - min(top, 0.0)) / c)
    total, start, last = 0.5, 1, math.inf
    while last > 1e-17 * abs(total):
        z = c + 1j * h * np.arange(start, start + BLOCK)
        terms = np.exp(z * x + d * np.log(_transform(z)) - np.log(z) - top)
        total, start, last = total + float(terms.real.sum()), start + BLOCK, float(np.abs(terms).max())
    return top + math.log(h * total / math.pi)


def _transform(z: complex | NDArray[np.complexfloating]) -> NDArray[np.complex128]:
    """M(z) = int_0^1 exp(-z u^2) du = sqrt(pi) erf(sqrt z) / (2 sqrt z)."""
    root = np.sqrt(np.asarray(z, dtype=np.complex128))
    return np.asarray(math.sqrt(math.pi) / 2 * erf(root) / root)


@final
@dataclass(frozen=True)
class Cube(Distribution):
    """The uniform distribution on [0, 1]^d.

    >>> cube = Cube(2)
    >>> cube.log_density(torch.tensor([[0.5, 0.5], [0.5, 1.5]]))
    tensor([0., -inf], dtype=torch.float64)
    >>> round(cube.covering_radius(1000, 0.05).value, 4)  # 4 sqrt(log(N/eps) / (pi N))
    0.2246
    """

    support_is_convex = True
    d: int

    def __post_init__(self) -> None:
        check_whole(self.d, "Cube(d")

    @property
    def dimension(self) -> int:
        """Return the d of [0, 1]^d."""
        return self.d

    @property
    def diameter(self) -> float:
        """Return sqrt(d), from corner to corner."""
        return math.sqrt(self.d)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return independent samples, (n, d) float64."""
        drawable(n, generator, "Cube.sample")
        return torch.rand(n, self.d, generator=generator, dtype=torch.float64, device=generator.device)

    def log_density(self, x: Tensor) -> Tensor:
        """Return 0 inside and on the boundary, -inf outside; with respect to Lebesgue's measure on R^d."""
        x = points(x, self.d, "Cube.log_density(x)")
        inside = ((x >= 0) & (x <= 1)).all(1)
        return x.new_zeros(len(x)).masked_fill(~inside, -math.inf)

    def covering_radius(self, samples: int, failure: float, *, rule: Rule = "exact") -> Estimate:
        """Return delta(N, eps) of sharpening Thm 4.2; the smallest ball is the one about a corner.

        "published" is Eq. 6, (4 / sqrt pi) (Gamma(d/2 + 1) log(N/eps) / N)^(1/d). It assumes that the ball of radius
        delta/2 about a corner meets the cube in a whole orthant. This is true up to delta/2 = 1, where "exact" gives
        the same. Beyond, the formula overstates the ball's measure and the result is undefined; "exact" takes the
        volume that is inside the cube.

        >>> Cube(10).covering_radius(100, 0.05, rule="published").kind
        'undefined'
        """
        checked(samples, failure, rule)
        ball = SmallestBall(lambda r: log_corner_measure(self.d, r), self.diameter)
        if rule != "published":
            return COMPUTED[rule](ball, samples, failure)
        log_t = (log_share(samples, failure) - log_orthant(self.d)) / self.d
        if log_t > 0:
            reach = f"delta/2 = {math.exp(log_t):.6g}" if log_t < 700 else "delta/2"
            fits = "Eq. 6 holds up to delta/2 = 1, while a ball about a corner fits in the cube"
            return undefined(f"{fits}; here {reach}")
        return published_radius(2 * math.exp(log_t), "Eq. 6", ball, samples, failure)

    def extreme_points(self, most: int, generator: torch.Generator) -> Tensor:
        """Return the corners, (2^d, d), or `most` random ones if there are more."""
        if self.d < 63 and 2**self.d <= most:
            return torch.tensor(list(product((0.0, 1.0), repeat=self.d)), dtype=torch.float64, device=generator.device)
        coins = torch.randint(0, 2, (most, self.d), generator=generator, device=generator.device)
        return coins.to(torch.float64)


@final
@dataclass(frozen=True)
class TruncatedGaussian(Distribution):
    """The standard normal distribution on R^d, given that every entry lies in [-cut, cut].

    >>> latents = TruncatedGaussian(2, cut=2.0)
    >>> float(latents.sample(1000, torch.Generator().manual_seed(0)).abs().max()) <= 2
    True
    >>> latents.covering_radius(1000, 0.05).kind
    'upper bound'
    """

    support_is_convex = True
    d: int
    cut: float = 2.0

    def __post_init__(self) -> None:
        check_whole(self.d, "TruncatedGaussian(d")
        if isinstance(self.cut, bool) or not (isinstance(self.cut, int | float) and 0 < self.cut <= 30):
            raise BadInput(f"TruncatedGaussian(cut={self.cut!r}): expected a number above 0 and at most 30")

    @property
    def dimension(self) -> int:
        """Return the d of R^d."""
        return self.d

    @property
    def diameter(self) -> float:
        """Return 2 cut sqrt(d), from corner to corner."""
        return 2 * self.cut * math.sqrt(self.d)

    @property
    def _log_mass(self) -> float:
        # log P(|z_i| <= cut) of one entry
        return math.log(math.erf(self.cut / math.sqrt(2)))

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return independent samples, (n, d) float64."""
        drawable(n, generator, "TruncatedGaussian.sample")
        u = torch.rand(n, self.d, generator=generator, dtype=torch.float64, device=generator.device)
        z = math.sqrt(2) * torch.erfinv((2 * u - 1) * math.erf(self.cut / math.sqrt(2)))
        return z.clamp(-self.cut, self.cut)

    def log_density(self, x: Tensor) -> Tensor:
        """Return log p(x), (n,), with respect to Lebesgue's measure on R^d; -inf outside."""
        x = points(x, self.d, "TruncatedGaussian.log_density(x)")
        logs = -x.square().sum(1) / 2 - self.d * (math.log(2 * math.pi) / 2 + self._log_mass)
        return logs.masked_fill((x.abs() > self.cut).any(1), -math.inf)

    def covering_radius(self, samples: int, failure: float, *, rule: Rule = "exact") -> Estimate:
        """Return delta(N, eps) by Eq. 19, with a lower bound of the measure of the smallest ball.

        "published" is undefined: the paper has no formula for Gaussian latents.
        """
        checked(samples, failure, rule)
        if rule == "published":
            return undefined("the paper leaves Gaussian latents to future work: rule 'exact' or 'tight'")
        found = COMPUTED[rule](SmallestBall(self._log_ball, self.diameter), samples, failure)
        note = found.note.replace("exact measure of the smallest ball", "lower bound of the smallest ball's measure")
        return replace(found, note=note)

    def _log_ball(self, r: float) -> float:
        s, c = r / math.sqrt(self.d), self.cut
        if s >= 2 * c:
            return 0.0
        # F(c) - F(c - s) as a tail's difference, which keeps its digits
        upper, lower = float(log_ndtr(s - c)), float(log_ndtr(-c))
        box = self.d * (upper + math.log(-math.expm1(min(lower - upper, -1e-300))) - self._log_mass)
        if r > c:
            return min(0.0, box)
        corner = self.d * (-c * c / 2 - math.log(2 * math.pi) / 2 - self._log_mass)
        return min(0.0, max(box, corner + log_orthant(self.d) + self.d * math.log(r)))

    def extreme_points(self, most: int, generator: torch.Generator) -> Tensor:
        """Return the corners, (2^d, d), or `most` random ones if there are more."""
        return self.cut * (2 * Cube(self.d).extreme_points(most, generator) - 1)
