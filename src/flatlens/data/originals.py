"""The original files: MNIST's IDX and CIFAR's binary version. Neither can run code when it is read."""

from __future__ import annotations

import gzip
import hashlib
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatlens.data.imagesets import ImageSet
from flatlens.errors import BadData, one_line

UNSIGNED_BYTES = 0x08
"""IDX's code for the type of its numbers; the only one these files use."""

Part = tuple[Tensor, Tensor]
"""Pixels (n, channels, rows, columns) uint8, and labels (n,) int64."""


def read_idx(known: ImageSet, folder: Path, train: bool) -> Part:
    """Return the images and the labels in two IDX files, gzipped or not.

    Raises:
        BadData: a file is damaged, or its contents do not fit its name.
    """
    images, labels = known.train_files if train else known.test_files
    count = known.train if train else known.test
    pixels = _idx(known, _plain_or_gz(folder, images), images, (count, *known.shape[1:]))
    named = _plain_or_gz(folder, labels)
    return pixels.unsqueeze(1), checked_labels(known, _idx(known, named, labels, (count,)), named)


def _plain_or_gz(folder: Path, name: str) -> Path:
    plain, zipped = folder / name, folder / f"{name}.gz"
    return plain if plain.is_file() or not zipped.is_file() else zipped


def _idx(known: ImageSet, path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return an IDX file: two zero bytes, type, number of dimensions, each size as a big-endian int32, the numbers."""
    head = 4 + 4 * len(shape)
    expected = head + int(np.prod(shape))
    content = _content(known, path, expected)
    if content[:4] != bytes((0, 0, UNSIGNED_BYTES, len(shape))):
        raise BadData(
            f"{path}: not an IDX file of {known.title} (it begins with {content[:4].hex()} instead of "
            f"{bytes((0, 0, UNSIGNED_BYTES, len(shape))).hex()}); {mending(known)}"
        )
    found = struct.unpack(f">{len(shape)}I", content[4:head]) if len(content) >= head else ()
    if found != shape:
        raise BadData(
            f"{path}: the file's shape is {_times(found)}; {known.title} has {_times(shape)}; {mending(known)}"
        )
    require_length(known, path, len(content), expected)
    require_md5(known, path, name, content)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy())


def _content(known: ImageSet, path: Path, expected: int) -> bytes:
    """Return the file's bytes, unzipped, and at most one more than expected, however large a damaged file is."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(expected + 1)
    except FileNotFoundError as error:
        raise BadData(f"{path}: there is no such file, and {known.title} needs it; {mending(known)}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadData(f"{path}: a damaged or truncated gzip file ({one_line(error)}); {mending(known)}") from error


def read_binary(known: ImageSet, folder: Path, train: bool) -> Part:
    """Return CIFAR's binary files: records of the label's bytes, then the red, green and blue planes, row by row.

    Raises:
        BadData: a file is missing or damaged, or its contents do not fit its name.
    """
    files = known.train_files if train else known.test_files
    size = _file_size(known, train)
    return _joined([_records(known, folder / f, f, _content(known, folder / f, size), size) for f in files])


def read_archive(known: ImageSet, archive: Path, train: bool) -> Part:
    """Return the same files from the .tar.gz that they are published in; nothing is unpacked to disk."""
    files = known.train_files if train else known.test_files
    size = _file_size(known, train)
    parts: dict[str, Part] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.removeprefix(f"{known.folder}/")
                stream = tar.extractfile(member) if name in files and member.isfile() else None
                if stream is not None:
                    parts[name] = _records(known, archive / member.name, name, stream.read(size + 1), size)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadData(f"{archive}: a damaged or truncated archive ({one_line(error)}); {mending(known)}") from error
    for name in files:
        if name not in parts:
            raise BadData(f"{archive}: does not contain {known.folder}/{name}; {mending(known)}")
    return _joined([parts[name] for name in files])


def require_archive(known: ImageSet, archive: Path) -> None:
    """Check the whole archive against its published checksum."""
    with archive.open("rb") as file:
        _compare(
            known,
            archive,
            archive.name,
            hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest(),
        )


def _file_size(known: ImageSet, train: bool) -> int:
    images = known.train // len(known.train_files) if train else known.test // len(known.test_files)
    return images * (known.label_bytes + int(np.prod(known.shape)))


def _records(known: ImageSet, path: Path, name: str, content: bytes, size: int) -> Part:
    require_length(known, path, len(content), size)
    require_md5(known, path, name, content)
    records = np.frombuffer(content, np.uint8).reshape(-1, known.label_bytes + int(np.prod(known.shape)))
    labels = torch.from_numpy(records[:, known.label_bytes - 1].copy())
    pixels = torch.from_numpy(records[:, known.label_bytes :].reshape(-1, *known.shape).copy())
    return pixels, checked_labels(known, labels, path)


def _joined(parts: list[Part]) -> Part:
    return torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts])


def checked_labels(known: ImageSet, labels: Tensor, path: Path) -> Tensor:
    """Return the labels as int64, each below the number of classes."""
    labels = labels.to(torch.int64)
    wrong = labels[(labels < 0) | (labels >= known.classes)]
    if len(wrong):
        raise BadData(
            f"{path}: the label {int(wrong[0])} is out of range: {known.title} has 0 to {known.classes - 1}; "
            f"{mending(known)}"
        )
    return labels


def require_length(known: ImageSet, path: Path, found: int, expected: int) -> None:
    """Refuse a file that is too short, or too long by even one byte."""
    if found != expected:
        met = f"has {found}: truncated" if found < expected else "has more"
        raise BadData(f"{path}: this file of {known.title} must have {expected} bytes; it {met}; {mending(known)}")


def require_md5(known: ImageSet, path: Path, name: str, content: bytes) -> None:
    """Check the content against the published checksum, if one is known; MD5 finds damage, not attacks."""
    if name in known.md5:
        _compare(known, path, name, hashlib.md5(content, usedforsecurity=False).hexdigest())


def _compare(known: ImageSet, path: Path, name: str, found: str) -> None:
    expected = known.md5.get(name, found)
    if found != expected:
        raise BadData(
            f"{path}: not the published {known.title}: its MD5 is {found} instead of {expected}; {mending(known)}"
        )


def mending(known: ImageSet) -> str:
    """Return the advice for a file of `known` that cannot be used."""
    return f"download it again: `flatlens data fetch {known.name}`"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "nothing"
