"""The two image sets that scikit-learn brings with it, no download.

`digits`: 1797 handwritten digits of 8 x 8 pixels, 10 classes. `patches`: colour patches of CIFAR's size, cut from two
photographs.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from flatlens.data.split import Images, Preparation, Split
from flatlens.errors import BadInput, needs

TOTAL = 1797
LEAST_TRAIN, LEAST_TEST = 10, 100


def digit_images() -> Images:
    """Return the digits as 8 x 8 grey images, 0 to 255: 600 to train on and the others to test, as in `digits`.

    >>> digit_images().pixels.shape
    torch.Size([600, 1, 8, 8])
    """
    x, labels = _shuffled(0)
    pixels = (x * (255 / 16)).round().to(torch.uint8).reshape(-1, 1, 8, 8)
    source = "scikit-learn's digits, 600 of 1797 images to train on and the other 1197 to test"
    return Images("digits", pixels[:600], labels[:600], pixels[600:], labels[600:], 10, source)


def digits(train: int = 600, seed: int = 0, flat: bool = True, scale: float = 1.0) -> Split:
    """Return a random split of the digits: `train` images to train on, all the rest to test.

    Each pixel is centred on its mean over the training images, and all are divided by one number, the standard
    deviation of the centred training pixels: the mean squared norm of a training input is 64. (A deviation for each
    pixel would blow up the pixels at the rim, which are nearly always black.) At the end all are multiplied by `scale`.
    As rows of 64 pixels, or, not `flat`, as images of shape (1, 8, 8).

    >>> split = digits(train=600)
    >>> tuple(split.x.shape), tuple(split.test_x.shape), split.classes
    ((600, 64), (1197, 64), 10)
    """
    if not LEAST_TRAIN <= train <= TOTAL - LEAST_TEST:
        sizes = f"at least {LEAST_TRAIN} and at most {TOTAL - LEAST_TEST} of the {TOTAL} images"
        raise BadInput(f"digits(train={train}): train on {sizes}; {LEAST_TEST} are kept to test")
    if not (math.isfinite(scale) and scale > 0):
        raise BadInput(f"digits(scale={scale}): expected a positive number")
    x, y = _shuffled(seed)
    x = x - x[:train].mean(0)
    x = (x / x[:train].square().mean().sqrt() * scale).to(torch.float32)
    x = x if flat else x.reshape(-1, 1, 8, 8)
    described = (
        f"scikit-learn's digits, {train} of {TOTAL} images to train on and the other {TOTAL - train} to test; "
        "pixels centred on their training means and divided by one standard deviation"
        f"{'' if scale == 1 else f', then multiplied by {scale:g}'}"
    )
    x, y, test_x, test_y = (part.contiguous() for part in (x[:train], y[:train], x[train:], y[train:]))
    return Split("digits", x, y, test_x, test_y, 10, described)


def _shuffled(seed: int) -> tuple[Tensor, Tensor]:
    """Return all pixels, shape (1797, 64), float64 between 0 and 16, and all labels, in random order."""
    with needs("study", "the data set digits"):
        from sklearn.datasets import load_digits
    order = torch.randperm(TOTAL, generator=torch.Generator().manual_seed(seed))
    pixels, labels = (torch.from_numpy(part)[order] for part in load_digits(return_X_y=True))
    return pixels, labels.to(torch.int64)


SIDE = 32
ROWS, COLUMNS = 427, 640
STRIP = 80  #: columns of a strip; a photograph has eight
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
            raise BadInput(f"patches({name}={size}): expected between {FEWEST} and {most} patches")
    with needs("study", "the data set patches"):
        from sklearn.datasets import load_sample_images
    photographs = [torch.tensor(p).permute(2, 0, 1) for p in load_sample_images().images]  # (3, 427, 640) uint8 each
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
