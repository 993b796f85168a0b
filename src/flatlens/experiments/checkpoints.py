"""Networks that were trained elsewhere: a table of checkpoints, or a folder of them, as the axis of a study.

    weights,lr,seed,gap
    runs/a.pt,0.1,0,0.31
    runs/b.pt,0.1,1,0.27

Columns with the names of the architecture's settings, such as `width`, set them. `seed` names the independent units.
`generalisation_gap` (or `gap`), `loss`, `accuracy`, `test_loss` and `test_accuracy` are results, and take the place of
those measured. All others are settings of the training.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from flatlens.csvfile import unescaped
from flatlens.errors import BadInput, one_line
from flatlens.experiments.reading import expression
from flatlens.experiments.settings import Axis
from flatlens.files import contents_of
from flatlens.models import Architecture, UserNetwork
from flatlens.plain import Options, made
from flatlens.training import TrainedElsewhere
from flatlens.training.losses import LossName

Facts: TypeAlias = dict[str, Any]

WEIGHTS = ("weights", "checkpoint", "path", "file")
"""The columns that may name the files."""
ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_BESIDE = ("config.json", "settings.json", "hparams.json")
"""Files beside a checkpoint, the only one of its folder, that say how it was trained."""
_WHOLE = "weights.safetensors"
"""The weights of a study's network; the other files in its folder are no checkpoints."""
SPELLINGS = {
    "gap": "generalisation_gap",
    "generalization_gap": "generalisation_gap",
    "learning_rate": "lr",
    "batchsize": "batch_size",
}
TAKEN = ("key", "outcome")
"""Columns of a study's own table."""
LARGEST = 2**26
"""Bytes of a table at most."""
_ASSIGNED = re.compile(r"(?:^|[/,;_\s-])([A-Za-z]\w*?)=([^,/;\s]+?)(?=[,/;_\s-][A-Za-z]\w*=|[,/;\s]|$)")


def checkpoint_axis(where: Path, model: Architecture, loss: LossName) -> Axis:
    """Return the axis "model+training" of the checkpoints in a folder or a table.

    Raises:
        BadInput: the table or a file is missing, names no file, or lists a checkpoint twice.
    """
    rows = _of_folder(where) if where.is_dir() else _of_table(where)
    values = [_network(file, _named(facts), model, loss) for file, facts in rows]
    met: dict[object, Path] = {}
    for (file, _), (architecture, training) in zip(rows, values, strict=True):
        same = (architecture, training.contents, training.known, training.seed)
        if same in met:
            raise BadInput(f"checkpoints: {file} and {met[same]} are the same weights with the same columns: keep one")
        met[same] = file
    return Axis("model+training", tuple(values))


def _network(file: Path, facts: Facts, model: Architecture, loss: LossName) -> tuple[Architecture, TrainedElsewhere]:
    """Return the architecture and the training of one checkpoint."""
    own = set(model.options) if isinstance(model, UserNetwork) else {field.name for field in fields(model)} - {"seed"}
    here = {name: value for name, value in facts.items() if name in own}
    if isinstance(model, UserNetwork):
        model = replace(model, options=Options({**model.options, **here}))
    elif here:
        kept = {field.name: getattr(model, field.name) for field in fields(model) if field.init}
        model = made(type(model), {**kept, **here})
    seed = facts.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise BadInput(f"checkpoints: the seed {seed!r} of {file} is no whole number: call that column something else")
    known = {name: value for name, value in facts.items() if name not in own and name != "seed"}
    return model, TrainedElsewhere(str(file.resolve()), contents_of(file), loss, Options(known), seed)


def _of_table(table: Path) -> list[tuple[Path, Facts]]:
    """Return the files and the other columns of a .csv, .tsv or .json table."""
    frame = _read(table)
    column = next((name for name in frame.columns if str(name).strip().lower() in WEIGHTS), None)
    if column is None or frame.empty:
        has = ", ".join(map(str, frame.columns)) or "nothing"
        raise BadInput(f"checkpoints: {table} needs a row for each network, and its file in a column "
                       f"{' or '.join(WEIGHTS)}; it has {has}")  # fmt: skip
    rows = []
    for number, record in enumerate(frame.to_dict("records"), 1):
        written = record.pop(column)
        near = table.parent / str(written)
        file = near if near.exists() else Path(str(written)).expanduser()
        if not isinstance(written, str) or not file.exists():
            raise BadInput(f"checkpoints: row {number} of {table} names {written!r}, and there is no such file")
        rows.append((file, {str(name).strip(): _cell(value) for name, value in record.items()}))
    return rows


def _read(table: Path) -> pd.DataFrame:
    if table.is_file() and table.stat().st_size > LARGEST:
        raise BadInput(f"checkpoints: {str(table)!r} is larger than {LARGEST >> 20} MiB: is it a table of networks?")
    try:
        if table.suffix == ".json":
            return pd.DataFrame(json.loads(table.read_text(encoding="utf-8")))
        read = pd.read_csv(table, sep="\t" if table.suffix == ".tsv" else ",", skipinitialspace=True)
        return read.rename(columns=unescaped).map(unescaped)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:  # pandas' own are ValueErrors
        raise BadInput(
            f"checkpoints: {str(table)!r} is no folder, and no table of comma-separated values ({one_line(error, 120)})"
        ) from error


def _of_folder(folder: Path) -> list[tuple[Path, Facts]]:
    """Return the checkpoints below a folder, with the facts in their names, lr=0.1_seed=3.pt, or in a file beside."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in ENDINGS and file.is_file())
    whole = {file.parent for file in files if file.name == _WHOLE}
    files = [file for file in files if file.parent not in whole or file.name == _WHOLE]
    if not files:
        raise BadInput(f"checkpoints: the folder {folder} holds no file that ends in {', '.join(ENDINGS)}")
    alone = {file for file in files if sum(other.parent == file.parent for other in files) == 1}
    rows = []
    for file in files:
        said = file.relative_to(folder).with_suffix("").as_posix()
        notes = [file.with_suffix(".json"), *(file.parent / name for name in _BESIDE if file in alone)]
        beside = next((note for note in notes if note.is_file()), None)
        facts = {} if beside is None else _scalars(beside)
        rows.append((file, {**facts, **{name: _cell(value) for name, value in _ASSIGNED.findall(said)}}))
    return rows


def _scalars(note: Path) -> Facts:
    """Return the numbers and words in a JSON file, those of nested objects by their last name."""
    try:
        plain = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"checkpoints: {note} cannot be read ({one_line(error, 120)})") from error
    found: Facts = {}
    parts = [plain]
    for part in parts:  # grows while it is walked
        for name, value in part.items() if isinstance(part, Mapping) else ():
            if isinstance(value, Mapping):
                parts.append(value)
            elif value is None or isinstance(value, bool | int | float | str):
                found.setdefault(str(name), _cell(value))
    return {name: value for name, value in found.items() if name != "type"}


def _cell(value: Any) -> Any:
    """Return a cell as a plain value; text as the number or the brackets that it spells; None where it is empty.

    >>> _cell("0.1"), _cell("(64, 32)"), _cell("relu"), _cell(float("nan")), _cell("12 Jan")
    (0.1, (64, 32), 'relu', None, '12 Jan')
    """
    if hasattr(value, "item"):  # NumPy's numbers
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, str):
        return value if value is None or isinstance(value, bool | int | float) else str(value)
    try:
        return expression(value, {})
    except BadInput:
        return value


def _named(facts: Facts) -> Facts:
    """Return facts by the names that flatlens uses, without empty ones; a seed as a whole number."""
    found = {SPELLINGS.get(name.lower().replace(" ", "_"), name): value for name, value in facts.items()}
    if taken := [name for name in found if name in TAKEN]:
        raise BadInput(f"checkpoints: a column is called {taken[0]!r}, as a column of flatlens's own is: rename it")
    found = {name: value for name, value in found.items() if value is not None}
    return {
        name: int(v) if name == "seed" and isinstance(v, float) and v.is_integer() else v for name, v in found.items()
    }
