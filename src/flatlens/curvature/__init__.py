"""Second derivatives of the risk by products with vectors, without the matrix: operators, eigenvalues, traces."""

from flatlens.curvature.krylov import Eigenpairs
from flatlens.curvature.leading import Eigenspace, eigenspace, eigenspace_memory, lanczos
from flatlens.curvature.operators import (
    Fisher,
    GaussNewton,
    Hessian,
    InputJacobian,
    Operator,
    ParameterJacobian,
    Residual,
)
from flatlens.curvature.spectrum import Density, eigenpairs, spectral_density

__all__ = [
    "Density",
    "Eigenpairs",
    "Eigenspace",
    "Fisher",
    "GaussNewton",
    "Hessian",
    "InputJacobian",
    "Operator",
    "ParameterJacobian",
    "Residual",
    "eigenpairs",
    "eigenspace",
    "eigenspace_memory",
    "lanczos",
    "spectral_density",
]
