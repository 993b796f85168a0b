"""MNIST, FashionMNIST, CIFAR-10 and CIFAR-100 from a folder on this machine; nothing is downloaded here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from flatlens.data.images import Images
from flatlens.data.imagesets import IMAGE_SETS, ImageSet
from flatlens.data.originals import Part, read_archive, read_binary, read_idx, require_archive
from flatlens.data.parquet import RECORD, damage, read_parquet, read_record
from flatlens.data.preparation import Preparation
from flatlens.data.split import Split
from flatlens.errors import BadData
from flatlens.estimate import Progress
from flatlens.progress import beside

Form: TypeAlias = Literal["IDX files", "binary files", "binary archive", "parquet files"]

VARIABLE = "FLATLENS_DATA"
"""The environment variable that names the folder of all data sets."""

PICKLED = {"cifar10": "cifar-10", "cifar100": "cifar-100"}
ANY = Preparation()


@dataclass(frozen=True)
class Found:
    """Files of a set, and their form."""

    form: Form
    place: Path  #: the folder, or the archive
    train: tuple[Path, ...] = ()  #: parquet files
    test: tuple[Path, ...] = ()


def default_root() -> Path:
    """Return the folder of the data sets: $FLATLENS_DATA, else ~/.cache/flatlens."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/flatlens").expanduser()


def mnist(
    root: str | os.PathLike[str] | None = None, prepare: Preparation = ANY, *, progress: Progress | None = None
) -> Split:
    """Return MNIST: 60,000 + 10,000 handwritten digits, x (n, 1, 28, 28).

    Read from ROOT/MNIST/raw/train-images-idx3-ubyte (.gz or not) and the three files like it, or from the hub's parquet
    files in ROOT/mnist. ROOT is `default_root()` unless it is given.

    Raises:
        BadData: no files, or damaged or foreign ones.
    """
    return prepare(read_images(IMAGE_SETS["mnist"], root, progress))


def fashion_mnist(
    root: str | os.PathLike[str] | None = None, prepare: Preparation = ANY, *, progress: Progress | None = None
) -> Split:
    """Return FashionMNIST: 60,000 + 10,000 pictures of clothes, x (n, 1, 28, 28).

    Read from ROOT/FashionMNIST/raw, or from parquet files in ROOT/fashion_mnist; else as `mnist`.
    """
    return prepare(read_images(IMAGE_SETS["fashion_mnist"], root, progress))


def cifar10(
    root: str | os.PathLike[str] | None = None, prepare: Preparation = ANY, *, progress: Progress | None = None
) -> Split:
    """Return CIFAR-10: 50,000 + 10,000 photographs in 10 classes, x (n, 3, 32, 32).

    Read from ROOT/cifar-10-batches-bin/data_batch_1.bin and the other batches (the binary version), from
    ROOT/cifar-10-binary.tar.gz, or from parquet files in ROOT/cifar10. The Python version is pickled, and refused.
    """
    return prepare(read_images(IMAGE_SETS["cifar10"], root, progress))


def cifar100(
    root: str | os.PathLike[str] | None = None, prepare: Preparation = ANY, *, progress: Progress | None = None
) -> Split:
    """Return CIFAR-100: 50,000 + 10,000 photographs in 100 classes (the fine labels), x (n, 3, 32, 32).

    Read from ROOT/cifar-100-binary, ROOT/cifar-100-binary.tar.gz, or parquet files in ROOT/cifar100; else as `cifar10`.
    """
    return prepare(read_images(IMAGE_SETS["cifar100"], root, progress))


def read_images(
    known: ImageSet, root: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Images:
    """Return all images of a set as in its files, checked against the facts known of the set.

    Raises:
        BadData: no files, or damaged or foreign ones.
    """
    progress = beside(progress)
    folder = default_root() if root is None else Path(root).expanduser()  # a shell leaves cifar10:~/sets alone
    found = find(known, folder)
    if found is None:
        raise BadData(_nothing(known, folder))
    if found.form == "binary archive":
        require_archive(known, found.place)
    if found.form == "parquet files":
        found = _as_fetched(known, found, progress)
    read = _reader(known, found, progress)
    pixels, labels = read(True)
    test_pixels, test_labels = read(False)
    source = f"{known.title} ({found.form})"
    return Images(known.name, pixels, labels, test_pixels, test_labels, known.classes, source)


def find(known: ImageSet, root: Path) -> Found | None:
    """Return the files of a set under `root`, in the first form that is there; do not open them."""
    original: Form = "binary files" if known.archive else "IDX files"
    ends = ("",) if known.archive else ("", ".gz")
    for folder in (root / known.folder, root):
        if any((folder / f"{name}{end}").is_file() for name in known.train_files for end in ends):
            return Found(original, folder)
    if known.archive and (root / known.archive).is_file():
        return Found("binary archive", root / known.archive)
    for folder, under in ((root / known.name, "**/"), (root / known.hub_folder, ""), (root, "")):
        train, test = (tuple(sorted(folder.glob(f"{under}{part}-*.parquet"))) for part in ("train", "test"))
        if train and test:
            return Found("parquet files", folder, train, test)
    return None


def _reader(known: ImageSet, found: Found, progress: Progress | None) -> Callable[[bool], Part]:
    if found.form == "IDX files":
        return lambda train: read_idx(known, found.place, train)
    if found.form == "binary files":
        return lambda train: read_binary(known, found.place, train)
    if found.form == "binary archive":
        return lambda train: read_archive(known, found.place, train)
    return lambda train: read_parquet(known, list(found.train if train else found.test), train, progress)


def _as_fetched(known: ImageSet, found: Found, progress: Progress | None) -> Found:
    """Return only the files that `flatlens data fetch` recorded there, if it did; each must be unchanged."""
    record = read_record(found.place)
    if record is None:
        return found
    for done, file in enumerate(record.files, start=1):
        path = found.place / file.path
        wrong = damage(path, file)
        if wrong:
            raise BadData(
                f"{path}: the file has changed since it was downloaded ({wrong}): `flatlens data fetch {known.name}` "
                f"downloads it again"
            )
        if progress is not None:
            progress(f"{known.title}: checksums", done, len(record.files))
    recorded = {found.place / file.path for file in record.files}
    train, test = (tuple(p for p in part if p in recorded) for part in (found.train, found.test))
    if not (train and test):
        raise BadData(
            f"{found.place / RECORD}: lists no training images or no test images: delete it, and run "
            f"`flatlens data fetch {known.name}` again"
        )
    return replace(found, train=train, test=test)


def _nothing(known: ImageSet, root: Path) -> str:
    pickled = _pickled(known, root)
    if pickled is not None:
        return (
            f"{pickled}: this is the Python version of {known.title}, which is pickled, and nothing is unpickled here; "
            f"get the binary version ({known.archive}) into {root}, or `flatlens data fetch {known.name}`"
        )
    first = known.train_files[0] if known.archive else f"{known.train_files[0]}(.gz)"
    return (
        f"{known.name}: no {known.title} in {root}: neither {known.folder}/{first} nor {known.name}/**/train-*.parquet "
        f"is there; `flatlens data fetch {known.name}` fetches it, {known.name}:ROOT or {VARIABLE} says where it is"
    )


def _pickled(known: ImageSet, root: Path) -> Path | None:
    """Return the path of the Python version of CIFAR, unpacked or not; None if it is not there."""
    if known.name not in PICKLED:
        return None
    stem = PICKLED[known.name]
    folders = (root / f"{stem}-batches-py", root / f"{stem}-python")
    files = (root / f"{stem}-python.tar.gz", *(root / name.removesuffix(".bin") for name in known.train_files))
    return next((p for p in folders if p.is_dir()), next((p for p in files if p.is_file()), None))
