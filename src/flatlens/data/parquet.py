"""Parquet files as the Hugging Face hub serves them: a column of PNG images, a column of labels."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flatlens.data.imagesets import ImageSet
from flatlens.data.originals import Part, checked_labels, mending
from flatlens.errors import BadData, needs
from flatlens.estimate import Progress

if TYPE_CHECKING:
    import pyarrow.parquet as pq

RECORD = "fetched.json"
"""The file beside the downloaded ones with their origin and their checksums."""


@dataclass(frozen=True)
class RecordedFile:
    """One file as the hub declared it."""

    path: str  #: in the repository, and beside the record
    bytes: int
    sha256: str


@dataclass(frozen=True)
class FetchRecord:
    """The downloaded files, with the repository and its revision."""

    repository: str
    revision: str
    files: tuple[RecordedFile, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers; `read_record` reads them."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def read_record(folder: Path) -> FetchRecord | None:
    """Return the record in `folder`, if there is one.

    Raises:
        BadData: it cannot be read.
    """
    try:
        plain = json.loads((folder / RECORD).read_text())
        files = tuple(RecordedFile(str(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in plain["files"])
        return FetchRecord(str(plain["repository"]), str(plain["revision"]), files)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{folder / RECORD}: a damaged record; delete it, and fetch the set again") from error


def damage(path: Path, file: RecordedFile, checked: Callable[[int], None] | None = None) -> str:
    """Return in words how a file on disk differs from the declared one; empty if it does not.

    `checked` is called with the number of bytes of each piece that is done.
    """
    if not path.is_file():
        return "it is missing"
    if path.stat().st_size != file.bytes:
        return f"it has {path.stat().st_size} bytes in place of {file.bytes}"
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
            if checked is not None:
                checked(len(piece))
    return "" if digest.hexdigest() == file.sha256 else f"its SHA256 is not {file.sha256}"


def read_parquet(known: ImageSet, files: list[Path], train: bool, progress: Progress | None = None) -> Part:
    """Return the images and labels of one part of the set, in the files' order.

    Raises:
        BadData: a file is damaged, or holds another set.
        BadInput: pyarrow or Pillow is not installed.
    """
    pixels = np.empty((known.train if train else known.test, *known.shape), np.uint8)
    labels = np.empty(len(pixels), np.int64)
    opened = [_opened(known, path) for path in files]
    rows = sum(file.metadata.num_rows for file in opened)
    if rows != len(pixels):
        names = ", ".join(path.name for path in files)
        raise BadData(
            f"{files[0].parent}: {known.title} must have {len(pixels)} images here, and {names} "
            f"{'hold' if len(files) > 1 else 'holds'} {rows}; {mending(known)}"
        )
    at = 0
    for path, file in zip(files, opened, strict=True):
        for batch in file.iter_batches(1024, columns=[known.image_column, known.label_column]):
            images = batch.column(0).field("bytes").to_pylist()
            for i, encoded in enumerate(images, start=at):
                pixels[i] = _decoded(known, encoded, path)
            labels[at : at + len(images)] = batch.column(1).to_numpy(zero_copy_only=False)
            at += len(images)
            if progress is not None:
                progress(f"{known.title}: {'training' if train else 'test'} images", at, len(pixels))
    return torch.from_numpy(pixels), checked_labels(known, torch.from_numpy(labels), files[0])


def _opened(known: ImageSet, path: Path) -> pq.ParquetFile:
    with needs("data", f"{path}: a parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise BadData(f"{path}: not a parquet file, or cut short; {mending(known)}") from error
    kinds = {field.name: field.type for field in file.schema_arrow}
    image, label = kinds.get(known.image_column), kinds.get(known.label_column)
    has_bytes = image is not None and pa.types.is_struct(image) and "bytes" in {f.name for f in image}
    if not has_bytes or label is None or not pa.types.is_integer(label):
        raise BadData(
            f"{path}: {known.title} has images in {known.image_column!r} and labels in {known.label_column!r}; "
            f"the columns here are {', '.join(f'{n} ({k})' for n, k in kinds.items())}; {mending(known)}"
        )
    return file


def _decoded(known: ImageSet, encoded: bytes | None, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    channels, rows, columns = known.shape
    mode = "L" if channels == 1 else "RGB"
    with needs("data", f"{path}: a parquet file of images"):
        from PIL import Image
    try:
        with Image.open(io.BytesIO(encoded or b""), formats=["PNG"]) as image:
            if (image.mode, image.size) != (mode, (columns, rows)):
                raise BadData(
                    f"{path}: an image of {known.title} is {mode}, {columns} x {rows}; one here is {image.mode}, "
                    f"{image.width} x {image.height}; {mending(known)}"
                )
            found = np.asarray(image)
    except BadData:
        raise
    except Exception as error:  # damaged bytes, or a header that promises more pixels than memory, in any words
        raise BadData(f"{path}: contains an image that is not a valid PNG; {mending(known)}") from error
    return found.reshape(rows, columns, channels).transpose(2, 0, 1)
