"""The uniform distribution on a cube."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import final

import torch
from torch import Tensor

from flatlens.distributions import covering
from flatlens.distributions.corner import log_corner_measure, log_orthant
from flatlens.distributions.covering import Rule, SmallestBall
from flatlens.distributions.distribution import Distribution, check_whole, drawable, points
from flatlens.estimate import Estimate, undefined


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

    d: int

    def __post_init__(self) -> None:
        check_whole(self.d, "Cube(d")

    @property
    def dimension(self) -> int:
        """Return the d of [0, 1]^d."""
        return self.d

    @property
    def intrinsic(self) -> int:
        """Return the d of [0, 1]^d."""
        return self.d

    @property
    def diameter(self) -> float:
        """Return sqrt(d), from corner to corner."""
        return math.sqrt(self.d)

    @property
    def support_is_convex(self) -> bool:
        """Return True: a cube is convex."""
        return True

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
        covering.checked(samples, failure, rule)
        ball = SmallestBall(lambda r: log_corner_measure(self.d, r), self.diameter)
        if rule == "exact":
            return covering.exact_radius(ball, samples, failure)
        if rule == "tight":
            return covering.tight_radius(ball, samples, failure)
        log_t = (covering.log_share(samples, failure) - log_orthant(self.d)) / self.d
        if log_t > 0:
            reach = f"delta/2 = {math.exp(log_t):.6g}" if log_t < 700 else "delta/2"
            return undefined(
                f"Eq. 6 holds up to delta/2 = 1, while a ball about a corner fits in the cube; here {reach}"
            )
        return covering.published_radius(2 * math.exp(log_t), "Eq. 6", ball, samples, failure)

    def extreme_points(self, most: int, generator: torch.Generator) -> Tensor:
        """Return the corners, (2^d, d), or `most` random ones if there are more."""
        if self.d < 63 and 2**self.d <= most:
            return torch.tensor(list(product((0.0, 1.0), repeat=self.d)), dtype=torch.float64, device=generator.device)
        coins = torch.randint(0, 2, (most, self.d), generator=generator, device=generator.device)
        return coins.to(torch.float64)
