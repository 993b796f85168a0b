"""The networks, data and measures that the paper's experiments on images share.

Of section 6's regularisers (B.3) and of appendix D, sharpness and the Gauss-Newton norm have BatchNorm in train mode,
its moments those of the 1000 samples measured. The Jacobian norm is the largest over the samples, in eval mode. Every
loss includes label smoothing and leaves out weight decay. Samples changed by mixup or augmentation are never measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import Axis, Dtype, NetworkSettings
from flatlens.models import MLP, VGG11, Architecture, ResNet18
from flatlens.papers.evidence import Table, trained_ones, where
from flatlens.papers.experiment import Scale
from flatlens.training import SGD, Augmentation, Steps, Training

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


SMOOTHING = "label_smoothing"


def smoothings(scale: Scale) -> Axis:
    """Return the axis of B.1's strengths."""
    return Axis(SMOOTHING, (0.0, 0.5) if scale == "smoke" else (0.0, 0.5, 0.75))


def of_smoothing(table: Table, smoothed: bool, *, fastest: bool = False) -> Table:
    """Return the networks with label smoothing, or those without; with `fastest`, only at the largest learning rate."""

    def chosen(networks: pd.DataFrame) -> pd.Series:
        rows = (networks[SMOOTHING] > 0) == smoothed
        return rows & (networks["lr"] == trained_ones(networks)[0]["lr"].max()) if fastest else rows

    return where(table, chosen)


_MOMENTUM, DECAY = 0.9, 5e-4
SHARPNESS_COLUMN, GGN_NORM = (f"{name}(rtol=0.01, batch_statistics=1000)" for name in ("sharpness", "ggn_norm"))
ABSOLUTE = ABSOLUTE_GAP.column
JACOBIAN_COLUMN, SOFTMAXED_COLUMN = JACOBIAN.column, SOFTMAXED.column
DRAWN_QUANTITIES = (
    ABSOLUTE_GAP,
    Quantity("sharpness", SHARPNESS_COLUMN),
    Quantity("Jacobian norm", JACOBIAN_COLUMN),
    Quantity("Gauss-Newton norm", GGN_NORM),
    Quantity("training loss", "loss", role="result"),
    Quantity("test accuracy", "test_accuracy", role="result"),
)
"""The quantities of Fig. 20 to 27."""
BATCH_JACOBIAN = "batch_jacobian_norm(rtol=0.01, batch_statistics=1000)"
MEASURED_QUANTITIES = (
    *DRAWN_QUANTITIES,
    Quantity("Jacobian norm of softmax", SOFTMAXED_COLUMN),
    Quantity("Jacobian norm in train mode", BATCH_JACOBIAN),
)
"""These, the Jacobian of softmax(f), and that of the batch with BatchNorm in train mode."""


@dataclass(frozen=True)
class Trained:
    """A kind of network with its training at one scale."""

    title: str
    data: DataSettings
    model: Architecture
    batch_size: int
    epochs: int
    samples: int  #: number of samples measured
    lrs: tuple[float, ...]  #: initial learning rates
    augmentation: Augmentation
    dtype: Dtype = "float64"  #: dtype in which they are measured

    def settings(self) -> NetworkSettings:
        """Return the settings without a regulariser other than weight decay.

        The learning rate falls to a tenth at 5/9 and 8/9 of the epochs, as after 50 and 80 of 90.
        """
        training = Training(
            SGD(self.lrs[0], _MOMENTUM, DECAY),
            batch_size=self.batch_size,
            schedule=Steps((5 * self.epochs // 9, 8 * self.epochs // 9)),
            max_epochs=self.epochs,
            check_every=100,
        )
        measures = (*(one.column for one in MEASURED_QUANTITIES), "accuracy")
        return NetworkSettings(self.data, self.model, training, measures, samples=self.samples, dtype=self.dtype)


def kinds(scale: Scale) -> Mapping[str, Trained]:
    """Return the kinds of networks by the names of their studies; each is trained with and without BatchNorm."""
    # the paper's networks on both of its data sets, with all its learning rates
    if scale == "paper":
        crops, lrs = Augmentation(), (0.1, 0.01, 0.001)
        return {
            f"{name}_{data}": Trained(f"{title}, {said}", DataSettings(data), model, 128, 90, 1000, lrs, crops)
            for data, classes, said in (("cifar10", 10, "CIFAR-10"), ("cifar100", 100, "CIFAR-100"))
            for name, title, model in (
                ("resnet18", "ResNet-18", ResNet18(classes)),
                ("vgg11", "VGG-11", VGG11(classes, init="vgg")),
            )
        }
    # narrow networks on few of its images, for which one learning rate has to do
    if scale == "desk":
        crops, few = Augmentation(), DataSettings("cifar10", train=200, test=1000)
        return {
            "resnet18": Trained("ResNet-18", few, NARROW_RESNET, 25, 60, 100, (0.05,), crops, measured_in(scale)),
            "vgg11": Trained("VGG-11", few, NARROW_VGG, 25, 60, 100, (0.02,), crops, measured_in(scale)),
        }
    # stand-ins that a laptop trains in minutes, and smaller ones only to see that it runs
    rows, images = DataSettings("digits", train=150, flat=False), DataSettings("patches", train=40, test=300)
    resnet, vgg = ResNet18(channels=1, width=1 / 8), VGG11(classes=2, width=1 / 8, init="vgg")
    digits = Trained("ResNet-18", rows, resnet, 25, 30, 30, (0.05,), Augmentation(pad=1, flip=False))
    patches = Trained("VGG-11", images, vgg, 10, 60, 30, (0.02,), Augmentation())
    if scale == "laptop":
        return {"resnet18": digits, "vgg11": patches}
    few, small = DataSettings("digits", train=20, flat=False), ResNet18(channels=1, width=1 / 32)
    return {
        "resnet18": _tiny(digits, few, small),
        "vgg11": _tiny(patches, DataSettings("patches", train=20, test=20), VGG11(2, width=1 / 64, init="vgg")),
    }


def _tiny(kind: Trained, data: DataSettings, model: Architecture) -> Trained:
    return replace(kind, data=data, model=model, batch_size=10, epochs=6, samples=10, lrs=(0.02,))
