"""The result of a study: its tables, what each column holds, and the zip archive that keeps them.

An archive has result.json, and each table as Parquet, which keeps every digit and type (it needs pyarrow, the extra
`data`). There are no weights and no values of single samples in it. Tables that are read are checked before anything is
computed from them.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from flatlens.errors import BadFolder, BadInput, MissingExtra, needs, one_line
from flatlens.experiments.overrides import IDENTITY, setting_columns, setting_text
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import Study
from flatlens.progress import count_of
from flatlens.result import of_report
from flatlens.settings_json import fits, made
from flatlens.training import Training
from flatlens.training.run import Ending


@dataclass(frozen=True, eq=False, repr=False)  # repr would show every table, eq would compare tables
class StudyResult:
    """A finished or unfinished study as tidy tables; every number can be computed again from the folders alone."""

    networks: pd.DataFrame
    """One row a network, sorted by lr, batch_size, seed: key, lr, batch_size, seed, outcome ("converged", "finished",
    "out of steps" or "diverged"), steps, then a column per network-level measure by its name in the report ("mls",
    "relative_flatness.sum") and one per layer ("relative_flatness[fc1]")."""
    layers: pd.DataFrame
    """Tidy: key, lr, batch_size, seed, measure, layer, position (execution order, from 0), value, kind."""
    curves: pd.DataFrame
    """Tidy: key, lr, batch_size, seed, step, loss, accuracy, test_loss."""
    histories: pd.DataFrame
    """Tidy, the measures followed in training: key, lr, batch_size, seed, step, rate (the learning rate of that step),
    edge (2 / rate), measure, layer, value, stderr, kind, products, note."""
    functions: pd.DataFrame
    """Tidy, of networks from R to R: key, lr, batch_size, seed, x, y, the outputs at the test inputs."""
    values: pd.DataFrame
    """One row a network in the order of `networks`: key, lr, batch_size, seed, included, then the studied quantities,
    transformed, one column each under the name shown. Rows that are not included stand outside every relation."""
    relations: pd.DataFrame
    """Every pair of quantities: x, y, n, units (independent ones: seeds, or networks), pearson, pearson_low,
    pearson_high, kendall, kendall_low, kendall_high."""
    within: pd.DataFrame
    """Each quantity against the gap inside groups of equal settings (means of the groups taken out): x, y, group
    ("lr", "lr, batch_size" or "seed"), groups, n, units, pearson, pearson_low, pearson_high."""
    gap_correlations: pd.DataFrame
    """Each measure with the gap, by every coefficient: kind, quantity, coefficient, value, low, high, p, n, units,
    given, why, note; `kind` is "" over all networks, else the kind of networks that it is over. Computed by the
    function of this name."""
    findings: list[str]
    """Sentences of the main results, with numbers and 95% intervals."""
    quantities: tuple[Quantity, ...]
    settings: dict[str, Any]
    """The study's settings, as in study.json, but without the folders of files."""
    versions: dict[str, str]
    """Versions that computed it: flatlens, torch, numpy, python, device, threads; several values joined by " | "."""
    excluded: list[tuple[str, str]]
    """(key, why) of the networks left out of `relations`, `within`, `gap_correlations` and the findings."""
    failed: list[tuple[str, str]]
    """(key, last line of the traceback) of the runs that ended in an error."""
    unfinished: int
    """Networks of the grid that have neither finished nor failed."""
    alone: list[tuple[str, int]] = field(default_factory=list)
    """(why, how many) of the networks that could not be trained in a stack with others."""
    varied: list[str] = field(default_factory=list)
    """The settings in which the networks differ: columns of `networks`."""
    answer: list[str] = field(default_factory=list)
    """The study in at most three sentences: what is the case, how certain, what speaks against it."""
    differences: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=TABLE_COLUMNS["differences"]))
    """Differences between the levels of each axis of words: setting, column (of `networks`), group, reference (the
    first level), value, low, high, scale ("ratio" of geometric means, or "difference" of means), p, p_holm (corrected
    for the number of columns that decide, or of the others), n (pairs, or independent networks), smaller (pairs in
    which the group has the smaller value), note, decides (invariant under rescaling, with a known direction),
    small_means ("flat", "compressed"). Not in an archive."""
    seconds: float = 0.0
    """Seconds of training and measuring, added up over the networks; 0 where they are not known."""

    def __repr__(self) -> str:
        """Return the answer, then the study's name and the number of its networks, and of those that are missing."""
        counts = {"left out": len(self.excluded), "failed": len(self.failed), "unfinished": self.unfinished}
        told = [f"{number} {how}" for how, number in counts.items() if number]
        networks = count_of(len(self.networks), "network")
        name = f"<StudyResult of {self.settings.get('name', 'a study')}: {', '.join([networks, *told])}>"
        return "\n".join([*self.answer, "", name]) if self.answer else name

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(line)}</p>" for line in filter(None, repr(self).split("\n")))

    def plot(self) -> Any:
        """Return an Altair chart of each measure against the gap; a notebook shows it by itself."""
        return of_report("figures.picture")(self)

    @property
    def against(self) -> pd.DataFrame:
        """Deprecated name of `gap_correlations`."""
        warnings.warn("StudyResult.against is now called gap_correlations", DeprecationWarning, stacklevel=2)
        return self.gap_correlations


_RESULT: dict[str, Any] = {
    "outcome": Ending, "steps": int, "layers": list[str], "versions": dict[str, str], "loss": float | None,
    "accuracy": float | None, "samples": int, "trained_alone": str, "seconds_training": float,
    "seconds_measuring": float,
}  # fmt: skip
"""What the result.json of a network holds; the first four always."""
TABLE_COLUMNS: dict[str, list[str]] = {
    "layers": [*IDENTITY, "measure", "layer", "position", "value", "kind"],
    "curves": [*IDENTITY, "step", "loss", "accuracy", "test_loss"],
    "histories": [
        *IDENTITY, "step", "rate", "edge", "measure", "layer", "value", "stderr", "kind", "products", "note",
    ],
    "functions": [*IDENTITY, "x", "y"],
    "relations": [
        "x", "y", "n", "units", "pearson", "pearson_low", "pearson_high", "kendall", "kendall_low", "kendall_high",
    ],
    "within": ["x", "y", "group", "groups", "n", "units", "pearson", "pearson_low", "pearson_high"],
    "gap_correlations": [
        "kind", "quantity", "coefficient", "value", "low", "high", "p", "n", "units", "given", "why", "note",
    ],
    "differences": [
        "setting", "column", "group", "reference", "value", "low", "high", "scale", "p", "p_holm", "n", "smaller",
        "note", "decides", "small_means",
    ],
}  # fmt: skip
"""The columns of each table that has the same ones in every study."""
_TEXTS = {"key", "measure", "layer", "kind", "note", "group", "quantity", "coefficient", "given", "why"}
"""Those that hold text; others hold numbers, but for the names of the quantities that are related, x and y."""
_ONCE = {
    "networks": ["key"],
    "layers": ["key", "measure", "layer"],
    "curves": ["key", "step"],
    "histories": ["key", "step", "measure", "layer"],
    "values": ["key"],
    "relations": ["x", "y"],
    "within": ["x", "y", "group"],
    "gap_correlations": ["kind", "quantity", "coefficient", "given"],
}
"""The columns whose values together occur in one row alone."""


def require_result(result: Mapping[str, Any]) -> None:
    """Raise BadInput for a result.json that lacks a value, or has one of another type."""
    for at, (name, hint) in enumerate(_RESULT.items()):
        if (at < 4 or name in result) and not fits(result.get(name), hint):
            raise BadInput(f"{name} is {result.get(name)!r:.40} in result.json")


def require_curves(curves: Mapping[str, Tensor]) -> None:
    """Raise BadInput for curves that are not numbers in rows of one length."""
    for group in (("step", "loss", "accuracy", "test_loss"), ("input", "output")):
        there = group if group[0] in curves else ()
        shapes = {tuple(curves[name].shape) if name in curves else () for name in there}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            raise BadInput(f"the curves {', '.join(group)} must have one length")


def require_tables(tables: Mapping[str, pd.DataFrame], study: Study, varied: list[str]) -> None:
    """Refuse tables that are not those of the study: columns, types, doubled or foreign networks."""
    facts = () if isinstance(study.base.training, Training) else ("lr", "batch_size")  # of a table of the user's
    for name, table in tables.items():
        there, expected = list(table.columns), _expected(name, table, study, varied)
        if twice := list(table.columns[table.columns.duplicated()]):
            raise BadInput(f"the table {name} has the column {twice[0]!r} twice")
        if missing := [column for column in expected if column not in there]:
            raise BadInput(f"the table {name} has no column {missing[0]!r}")
        if extra := [column for column in there if column not in expected]:
            raise BadInput(f"the table {name} has the column {extra[0]!r}, which no such table has")
        for column, kind in expected.items():
            if column not in facts and not table.empty and not _KINDS[kind](table[column]):
                raise BadInput(f"the column {column!r} of the table {name} must hold {kind}")
        if name in _ONCE and (again := table.duplicated(_ONCE[name])).any():
            row = ", ".join(map(str, table[again].iloc[0][_ONCE[name]]))
            raise BadInput(f"the table {name} has two rows for {row}")
    networks, keys = tables["networks"], list(tables["networks"]["key"])
    if (again := networks.drop(columns="key").duplicated()).any():
        raise BadInput(f"the table networks has the network {networks['key'][again].iloc[0]} a second time")
    if len(networks) > (most := math.prod(len(axis.values) for axis in study.axes)):
        raise BadInput(f"the table networks has {len(networks)} networks, more than the {most} of the study")
    if list(tables["values"]["key"]) != keys:
        raise BadInput("the tables networks and values have other networks, or another order")
    for name, table in tables.items():
        if "key" in table and (left := set(table["key"]) - set(keys)):
            raise BadInput(f"the table {name} has the network {min(left)}, which the table networks does not have")


def _expected(name: str, table: pd.DataFrame, study: Study, varied: list[str]) -> dict[str, str]:
    """Return the columns that a table must have, with what they hold: a key of `_KINDS`."""
    network = {column: "text" if column in _TEXTS else "numbers" for column in IDENTITY}
    if name == "values":
        return network | {"included": "True or False"} | {quantity.name: "numbers" for quantity in study.quantities}
    if name != "networks":
        texts = _TEXTS | {"x", "y"} if name in ("relations", "within") else _TEXTS
        return {column: "text" if column in texts else "numbers" for column in TABLE_COLUMNS[name]}
    axes = dict.fromkeys((axis for axis in varied if axis not in IDENTITY), "any values")
    parts = dict.fromkeys(set(setting_columns(varied)) & set(table), "any values")  # none of joint axes in older tables
    own = {"outcome": "text", "steps": "numbers"} | network | axes | parts
    return own | {str(one): "text" if one == "weights" else "numbers" for one in table if one not in own}


def _are_numbers(column: pd.Series[Any]) -> bool:
    numbers = pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_bool_dtype(column.dtype)
    return (numbers and column.dtype.kind != "c") or bool(column.isna().all())


_KINDS: Mapping[str, Callable[[pd.Series[Any]], bool]] = {
    "text": lambda column: all(isinstance(one, str) for one in column),
    "numbers": _are_numbers,
    "True or False": lambda column: pd.api.types.is_bool_dtype(column.dtype),
    "any values": lambda column: True,
}
"""Whether a column holds what its table has there."""
_TABLES = tuple(one.name for one in fields(StudyResult) if one.type == "pd.DataFrame" and one.name != "differences")
_OTHERS = tuple(
    one.name for one in fields(StudyResult) if one.name not in (*_TABLES, "quantities", "differences", "answer")
)
_RESULT_FILE = "result.json"
_PLAIN = re.compile(r"(?!\.+$)[\w.+,=()@ -]+")
LARGEST, MOST, MOST_CELLS = 2**30, 10_000, 10**8
"""Bytes of an archive or a table, unpacked, files of an archive, and cells of a table, at most."""


def write_study(archive: zipfile.ZipFile, name: str, result: StudyResult) -> None:
    """Write the tables of a study under a name; refuse those that cannot be written as Parquet."""
    plain = {key: getattr(result, key) for key in _OTHERS}
    write_member(archive, f"{name}/{_RESULT_FILE}", json.dumps(plain, indent=1).encode())
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
                members = archive.infolist()
                if len(members) > MOST:
                    raise BadInput(f"it has {len(members):,} files, more than {MOST:,}")
                if (size := sum(member.file_size for member in members)) > LARGEST:
                    raise BadInput(f"it unpacks to {size:,} bytes, more than {LARGEST:,}")
                for name, number in Counter(member.filename for member in members).items():
                    if number > 1:
                        raise BadInput(f"it has {name!r} twice")
                    if not all(_PLAIN.fullmatch(part) for part in name.split("/")):
                        raise BadInput(f"{name!r} in it is not the name of a flatlens file")
                    if stat.S_ISLNK(archive.getinfo(name).external_attr >> 16):
                        raise BadInput(f"{name!r} in it is a link")
                yield archive
    except MissingExtra:
        raise
    except Exception as error:  # damaged bytes make a reader fail in any way at all
        raise BadFolder(f"{str(path)!r} does not hold {what}, or is damaged ({one_line(error, 300)})") from error


def write_member(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Write a file into the archive, always with one date: equal tables make equal bytes."""
    archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)


def read_studies_in(archive: zipfile.ZipFile, beside: Sequence[str] = ()) -> dict[str, StudyResult]:
    """Return the results of all studies in an archive, by name, each complete; `beside` names its only other files."""
    files = set(archive.namelist()) - set(beside)
    names = [name.removesuffix(f"/{_RESULT_FILE}") for name in archive.namelist() if name.endswith(f"/{_RESULT_FILE}")]
    needed = {
        f"{name}/{file}": None for name in names for file in (_RESULT_FILE, *(f"{table}.parquet" for table in _TABLES))
    }
    for what, differing in (("lacks", needed.keys() - files), ("holds", files - needed.keys())):
        if differing:
            raise BadInput(f"it {what} the file {min(differing)}")
    return {name: _read_study(archive, name) for name in names}


def _read_study(archive: zipfile.ZipFile, name: str) -> StudyResult:
    from pyarrow import parquet

    def no_number(text: str) -> float:
        raise BadInput(f"{_RESULT_FILE} has the value {text}")

    values = json.loads(archive.read(f"{name}/{_RESULT_FILE}"), parse_constant=no_number)
    if not isinstance(values, dict):
        raise BadInput(f"{name}/{_RESULT_FILE} is not a JSON object")
    values.pop("answers", None)  # of an older archive
    if extra := values.keys() - set(_OTHERS):
        raise BadInput(f"{name}/{_RESULT_FILE} has {min(extra)!r}, which no study has")
    pairs = {key: value for key, value in values.items() if isinstance(value, list)}  # JSON has lists for tuples
    values |= {key: [tuple(one) if isinstance(one, list) else one for one in value] for key, value in pairs.items()}
    # the tables, if they are not too large: a few bytes of Parquet can stand for any number of equal values
    tables = {}
    for table in _TABLES:
        member = f"{name}/{table}.parquet"
        content = io.BytesIO(archive.read(member))
        about = parquet.read_metadata(content)
        size = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
        if about.num_rows * about.num_columns > MOST_CELLS or size > LARGEST:
            raise BadInput(f"{member} has {about.num_rows:,} rows of {about.num_columns:,} columns: too many")
        tables[table] = pd.read_parquet(content)
    if "kind" not in tables["gap_correlations"]:  # an older archive: its rows are of all networks
        tables["gap_correlations"].insert(0, "kind", "")
    study = Study.from_json(values.get("settings", {}))
    if isinstance(study.base.training, Training):  # None has a name since then
        for column in setting_columns(study.varied):
            if column in tables["networks"] and tables["networks"][column].isna().any():
                known = tables["networks"][column].astype(object)
                tables["networks"][column] = known.where(known.notna(), setting_text(None))
    found: StudyResult = made(StudyResult, {**values, **tables, "quantities": study.quantities})
    require_tables(tables, study, found.varied)
    return found
