"""Every bound by name, in the catalogue's order. A new one is added here."""

from __future__ import annotations

from flatlens.bounds.batchnorm import batchnorm_limit
from flatlens.bounds.bound import Bound
from flatlens.bounds.compression import linear_stability, mls_chain, network_volume_bound, nmls_bound, volume_bound
from flatlens.bounds.growth import jacobian_growth
from flatlens.bounds.interpolation import interpolation_bound
from flatlens.bounds.invariant import adaptive_bound, matrix_normalized_bound, normalized_mls_bound
from flatlens.bounds.relative import feature_robustness_bound, uniform_robustness_bound
from flatlens.bounds.relative_generalisation import relative_generalisation
from flatlens.bounds.residual import residual_bound
from flatlens.bounds.sharpening import jacobian_generalisation, lipschitz_bound

BOUNDS: dict[str, Bound] = {
    one.name: one
    for one in (
        interpolation_bound,
        linear_stability,
        volume_bound,
        network_volume_bound,
        mls_chain,
        nmls_bound,
        residual_bound,
        matrix_normalized_bound,
        adaptive_bound,
        normalized_mls_bound,
        lipschitz_bound,
        jacobian_growth,
        jacobian_generalisation,
        feature_robustness_bound,
        uniform_robustness_bound,
        relative_generalisation,
        batchnorm_limit,
    )
}
