"""Images as their files hold them: whole numbers, before any preparation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Images:
    """All training and test images of a set; `Preparation` makes a `Split` of them."""

    name: str
    pixels: Tensor  #: (n, channels, rows, columns) uint8
    labels: Tensor  #: (n,) int64
    test_pixels: Tensor
    test_labels: Tensor
    classes: int
    source: str  #: origin of the images, as the beginning of a sentence
