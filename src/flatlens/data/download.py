"""`flatlens data fetch`: download an image set's parquet files from the hub, on a machine with a network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatlens.data.image_sets import IMAGE_SETS, RECORD, FetchRecord, ImageSet, RecordedFile, default_root
from flatlens.errors import BadData, BadFolder, UnknownName, needs, typed_line
from flatlens.estimate import Progress
from flatlens.files import write_whole
from flatlens.progress import beside

_INCOMING = ".incoming"  #: folder of files that are not complete and checked yet
_PATIENCE = 20.0  #: seconds to wait for an answer of the hub


@dataclass(frozen=True)
class Fetched:
    """The result of a download: the files on disk."""

    folder: Path
    record: FetchRecord
    downloaded: tuple[str, ...]  #: the files that were not there yet


def fetch(name: str, root: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> Fetched:
    """Download the parquet files of an image set into ROOT/`name`, with a record of their origin.

    A file appears complete, with the size and the SHA256 that the hub declares for it, or not at all. After an
    interruption the same call downloads the files that are still missing. If all files are there already, they are
    verified without the hub.

    Raises:
        UnknownName: no image set has this name.
        BadData: the hub cannot be reached, or a file differs from its declared size or checksum.
        BadInput: huggingface_hub is not installed.
        BadFolder: nothing can be written there.
    """
    if name not in IMAGE_SETS:
        raise UnknownName.among("image set", name, IMAGE_SETS, where="to fetch")
    known, progress = IMAGE_SETS[name], beside(progress)
    folder = (default_root() if root is None else Path(root).expanduser()) / name
    record = FetchRecord.read(folder)
    if record is not None and not _missing(folder, record, progress):
        return Fetched(folder, record, ())
    with needs("data", f"fetching {known.title}"):
        import huggingface_hub
    # The set's parquet files in the newest state of its repository, with sizes and checksums
    under = f"{known.hub_folder}/"
    with _explained(huggingface_hub, known, folder):
        info = huggingface_hub.HfApi().dataset_info(known.repository, files_metadata=True, timeout=_PATIENCE)
    listed = [s for s in info.siblings or () if s.rfilename.startswith(under) and s.rfilename.endswith(".parquet")]
    parts = {Path(s.rfilename).name.partition("-")[0] for s in listed}
    if not parts >= {"train", "test"} or any(s.lfs is None or ".." in Path(s.rfilename).parts for s in listed):
        lacks = f"the dataset {known.repository} on the hub has no parquet files with checksums in {under} any more"
        raise BadData(f"{known.name}: {lacks}; {_by_hand(known, folder)}")
    files: Any = [(s.rfilename, s.lfs) for s in listed]
    declared = tuple(RecordedFile(path, int(lfs.size), str(lfs.sha256)) for path, lfs in files)
    record = FetchRecord(known.repository, str(info.sha), declared)
    # Those that are missing
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFolder(f"--root: the folder {folder} cannot be made ({error.strerror})") from error
    missing = _missing(folder, record, progress)
    shutil.rmtree(folder / _INCOMING, ignore_errors=True)  # of a download that was killed
    try:
        for file in missing:
            _download(huggingface_hub, known, record, file, folder, progress)
    finally:
        shutil.rmtree(folder / _INCOMING, ignore_errors=True)
    write_whole(folder / RECORD, json.dumps(record.as_json(), indent=1) + "\n")
    return Fetched(folder, record, tuple(file.path for file in missing))


def _missing(folder: Path, record: FetchRecord, progress: Progress | None) -> list[RecordedFile]:
    """Return the files that are not on disk as the hub declared them."""
    present = [file for file in record.files if (folder / file.path).is_file()]
    meter = _Meter("checksums", sum(file.bytes for file in present), progress)
    sound = [file for file in present if not file.damage(folder / file.path, meter)]
    return [file for file in record.files if file not in sound]


class _Meter:
    """A count of bytes, reported in MB to be readable."""

    def __init__(self, what: str, total: int, progress: Progress | None) -> None:
        self.what, self.total, self.progress, self.done = f"{what} (MB)", total, progress, 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.what, round(self.done / 1e6), max(1, round(self.total / 1e6)))


def _download(
    hub: Any, known: ImageSet, record: FetchRecord, file: RecordedFile, folder: Path, progress: Progress | None
) -> None:
    """Download one file in exactly the recorded state; it gets its name when it is complete and checked."""
    path = folder / file.path
    # the hub's library shows progress by a bar of this class: here it shows nothing, and counts
    meter = _Meter(path.name, file.bytes, progress)

    class Silent(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            meter(max(0, int(self.n) - meter.done))  # there may be two bars, of bytes received and bytes written

    with _explained(hub, known, folder):
        arrived = Path(
            hub.hf_hub_download(
                record.repository, file.path, repo_type="dataset", revision=record.revision, library_name="flatlens",
                local_dir=folder / _INCOMING, etag_timeout=_PATIENCE, tqdm_class=Silent,
            )
        )  # fmt: skip
    # complete, and as declared
    if wrong := file.damage(arrived):
        differs = f"the downloaded file differs from the hub's checksum or size ({wrong})"
        raise BadData(f"{path}: {differs}; it was deleted: run the command again")
    path.parent.mkdir(parents=True, exist_ok=True)
    arrived.replace(path)


@contextmanager
def _explained(hub: Any, known: ImageSet, folder: Path) -> Iterator[None]:
    """Say what to do if the hub gives no answer."""
    try:
        yield
    except Exception as error:  # the hub's client passes on what its HTTP library raises, and has changed it twice
        silent = f"the hub ({hub.HfApi().endpoint}) gave no answer that can be used ({typed_line(error, 200)})"
        raise BadData(f"{known.name}: {silent}; {_by_hand(known, folder)}") from error


def _by_hand(known: ImageSet, folder: Path) -> str:
    return (
        f"where there is a network, run the same command and copy {folder} here, or put the .parquet files of "
        f"https://huggingface.co/datasets/{known.repository}/tree/main/{known.hub_folder} into "
        f"{folder / known.hub_folder}"
    )
