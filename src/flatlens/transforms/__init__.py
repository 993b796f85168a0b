"""Transforms of the weights that keep a network's function, and the check of which numbers they keep."""

from typing import Any

from flatlens.deprecated_names import FORMER_TRANSFORMS
from flatlens.transforms.attention import (
    gate_scale,
    head_permutation,
    norm_folding,
    norm_scale,
    query_key_basis,
    value_output_basis,
)
from flatlens.transforms.definition import TRANSFORMS, Moved, Transform, transform
from flatlens.transforms.invariance import Applied, Cell, InvarianceReport, check_invariance
from flatlens.transforms.neurons import (
    batchnorm_folding,
    batchnorm_scale,
    feature_by_feature,
    feature_normalization,
    layerwise,
    neuronwise,
    order_reader,
    order_source,
    permutation,
)
from flatlens.transforms.wiring import OUTPUTS, Link, Reader, Wiring, read_wiring

__all__ = [
    "OUTPUTS", "TRANSFORMS", "Applied", "Cell", "InvarianceReport", "Link", "Moved", "Reader", "Transform",
    "Wiring", "batchnorm_folding", "batchnorm_scale", "check_invariance", "feature_by_feature",
    "feature_normalization", "gate_scale", "head_permutation", "layerwise", "neuronwise", "norm_folding",
    "norm_scale", "order_reader", "order_source", "permutation", "query_key_basis", "read_wiring", "transform",
    "value_output_basis",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in FORMER_TRANSFORMS:
        return TRANSFORMS[name]
    raise AttributeError(f"module 'flatlens.transforms' has no attribute {name!r}")
