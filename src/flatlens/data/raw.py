"""Images and texts as they are, and their preparation for a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flatlens.errors import BadData, needs, one_line
from flatlens.models.preparing import ImagePreparation, NetworkPreparation, TextPreparation

if TYPE_CHECKING:
    from PIL.Image import Image

HELD = 2**29
"""Largest size in bytes of prepared images kept in memory; larger sets are prepared again at each reading."""

Prepared: TypeAlias = "tuple[Tensor | dict[str, Tensor], Any] | Dataset[Any]"


@dataclass(frozen=True, eq=False)
class RawImages:
    """Images to be opened one at a time, and their targets."""

    open: Sequence[Callable[[], Image]]
    targets: Tensor


@dataclass(frozen=True, eq=False)
class RawTexts:
    """Texts and their targets."""

    texts: Sequence[str]
    targets: Tensor


Raw: TypeAlias = RawImages | RawTexts


@final
class _Opened(Dataset[tuple[Tensor, Tensor]]):
    """Images that are prepared when they are indexed."""

    def __init__(self, raw: RawImages, preparation: ImagePreparation) -> None:
        self._raw, self._preparation = raw, preparation

    def __len__(self) -> int:
        return len(self._raw.open)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._raw.open[index]().convert(self._preparation.mode)
        return self._preparation.convert(image), self._raw.targets[index]


def from_pixels(pixels: Tensor, targets: Tensor) -> RawImages:
    """Return images (n, channels, rows, columns) of whole numbers between 0 and 255, to be opened one at a time."""
    with needs("study", "a data set of images"):
        from PIL import Image

    def opener(index: int) -> Callable[[], Image.Image]:
        def opened() -> Image.Image:
            one = pixels[index]
            return Image.fromarray(one[0].numpy() if len(one) == 1 else one.permute(1, 2, 0).contiguous().numpy())

        return opened

    return RawImages([opener(index) for index in range(len(pixels))], targets)


def from_file(path: Path, argument: str) -> Callable[[], Image]:
    """Return a function that opens the image in a file."""
    with needs("study", "a data set of images"):
        from PIL import Image

    def opened() -> Image.Image:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice as large is an error
                with Image.open(path) as image:
                    image.load()
                    return image
        except Exception as error:  # damaged bytes make a reader fail in any way at all
            raise BadData(f"{argument}: {path} cannot be read as an image ({one_line(error, 120)})") from error

    return opened


def prepare(raw: Raw, preparation: NetworkPreparation | None, argument: str) -> Prepared:
    """Return images or texts as the network takes them: data for `flatlens.Problem`.

    Images without a preparation become pixels between 0 and 1, and have to be of one size.

    Raises:
        BadData: the network reads the other kind, or there is no tokenizer, or a file cannot be read.
    """
    if isinstance(raw, RawTexts):
        if not isinstance(preparation, TextPreparation):
            reads = "reads images" if preparation else "has no tokenizer"
            raise BadData(f"{argument}: these are texts, and the network {reads}: name an hf: network with a tokenizer")
        encoded = preparation.encode(raw.texts)
        return encoded, next_tokens(encoded) if preparation.next_tokens else raw.targets
    if isinstance(preparation, TextPreparation):
        raise BadData(f"{argument}: these are images, and the network reads texts: name a folder of .txt files")
    known = preparation or ImagePreparation(_plain, PLAIN)
    opened = _Opened(raw, known)
    if preparation is not None and opened[0][0].nbytes * len(opened) > HELD:
        return opened
    images = [opened[index][0] for index in range(len(opened))]
    if len({image.shape for image in images}) > 1:
        odd = next(image for image in images if image.shape != images[0].shape)
        raise BadData(
            f"{argument}: images have different sizes ({_size(images[0])} and {_size(odd)} pixels): resize them to one "
            f"size, or use a timm: or hf: network, which resizes them itself"
        )
    return torch.stack(images), raw.targets


def next_tokens(encoded: Mapping[str, Tensor]) -> Tensor:
    """Return each token's target, (n, tokens): the next token; -100 (ignored) at padding and at the end.

    >>> next_tokens({"input_ids": torch.tensor([[7, 8, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])})
    tensor([[   8,    9, -100, -100]])
    """
    ids, mask = encoded["input_ids"], encoded["attention_mask"].bool()
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = torch.where(mask[:, :-1] & mask[:, 1:], ids[:, 1:], IGNORED)
    return targets


IGNORED = -100
PLAIN = "red, green and blue between 0 and 1"


def _plain(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255


def _size(image: Tensor) -> str:
    return f"{image.shape[1]} x {image.shape[2]}"
