"""A data set: its images as their files hold them, their preparation, and the split into training and test data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatlens.bounds import Target
from flatlens.distributions import Distribution
from flatlens.settings_json import check, require_setting


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


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Split:
    """Training and test data of one problem, classification or regression.

    `train` and `test` are the (inputs, targets) pairs that `flatlens.Problem` takes.

    >>> from flatlens.data import digits
    >>> split = digits(train=100)
    >>> split.x.shape, split.classes
    (torch.Size([100, 64]), 10)
    """

    name: str
    x: Tensor  #: (n, ...) float32
    y: Tensor  #: (n,) int64 labels; (n, N) numbers, of the inputs' dtype, for a regression
    test_x: Tensor
    test_y: Tensor
    classes: int  #: labels are 0 to classes - 1; 0 says that this is a regression
    description: str = ""  #: preparation of the data, in a sentence
    distribution: Distribution | None = None  #: law from which the inputs were drawn independently, if it is known
    target: Target | None = None  #: the function that made the targets, where it is known

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the training data."""
        return self.x, self.y

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the held-out data."""
        return self.test_x, self.test_y

    @property
    def held_out(self) -> tuple[Tensor, Tensor] | None:
        """The held-out data; None if there is none."""
        return self.test if len(self.test_x) else None


_IMAGES_TOGETHER = 2048  #: images that are held in float64 at a time

STEPS = {
    "component": "each pixel of each channel centred and divided by its standard deviation",
    "channel": "each channel centred and divided by its standard deviation over all pixels",
    "none": "pixels between 0 and 1",
}


@dataclass(frozen=True)
class Preparation:
    """The preparation of a set of images for a network.

    The mean and the standard deviation are always the training images'; the test images are shifted and divided by the
    same numbers. What is constant over the training images is centred only.

    >>> Preparation(train=5000, order="first", standardise="component", statistics="all", scale=1.5).scale
    1.5
    """

    train: int | None = None  #: number of training images; None: all of them
    test: int | None = None
    classes: tuple[int, ...] | None = None  #: keep these alone, relabelled 0, 1, ... in this order
    order: Literal["random", "first"] = "random"  #: drawn by `seed`, or the first in the file
    seed: int = 0
    standardise: Literal["component", "channel", "none"] = "channel"
    statistics: Literal["used", "all"] = "used"  #: those of the training images used, or of all that the set has
    scale: float = 1.0  #: the inputs are multiplied by this at the end
    flat: bool = False  #: each image as one row, (n, channels * rows * columns)

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            size = getattr(self, name)
            require_setting(self, name, size is None or size >= 1, "expected at least 1 image")
        named_once = self.classes is None or 2 <= len(self.classes) == len(set(self.classes))
        require_setting(self, "classes", named_once, "expected two classes or more, each named once")
        require_setting(self, "scale", 0 < self.scale < math.inf, "expected a positive number")
        check(self, order=("random", "first"), standardise=STEPS, statistics=("used", "all"))

    def __call__(self, images: Images) -> Split:
        """Return the split of `images`: float32 inputs, int64 labels.

        Raises:
            BadInput: more images, or another class, than the set has.
        """
        generator = torch.Generator().manual_seed(self.seed)
        chosen = self._chosen(images, "train", images.labels, self.train, generator)
        held_out = self._chosen(images, "test", images.test_labels, self.test, generator)
        pixels = images.pixels[chosen]
        mean, deviation = _statistics(images.pixels if self.statistics == "all" else pixels, self.standardise)
        return Split(
            name=images.name,
            x=self._inputs(pixels, mean, deviation),
            y=self._relabelled(images.labels[chosen]),
            test_x=self._inputs(images.test_pixels[held_out], mean, deviation),
            test_y=self._relabelled(images.test_labels[held_out]),
            classes=images.classes if self.classes is None else len(self.classes),
            description=self._description(images, len(chosen), len(held_out)),
        )

    def _chosen(
        self, images: Images, part: str, labels: Tensor, size: int | None, generator: torch.Generator
    ) -> Tensor:
        """Return the indices of the images to use; a smaller number of images is a part of a larger one."""
        candidates = torch.arange(len(labels))
        if self.classes is not None:
            there = set(self.classes) <= set(range(images.classes))
            require_setting(self, "classes", there, f"{images.name} has the classes 0 to {images.classes - 1}")
            candidates = candidates[torch.isin(labels, torch.tensor(self.classes))]
        # drawn even if unused, so that the test images stay the same
        shuffled = torch.randperm(len(candidates), generator=generator)
        if size is None:
            return candidates
        of_these = "" if self.classes is None else " of these classes"
        has = f"{images.name} has only {len(candidates)} {_WORDS[part]} images{of_these}"
        require_setting(self, part, size <= len(candidates), f"{has}: ask for at most {len(candidates)}")
        return candidates[:size] if self.order == "first" else candidates[shuffled[:size]]

    def _relabelled(self, labels: Tensor) -> Tensor:
        if self.classes is None:
            return labels
        new = torch.full((max(self.classes) + 1,), -1)
        new[torch.tensor(self.classes)] = torch.arange(len(self.classes))
        return new[labels]

    def _inputs(self, pixels: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        inputs = torch.empty(pixels.shape, dtype=torch.float32)
        for start in range(0, len(pixels), _IMAGES_TOGETHER):
            part = pixels[start : start + _IMAGES_TOGETHER].double() / 255
            inputs[start : start + _IMAGES_TOGETHER] = (part - mean) / deviation * self.scale
        return inputs.flatten(1) if self.flat else inputs

    def _description(self, images: Images, train: int, test: int) -> str:
        sizes = []
        for part, asked, count in (("train", self.train, train), ("test", self.test, test)):
            told = f"{count} {_WORDS[part]} images"
            drawn = f"the first {told}" if self.order == "first" else f"{told} drawn with seed {self.seed}"
            sizes.append(f"all {told}" if asked is None else drawn)
        kept = "" if self.classes is None else f", of the classes {', '.join(map(str, self.classes))}"
        of = "the training images used" if self.statistics == "used" else "all training images of the set"
        by = "" if self.standardise == "none" else f" (of {of})"
        scaled = "" if self.scale == 1 else f"; times {self.scale:g}"
        return f"{images.source}, {' and '.join(sizes)}{kept}; {STEPS[self.standardise]}{by}{scaled}"


_WORDS = {"train": "training", "test": "test"}


def _statistics(pixels: Tensor, standardise: str) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of pixels in [0, 1], exact whatever the chunks, as (1, channels, 1, 1)."""
    if standardise == "none":
        return torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    total = torch.zeros(pixels.shape[1:], dtype=torch.int64)
    squares = torch.zeros_like(total)
    for start in range(0, len(pixels), _IMAGES_TOGETHER):
        part = pixels[start : start + _IMAGES_TOGETHER].to(torch.int64)
        total += part.sum(0)
        squares += part.square().sum(0)
    low, high, count = pixels.amin(0), pixels.amax(0), len(pixels)
    if standardise == "channel":
        count *= total[0].numel()
        total, squares = (each.sum((1, 2), keepdim=True) for each in (total, squares))
        low, high = low.amin((1, 2), keepdim=True), high.amax((1, 2), keepdim=True)
    mean = total.double() / count
    deviation = (squares.double() / count - mean.square()).clamp(min=0).sqrt()
    # a constant pixel has no deviation, and rounding must not give it one
    return mean / 255, torch.where(low == high, 1.0, deviation / 255)
