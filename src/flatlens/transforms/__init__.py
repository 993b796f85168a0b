"""Transforms of the weights that keep a network's function, and the check of which numbers they keep."""

from flatlens.transforms.batchnorm import batchnorm_folding, batchnorm_scale
from flatlens.transforms.cells import Applied, Cell, InvarianceReport
from flatlens.transforms.invariance import check_invariance
from flatlens.transforms.permutation import permutation
from flatlens.transforms.registry import TRANSFORMS
from flatlens.transforms.rescaling import feature_normalisation, layerwise, neuronwise
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
    "feature_normalisation",
    "layerwise",
    "neuronwise",
    "permutation",
    "read_wiring",
]
