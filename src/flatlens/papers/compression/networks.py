"""The networks that the paper trains, by SGD on the half squared error, and their data."""

from __future__ import annotations

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import Quantity
from flatlens.models import MLP, Architecture, LeNet5, SmallVGG
from flatlens.papers.experiment import ON_PAPERS_DATA, Scale, tested

FIXED_LR, FIXED_BATCH = 0.1, 20
INTERPOLATES = 0.01
"""Loss below which a network counts as interpolating, where the paper says "after the loss is minimized"."""
SAMPLES = 100

LOG_VOLUME = Quantity("log volume", "log_volume")
TOP_THREE = Quantity("log volume, 3 largest eigenvalues (code)", "log_volume(top_k=3)")
LOG_DIMENSION = Quantity("log local dimension (code)", "local_dimension", "log")
"""The last two are quantities of the text in the form in which the authors' figures show them."""


def vgg(scale: Scale) -> tuple[DataSettings, Architecture]:
    """Return the paper's small VGG and its data, two classes of images."""
    if scale in ON_PAPERS_DATA:
        return DataSettings("cifar10", test=tested(scale), classes=(0, 1)), SmallVGG(classes=2)
    return DataSettings("patches", train=600 if scale == "laptop" else 30), SmallVGG(classes=2)


def mlp(scale: Scale) -> tuple[DataSettings, Architecture]:
    """Return four dense layers and their data, images as rows."""
    if scale in ON_PAPERS_DATA:
        return DataSettings("fashion_mnist", test=tested(scale), flat=True), MLP(784, (784, 784, 784), 10)
    train, width = (600, 64) if scale == "laptop" else (100, 16)
    return DataSettings("digits", train=train), MLP(64, (width, width, width), 10)


def lenet(scale: Scale) -> tuple[DataSettings, Architecture]:
    """Return LeNet5 and its data."""
    if scale in ON_PAPERS_DATA:
        return DataSettings("cifar10", test=tested(scale)), LeNet5()
    return DataSettings("patches", train=600 if scale == "laptop" else 30), LeNet5(classes=2)


def samples(data: DataSettings) -> int:
    """Return the number of training samples that are measured."""
    return min(SAMPLES, data.train or SAMPLES)


def top_three(model: Architecture) -> tuple[Quantity, ...]:
    """Return the volume of the three largest eigenvalues; nothing for two outputs, where it equals the volume."""
    return (TOP_THREE,) if getattr(model, "classes", None) != 2 else ()
