"""ImageNet's images from a folder with one folder for each class: a sample, cut to squares of one size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatlens.data.folders import read_folder
from flatlens.data.local import default_root
from flatlens.data.raw import RawImages
from flatlens.data.split import Split
from flatlens.errors import BadData

SHORT, SIDE = 256, 224
"""Pixels: the shorter side is brought to the first, and a square of the second cut out of the middle."""


def imagenet(n: int = 100, test: int = 100, seed: int = 0, root: str | Path | None = None) -> Split:
    """Return `n` and `test` images drawn by `seed` from ROOT/imagenet/CLASS/FILE, such as the validation set's.

    Classes are numbered in the order of their folders' names, as ImageNet's are (n01440764 is 0). x (n, 3, 224, 224)
    between 0 and 1; networks bring their own normalisation.

    Raises:
        BadData: no such folder, too few images, or a file that is none.
    """
    folder = (default_root() if root is None else Path(root)) / "imagenet"
    if not folder.is_dir():
        raise BadData(f"imagenet: there is no folder {folder}: put images there as CLASS/FILE, or set FLATLENS_DATA")
    raw = read_folder(folder, {}, "imagenet").train
    if not isinstance(raw, RawImages):
        raise BadData(f"imagenet: {folder} holds texts, not images")
    there = len(raw.open)
    if n < 1 or test < 0 or there < n + test:
        raise BadData(
            f"imagenet: {n} training and {test} test images are wanted, but {folder} has {there}: ask for fewer, or "
            f"add images"
        )
    chosen = torch.randperm(there, generator=torch.Generator().manual_seed(seed))[: n + test]
    x = torch.stack([_square(raw, int(index)) for index in chosen])
    y = raw.targets[chosen]
    classes = int(raw.targets.max()) + 1
    told = f"{n} and {test} of {there} images, the middle {SIDE} x {SIDE} pixels of a shorter side of {SHORT}"
    return Split("imagenet", x[:n], y[:n], x[n:], y[n:], classes, told)


def _square(raw: RawImages, index: int) -> Tensor:
    image = raw.open[index]().convert("RGB")
    scale = SHORT / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)))
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    pixels = np.array(image.crop((left, top, left + SIDE, top + SIDE)))
    return torch.from_numpy(pixels).permute(2, 0, 1).to(torch.float32) / 255
