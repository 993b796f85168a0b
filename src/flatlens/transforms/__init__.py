"""Transforms of the weights that keep a network's function, and the check of which numbers they keep."""

from typing import Any

from flatlens.former import FORMER_TRANSFORMS
from flatlens.transforms.batchnorm import batchnorm_folding, batchnorm_scale
from flatlens.transforms.cells import Applied, Cell, InvarianceReport
from flatlens.transforms.heads import (
    gate_scale,
    head_permutation,
    norm_folding,
    norm_scale,
    query_key_basis,
    value_output_basis,
)
from flatlens.transforms.invariance import check_invariance
from flatlens.transforms.permutation import permutation
from flatlens.transforms.registry import TRANSFORMS
from flatlens.transforms.rescaling import feature_normalization, layerwise, neuronwise
from flatlens.transforms.transform import Moved, Transform
from flatlens.transforms.wiring import OUTPUTS, Link, Reader, Wiring, read_wiring

__all__ = [
    "OUTPUTS",
    "TRANSFORMS",
    "Applied",
    "Cell",
    "InvarianceReport",
    "Link",
    "Moved",
    "Reader",
    "Transform",
    "Wiring",
    "batchnorm_folding",
    "batchnorm_scale",
    "check_invariance",
    "feature_normalization",
    "gate_scale",
    "head_permutation",
    "layerwise",
    "neuronwise",
    "norm_folding",
    "norm_scale",
    "permutation",
    "query_key_basis",
    "read_wiring",
    "value_output_basis",
]


def __getattr__(name: str) -> Any:
    if name in FORMER_TRANSFORMS:
        return TRANSFORMS[name]
    raise AttributeError(f"module 'flatlens.transforms' has no attribute {name!r}")
