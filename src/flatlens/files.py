"""Files that are written complete or not at all, their checksums, and tables as CSV files."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import socket
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from flatlens.errors import BadFolder

if TYPE_CHECKING:
    import pandas as pd

PARTIAL = ".partial"
CHECKSUMS = "checksums.json"


def write_whole(path: Path, content: bytes | str) -> Path:
    """Replace `path` in one step, flushed to the disk first: no reader and no power cut ever finds half a file.

    Bytes in a file's name that are not UTF-8 are written as their codes.
    """
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r}: make it first")
    partial = partial_name(path)
    try:
        with partial.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return path


def require_writable(file: Path, named: str) -> None:
    """Raise BadFolder, before the work, unless a file can be written; `named` is what the error calls it."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise BadFolder(f"{named}: there is no folder {file.parent}: make it first")
    if file.is_dir():
        raise BadFolder(f"{named}: this is a folder: name a file in it")
    try:
        first = partial_name(file.absolute())
        first.touch()  # permissions do not tell: a file system may take no files
        first.unlink()
    except OSError as error:
        refused = f"{named}: cannot be written there: name a file in a folder that you may write to"
        raise BadFolder(refused) from error


def partial_name(target: Path) -> Path:
    """Return a hidden name beside `target` to write to first; it contains the machine and the process that write."""
    return target.with_name(f".{target.name}.{host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}{PARTIAL}")


def host() -> str:
    """Return this machine's name, as one word."""
    return socket.gethostname().replace(".", "-") or "localhost"


def write_checksums(folder: Path) -> None:
    """Record the SHA-256 of every file in `folder` beside them."""
    found = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def require_checksums(folder: Path) -> None:
    """Raise BadFolder, with the file's name, unless every file is unchanged since `write_checksums`."""
    if not (folder / CHECKSUMS).exists():  # earlier versions wrote none
        return
    try:
        recorded = dict(json.loads((folder / CHECKSUMS).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFolder(f"{CHECKSUMS} cannot be read") from error
    for name, digest in recorded.items():
        path = folder / str(name)
        if not path.is_file() or _sha256(path) != digest:
            changed = "has changed since it was written (its checksum differs)"
            raise BadFolder(f"{name} {changed if path.is_file() else 'is missing'}")


def contents_of(path: Path) -> str:
    """Return twelve hexadecimal digits of the hash of a file's bytes, or of those of all files in a folder."""
    if not path.is_dir():
        return _sha256(path)[:12]
    every = [f"{file.name} {_sha256(file)}" for file in sorted(path.iterdir()) if file.is_file()]
    return hashlib.sha256("\n".join(every).encode()).hexdigest()[:12]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_all(paths: Iterable[Path]) -> None:
    """Flush several files at once: for a disk this takes hardly longer than one."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(flush, paths))


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk, so that it is complete after a rename and a power cut."""
    if os.name == "nt" and path.is_dir():
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_RUN = re.compile("'*[=+\\-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH COMMERCIAL AT}]")
"""The beginning of text that is escaped: what a spreadsheet takes for a formula, or what is escaped already."""


def csv_of(table: pd.DataFrame) -> str:
    """Return a table as CSV with all digits: 17 identify a float64.

    Text of a user's that a spreadsheet would run as a formula has an apostrophe in front.
    """
    from pandas.api.types import is_numeric_dtype  # only here: pandas takes .3 s

    shown = table.rename(columns=_escaped)
    for at, kind in enumerate(table.dtypes):
        if not is_numeric_dtype(kind):
            shown.isetitem(at, [_escaped(cell) for cell in table.iloc[:, at]])
    text: str = shown.to_csv(index=False, float_format="%.17g", lineterminator="\n")
    if "\r" in text:  # outside quotes it would end a row
        text = shown.to_csv(index=False, float_format="%.17g", lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    return text


def unescaped(cell: object) -> object:
    """Return a cell or a name of a column as it was before `csv_of`.

    >>> unescaped("'=1+1"), unescaped("''=1"), unescaped("'tis"), unescaped("-1.5")
    ('=1+1', "'=1", "'tis", '-1.5')
    """
    return cell[1:] if isinstance(cell, str) and cell[:1] == "'" and _RUN.match(cell) else cell


def _escaped(cell: object) -> object:
    if not isinstance(cell, str) or not _RUN.match(cell):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell if cell == cell.strip() else f"'{cell}"
