"""A reproduction as one small file: the tables of its studies, from which it is weighed and drawn again.

A zip file that holds experiment.json and, for each study, result.json and its tables as Parquet, which keeps every
digit and type. There are no weights and no values of single samples in it. Needs pyarrow (the extra `data`).
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.errors import BadFolder, needs, one_line
from flatlens.experiments.result import StudyResult
from flatlens.experiments.settings import Study
from flatlens.files import write_whole
from flatlens.papers.predictions import Results
from flatlens.papers.reproduce import AGAIN, MARK, Reproduction, concluded, from_mark

_TABLES = tuple(field.name for field in fields(StudyResult) if field.type == "pd.DataFrame")
_OTHERS = tuple(field.name for field in fields(StudyResult) if field.name not in (*_TABLES, "quantities"))
_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every member: equal tables make equal bytes."""


def save_archive(found: Reproduction, path: str | os.PathLike[str]) -> Path:
    """Write the tables of a reproduction, and of its re-run, into one zip file; return its path."""
    content = io.BytesIO()
    with needs("data", "an archive"), zipfile.ZipFile(content, "w") as archive:
        _write(archive, MARK, json.dumps({"experiment": found.experiment.id, "scale": found.scale}).encode())
        for prefix, results in (("", found.results), (f"{AGAIN}/", found.second)):
            for name, result in results.items():
                plain = {key: getattr(result, key) for key in _OTHERS}
                _write(archive, f"{prefix}{name}/result.json", json.dumps(plain, indent=1).encode())
                for table in _TABLES:
                    data = getattr(result, table).to_parquet(index=False, compression="zstd")
                    _write(archive, f"{prefix}{name}/{table}.parquet", data)
    return write_whole(Path(path), content.getvalue())


def load_archive(path: str | os.PathLike[str]) -> Reproduction:
    """Return a reproduction from its archive: weighed anew by the present predictions, with its figures' data.

    Raises:
        BadFolder: the file is no archive, or a damaged one.
    """
    try:
        with zipfile.ZipFile(path) as archive, needs("data", "an archive"):
            experiment, scale = from_mark(json.loads(archive.read(MARK)))
            first, second = _studies(archive, ""), _studies(archive, f"{AGAIN}/")
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise BadFolder(
            f"{str(path)!r} is no archive of a reproduction, or a damaged one ({one_line(error)})"
        ) from error
    return concluded(experiment, scale, first, second)


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)


def _studies(archive: zipfile.ZipFile, prefix: str) -> Results:
    names = (name.removesuffix("/result.json") for name in archive.namelist() if name.endswith("/result.json"))
    mine = (name for name in names if name.startswith(f"{AGAIN}/") == bool(prefix))
    return {name.removeprefix(prefix): _read(archive, name) for name in mine}


def _read(archive: zipfile.ZipFile, name: str) -> StudyResult:
    values: dict[str, Any] = json.loads(archive.read(f"{name}/result.json"))
    pairs = {key: value for key, value in values.items() if isinstance(value, list)}  # JSON has lists for tuples
    values |= {key: [tuple(one) if isinstance(one, list) else one for one in value] for key, value in pairs.items()}
    values |= {table: pd.read_parquet(io.BytesIO(archive.read(f"{name}/{table}.parquet"))) for table in _TABLES}
    return StudyResult(**values, quantities=Study.from_json(values["settings"]).quantities)
