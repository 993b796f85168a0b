"""Standard normal latents, cut off entry by entry: the truncation of GANs, with a support that samples can cover.

Sharpening section 4 leaves Gaussian latents to future work: R^d is covered by no finite sample. The cut-off cube
[-c, c]^d is. With s = r / sqrt(d), a ball of radius r about any z of the cube holds a box of side s that reaches from z
towards the centre, in every coordinate. Its measure is least at a corner, as the density falls with |z_i|, so

    Phi(r) >= ((F(c) - F(c - s)) / (F(c) - F(-c)))^d,    F the normal distribution function,

which is 1 at the diameter 2 c sqrt(d). For r <= c the ball also holds a whole orthant, of a density no less than the
corner's. The larger of the two is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from scipy.special import log_ndtr
from torch import Tensor

from flatlens.distributions.cube import Cube, log_orthant
from flatlens.distributions.distribution import (
    COMPUTED,
    Distribution,
    Rule,
    SmallestBall,
    check_whole,
    checked,
    drawable,
    points,
)
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined


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
