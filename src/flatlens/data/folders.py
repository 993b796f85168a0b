"""A folder of images or of texts, FOLDER/CLASS/FILE, or with train/ and test/ above the classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from flatlens.data.raw import Raw, RawImages, RawTexts, from_file
from flatlens.errors import BadData

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

    Raises:
        BadData: no classes, no files, both images and texts, a text that is not UTF-8, or a class that the training
            samples do not have.
    """
    train = folder / "train" if (folder / "train").is_dir() else folder
    test = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None) if train != folder else None
    classes = _classes(train)
    if not classes:
        raise BadData(f"{argument}: {folder} has no folder for each class: {folder}/CLASS/FILE is needed")
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
        raise BadData(
            f"{argument}: {folder} has a class {foreign[0]}, and the training samples have none of that name (they "
            f"have {has}): rename it, or move it away"
        )
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
    return RawTexts([_text(p, argument) for p, _ in texts], targets), "texts"


def _files(folder: Path, argument: str) -> list[Path]:
    """Return all files under a folder; unlike `Path.rglob`, do not skip silently what cannot be read."""

    def unreadable(error: OSError) -> None:
        raise BadData(
            f"{argument}: {error.filename} cannot be read ({error.strerror}): mend its permissions"
        ) from error

    if not folder.is_dir():  # a class without held-out samples
        return []
    walk = os.walk(folder, onerror=unreadable)
    return sorted(path for here, _, names in walk for name in names if (path := Path(here, name)).is_file())


def _text(path: Path, argument: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadData(f"{argument}: {path} is not UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise BadData(f"{argument}: {path} cannot be read ({error.strerror})") from error
