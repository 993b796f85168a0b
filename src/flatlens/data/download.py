"""`flatlens data fetch`: download an image set's parquet files from the hub, on a machine with a network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flatlens.data.image_sets import (
    IMAGE_SETS,
    RECORD,
    FetchRecord,
    ImageSet,
    RecordedFile,
    damage,
    default_root,
    read_record,
)
from flatlens.errors import BadData, BadFolder, UnknownName, needs, typed_line
from flatlens.estimate import Progress
from flatlens.files import write_whole
from flatlens.progress import beside

_T = TypeVar("_T")

PIECE = 1 << 23
"""Bytes per request: the progress bar moves, and little is lost by an interruption."""

_PATIENCE = 20.0
"""Seconds to wait for an answer of the hub."""

_WHOLE = 200
"""HTTP status of an answer with the whole file, from a proxy that does not support ranges."""


@dataclass(frozen=True)
class Fetched:
    """The result of a download: the files on disk."""

    folder: Path
    record: FetchRecord
    downloaded: tuple[str, ...]  #: the files that were not there yet


def fetch(name: str, root: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> Fetched:
    """Download the parquet files of an image set into ROOT/`name`, with a record of their origin.

    A file appears complete, with the size and the SHA256 that the hub declares for it, or not at all. After an
    interruption the same call continues. If all files are there already, they are verified without the hub.

    Raises:
        UnknownName: no image set has this name.
        BadData: the hub cannot be reached, or a file differs from its declared size or checksum.
        BadInput: huggingface_hub is not installed.
        BadFolder: nothing can be written there.
    """
    if name not in IMAGE_SETS:
        raise UnknownName.among("image set to fetch", name, IMAGE_SETS)
    known = IMAGE_SETS[name]
    folder = (default_root() if root is None else Path(root).expanduser()) / name
    record = read_record(folder)
    if record is None or _missing(folder, record, progress):
        hub = _Hub(known, folder)
        record = hub.declared()
        _make(folder)
        downloaded = _missing(folder, record, progress)
        for file in downloaded:
            _download(hub, record, file, folder / file.path, progress)
        write_whole(folder / RECORD, json.dumps(record.as_json(), indent=1) + "\n")
        return Fetched(folder, record, tuple(file.path for file in downloaded))
    return Fetched(folder, record, ())


def _missing(folder: Path, record: FetchRecord, progress: Progress | None) -> list[RecordedFile]:
    """Return the files that are not on disk as the hub declared them."""
    present = [file for file in record.files if (folder / file.path).is_file()]
    meter = _Meter("checksums", sum(file.bytes for file in present), progress)
    sound = [file for file in present if not damage(folder / file.path, file, meter)]
    return [file for file in record.files if file not in sound]


class _Meter:
    """A count of bytes, reported in MB to be readable."""

    def __init__(self, what: str, total: int, progress: Progress | None, done: int = 0) -> None:
        self.what, self.total, self.progress, self.done = f"{what} (MB)", total, beside(progress), done

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.what, round(self.done / 1e6), max(1, round(self.total / 1e6)))


class _Hub:
    """The hub: the files it declares, and their bytes."""

    def __init__(self, known: ImageSet, folder: Path) -> None:
        with needs("data", f"fetching {known.title}"):
            import huggingface_hub
            import huggingface_hub.utils
        self._library: Any = huggingface_hub
        self._endpoint = str(huggingface_hub.HfApi().endpoint)  # $HF_ENDPOINT, where it is set
        self._known, self._folder = known, folder

    def declared(self) -> FetchRecord:
        """Return the set's parquet files in the newest state of its repository, with sizes and checksums."""
        repository, under = self._known.repository, f"{self._known.hub_folder}/"
        info = self._asked(
            lambda: self._library.HfApi(endpoint=self._endpoint).dataset_info(
                repository, files_metadata=True, timeout=_PATIENCE
            )
        )
        listed = [s for s in info.siblings or () if s.rfilename.startswith(under) and s.rfilename.endswith(".parquet")]
        parts = {Path(s.rfilename).name.partition("-")[0] for s in listed}
        if not parts >= {"train", "test"} or any(s.lfs is None or ".." in Path(s.rfilename).parts for s in listed):
            raise BadData(
                f"{self._known.name}: the dataset {repository} on the hub has no parquet files with checksums in "
                f"{under} any more; {self._by_hand()}"
            )
        files = tuple(RecordedFile(s.rfilename, int(s.lfs.size), str(s.lfs.sha256)) for s in listed)
        return FetchRecord(repository, str(info.sha), files)

    def piece(self, record: FetchRecord, file: RecordedFile, start: int, length: int) -> bytes:
        """Return bytes of a file in exactly the recorded state.

        The library's own downloads start from the beginning in every process; with pieces, a later one continues.
        """
        url = self._library.hf_hub_url(
            record.repository, file.path, repo_type="dataset", revision=record.revision, endpoint=self._endpoint
        )
        headers = {
            **self._library.utils.build_hf_headers(library_name="flatlens"),
            "Range": f"bytes={start}-{start + length - 1}",
            "Accept-Encoding": "identity",
        }
        answer = self._asked(lambda: self._answer(url, headers))
        content = bytes(answer.content)
        return content[start : start + length] if answer.status_code == _WHOLE else content

    def _answer(self, url: str, headers: dict[str, str]) -> Any:
        answer = self._library.utils.http_backoff("GET", url, headers=headers, timeout=_PATIENCE)
        self._library.utils.hf_raise_for_status(answer)
        return answer

    def _asked(self, question: Callable[[], _T]) -> _T:
        try:
            return question()
        except Exception as error:  # the hub's client passes on what its HTTP library raises, and has changed it twice
            raise BadData(
                f"{self._known.name}: the hub ({self._endpoint}) gave no answer that can be used "
                f"({typed_line(error, 200)}); {self._by_hand()}"
            ) from error

    def _by_hand(self) -> str:
        known = self._known
        return (
            f"where there is a network, run the same command and copy {self._folder} here, or put the .parquet files "
            f"of https://huggingface.co/datasets/{known.repository}/tree/main/{known.hub_folder} into "
            f"{self._folder / known.hub_folder}"
        )


def _download(hub: _Hub, record: FetchRecord, file: RecordedFile, path: Path, progress: Progress | None) -> None:
    """Download pieces into a temporary file, and rename it when it is complete and checked."""
    _make(path.parent)
    # the checksum is in the name: pieces of another version are not continued
    part = path.with_name(f"{path.name}.{file.sha256[:12]}.part")
    done = part.stat().st_size if part.exists() else 0
    if done > file.bytes:
        part.unlink()
        done = 0
    meter = _Meter(path.name, file.bytes, progress, done)
    with part.open("ab") as out:
        while done < file.bytes and (piece := hub.piece(record, file, done, min(PIECE, file.bytes - done))):
            out.write(piece)
            done += len(piece)
            meter(len(piece))
        out.flush()
        os.fsync(out.fileno())
    wrong = damage(part, file)
    if wrong:
        part.unlink()
        raise BadData(
            f"{path}: the downloaded file differs from the hub's checksum or size ({wrong}); it was deleted: "
            "run the command again"
        )
    part.replace(path)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFolder(f"--root: the folder {folder} cannot be made ({error.strerror})") from error
