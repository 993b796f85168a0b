"""Progress of the runs in a folder: each worker writes a small file, on any machine; the observer reads them."""

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
    """Yield a `Progress` that writes (done, total) into `path`; the file is removed at the end."""
    try:
        yield _Note(path)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class _Note:
    """A `Progress` that writes to a file, and ignores I/O errors: progress is optional."""

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
    """Return (done, total) of every run with a progress file in `folder`, by the stem of the file."""
    notes = {path.name.removesuffix(SUFFIX): _read(path) for path in sorted(folder.glob(f"[!.]*{SUFFIX}"))}
    return {stem: note for stem, note in notes.items() if note is not None}


def remove_progress_files(folder: Path) -> None:
    """Remove the files that killed runs left; running ones write theirs again within a second."""
    for path in folder.glob(f"[!.]*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[int, int] | None:
    try:
        done, total = path.read_text(encoding="ascii").split()
        return int(done), int(total)
    except (OSError, ValueError):
        return None  # the run has just ended
