"""scikit-learn's bundled handwritten digits: 1797 images of 8 x 8 pixels, 10 classes, no download."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from flatlens.data.images import Images
from flatlens.data.split import Split
from flatlens.errors import BadInput, needs

TOTAL = 1797
LEAST_TRAIN, LEAST_TEST = 10, 100


def digit_images() -> Images:
    """Return the digits as 8 x 8 grey images, 0 to 255: 600 to train on and the others to test, as in `digits`.

    >>> digit_images().pixels.shape
    torch.Size([600, 1, 8, 8])
    """
    x, y = _bundled()
    order = torch.randperm(TOTAL, generator=torch.Generator().manual_seed(0))
    pixels = (torch.from_numpy(x)[order] * (255 / 16)).round().to(torch.uint8).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(y).to(torch.int64)[order]
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
        raise BadInput(
            f"digits(train={train}): train on at least {LEAST_TRAIN} and at most {TOTAL - LEAST_TEST} of the "
            f"{TOTAL} images; {LEAST_TEST} are kept to test"
        )
    if not (math.isfinite(scale) and scale > 0):
        raise BadInput(f"digits(scale={scale}): a positive number is needed")
    pixels, labels = _bundled()
    order = torch.randperm(TOTAL, generator=torch.Generator().manual_seed(seed))
    x = torch.from_numpy(pixels)[order]
    y = torch.from_numpy(labels).to(torch.int64)[order]
    x = x - x[:train].mean(0)
    x = (x / x[:train].square().mean().sqrt() * scale).to(torch.float32)
    x = x if flat else x.reshape(-1, 1, 8, 8)
    return Split(
        name="digits",
        x=x[:train].contiguous(),
        y=y[:train].contiguous(),
        test_x=x[train:].contiguous(),
        test_y=y[train:].contiguous(),
        classes=10,
        description=(
            f"scikit-learn's digits, {train} of {TOTAL} images to train on and the other {TOTAL - train} to test; "
            "pixels centred on their training means and divided by one standard deviation"
            f"{'' if scale == 1 else f', then multiplied by {scale:g}'}"
        ),
    )


def _bundled() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return all pixels, shape (1797, 64), between 0 and 16, and all labels."""
    with needs("study", "the data set digits"):
        from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels
