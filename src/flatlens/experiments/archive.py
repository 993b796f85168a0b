"""The tables of a study in a zip file: result.json, and each table as Parquet, which keeps every digit and type.

There are no weights and no values of single samples in it. Needs pyarrow (the extra `data`).
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pandas as pd

from flatlens.errors import BadFolder, BadInput, MissingExtra, needs, one_line
from flatlens.experiments.result import StudyResult
from flatlens.experiments.schema import require_tables
from flatlens.experiments.settings import Study
from flatlens.plain import made

_TABLES = tuple(field.name for field in fields(StudyResult) if field.type == "pd.DataFrame")
_OTHERS = tuple(field.name for field in fields(StudyResult) if field.name not in (*_TABLES, "quantities"))
_RESULT = "result.json"
_PLAIN = re.compile(r"(?!\.+$)[\w.+,=()@ -]+")
LARGEST, MOST, MOST_CELLS = 2**30, 10_000, 10**8
"""Bytes of an archive or a table, unpacked, files of an archive, and cells of a table, at most."""
_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every member: equal tables make equal bytes."""


def write_study(archive: zipfile.ZipFile, name: str, result: StudyResult) -> None:
    """Write the tables of a study under a name.

    Raises:
        BadInput: a table cannot be written as Parquet.
    """
    plain = {key: getattr(result, key) for key in _OTHERS}
    write_member(archive, f"{name}/{_RESULT}", json.dumps(plain, indent=1).encode())
    for table in _TABLES:
        try:
            with needs("data", "an archive"):
                data = getattr(result, table).to_parquet(index=False, compression="zstd")
        except MissingExtra:
            raise
        except (ValueError, TypeError) as error:  # pyarrow's own are such
            raise BadInput(f"the table {table!r} of the study cannot be stored ({one_line(error)})") from error
        write_member(archive, f"{name}/{table}.parquet", data)


@contextmanager
def opened_archive(path: str | os.PathLike[str], what: str) -> Iterator[zipfile.ZipFile]:
    """Open an archive to read it; raise BadFolder, one line, if the file is not `what`, is too large, or is damaged."""
    try:
        with needs("data", what):
            if not Path(path).is_file():
                raise BadInput("there is no such file")
            with zipfile.ZipFile(path) as archive:
                _require_members(archive.infolist())
                yield archive
    except MissingExtra:
        raise
    except Exception as error:  # damaged bytes make a reader fail in any way at all
        raise BadFolder(f"{str(path)!r} does not hold {what}, or is damaged ({one_line(error, 300)})") from error


def _require_members(members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse an archive that holds anything but files of plain names, each once, or too much."""
    names = [member.filename for member in members]
    if len(names) > MOST:
        raise BadInput(f"it has {len(names):,} files, more than {MOST:,}")
    if (size := sum(member.file_size for member in members)) > LARGEST:
        raise BadInput(f"it unpacks to {size:,} bytes, more than {LARGEST:,}")
    seen: set[str] = set()
    for member, name in zip(members, names, strict=True):
        if name in seen:
            raise BadInput(f"it has {name!r} twice")
        seen.add(name)
        if not all(_PLAIN.fullmatch(part) for part in name.split("/")):
            raise BadInput(f"{name!r} in it is no name of a file of flatlens")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise BadInput(f"{name!r} in it is a link")


def write_member(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Write a file into the archive."""
    archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)


def read_studies_in(archive: zipfile.ZipFile, beside: Sequence[str] = ()) -> dict[str, StudyResult]:
    """Return the results of all studies in an archive, by name; `beside` names its other files.

    Raises:
        BadInput: it has other files, or a study is not complete, or not as `write_study` writes it.
    """
    files = set(archive.namelist()) - set(beside)
    names = [name.removesuffix(f"/{_RESULT}") for name in archive.namelist() if name.endswith(f"/{_RESULT}")]
    needed = {
        f"{name}/{file}": None for name in names for file in (_RESULT, *(f"{table}.parquet" for table in _TABLES))
    }
    for what, differing in (("lacks", needed.keys() - files), ("holds", files - needed.keys())):
        if differing:
            raise BadInput(f"it {what} the file {min(differing)}")
    return {name: _read_study(archive, name) for name in names}


def _read_study(archive: zipfile.ZipFile, name: str) -> StudyResult:
    values = json.loads(archive.read(f"{name}/{_RESULT}"), parse_constant=_no_number)
    if not isinstance(values, dict):
        raise BadInput(f"{name}/{_RESULT} is not a JSON object")
    if extra := values.keys() - set(_OTHERS):
        raise BadInput(f"{name}/{_RESULT} has {min(extra)!r}, which no study has")
    pairs = {key: value for key, value in values.items() if isinstance(value, list)}  # JSON has lists for tuples
    values |= {key: [tuple(one) if isinstance(one, list) else one for one in value] for key, value in pairs.items()}
    tables = {table: _read_table(archive, f"{name}/{table}.parquet") for table in _TABLES}
    if "kind" not in tables["gap_correlations"]:  # an older archive: its rows are of all networks
        tables["gap_correlations"].insert(0, "kind", "")
    study = Study.from_json(values.get("settings", {}))
    found: StudyResult = made(StudyResult, {**values, **tables, "quantities": study.quantities})
    require_tables(tables, study, found.varied)
    return found


def _read_table(archive: zipfile.ZipFile, member: str) -> pd.DataFrame:
    """Return a table, if it is not too large: a few bytes of Parquet can stand for any number of equal values."""
    from pyarrow import parquet

    content = archive.read(member)
    about = parquet.read_metadata(io.BytesIO(content))
    size = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
    if about.num_rows * about.num_columns > MOST_CELLS or size > LARGEST:
        raise BadInput(f"{member} has {about.num_rows:,} rows of {about.num_columns:,} columns: too many")
    return pd.read_parquet(io.BytesIO(content))


def _no_number(text: str) -> float:
    raise BadInput(f"{_RESULT} has the value {text}")
