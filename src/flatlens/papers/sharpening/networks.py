"""The networks and measures that the paper's experiments on images share."""

from __future__ import annotations

from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import Dtype
from flatlens.models import VGG11, ResNet18
from flatlens.papers.experiment import Scale

BATCH_SHARPNESS = Quantity("sharpness", "sharpness(batch_statistics=1000)")
"""The Hessian's, in train mode (A.1); a ghost batch holds the whole sample if that is smaller."""
ABSOLUTE_GAP = Quantity("generalisation gap", "generalisation_gap(convention='absolute')", role="result")
JACOBIAN = Quantity("Jacobian norm", "jacobian_norm")
SOFTMAXED = Quantity("Jacobian norm, softmaxed", "jacobian_norm(softmax=True)")

VGG = VGG11(init="vgg")
RESNET = ResNet18()
"""Networks as in the code that B.1 and B.2 cite."""
NARROW_VGG, NARROW_RESNET = VGG11(width=1 / 8, init="vgg"), ResNet18(width=1 / 16)
"""The same for desk scale, with an eighth and a sixteenth of their channels."""


def measured_in(scale: Scale) -> Dtype:
    """Return the dtype in which narrow VGGs and ResNets are measured: float32 at desk scale, in a third of the time."""
    return "float32" if scale == "desk" else "float64"
