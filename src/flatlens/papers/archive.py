"""A reproduction as one small file: the tables of its studies, from which it is weighed and drawn again.

A zip file that holds experiment.json and the tables of each study (`flatlens.experiments.archive`).
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

from flatlens.errors import BadFolder, BadInput
from flatlens.experiments.archive import opened_archive, read_studies_in, write_member, write_study
from flatlens.files import write_whole
from flatlens.papers.experiment import Experiment, Scale
from flatlens.papers.predictions import Results
from flatlens.papers.reproduce import MARK, RERUN, Reproduction, concluded, from_mark

WHAT = "the archive of a reproduction"
_SCHEMA = 1
"""Number of the form of an archive; it grows when a reader must change. Archives without it have the first."""


def save_archive(found: Reproduction, path: str | os.PathLike[str]) -> Path:
    """Write the tables of a reproduction, and of its re-run, into one zip file; return its path."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        mark = {"experiment": found.experiment.id, "scale": found.scale, "schema": _SCHEMA}
        write_member(archive, MARK, json.dumps(mark).encode())
        for prefix, results in (("", found.results), (RERUN, found.second)):
            for name, result in results.items():
                write_study(archive, f"{prefix}{name}", result)
    return write_whole(Path(path), content.getvalue())


def load_archive(path: str | os.PathLike[str]) -> Reproduction:
    """Return a reproduction from its archive: weighed anew by the present predictions, with its figures' data.

    Raises:
        BadFolder: the file is no archive, or a damaged one.
    """
    experiment, scale, studies = read_studies(path)
    if lacking := [name for name in experiment.studies(scale) if name not in studies]:
        raise BadFolder(f"{str(path)!r} does not hold {WHAT}: the study {lacking[0]!r} is not in it")
    again = {name.removeprefix(RERUN): result for name, result in studies.items() if name.startswith(RERUN)}
    return concluded(experiment, scale, {n: r for n, r in studies.items() if not n.startswith(RERUN)}, again)


def read_studies(path: str | os.PathLike[str]) -> tuple[Experiment, Scale, Results]:
    """Return the experiment, its scale and its studies; those of the re-run are named "again/...".

    Raises:
        BadFolder: the file is no archive, or a damaged one.
    """
    with opened_archive(path, WHAT) as archive:
        mark = json.loads(archive.read(MARK))
        if mark.get("schema", _SCHEMA) != _SCHEMA:
            raise BadInput(
                f"it has the form {mark['schema']!r}, of another version of flatlens; this one reads {_SCHEMA}"
            )
        experiment, scale = from_mark(mark)
        return experiment, scale, read_studies_in(archive, [MARK])


def archive_name(experiment: str, scale: str) -> str:
    """Return the name of an experiment's archive in a folder of archives: "X4-desk.zip"."""
    return f"{experiment}-{scale}.zip"


def known_studies(experiment: Experiment, scale: Scale, place: Path | None) -> Results:
    """Return the studies of an experiment in an archive, or in a folder of archives; empty if it has none.

    Raises:
        BadInput: there is nothing at `place`, or it is the archive of another experiment or scale.
        BadFolder: it is no archive, or a damaged one.
    """
    if place is None:
        return {}
    file = place / archive_name(experiment.id, scale) if place.is_dir() else place
    if not file.exists():
        if place.is_dir():
            return {}
        raise BadInput(f"there is no file or folder {str(place)!r}")
    there, at, studies = read_studies(file)
    if (there.id, at) != (experiment.id, scale):
        raise BadInput(f"{str(file)!r} holds {there.id} at {at} scale, not {experiment.id} at {scale} scale")
    return studies
