"""The uniform distribution on a sphere; a ball about one of its points is a spherical cap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy.special import betainc, betaln, roots_laguerre
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

_SMALL = 1e-200  #: smaller values of the incomplete beta function are near underflow: their log is computed
LAGUERRE = roots_laguerre(32)  #: points and weights for int_0^inf exp(-w) f(w) dw


def log_cap_measure(d: int, r: float) -> float:
    """Return the log of the share of S^d (in R^{d+1}) within the distance r, through space, of one of its points.

    With I = I_x(d/2, 1/2), the regularised incomplete beta function at x = r^2 - r^4/4, the squared sine of the cap's
    angle, the share is I/2 up to r = sqrt 2, the half sphere, and 1 - I/2 beyond (Li 2011).
    """
    if r >= 2:
        return 0.0
    x = r * r * (1 - r * r / 4)
    half = float(betainc(d / 2, 0.5, min(x, 1.0))) / 2
    if r * r > 2:
        return math.log1p(-half)
    return math.log(half) if half > _SMALL else _log_small(d / 2, r) - math.log(2)


def _log_small(a: float, r: float) -> float:
    """Log I_x(a, 1/2) for a value that underflows, x = r^2 - r^4/4.

        I_x(a, 1/2) = x^a / (a B(a, 1/2)) int_0^inf e^-w (1 - x e^(-w/a))^(-1/2) dw,

    the integral over t = x e^(-w/a). Where it is used, x^a is so small that 1 - x is hundreds of times 1/a, or that x
    is near 0. Then the root hardly changes, and a few points are exact to rounding.
    """
    log_x = 2 * math.log(r) + math.log1p(-r * r / 4)
    w, weight = LAGUERRE
    mean = float(weight @ (1 - np.exp(log_x - w / a)) ** -0.5)
    return a * log_x - math.log(a) - float(betaln(a, 0.5)) + math.log(mean)


ON = 1e-6  #: tolerance of | ||x|| - 1 | for a point on the sphere: rounding of float32


@final
@dataclass(frozen=True)
class Sphere(Distribution):
    """The uniform distribution on the unit sphere S^d in R^{d+1}.

    d is the sphere's OWN dimension, so samples have d + 1 entries: `Sphere(1)` is the circle in the plane, `Sphere(2)`
    the surface of the ball in space. Distances are those of R^{d+1}, through the ball.

    >>> Sphere(2).dimension, Sphere(2).intrinsic
    (3, 2)
    >>> pole_and_centre = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> 1 / Sphere(2).log_density(pole_and_centre).exp() / math.pi  # areas
    tensor([4.0000,    inf], dtype=torch.float64)
    >>> round(Sphere(2).covering_radius(1000, 0.05).value, 4)  # 4 sqrt(log(N/eps) / N)
    0.3981
    """

    d: int

    def __post_init__(self) -> None:
        check_whole(self.d, "Sphere(d")

    @property
    def dimension(self) -> int:
        """Return d + 1: S^d lies in R^{d+1}."""
        return self.d + 1

    @property
    def intrinsic(self) -> int:
        """Return the d of S^d."""
        return self.d

    @property
    def diameter(self) -> float:
        """Return 2, through the ball."""
        return 2.0

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return independent samples, (n, d + 1) float64: Gaussian vectors, scaled to length 1."""
        drawable(n, generator, "Sphere.sample")
        x = torch.randn(n, self.d + 1, generator=generator, dtype=torch.float64, device=generator.device)
        return torch.nn.functional.normalize(x, dim=1, eps=0.0)

    def log_density(self, x: Tensor) -> Tensor:
        """Return -log of the sphere's area, 2 pi^((d+1)/2) / Gamma((d+1)/2), if | ||x|| - 1 | <= 1e-6; else -inf.

        The density is with respect to the area of S^d; with respect to Lebesgue's measure on R^{d+1} there is none.
        """
        x = points(x, self.dimension, "Sphere.log_density(x)")
        half = self.dimension / 2
        log_area = math.log(2) + half * math.log(math.pi) - math.lgamma(half)
        off = (torch.linalg.vector_norm(x, dim=1) - 1).abs() > ON
        return x.new_full((len(x),), -log_area).masked_fill(off, -math.inf)

    def covering_radius(
        self, samples: int, failure: float, *, rule: Rule = "exact", gamma: float | None = None
    ) -> Estimate:
        """Return delta(N, eps) of sharpening Thm 4.2; a ball about a point is a spherical cap.

        "published" is Eq. 7, 2^(1+1/d) (1-gamma)^(-1/2) (log(N/eps)/N)^(1/d), for N large enough that
        (2 log(N/eps)/N)^(2/d) < gamma - gamma^2; it is undefined for smaller N. 0 < gamma < 1; the default is the
        smallest gamma that satisfies this, to 1e-9.

        Eq. 7 uses a cap measure that is too large: its proof divides by the area of S^{d-1} instead of that of S^d, and
        drops the factor 2/d of an integral. It takes r^d / 2 for a cap whose measure, for small r, is
        Gamma((d+1)/2) / (2 sqrt(pi) Gamma(d/2+1)) r^d. The ratio is sqrt(pi) Gamma(d/2+1) / Gamma((d+1)/2): pi/2 at
        d = 1, and 2 at d = 2, where r^2/4 is exact. So, apart from gamma, the radius of Eq. 7 is smaller than that of
        Eq. 19 by the d-th root of this ratio. It still is a covering radius where (*) of `distribution` proves
        it, which needs a little over half of the radius of Eq. 19; elsewhere it is undefined.

        >>> sphere = Sphere(2)
        >>> printed, right = (sphere.covering_radius(10**6, 0.05, rule=rule).value for rule in ("published", "exact"))
        >>> round((right / printed) ** 2, 3)
        2.0
        """
        checked(samples, failure, rule)
        if gamma is not None and rule != "published":
            raise BadInput(f"Sphere.covering_radius(gamma={gamma!r}): it belongs to rule='published' alone")
        if gamma is not None and not 0 < gamma < 1:
            raise BadInput(f"Sphere.covering_radius(gamma={gamma!r}): expected a number above 0 and below 1")
        ball = SmallestBall(lambda r: log_cap_measure(self.d, r), self.diameter)
        if rule != "published":
            return COMPUTED[rule](ball, samples, failure)
        log_root = (math.log(2) + log_share(samples, failure)) / self.d
        least = math.exp(2 * log_root) if log_root < 0 else math.inf
        if gamma is None:
            # The least with gamma - gamma^2 > least, to 1e-9: the root (1 - sqrt(1 - 4 least)) / 2, without its
            # cancellation; 1/2, the best, if there is none
            root = 2 * least / (1 + math.sqrt(1 - 4 * least)) if least < 0.25 else 0.5
            gamma = min(root * (1 + 1e-9), 0.5)
        if not least < gamma - gamma**2:
            room = f"gamma - gamma^2 = {gamma - gamma**2:.6g}"
            return undefined(f"Eq. 7 needs (2 log(N/eps)/N)^(2/d) < {room}; here it is {least:.6g}: use more samples")
        R = 2 * math.exp(log_root) / math.sqrt(1 - gamma)
        return published_radius(R, f"Eq. 7 at gamma = {gamma:.6g}", ball, samples, failure)
