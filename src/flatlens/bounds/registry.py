"""Every bound by name, in the catalogue's order."""

from __future__ import annotations

from flatlens.bounds import (
    batchnorm,
    compression,
    growth,
    interpolation,
    invariant,
    relative,
    relative_generalisation,
    residual,
    sharpening,
)
from flatlens.bounds.bound import BOUNDS

_HOMES = (
    batchnorm, compression, growth, interpolation, invariant,
    relative, relative_generalisation, residual, sharpening,
)  # fmt: skip
"""The modules of bounds: importing one registers its bounds."""

__all__ = ["BOUNDS"]
