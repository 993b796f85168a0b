"""Images and texts as they are, from a folder with one folder for each class, and their preparation for a network."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flatlens.data.image_sets import default_root
from flatlens.data.split import Split
from flatlens.errors import BadData, needs, one_line
from flatlens.models.external import ImagePreparation, NetworkPreparation, TextPreparation

if TYPE_CHECKING:
    from PIL.Image import Image


HELD = 2**29  #: largest size in bytes of prepared images kept in memory; larger sets are prepared at each reading

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

    def opened(one: Tensor) -> Image.Image:
        return Image.fromarray(one[0].numpy() if len(one) == 1 else one.permute(1, 2, 0).contiguous().numpy())

    return RawImages([partial(opened, one) for one in pixels], targets)


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
    """
    if isinstance(raw, RawTexts):
        if not isinstance(preparation, TextPreparation):
            reads = "reads images" if preparation else "has no tokenizer"
            raise BadData(f"{argument}: these are texts, and the network {reads}: name an hf: network with a tokenizer")
        encoded = preparation.encode(raw.texts)
        return encoded, next_tokens(encoded) if preparation.next_tokens else raw.targets
    if isinstance(preparation, TextPreparation):
        raise BadData(f"{argument}: these are images, and the network reads texts: name a folder of .txt files")
    known = preparation or ImagePreparation(_as_tensor, PLAIN)
    opened = _Opened(raw, known)
    if preparation is not None and opened[0][0].nbytes * len(opened) > HELD:
        return opened
    images = [opened[index][0] for index in range(len(opened))]
    if len({image.shape for image in images}) > 1:
        odd = next(image for image in images if image.shape != images[0].shape)
        sizes = " and ".join(f"{one.shape[1]} x {one.shape[2]}" for one in (images[0], odd))
        mend = "resize them to one size, or use a timm: or hf: network, which resizes them itself"
        raise BadData(f"{argument}: images have different sizes ({sizes} pixels): {mend}")
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


def _as_tensor(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255


_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
TEXTS = frozenset({".txt"})
HELD_OUT = ("test", "val", "valid", "validation")
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Folder:
    """The contents of a folder, not opened yet."""

    train: Raw
    test: Raw | None
    description: str
    labels: Mapping[str, int]  #: of the classes, by name


def read_folder(
    folder: Path, known: Mapping[str, int], argument: str, beside: Mapping[str, int] | None = None
) -> Folder:
    """Return the samples of a folder, in the order of their names; each class has its own folder.

    Labels are the network's if `known` contains every class by name; else the classes' own names if these are whole
    numbers; else 0, 1, ... in alphabetical order. Held-out samples have the labels of the training samples' classes;
    `beside`: these, if the samples are held out and the training samples are in another folder.
    """
    train = folder / "train" if (folder / "train").is_dir() else folder
    test = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None) if train != folder else None
    classes = _classes(train)
    if not classes:
        raise BadData(f"{argument}: {folder} has no folder for each class: use {folder}/CLASS/FILE")
    labels = _labels(train, classes, known, beside or {}, argument)
    found, kind = _read(train, labels, argument)
    held_out = None
    if test is not None:
        held_out = _read(test, _labels(test, _classes(test), known, labels, argument), argument)[0]
    told = ", ".join(f"{name} is {labels[name]}" for name in classes[:_SHOWN])
    more = ", ..." if len(classes) > _SHOWN else ""
    size = f"{len(found.targets)} {kind} of {len(classes)} classes ({told}{more})"
    return Folder(found, held_out, f"the folder {folder.name}, {size}", labels)


def _classes(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _labels(
    folder: Path, classes: list[str], known: Mapping[str, int], beside: Mapping[str, int], argument: str
) -> dict[str, int]:
    """Return the labels of a folder's classes; `beside` has those of the training samples, if these are held out."""
    every = {*classes, *beside}
    if every <= known.keys():
        return {name: known[name] for name in classes}
    if all(name.isdecimal() for name in every):
        return {name: int(name) for name in classes}
    if not beside:
        return {name: label for label, name in enumerate(classes)}
    if foreign := [name for name in classes if name not in beside]:
        has = ", ".join(list(beside)[:_SHOWN]) + ", ..." * (len(beside) > _SHOWN)
        lacks = f"the training samples have none of that name (they have {has})"
        raise BadData(f"{argument}: {folder} has a class {foreign[0]}, and {lacks}: rename it, or move it away")
    return {name: beside[name] for name in classes}


def _read(folder: Path, labels: Mapping[str, int], argument: str) -> tuple[Raw, str]:
    files = [(p, labels[name]) for name in labels for p in _files(folder / name, argument)]
    images = [(p, label) for p, label in files if p.suffix.lower() in _IMAGES]
    texts = [(p, label) for p, label in files if p.suffix.lower() in TEXTS]
    if bool(images) == bool(texts):
        there = f"{len(images)} images and {len(texts)} texts" if images else "neither images nor .txt files"
        raise BadData(f"{argument}: the class folders of {folder} hold {there}: use images only or texts only")
    targets = torch.tensor([label for _, label in images or texts])
    if images:
        return RawImages([from_file(p, argument) for p, _ in images], targets), "images"
    contents = []
    for path, _ in texts:
        try:
            contents.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise BadData(f"{argument}: {path} is not UTF-8 ({error.reason} at byte {error.start})") from error
        except OSError as error:
            raise BadData(f"{argument}: {path} cannot be read ({error.strerror})") from error
    return RawTexts(contents, targets), "texts"


def _files(folder: Path, argument: str) -> list[Path]:
    """Return all files under a folder; unlike `Path.rglob`, do not skip silently what cannot be read."""

    def unreadable(error: OSError) -> None:
        unread = f"{argument}: {error.filename} cannot be read ({error.strerror})"
        raise BadData(f"{unread}: change its permissions") from error

    if not folder.is_dir():  # a class without held-out samples
        return []
    walk = os.walk(folder, onerror=unreadable)
    return sorted(path for here, _, names in walk for name in names if (path := Path(here, name)).is_file())


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
        asked = f"{n} training and {test} test images were requested, but {folder} has {there}"
        raise BadData(f"imagenet: {asked}: request fewer, or add images")
    chosen = torch.randperm(there, generator=torch.Generator().manual_seed(seed))[: n + test]
    squares = []
    for index in chosen:
        image = raw.open[int(index)]().convert("RGB")
        scale = SHORT / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)))
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        squares.append(_as_tensor(image.crop((left, top, left + SIDE, top + SIDE))))
    x = torch.stack(squares)
    y = raw.targets[chosen]
    classes = int(raw.targets.max()) + 1
    told = f"{n} and {test} of {there} images, the middle {SIDE} x {SIDE} pixels of a shorter side of {SHORT}"
    return Split("imagenet", x[:n], y[:n], x[n:], y[n:], classes, told)
