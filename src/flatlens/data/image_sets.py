"""MNIST, FashionMNIST, CIFAR-10 and CIFAR-100 from a folder on this machine; nothing is downloaded here.

They are read from the original files (IDX, CIFAR's binary version) or from the hub's parquet files, and checked against
the shapes, sizes and checksums in `IMAGE_SETS`. None of these forms can run code when it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flatlens.data.split import Images, Preparation, Split
from flatlens.errors import BadData, needs, one_line
from flatlens.estimate import Progress
from flatlens.progress import beside

if TYPE_CHECKING:
    import pyarrow.parquet as pq

Form: TypeAlias = Literal["IDX files", "binary files", "binary archive", "parquet files"]
Part: TypeAlias = tuple[Tensor, Tensor]  #: pixels (n, channels, rows, columns) uint8, and labels (n,) int64

VARIABLE = "FLATLENS_DATA"  #: the environment variable that names the folder of all data sets
RECORD = "fetched.json"  #: the file beside the downloaded ones with their origin and their checksums
UNSIGNED_BYTES = 0x08  #: IDX's code for the type of its numbers; the only one these files use
PICKLED = {"cifar10": "cifar-10", "cifar100": "cifar-100"}
ANY = Preparation()


@dataclass(frozen=True)
class ImageSet:
    """An image set: the names of its files and what they must contain.

    >>> from flatlens.data import IMAGE_SETS
    >>> IMAGE_SETS["mnist"].classes
    10
    """

    name: str
    title: str
    shape: tuple[int, int, int]  #: channels, rows, columns
    classes: int
    train: int  #: training images in all
    test: int
    folder: str  #: folder of the original files, under the root
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    repository: str  #: on the Hugging Face hub
    hub_folder: str  #: folder of the parquet files, in the repository
    image_column: str
    label_column: str
    archive: str = ""  #: holds the folder, unpacked or not
    label_bytes: int = 1  #: before each image of a CIFAR file; the last one is the label
    md5: Mapping[str, str] = field(default_factory=dict, hash=False)  #: checksums; of IDX files uncompressed

    def part(self, train: bool) -> tuple[tuple[str, ...], int]:
        """Return the names of the original files of one part, and the number of its images."""
        return (self.train_files, self.train) if train else (self.test_files, self.test)

    def unusable(self, path: Path, why: str) -> BadData:
        """Return the error for a file or folder of the set that cannot be used."""
        return BadData(f"{path}: {why}; download it again: `flatlens data fetch {self.name}`")


MNIST = ImageSet(
    name="mnist",
    title="MNIST",
    shape=(1, 28, 28),
    classes=10,
    train=60_000,
    test=10_000,
    folder="MNIST/raw",
    train_files=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    test_files=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    repository="ylecun/mnist",
    hub_folder="mnist",
    image_column="image",
    label_column="label",
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)

FASHION_MNIST = replace(
    MNIST,
    name="fashion_mnist",
    title="FashionMNIST",
    folder="FashionMNIST/raw",
    repository="zalando-datasets/fashion_mnist",
    hub_folder="fashion_mnist",
    md5={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
)

CIFAR10 = ImageSet(
    name="cifar10",
    title="CIFAR-10",
    shape=(3, 32, 32),
    classes=10,
    train=50_000,
    test=10_000,
    folder="cifar-10-batches-bin",
    train_files=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test_files=("test_batch.bin",),
    repository="uoft-cs/cifar10",
    hub_folder="plain_text",
    image_column="img",
    label_column="label",
    archive="cifar-10-binary.tar.gz",
    md5={
        "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
)

CIFAR100 = replace(
    CIFAR10,
    name="cifar100",
    title="CIFAR-100",
    classes=100,
    folder="cifar-100-binary",
    train_files=("train.bin",),
    test_files=("test.bin",),
    repository="uoft-cs/cifar100",
    hub_folder="cifar100",
    label_column="fine_label",
    archive="cifar-100-binary.tar.gz",
    label_bytes=2,  # the superclass, then the class
    md5={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
)

IMAGE_SETS: dict[str, ImageSet] = {s.name: s for s in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
"""The sets that are read from a folder, by name."""


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
    """Return all images of a set as in its files; BadData where there are none, or damaged or foreign ones."""
    progress = beside(progress)
    folder = default_root() if root is None else Path(root).expanduser()  # a shell leaves cifar10:~/sets alone
    found = find(known, folder)
    if found is None:
        raise BadData(_nothing(known, folder))
    if found.form == "parquet files":
        found = _as_fetched(known, found, progress)
        both = (found.train, True), (found.test, False)
        parts = [_read_parquet(known, files, train, progress) for files, train in both]
    elif found.form == "IDX files":
        parts = [_read_idx(known, found.place, train) for train in (True, False)]
    elif found.form == "binary files":
        # CIFAR's: records of the label's bytes, then the red, green and blue planes, row by row
        parts = []
        for train in (True, False):
            files, size = known.part(train)[0], _file_size(known, train)
            paths = [(name, found.place / name) for name in files]
            parts.append(_joined([_records(known, at, name, _content(known, at, size), size) for name, at in paths]))
    else:
        with found.place.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        _require_md5(known, found.place, found.place.name, digest.hexdigest())
        parts = [_read_archive(known, found.place, train) for train in (True, False)]
    (pixels, labels), (test_pixels, test_labels) = parts
    source = f"{known.title} ({found.form})"
    return Images(known.name, pixels, labels, test_pixels, test_labels, known.classes, source)


@dataclass(frozen=True)
class Found:
    """Files of a set, and their form."""

    form: Form
    place: Path  #: the folder, or the archive
    train: tuple[Path, ...] = ()  #: parquet files
    test: tuple[Path, ...] = ()


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


def _nothing(known: ImageSet, root: Path) -> str:
    """Return why no files of a set can be read: there are none, or CIFAR's Python version alone, unpacked or not."""
    if stem := PICKLED.get(known.name):
        folders = [root / f"{stem}-batches-py", root / f"{stem}-python"]
        files = [root / f"{stem}-python.tar.gz", *(root / name.removesuffix(".bin") for name in known.train_files)]
        for path in [*(p for p in folders if p.is_dir()), *(p for p in files if p.is_file())]:
            return (
                f"{path}: this is the pickled Python version of {known.title}, and flatlens never unpickles: get the "
                f"binary version ({known.archive}) into {root}, or run `flatlens data fetch {known.name}`"
            )
    first = known.train_files[0] if known.archive else f"{known.train_files[0]}(.gz)"
    return (
        f"{known.name}: no {known.title} in {root}, neither {known.folder}/{first} nor "
        f"{known.name}/**/train-*.parquet: run `flatlens data fetch {known.name}`, or name its folder by "
        f"{known.name}:ROOT or {VARIABLE}"
    )


def _read_idx(known: ImageSet, folder: Path, train: bool) -> Part:
    """Return the images and the labels in two IDX files, gzipped or not: zeros, type, sizes (big-endian), numbers."""
    names, count = known.part(train)
    read = []
    for name, shape in zip(names, ((count, *known.shape[1:]), (count,)), strict=True):
        zipped = folder / f"{name}.gz"
        path = zipped if zipped.is_file() and not (folder / name).is_file() else folder / name
        head = 4 + 4 * len(shape)
        expected = head + int(np.prod(shape))
        content, magic = _content(known, path, expected), bytes((0, 0, UNSIGNED_BYTES, len(shape)))
        if content[:4] != magic:
            begins = f"it begins with {content[:4].hex()} instead of {magic.hex()}"
            raise known.unusable(path, f"not an IDX file of {known.title} ({begins})")
        found = struct.unpack(f">{len(shape)}I", content[4:head]) if len(content) >= head else ()
        if found != shape:
            has, wanted = (" x ".join(map(str, sizes)) or "nothing" for sizes in (found, shape))
            raise known.unusable(path, f"the file's shape is {has}; {known.title} has {wanted}")
        _require_published(known, path, name, content, expected)
        read.append(torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy()))
    return read[0].unsqueeze(1), _checked_labels(known, read[1], path)


def _content(known: ImageSet, path: Path, expected: int) -> bytes:
    """Return the file's bytes, unzipped, and at most one more than expected, however large a damaged file is."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(expected + 1)
    except FileNotFoundError as error:
        raise known.unusable(path, f"there is no such file, and {known.title} needs it") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise known.unusable(path, f"a damaged or truncated gzip file ({one_line(error)})") from error


def _read_archive(known: ImageSet, archive: Path, train: bool) -> Part:
    """Return the same files from the .tar.gz that they are published in; nothing is unpacked to disk."""
    files, size = known.part(train)[0], _file_size(known, train)
    parts: dict[str, Part] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.removeprefix(f"{known.folder}/")
                stream = tar.extractfile(member) if name in files and member.isfile() else None
                if stream is not None:
                    parts[name] = _records(known, archive / member.name, name, stream.read(size + 1), size)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise known.unusable(archive, f"a damaged or truncated archive ({one_line(error)})") from error
    for name in files:
        if name not in parts:
            raise known.unusable(archive, f"does not contain {known.folder}/{name}")
    return _joined([parts[name] for name in files])


def _file_size(known: ImageSet, train: bool) -> int:
    files, count = known.part(train)
    return count // len(files) * (known.label_bytes + int(np.prod(known.shape)))


def _records(known: ImageSet, path: Path, name: str, content: bytes, size: int) -> Part:
    _require_published(known, path, name, content, size)
    records = np.frombuffer(content, np.uint8).reshape(-1, known.label_bytes + int(np.prod(known.shape)))
    labels = torch.from_numpy(records[:, known.label_bytes - 1].copy())
    pixels = torch.from_numpy(records[:, known.label_bytes :].reshape(-1, *known.shape).copy())
    return pixels, _checked_labels(known, labels, path)


def _joined(parts: list[Part]) -> Part:
    return torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts])


def _checked_labels(known: ImageSet, labels: Tensor, path: Path) -> Tensor:
    labels = labels.to(torch.int64)
    wrong = labels[(labels < 0) | (labels >= known.classes)]
    if len(wrong):
        why = f"the label {int(wrong[0])} is out of range: {known.title} has 0 to {known.classes - 1}"
        raise known.unusable(path, why)
    return labels


def _require_published(known: ImageSet, path: Path, name: str, content: bytes, expected: int) -> None:
    """Refuse a file that is too short, or too long by even one byte, or has another checksum than the published one."""
    if (found := len(content)) != expected:
        met = f"has {found}: truncated" if found < expected else "has more"
        raise known.unusable(path, f"this file of {known.title} must have {expected} bytes; it {met}")
    _require_md5(known, path, name, hashlib.md5(content, usedforsecurity=False).hexdigest())


def _require_md5(known: ImageSet, path: Path, name: str, found: str) -> None:
    expected = known.md5.get(name, found)  # where it is known; MD5 finds damage, not attacks
    if found != expected:
        raise known.unusable(path, f"not the published {known.title}: its MD5 is {found} instead of {expected}")


def _read_parquet(known: ImageSet, files: Sequence[Path], train: bool, progress: Progress | None) -> Part:
    """Return the images and labels of one part of the set, in the files' order."""
    pixels = np.empty((known.part(train)[1], *known.shape), np.uint8)
    labels = np.empty(len(pixels), np.int64)
    opened = [_opened(known, path) for path in files]
    rows = sum(file.metadata.num_rows for file in opened)
    if rows != len(pixels):
        names = ", ".join(path.name for path in files)
        holds = f"{names} {'hold' if len(files) > 1 else 'holds'} {rows}"
        raise known.unusable(files[0].parent, f"{known.title} must have {len(pixels)} images here, and {holds}")
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
    return torch.from_numpy(pixels), _checked_labels(known, torch.from_numpy(labels), files[0])


def _opened(known: ImageSet, path: Path) -> pq.ParquetFile:
    with needs("data", f"{path}: a parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise known.unusable(path, "not a parquet file, or cut short") from error
    kinds = {field.name: field.type for field in file.schema_arrow}
    image, label = kinds.get(known.image_column), kinds.get(known.label_column)
    has_bytes = image is not None and pa.types.is_struct(image) and "bytes" in {f.name for f in image}
    if not has_bytes or label is None or not pa.types.is_integer(label):
        has = f"{known.title} has images in {known.image_column!r} and labels in {known.label_column!r}"
        here = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise known.unusable(path, f"{has}; the columns here are {here}")
    return file


def _decoded(known: ImageSet, encoded: bytes | None, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    channels, rows, columns = known.shape
    mode = "L" if channels == 1 else "RGB"
    with needs("data", f"{path}: a parquet file of images"):
        from PIL import Image
    try:
        with Image.open(io.BytesIO(encoded or b""), formats=["PNG"]) as image:
            if (image.mode, image.size) != (mode, (columns, rows)):
                here = f"{image.mode}, {image.width} x {image.height}"
                wanted = f"an image of {known.title} is {mode}, {columns} x {rows}"
                raise known.unusable(path, f"{wanted}; one here is {here}")
            found = np.asarray(image)
    except BadData:
        raise
    except Exception as error:  # damaged bytes, or a header that promises more pixels than memory, in any words
        raise known.unusable(path, "contains an image that is not a valid PNG") from error
    return found.reshape(rows, columns, channels).transpose(2, 0, 1)


@dataclass(frozen=True)
class RecordedFile:
    """A file as the hub declared it."""

    path: str  #: in the repository, and beside the record
    bytes: int
    sha256: str

    def damage(self, path: Path, checked: Callable[[int], None] | None = None) -> str:
        """Return in words how a file differs from the declared one, or ""; `checked` gets the bytes of each piece."""
        if not path.is_file():
            return "it is missing"
        if path.stat().st_size != self.bytes:
            return f"it has {path.stat().st_size} bytes instead of {self.bytes}"
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
                if checked is not None:
                    checked(len(piece))
        return "" if digest.hexdigest() == self.sha256 else f"its SHA256 is not {self.sha256}"


@dataclass(frozen=True)
class FetchRecord:
    """The downloaded files, with the repository and its revision."""

    repository: str
    revision: str
    files: tuple[RecordedFile, ...]

    @classmethod
    def read(cls, folder: Path) -> FetchRecord | None:
        """Return the record in `folder`, if there is one."""
        try:
            plain = json.loads((folder / RECORD).read_text())
            files = tuple(RecordedFile(str(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in plain["files"])
            return cls(str(plain["repository"]), str(plain["revision"]), files)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise BadData(f"{folder / RECORD}: a damaged record; delete it, and fetch the set again") from error

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold, as `read` reads it."""
        return asdict(self)


def _as_fetched(known: ImageSet, found: Found, progress: Progress | None) -> Found:
    """Return only the files that `flatlens data fetch` recorded there, if it did; each must be unchanged."""
    record = FetchRecord.read(found.place)
    if record is None:
        return found
    for done, file in enumerate(record.files, start=1):
        if wrong := file.damage(path := found.place / file.path):
            changed = f"the file has changed since it was downloaded ({wrong})"
            raise BadData(f"{path}: {changed}: `flatlens data fetch {known.name}` downloads it again")
        if progress is not None:
            progress(f"{known.title}: checksums", done, len(record.files))
    recorded = {found.place / file.path for file in record.files}
    train, test = (tuple(p for p in part if p in recorded) for part in (found.train, found.test))
    if not (train and test):
        mend = f"delete it, and run `flatlens data fetch {known.name}` again"
        raise BadData(f"{found.place / RECORD}: lists no training images or no test images: {mend}")
    return replace(found, train=train, test=test)
