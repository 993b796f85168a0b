"""The tables of a study in a zip file: result.json, and each table as Parquet, which keeps every digit and type.

There are no weights and no values of single samples in it. Needs pyarrow (the extra `data`).
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pandas as pd

from flatlens.errors import BadFolder, BadInput, MissingExtra, needs, one_line
from flatlens.experiments.result import StudyResult
from flatlens.experiments.settings import Study

_TABLES = tuple(field.name for field in fields(StudyResult) if field.type == "pd.DataFrame")
_OTHERS = tuple(field.name for field in fields(StudyResult) if field.name not in (*_TABLES, "quantities"))
_RESULT = "result.json"
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
def reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Raise BadFolder, one line, if the file is not `what`, or is damaged."""
    try:
        with needs("data", what):
            yield
    except MissingExtra:
        raise
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadFolder(f"{str(path)!r} does not hold {what}, or is damaged ({one_line(error)})") from error


def write_member(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Write a file into the archive."""
    archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)


def studies_in(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the studies in an archive."""
    return [name.removesuffix(f"/{_RESULT}") for name in archive.namelist() if name.endswith(f"/{_RESULT}")]


def read_study(archive: zipfile.ZipFile, name: str) -> StudyResult:
    """Return the result of a study from its tables."""
    values: dict[str, Any] = json.loads(archive.read(f"{name}/{_RESULT}"))
    pairs = {key: value for key, value in values.items() if isinstance(value, list)}  # JSON has lists for tuples
    values |= {key: [tuple(one) if isinstance(one, list) else one for one in value] for key, value in pairs.items()}
    values |= {table: pd.read_parquet(io.BytesIO(archive.read(f"{name}/{table}.parquet"))) for table in _TABLES}
    if "kind" not in values["gap_correlations"]:  # an older archive: its rows are of all networks
        values["gap_correlations"].insert(0, "kind", "")
    return StudyResult(**values, quantities=Study.from_json(values["settings"]).quantities)
