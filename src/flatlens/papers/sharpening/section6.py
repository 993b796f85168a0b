"""Data, training and measures that the networks of section 6's regularisers (B.3) and of appendix D share.

Sharpness and the Gauss-Newton norm have BatchNorm in train mode, its moments those of the 1000 samples measured. The
Jacobian norm is the largest over the samples, in eval mode. Every loss includes label smoothing and leaves out weight
decay. Samples changed by mixup or augmentation are never measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import Dtype, NetworkSettings
from flatlens.models import VGG11, Architecture, ResNet18
from flatlens.papers.experiment import Scale
from flatlens.papers.sharpening.networks import (
    ABSOLUTE_GAP,
    JACOBIAN,
    NARROW_RESNET,
    NARROW_VGG,
    SOFTMAXED,
    measured_in,
)
from flatlens.training import SGD, Augmentation, Steps, Training

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
    if scale == "desk":
        crops, few = Augmentation(), DataSettings("cifar10", train=200, test=1000)
        return {
            "resnet18": Trained("ResNet-18", few, NARROW_RESNET, 25, 60, 100, (0.05,), crops, measured_in(scale)),
            "vgg11": Trained("VGG-11", few, NARROW_VGG, 25, 60, 100, (0.02,), crops, measured_in(scale)),
        }
    digits = Trained(
        "ResNet-18",
        DataSettings("digits", train=150, flat=False),
        ResNet18(channels=1, width=1 / 8),
        batch_size=25,
        epochs=30,
        samples=30,
        lrs=(0.05,),
        augmentation=Augmentation(pad=1, flip=False),
    )
    patches = Trained(
        "VGG-11",
        DataSettings("patches", train=40, test=300),
        VGG11(classes=2, width=1 / 8, init="vgg"),
        batch_size=10,
        epochs=60,
        samples=30,
        lrs=(0.02,),
        augmentation=Augmentation(),
    )
    if scale == "laptop":
        return {"resnet18": digits, "vgg11": patches}
    few, small = DataSettings("digits", train=20, flat=False), ResNet18(channels=1, width=1 / 32)
    return {
        "resnet18": _tiny(digits, few, small),
        "vgg11": _tiny(patches, DataSettings("patches", train=20, test=20), VGG11(2, width=1 / 64, init="vgg")),
    }


def _tiny(kind: Trained, data: DataSettings, model: Architecture) -> Trained:
    return replace(kind, data=data, model=model, batch_size=10, epochs=6, samples=10, lrs=(0.02,))


SMALL_NETWORKS = (
    "ResNet-18 on 150 of scikit-learn's digits, which are moved by one pixel and never flipped, VGG-11 on 40 patches "
    "of two photographs, both an eighth as wide."
)
FEW_OF_CIFAR = (
    "200 images of CIFAR-10, without CIFAR-100; ResNet-18 with a sixteenth, VGG-11 with an eighth of its channels; "
    "batches of 25, 100 samples measured, in float32."
)
TINY = "20 of scikit-learn's digits, 20 patches of two photographs, networks a 32nd and a 64th as wide."
JACOBIANS = (
    "Section 6 does not say of what the Jacobian is: claims are of the network's outputs; that of their softmax, which "
    "sections 5, B.1 and C.1 plot, stands beside them in the figure of correlations."
)
SECTION6_UNSAID = "Channels are standardised, VGG-11 begins as its cited code does, and the 5 seeds are 0 to 4: unsaid."
