"""How far the runs of a folder are: a tiny file each, written by its worker wherever that is, read by who watches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flatlens.estimate import Progress
from flatlens.files import partial_name

SUFFIX = ".progress"
EVERY = 1.0
"""Seconds between two writes."""


@contextmanager
def progress_file(path: Path) -> Iterator[Progress]:
    """In here, a `Progress` that notes (done, total) in `path`; after, the file is gone."""
    try:
        yield _Note(path)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class _Note:
    """No note is worth a run: a disk that is full or slow is not complained about."""

    def __init__(self, path: Path) -> None:
        self.path, self.next = path, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() < self.next:
            return
        partial = partial_name(self.path)
        with suppress(OSError):
            try:
                partial.write_text(f"{done} {total}\n", encoding="ascii")
                partial.replace(self.path)
            finally:
                partial.unlink(missing_ok=True)
        self.next = time.monotonic() + EVERY


def in_progress(folder: Path) -> dict[str, tuple[int, int]]:
    """(done, total) of every run that notes it in `folder`, by the stem of its file."""
    notes = {path.name.removesuffix(SUFFIX): _read(path) for path in sorted(folder.glob(f"[!.]*{SUFFIX}"))}
    return {stem: note for stem, note in notes.items() if note is not None}


def remove_progress_files(folder: Path) -> None:
    """Remove the notes that killed runs left; those of living ones are back within a second."""
    for path in folder.glob(f"[!.]*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[int, int] | None:
    try:
        done, total = path.read_text(encoding="ascii").split()
        return int(done), int(total)
    except (OSError, ValueError):
        return None  # it has just ended
