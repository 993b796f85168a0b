"""Patches of scikit-learn's two bundled photographs: colour images of CIFAR's size, no download."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flatlens.data.images import Images
from flatlens.data.preparation import Preparation
from flatlens.data.split import Split
from flatlens.errors import BadInput, needs

SIDE = 32
ROWS, COLUMNS = 427, 640
STRIP = 80
"""Columns of a strip; a photograph has eight."""

TEST_STRIPS = (2, 5)
TRAIN_STRIPS = (0, 1, 3, 4, 6, 7)
FEWEST = 10


def patches(
    train: int = 600,
    test: int = 600,
    seed: int = 0,
    standardise: Literal["component", "channel", "none"] = "channel",
    scale: float = 1.0,
    flat: bool = False,
) -> Split:
    """Return 32 x 32 colour patches; the label says from which photograph: 0 the palace, 1 the flower.

    Each photograph is cut into eight upright strips of 80 columns. Test patches lie within the third and the sixth,
    training patches within the others, so that no pixel is in both. Corners are drawn evenly and without replacement;
    patches of one part may overlap. Half of each part is of each photograph. Standardised on the training patches.

    >>> split = patches(train=20, test=10)
    >>> tuple(split.x.shape), tuple(split.test_x.shape), split.y.bincount().tolist()
    ((20, 3, 32, 32), (10, 3, 32, 32), [10, 10])

    Raises:
        BadInput: a size out of range, or Pillow is not installed.
    """
    return Preparation(standardise=standardise, scale=scale, flat=flat)(patch_images(train, test, seed))


def patch_images(train: int = 600, test: int = 600, seed: int = 0) -> Images:
    """Return the patches as in the photographs, before any preparation."""
    for name, size, strips in (("train", train, TRAIN_STRIPS), ("test", test, TEST_STRIPS)):
        most = 2 * len(strips) * (STRIP - SIDE + 1) * (ROWS - SIDE + 1)
        if not FEWEST <= size <= most:
            raise BadInput(f"patches({name}={size}): between {FEWEST} and {most} patches are needed")
    photographs = _photographs()
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = _drawn(photographs, train, TRAIN_STRIPS, generator)
    test_pixels, test_labels = _drawn(photographs, test, TEST_STRIPS, generator)
    source = (
        "32 x 32 patches of scikit-learn's photographs china.jpg (0) and flower.jpg (1), test patches from the third "
        "and sixth of eight upright strips, training patches from the others"
    )
    return Images("patches", pixels, labels, test_pixels, test_labels, 2, source)


def corners(count: int, strips: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return upper left corners (row, column) of `count` different patches within one of the strips, (count, 2)."""
    rows, columns = ROWS - SIDE + 1, STRIP - SIDE + 1
    drawn = torch.randperm(len(strips) * rows * columns, generator=generator)[:count]
    strip = torch.tensor(strips)[drawn // (rows * columns)]
    return torch.stack([drawn // columns % rows, strip * STRIP + drawn % columns], 1)


def _drawn(
    photographs: list[Tensor], count: int, strips: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    found = []
    for photograph, share in zip(photographs, (count - count // 2, count // 2), strict=True):
        places = corners(share, strips, generator).tolist()
        found.append(torch.stack([photograph[:, r : r + SIDE, c : c + SIDE] for r, c in places]))
    labels = torch.cat([torch.full((len(part),), i) for i, part in enumerate(found)])
    order = torch.randperm(count, generator=generator)
    return torch.cat(found)[order], labels[order]


def _photographs() -> list[Tensor]:
    """Return the two photographs, (3, 427, 640) uint8 each."""
    with needs("study", "the data set patches"):
        from sklearn.datasets import load_sample_images
    return [torch.tensor(p).permute(2, 0, 1) for p in load_sample_images().images]
