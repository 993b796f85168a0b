"""Folders that appear complete or not at all; removal of files that killed processes left."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from flatlens.errors import BadFolder
from flatlens.files import PARTIAL, flush, flush_all, host, partial_name

OLD = 24 * 3600.0
"""Seconds after which any temporary file is removed: its process number may belong to another process by now."""


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it becomes `target` at the end, and is removed after an error.

    If another process was quicker, its folder stays and this one is removed: both hold the same results.
    """
    partial = partial_name(target)
    try:
        partial.mkdir(parents=True)
        yield partial
        flush_all([*partial.iterdir(), partial])
        with contextlib.suppress(FileExistsError):
            _rename_folder(partial, target)
        flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def clear_errors(out: Path) -> Iterator[None]:
    """Turn errors of the system (a full disk, no permission) into one line about `out`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        where = f" ({error.filename})" if error.filename else ""
        raise BadFolder(
            f"cannot use the folder {str(out)!r}: {reason}{where}; what was finished is kept: "
            "free space or change the permissions, and run the same command again"
        ) from error


def refuse_foreign(out: Path, mark: str, own: Collection[str], what: str) -> None:
    """Refuse an output folder that holds other files than `own`, unless another process has just written `mark`.

    Raises:
        BadFolder: it is a file, or holds other files and no `what`.
    """
    if out.exists() and not out.is_dir():
        raise BadFolder(f"the output {str(out)!r} is a file: name a folder")
    there = sorted(p.name for p in out.iterdir() if not p.name.startswith(".")) if out.exists() else []
    foreign = [name for name in there if name not in own]
    if foreign and not (out / mark).is_file():  # looked for last: what the other process writes comes after its mark
        raise BadFolder(
            f"the output folder {str(out)!r} holds other files ({', '.join(foreign[:3])}) and no {what}: name an empty "
            "or new folder with --out"
        )


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes; files of running processes stay."""
    for leftover in folder.glob(f".*{PARTIAL}"):
        if _abandoned(leftover):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _abandoned(leftover: Path) -> bool:
    try:
        if time.time() - leftover.stat().st_mtime > OLD:
            return True
        where, process = leftover.name.removesuffix(PARTIAL).rsplit(".", 3)[1:3]
        return where == host() and not _alive(int(process))
    except (FileNotFoundError, ValueError):
        return False  # just finished, or not a file of flatlens


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    try:  # a zombie, whose parent has not read its exit status: "1234 (name) Z ..."
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True  # no such files on this system


def _rename_folder(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError:
        if target.is_dir():  # "directory not empty" has several error numbers
            raise FileExistsError(target) from None
        raise
