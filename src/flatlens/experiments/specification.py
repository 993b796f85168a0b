"""Studies as users write them: a data set's name with a few settings, a table of checkpoints, or a small YAML file.

    name: smoothing
    data: {name: digits, train: 300}
    model: MLP(widths=(64, 64))
    training: {optimiser: SGD(lr=0.1), batch_size: 16, loss: cross_entropy, max_epochs: 50}
    set: {label_smoothing: [0, 0.5], seed: 0:5}
    measures: [mls, relative_flatness, generalisation_gap]

Data and model may be the user's own, `net.py:samples` and `net.py:build`; the arguments of `build` are settings. The
architecture's inputs and outputs come from the data. Every part but the data has a default.

`checkpoints: runs.csv` names networks that were trained elsewhere, which are measured only:

    weights,lr,seed,gap
    runs/a.pt,0.1,0,0.31

Columns with the names of the architecture's settings, such as `width`, set them. `seed` names the independent units.
`generalisation_gap` (or `gap`), `loss`, `accuracy`, `test_loss` and `test_accuracy` are results, and take the place of
those measured. All others are settings of the training.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

import pandas as pd

from flatlens import user_code
from flatlens.data import Split, UserData
from flatlens.data.sources import IMAGES, SYNTHETIC, DataSettings, ReadSamples
from flatlens.errors import BadData, BadInput, UnknownName, needs, one_line
from flatlens.experiments.overrides import NONE, TOGETHER, last_field, split_values, value_of, vary
from flatlens.experiments.quantities import STUDIED, quantities, setting
from flatlens.experiments.settings import KNOWN, Axis, NetworkSettings, Study, StudyScale, facts, fitted
from flatlens.files import contents_of, unescaped
from flatlens.measures import named
from flatlens.measures.definition import MEASURES, as_studied
from flatlens.models import ARCHITECTURES, MLP, Architecture, SmallVGG, UserNetwork
from flatlens.models.weights import load_weights
from flatlens.operations.layers import is_linear
from flatlens.settings_json import Options, made
from flatlens.training import SGD, Augmentation, Mixup, TrainedElsewhere, Training, Until
from flatlens.training.objective import LossName
from flatlens.training.optimisers import Ridge, Stepping
from flatlens.training.run import TrainingRun
from flatlens.training.settings import RESULTS

LONGEST = 60
"""Number of characters of a setting that an error repeats."""

_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z")
"""Numbers that YAML 1.1 takes for words: it wants a point and a sign, 1.0e-3."""
_MOST = 100_000
"""Largest number of values of an axis."""


def expression(text: str, known: Mapping[str, type]) -> Any:
    """Return a value: a number, a tuple, True, None, a word as it is, or settings by the name of their type.

    >>> expression("(64, 32)", {}), expression("relu", {}), expression("None", {})
    ((64, 32), 'relu', None)

    Raises:
        BadInput: it is none of these; UnknownName: no settings have this name.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, known, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the parser's own limits
        if isinstance(error, BadInput):
            raise
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise BadInput(
            f"{shown!r} is not a setting: write a number, a word, or settings such as SGD(lr=0.1)"
        ) from error


def values(text: str, known: Mapping[str, type]) -> tuple[Any, ...]:
    """Return several values, separated by commas; 0:5 is 0, 1, 2, 3, 4.

    >>> values("0.05,0.1", {}), values("0:3", {}), values("(64,64),(32,)", {})
    ((0.05, 0.1), (0, 1, 2), ((64, 64), (32,)))
    """
    if not text.strip():
        raise BadInput("a setting needs at least one value, such as lr=0.05,0.1 or seed=0:5")
    ends = text.split(":")
    if len(ends) in (2, 3) and all(end.strip().lstrip("-").isdecimal() for end in ends):
        try:
            found = range(*map(int, ends))
            if not 0 < len(found) <= _MOST:
                raise ValueError
        except (ValueError, OverflowError) as error:
            raise BadInput(
                f"{text[:LONGEST]!r} is an empty range, or one of more than {_MOST:,} numbers: FIRST:END includes "
                f"FIRST and excludes END (0:5 is 0, 1, 2, 3, 4)"
            ) from error
        return tuple(found)
    return tuple(expression(f"({text},)", known))


def assignment(text: str, known: Mapping[str, type]) -> tuple[str, tuple[Any, ...]]:
    """Return the name and the values of an assignment such as `lr=0.05,0.1`."""
    name, equals, right = text.partition("=")
    if not equals or not name.strip():
        raise BadInput(f"--set {text}: write NAME=VALUE, NAME=VALUE,VALUE or NAME=FIRST:END")
    return name.strip(), values(right, known)


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; refuse one that is missing, is not YAML or not a mapping."""
    with needs("study", "a study in YAML"):
        import yaml

    class Loader(yaml.SafeLoader):  # to which 1e-3 is a number, as in Python, and which refuses a name given twice
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := next((key for at, key in enumerate(keys) if key in keys[:at]), None):
                raise BadInput(f"the study {str(path)!r} names {twice} twice: keep one of them")
            return node

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except BadInput:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the study {str(path)!r} cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date; unclosed brackets
        raise BadInput(f"the study {str(path)!r} is not YAML: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise BadInput(
            f"the study {str(path)!r} is a {type(found).__name__}: it must be a mapping, data: ..., model: ..."
        )
    parts: list[Any] = [found]
    for count, part in enumerate(parts):  # the list grows during the loop
        if count > _MOST:
            raise BadInput(f"the study {str(path)!r} contains itself, or more than {_MOST:,} values")
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return found


def _value(node: ast.expr, known: Mapping[str, type], text: str) -> Any:
    if isinstance(node, ast.Name):
        return made(known[node.id], {}) if node.id in known else node.id
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(each, known, text) for each in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if (name := node.func.id) not in known:
            raise UnknownName.among("settings", name, known)
        plain = [_value(each, known, text) for each in node.args]
        named = {each.arg: _value(each.value, known, text) for each in node.keywords if each.arg is not None}
        kind = known[name]
        names = [field.name for field in fields(kind)] if is_dataclass(kind) else []
        if len(plain) > len(names) or set(names[: len(plain)]) & set(named):
            raise BadInput(f"{text!r}: give the settings of a {name} by name, once each")
        return made(kind, {**dict(zip(names, plain, strict=False)), **named})
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise BadInput(
            f"{text!r} is not a setting: {ast.unparse(node)!r} must be a number, a word, or settings such as "
            f"SGD(lr=0.1)"
        ) from error


IMPLIED: Mapping[str, type] = {
    "data": DataSettings, "training": Training, "until": Until, "augmentation": Augmentation, "mixup": Mixup,
}  # fmt: skip
"""Types that a YAML file may omit, by the name of the part."""
_SIZES: dict[str, Any] = {"inputs": 1, "widths": (64, 64, 64), "outputs": 1}
"""Sizes of an MLP, which the data and the user replace."""


def data_of(part: Any, test: str | None) -> tuple[DataSettings | UserData, ReadSamples | None]:
    """Return the data of a study: a named set, or the user's own with all its samples."""
    plain: Any = {"name": part} if isinstance(part, str) else part
    name = str(plain.get("name", "")) if isinstance(plain, Mapping) else ""
    if user_code.is_userfile(name) or (name not in (*SYNTHETIC, *IMAGES) and Path(name).is_dir() and name):
        data, samples = UserData.read(name, test)
        for key, value in plain.items():
            data = data if key == "name" else vary(data, str(key), value)
        return data, samples
    found = part_of("data", plain)
    if not isinstance(found, DataSettings):
        raise BadInput(
            f"data: expected the name of a data set, file.py:NAME, a folder, or a mapping such as {{name: digits}}, "
            f"got {found!r}"
        )
    if test is not None:
        raise BadInput(f"--test: {found.name} has its own test data; --test is for data of your own, file.py:NAME")
    return found, None


def part_of(name: str, plain: Any) -> Any:
    """Return a part of a YAML file: settings from an expression, or from a mapping whose type is named or implied."""
    if isinstance(plain, str) and name == "model" and user_code.is_userfile(plain.partition("(")[0]):
        spec, bracket, rest = plain.partition("(")
        return UserNetwork.of(spec, expression(f"given({rest}", {"given": dict}) if bracket else {})
    if isinstance(plain, str) and ("(" in plain or plain in KNOWN):
        # an MLP may leave out the sizes that the data gives
        known: dict[str, Any] = {**KNOWN, "MLP": lambda **given: made(MLP, _SIZES | given)}
        return expression(plain, known)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, list):
        return tuple(part_of(name, each) for each in plain)
    if not isinstance(plain, Mapping):
        return plain
    kind = KNOWN.get(str(plain.get("type"))) or IMPLIED.get(name)
    if kind is None:
        raise BadInput(
            f"{name}: {dict(plain)} needs a known type: write type: NAME, or NAME(...); types: {', '.join(KNOWN)}"
        )
    inside = {key: part_of(str(key), value) for key, value in plain.items() if key != "type"}
    if kind is Training:
        of_optimisers = {field.name for one in get_args(Stepping) for field in fields(one)}
        for name_of, value in inside.items():
            if name_of in of_optimisers - {field.name for field in fields(Training)}:
                shown = f"lr={value}" if name_of == "lr" else f"lr=0.1, {name_of}={value}"
                raise UnknownName(
                    f"training: {name_of} is a setting of the optimiser: write optimiser: SGD({shown}), or {name_of}: "
                    f"{value} under set:"
                )
    try:
        return made(kind, _SIZES | inside if kind is MLP else inside)
    except UnknownName:
        raise
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error


def assigned(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the name and the values of `--set NAME=VALUE,VALUE`; models may be functions of the user's.

    >>> assigned("lr=0.05,0.1"), assigned("model=MLP(widths=(8,)),MLP")[1][1].widths
    (('lr', (0.05, 0.1)), (64, 64, 64))
    """
    name, _, right = text.partition("=")
    if name.strip() != "model" or not right.strip():
        return assignment(text, KNOWN)
    return "model", tuple(part_of("model", one) for one in split_values(f"({right})") if one)


def pairs(plain: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the names and values in the part `set` of a YAML file."""
    if not isinstance(plain, Mapping):
        raise BadInput(f"set: expected a mapping of names to values, got {plain!r}")
    found = []
    for name, value in plain.items():
        if isinstance(value, str):
            found.append(assigned(f"{name}={value}"))
        else:
            several = value if isinstance(value, list) else [value]
            found.append((str(name), tuple(part_of(str(name), each) for each in several)))
    return found


def in_its_folder(file: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the parts of a YAML file with its files found from its own folder, where they are there."""

    def found(part: Any) -> Any:
        if isinstance(part, Mapping) and "name" in part:
            return {**part, "name": found(part["name"])}
        if not isinstance(part, str):
            return part
        path = user_code.file_of(part.partition("(")[0])
        there = (folder / path).exists() and not path.is_absolute()
        return f"{folder / path}{part[len(str(path)) :]}" if there else part

    named = ("data", "test", "model", "checkpoints")
    whole = {name: found(part) if name in named else part for name, part in file.items()}
    axes = file.get("set")
    if not isinstance(axes, Mapping) or "model" not in axes:
        return whole
    models = split_values(f"({axes['model']})") if isinstance(axes["model"], str) else axes["model"]
    several = models if isinstance(models, list) else [models]
    models = [found(one) if user_code.is_userfile(str(one).partition("(")[0]) else one for one in several]
    return {**whole, "set": {**axes, "model": models}}


Facts: TypeAlias = dict[str, Any]
WEIGHTS = ("weights", "checkpoint", "path", "file")
"""The columns that may name the files."""
ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_WHOLE = "weights.safetensors"
"""The weights of a study's network; the other files in its folder are not checkpoints."""
SPELLINGS = {
    "gap": "generalisation_gap", "generalization_gap": "generalisation_gap", "learning_rate": "lr",
    "batchsize": "batch_size",
}  # fmt: skip
EMPTY = ("", "NaN", "nan", "NA", "N/A", "n/a", "#N/A", "NULL", "null")
"""Cells of a table that hold nothing; None is a value of a setting."""
LARGEST = 2**26
"""Bytes of a table at most."""
_ASSIGNED = re.compile(r"(?:^|[/,;_\s-])([A-Za-z]\w*?)=([^,/;\s]+?)(?=[,/;_\s-][A-Za-z]\w*=|[,/;\s]|$)")


def checkpoint_axis(where: Path, model: Architecture, loss: LossName) -> Axis:
    """Return the axis "model+training" of the checkpoints in a folder or a table, each of which has to be a file."""
    own = set(model.options) if isinstance(model, UserNetwork) else {field.name for field in fields(model)} - {"seed"}
    met: dict[tuple[Architecture, str, Options, int | None], Path] = {}
    values = []
    for file, found in _of_folder(where) if where.is_dir() else _of_table(where):
        # the facts by the names that flatlens uses, without empty ones
        facts = {SPELLINGS.get(name.lower().replace(" ", "_"), name): value for name, value in found.items()}
        if taken := [name for name in facts if name in ("key", "outcome")]:
            raise BadInput(f"checkpoints: the column {taken[0]!r} has the name of a column of flatlens: rename it")
        numbers = (*RESULTS, "seed")
        facts = {n: value for n, value in facts.items() if value is not None and not (value == NONE and n in numbers)}
        seed = facts.get("seed")
        if isinstance(seed, float) and seed.is_integer():
            seed = facts["seed"] = int(seed)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise BadInput(f"checkpoints: the seed {seed!r} of {file} is not a whole number: rename that column")
        # those that are settings of the architecture; all others are of the training
        architecture = model
        here = {name: None if value == NONE else value for name, value in facts.items() if name in own}
        if isinstance(model, UserNetwork):
            architecture = replace(model, options=Options({**model.options, **here}))
        elif here:
            kept = {field.name: getattr(model, field.name) for field in fields(model) if field.init}
            architecture = made(type(model), {**kept, **here})
        known = Options({name: value for name, value in facts.items() if name not in own and name != "seed"})
        training = TrainedElsewhere(str(file.resolve()), contents_of(file), loss, known, seed)
        same = (architecture, training.contents, known, seed)
        if same in met:
            raise BadInput(f"checkpoints: {file} and {met[same]} are the same weights with the same columns: keep one")
        met[same] = file
        values.append((architecture, training))
    return Axis("model+training", tuple(values))


def _of_table(table: Path) -> list[tuple[Path, Facts]]:
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
        separator = "\t" if table.suffix == ".tsv" else ","
        read = pd.read_csv(table, sep=separator, skipinitialspace=True, keep_default_na=False, na_values=EMPTY)
        return read.rename(columns=unescaped).map(unescaped)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:  # pandas' own are ValueErrors
        raise BadInput(
            f"checkpoints: {str(table)!r} is neither a folder nor a table of comma-separated values "
            f"({one_line(error, 120)})"
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
        # a file beside a checkpoint, or beside the only one of its folder, says how it was trained
        others = ("config.json", "settings.json", "hparams.json") if file in alone else ()
        notes = [file.with_suffix(".json"), *(file.parent / name for name in others)]
        beside = next((note for note in notes if note.is_file()), None)
        facts = {} if beside is None else _scalars(beside)
        rows.append((file, {**facts, **{name: _cell(value) for name, value in _ASSIGNED.findall(said)}}))
    return rows


def _scalars(note: Path) -> Facts:
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

    >>> _cell("0.1"), _cell("(64, 32)"), _cell("relu"), _cell(float("nan")), _cell("12 Jan"), _cell("None")
    (0.1, (64, 32), 'relu', None, '12 Jan', 'none')
    """
    if hasattr(value, "item"):  # NumPy's numbers
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, str):
        return value if value is None or isinstance(value, bool | int | float) else str(value)
    try:
        found = expression(value, {})
    except BadInput:
        return value
    return NONE if found is None else found


PARTS = ("name", "data", "test", "model", "checkpoints", "training", "set", "measures")
ENDS = ("max_steps", "max_epochs")


def study_of(
    data: str,
    *,
    model: str | None = None,
    settings: Sequence[str] = (),
    measures: Sequence[str] = (),
    test: str | None = None,
    checkpoints: str | None = None,
    scale: StudyScale = "laptop",
    begun: Study | None = None,
) -> Study:
    """Return the study that a command line describes; `data` is a data set's name, the user's own, or a YAML file.

    `settings` are `NAME=VALUE` for all networks, or `NAME=VALUE,VALUE` and `NAME=FIRST:END` for an axis. The default
    axes apply only if no axis is given, without those of settings that are given. `begun` is the study that the folder
    holds: where this is that of the digits without options, `settings` are changes of it.

    >>> study = study_of("digits", settings=["lr=0.05,0.1", "seed=0:5", "label_smoothing=0.1"], scale="smoke")
    >>> len(study.networks()), study.base.training.label_smoothing
    (10, 0.1)

    Raises:
        BadInput: a part is unknown or impossible, or parts do not fit together.
    """
    # the parts of the file, and what is given here in their place
    given_here = {"model": model, "test": test, "checkpoints": checkpoints}
    file = _file_of(data, given_here)
    if data == "digits" and not (any(given_here.values()) or measures):
        own, changes = Study.digits(scale), [assigned(one) for one in settings]
        if not changes:
            return own
        if begun is not None and begun.base == own.base and "model" not in dict(changes):
            varied = {axis.name for axis in own.axes}
            for name, values in changes:
                alone = len(values) == 1 and name not in varied
                own = own.setting(name, values[0]) if alone else own.over(name, *values)
            return _with_quantities(own)
    named_measures = tuple(measures) or tuple(map(str, file.get("measures", ()))) or STUDIED
    given = [*pairs(file.get("set", {})), *map(assigned, settings)]
    if ends := {name: several[0] for name, several in given if name in ENDS and "checkpoints" not in file}:
        file["training"] = {**file.get("training", {}), **ends}
    # settings that all networks share, with the sizes of the data; the data again, if a setting changed it
    base, split, read = _base(file, scale, tuple(as_studied(one).key for one in named(named_measures)))
    loaded = base.data
    axes: dict[str, Axis] = {}
    shared: dict[str, Any] = {}
    for name, several in sorted(given, key=lambda pair: pair[0] != "model"):  # others may be the architecture's own
        if TOGETHER in name and "model" in name.split(TOGETHER):
            raise BadInput(f"--set {name}: architectures are an axis of their own: --set model=A,B")
        values = tuple(map(_architecture, several)) if name == "model" else several
        for earlier in (axes, shared):  # the last of a name counts
            earlier.pop(name, None)
        if len(values) != 1:
            axes[name] = Axis(name, values)  # refuses none
        elif name != "model":
            shared[name] = values[0]
        if len(values) == 1 or name == "model":
            base = vary(base, name, values[0])
    # images as rows, where the architecture takes rows and the data can be either
    if not isinstance(base.model, UserNetwork) and "inputs" in {f.name for f in fields(base.model)}:
        known = base.data.name in IMAGES or (base.data.name in SYNTHETIC and "flat" in SYNTHETIC[base.data.name][1])
        if base.data.flat is None and (isinstance(base.data, UserData) or (known and base.data.name != "digits")):
            base = vary(base, "data.flat", True)
    if base.data != loaded:
        split = _loaded(base.data, read)
    base = vary(base, "model", fitted(base.model, split))
    if not len(split.test_x):
        kept = [name for name in base.measures if not MEASURES[name.partition("(")[0]].held_out]
        base = replace(base, measures=tuple(kept))
    # more samples than there are, unless each network has a number of its own, are refused before any is trained
    if not any("data.train" in axis.split(TOGETHER) for axis in axes):
        there = len(split.x)
        for number in axes["samples"].values if "samples" in axes else (base.samples,):
            if number is not None and not 1 <= number <= there:
                raise BadInput(
                    f"--set samples={number}: there are {there} training samples: 1 to {there} can be measured"
                )
    name = str(file.get("name", user_code.file_of(data).stem))
    if isinstance(base.training, TrainedElsewhere):
        return _of_checkpoints(name, base, str(file["checkpoints"]), list(axes), scale)
    # the axes, each architecture complete; and the quantities to compare
    taken = {*map(last_field, shared), *file.get("training", {})}
    taken |= {"lr"} if "optimiser" in taken else set()
    default = (Axis("lr", (0.02, 0.05, 0.1)), Axis("seed", (0, 1, 2)))
    grid = tuple(axes.values()) or tuple(axis for axis in default if axis.name not in taken)
    if not grid:
        raise BadInput("--set: every setting has one value, so there is one network: give one several, as in seed=0:6")
    if "model" in axes:
        models = _fitted_models(axes["model"], base, shared, grid, split)
        base = vary(base, "model", models[0])
        grid = tuple(replace(axis, values=models) if axis.name == "model" else axis for axis in grid)
    else:
        base = _complete(base, grid, split)
    return _with_quantities(Study(name, base, grid, scale=scale))


def _with_quantities(study: Study) -> Study:
    """Return the study with the quantities to compare: its measures, and those of its settings that are numbers."""
    columns = {axis.name: axis.values for axis in study.axes}
    if isinstance(study.base.training, TrainedElsewhere):
        rows = [facts(one) for one in study.networks()]
        columns = {one: tuple(row[one] for row in rows if one in row) for one in study.varied}
    shown = [one for name, values in columns.items() if (one := setting(name, values)) is not None]
    layers = study.base.model.build().named_modules()
    first = next((name for name, module in layers if is_linear(module)), "")
    return replace(study, quantities=quantities(study.base.measures, shown, first_layer=first))


def _file_of(data: str, given: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the parts of the study: those of a YAML file, or the data alone; parts that are given replace them."""
    file: dict[str, Any] = (
        in_its_folder(load_yaml(Path(data)), Path(data).parent) if data.endswith(user_code.YAML) else {"data": data}
    )
    file = {**file, **{part: text for part, text in given.items() if text is not None}}
    if unknown := [part for part in file if part not in PARTS]:
        raise BadInput(f"the study {data!r} has no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if "data" not in file:
        raise BadInput(f"the study {data!r} names no data: add a line such as data: digits")
    for part, kinds in {"training": (Mapping,), "measures": (list, tuple)}.items():
        if part in file and (not isinstance(file[part], kinds) or (part == "measures" and not file[part])):
            needed = "[mls, nmls]" if part == "measures" else "{batch_size: 16, max_epochs: 50}"
            raise BadInput(f"{part}: expected something like {needed}, got {file[part]!r}")
    return file


def _architecture(given: Any) -> Architecture:
    if isinstance(given, ARCHITECTURES):
        return given  # type: ignore[return-value]
    shown, known = repr(given)[:LONGEST], ", ".join(kind.__name__ for kind in ARCHITECTURES)
    raise BadInput(f"model: {shown} is not an architecture: choose from {known}; several are an axis, --set model=A,B")


def _fitted_models(
    axis: Axis, base: NetworkSettings, shared: Mapping[str, Any], grid: Sequence[Axis], split: Split
) -> tuple[Architecture, ...]:
    """Return an axis's architectures with the settings that all networks share and the sizes of the data."""
    takes = {field.name: one for one in axis.values for field in fields(one) if field.name in ("inputs", "channels")}
    if len(takes) == 2:
        rows, images = (type(takes[kind]).__name__ for kind in ("inputs", "channels"))
        raise BadInput(f"--set model: {rows} takes rows of numbers and {images} images: that makes two studies")
    models = []
    for model in axis.values:
        one = vary(base, "model", model)
        for name in (*shared, *(axis.name for axis in grid)):
            try:
                value_of(one, name)
            except UnknownName as error:
                kind = str(one.model).partition("(")[0]
                told = f"--set {name}: {kind} has no such setting, and every architecture of an axis must"
                raise BadInput(told) from error
        for name, value in shared.items():
            one = vary(one, name, value)
        models.append(_complete(vary(one, "model", fitted(one.model, split)), grid, split).model)
    if again := [str(one) for one in models if list(map(str, models)).count(str(one)) > 1]:
        raise BadInput(f"--set model: {again[0]} is listed twice: give each its own name or settings")
    return tuple(models)


def _complete(base: NetworkSettings, grid: Sequence[Axis], split: Split) -> NetworkSettings:
    """Return the settings with a value for each argument of the user's function: where it has none, an axis's first."""
    for axis in grid:
        if isinstance(base.model, UserNetwork) and axis.name != "model" and value_of(base, axis.name) is None:
            base = vary(base, axis.name, axis.values[0])
    # Before any worker begins: can a network of the user's, or one on their data, be trained?
    if isinstance(base.model, UserNetwork):
        base.model.require_complete()
    if isinstance(base.model, UserNetwork) or isinstance(base.data, UserData):
        assert isinstance(base.training, Training)
        if isinstance(base.training.optimiser, Ridge):
            return base
        network = base.model.build()
        try:
            TrainingRun(network, split.train, split.held_out, base.training, None)
        except BadData as error:
            label = {"data": "data: ", "test": "test data of "}.get(error.argument) if error.call == "train" else None
            raise error if label is None else error.but(argument=f"{label}{base.data.name}", call="") from error
    return base


def _of_checkpoints(name: str, base: NetworkSettings, where: str, varied: list[str], scale: StudyScale) -> Study:
    assert isinstance(base.training, TrainedElsewhere)
    if varied:
        raise BadInput(
            f"--set {varied[0]}: the networks of --checkpoints are trained already: what differs stands "
            f"in the columns of the table"
        )
    axis = checkpoint_axis(Path(where), base.model, base.training.loss)
    base = vary(base, axis.name, axis.values[0])
    assert isinstance(base.training, TrainedElsewhere)
    if isinstance(base.model, UserNetwork):
        base.model.require_complete()
    load_weights(base.model.build(), base.training.weights)  # a wrong architecture shows before any worker begins
    return _with_quantities(Study(name, base, (axis,), scale=scale))


def _loaded(data: DataSettings | UserData, read: ReadSamples | None) -> Split:
    """Return the data, of samples that were read already where it is the user's own: that can take long."""
    return data.split(read) if isinstance(data, UserData) and read is not None else data.load()


def _base(
    file: Mapping[str, Any], scale: StudyScale, measures: tuple[str, ...]
) -> tuple[NetworkSettings, Split, ReadSamples | None]:
    """Return the settings before `set` and the command line change them, the data, and all samples of user's data."""
    elsewhere = "checkpoints" in file
    if elsewhere and not Path(str(file["checkpoints"])).expanduser().exists():
        raise BadInput(f"checkpoints: {file['checkpoints']} is neither a folder nor an existing table")
    data, read = data_of(file["data"], file.get("test"))
    if data.name == "digits" and isinstance(data, DataSettings) and data.train is None:
        data = vary(data, "train", 600 if scale == "laptop" else 200)
    if elsewhere and isinstance(data, UserData) and data.test is None and read is not None and read[1] is None:
        data = vary(data, "test", 0)  # they may have been trained on all samples
    split = _loaded(data, read)
    default = SmallVGG(init="kaiming_uniform") if split.x.ndim == 4 else MLP(1, (64, 64, 64), 1)
    architecture = _architecture(part_of("model", file.get("model", default)))
    given = file.get("training", {})
    if elsewhere:
        if "model" not in file:
            raise BadInput(
                "checkpoints: --model says what network they are of: file.py:NAME, or such as MLP(widths=(64, 64))"
            )
        if left := sorted(set(given) - {"loss"}):
            raise BadInput(
                f"training: {left[0]} has no effect on checkpoints, which are trained already: only loss has"
            )
        loss = "cross_entropy" if split.classes else "half_squared_error"
        untrained = made(TrainedElsewhere, {"weights": "", "contents": "", "loss": loss, **given})
        return NetworkSettings(data, architecture, untrained, measures), split, read
    # Defaults that suit most data: to interpolation, or for a number of steps
    defaults: dict[str, Any] = {"optimiser": SGD(0.05), "max_steps": 20_000 if scale == "laptop" else 2_000}
    if split.classes == 0:
        defaults |= {"loss": "half_squared_error", "until": Until(loss_below=1e-3)}
    else:
        defaults |= {"batch_size": 32, "loss": "cross_entropy", "until": Until(loss_below=1e-2, accuracy=1.0)}
    if set(ENDS) & set(given):  # the user gave an end of training: no other condition
        defaults = {name: value for name, value in defaults.items() if name not in ("until", "max_steps")}
    training = part_of("training", {**defaults, **given})
    return NetworkSettings(data, architecture, training, measures), split, read
