"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flatlens.errors import BadFolder

PARTIAL = ".partial"
CHECKSUMS = "checksums.json"


def write_whole(path: Path, content: bytes | str) -> Path:
    """Replace `path` in one step, pushed to the disk first: a reader, a kill or a power cut never meets half a file."""
    partial = partial_name(path)
    try:
        with partial.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return path


def partial_name(target: Path) -> Path:
    """Where to write what will be `target`: hidden, beside it, and saying which process on which machine is at it."""
    return target.with_name(f".{target.name}.{host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}{PARTIAL}")


def host() -> str:
    """This machine's name, as one word."""
    return socket.gethostname().replace(".", "-") or "localhost"


def write_checksums(folder: Path) -> None:
    """Record the SHA-256 of every file in `folder` beside them."""
    found = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def require_checksums(folder: Path) -> None:
    """Raise BadFolder, with the file's name, unless every file is as `write_checksums` met it.

    A folder without checksums, from a version that wrote none, passes.
    """
    if not (folder / CHECKSUMS).exists():
        return
    try:
        recorded = dict(json.loads((folder / CHECKSUMS).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFolder(f"{CHECKSUMS} cannot be read") from error
    for name, digest in recorded.items():
        path = folder / str(name)
        if not path.is_file() or _sha256(path) != digest:
            raise BadFolder(f"{name} is {'not what was written' if path.is_file() else 'missing'}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_all(paths: Iterable[Path]) -> None:
    """As `flush`, all at once: a disk takes hardly longer for many than for one."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(flush, paths))


def flush(path: Path) -> None:
    """Push a file or a folder to the disk, so that a power cut after a rename finds it whole."""
    if os.name == "nt" and path.is_dir():
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
