"""The networks, data and measures that the paper's experiments on images share."""

from __future__ import annotations

from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import Dtype
from flatlens.models import MLP, VGG11, ResNet18
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


def rows(scale: Scale) -> tuple[DataSettings, MLP]:
    """Return patches of photographs as rows of numbers, and a fully connected ReLU network on them."""
    train, width = (20, 8) if scale == "smoke" else (300, 64)
    return DataSettings("patches", train=train, test=200, flat=True), MLP(3072, (width, width, width), 2)


def small_resnet(scale: Scale) -> tuple[DataSettings, ResNet18]:
    """Return digits of 8 x 8 pixels, and a narrow ResNet-18 with BatchNorm on them."""
    train, width = (20, 0.03125) if scale == "smoke" else (200, 0.125)
    return DataSettings("digits", train=train, flat=False), ResNet18(classes=10, channels=1, width=width)


def small_vgg(scale: Scale) -> tuple[DataSettings, VGG11]:
    """Return patches of photographs, and a narrow VGG-11 with BatchNorm on them."""
    train, width = (20, 0.03125) if scale == "smoke" else (200, 0.0625)
    return DataSettings("patches", train=train, test=200), VGG11(classes=2, width=width)


GHOSTS = (
    "Sharpness is measured in train mode, BatchNorm's moments over 1000 points as in B.3; B.1, B.2 and C.1 name no "
    "size. Where the data have 2500 points, the last batch has 500."
)
UNTOLD_INIT = "Weights begin as in the code that the paper cites for each network."
PATCH_ROWS = (
    "A ReLU network of three hidden layers of 64, without BatchNorm, on patches of two photographs in place of the "
    "paper's networks on CIFAR-10."
)
NARROW = "VGG-11 with an eighth of its channels, ResNet-18 with a sixteenth."
DIGIT_RESNET = "ResNet-18 with an eighth of its channels, on 200 of scikit-learn's digits in place of CIFAR."
PATCH_VGG = "VGG-11 with a sixteenth of its channels, on 200 patches of two photographs in place of CIFAR."
