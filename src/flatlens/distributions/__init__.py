"""Known distributions of data: samples, densities, and how closely a number of samples covers the support."""

from flatlens.distributions.cube import Cube, TruncatedGaussian
from flatlens.distributions.distribution import (
    RULES,
    Distribution,
    Rule,
    covering_radius_of,
    empirical_covering_radius,
    intrinsic_dimension,
)
from flatlens.distributions.mixture import GaussianMixture
from flatlens.distributions.push_forward import PushForward, lipschitz_product
from flatlens.distributions.sphere import Sphere

__all__ = [
    "RULES", "Cube", "Distribution", "GaussianMixture", "PushForward", "Rule", "Sphere", "TruncatedGaussian",
    "covering_radius_of", "empirical_covering_radius", "intrinsic_dimension", "lipschitz_product",
]  # fmt: skip
