"""The parts of a study as users write them: data, architecture, training and settings, from text or from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from flatlens import userfile
from flatlens.data import UserData
from flatlens.data.named import IMAGES, SYNTHETIC, DataSettings
from flatlens.data.user_data import ReadSamples
from flatlens.errors import BadInput, UnknownName
from flatlens.experiments.reading import assignment, expression
from flatlens.experiments.settings import KNOWN
from flatlens.experiments.vary import split_values, vary
from flatlens.models import MLP, UserNetwork
from flatlens.plain import made
from flatlens.training import Augmentation, Mixup, Training, Until
from flatlens.training.optimisers import Stepping

IMPLIED: Mapping[str, type] = {
    "data": DataSettings,
    "training": Training,
    "until": Until,
    "augmentation": Augmentation,
    "mixup": Mixup,
}
"""Types that a YAML file may omit, by the name of the part."""
_SIZES: dict[str, Any] = {"inputs": 1, "widths": (64, 64, 64), "outputs": 1}
"""Sizes of an MLP, which the data and the user replace."""


def data_of(part: Any, test: str | None) -> tuple[DataSettings | UserData, ReadSamples | None]:
    """Return the data of a study: a named set, or the user's own with all its samples."""
    plain: Any = {"name": part} if isinstance(part, str) else part
    name = str(plain.get("name", "")) if isinstance(plain, Mapping) else ""
    if userfile.is_userfile(name) or (name not in (*SYNTHETIC, *IMAGES) and Path(name).is_dir() and name):
        data, samples = UserData.read(name, test)
        for key, value in plain.items():
            data = data if key == "name" else vary(data, str(key), value)
        return data, samples
    found = part_of("data", plain)
    if not isinstance(found, DataSettings):
        raise BadInput(
            f"data: the name of a data set, file.py:NAME, a folder, or a mapping such as {{name: digits}} is needed, "
            f"got {found!r}"
        )
    if test is not None:
        raise BadInput(f"--test: {found.name} has test data of its own; it goes with data of your own, file.py:NAME")
    return found, None


def part_of(name: str, plain: Any) -> Any:
    """Return a part of a YAML file: settings from an expression, or from a mapping whose type is named or implied."""
    if isinstance(plain, str) and name == "model" and userfile.is_userfile(plain.partition("(")[0]):
        return _user_network(plain)
    if isinstance(plain, str):
        looks_like_settings = "(" in plain or plain in KNOWN
        return expression_of_model(plain) if looks_like_settings else plain
    if isinstance(plain, list):
        return tuple(part_of(name, each) for each in plain)
    if not isinstance(plain, Mapping):
        return plain
    kind = KNOWN.get(str(plain.get("type"))) or IMPLIED.get(name)
    if kind is None:
        raise BadInput(
            f"{name}: {dict(plain)} needs a known type: write type: NAME, or NAME(...); known are {', '.join(KNOWN)}"
        )
    inside = {key: part_of(str(key), value) for key, value in plain.items() if key != "type"}
    if kind is Training:
        _require_no_optimiser(inside)
    try:
        return made(kind, _SIZES | inside if kind is MLP else inside)
    except UnknownName:
        raise
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error


def _require_no_optimiser(given: Mapping[str, Any]) -> None:
    """Raise UnknownName for a setting of the optimiser, such as the learning rate, beside those of training."""
    own = {field.name for field in fields(Training)}
    for name, value in given.items():
        if name not in own and any(name in {field.name for field in fields(kind)} for kind in get_args(Stepping)):
            shown = f"lr={value}" if name == "lr" else f"lr=0.1, {name}={value}"
            raise UnknownName(
                f"training: {name} is a setting of the optimiser: write optimiser: SGD({shown}), or {name}: {value} "
                f"under set:"
            )


def expression_of_model(text: str) -> Any:
    """Return the architecture that `MLP(widths=(64, 64))` describes; sizes that the data gives may be left out."""

    def mlp(**given: Any) -> MLP:
        found: MLP = made(MLP, _SIZES | given)
        return found

    known: dict[str, Any] = {**KNOWN, "MLP": mlp}
    return expression(text, known)


def assigned(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the name and the values of `--set NAME=VALUE,VALUE`; models may be functions of the user's.

    >>> assigned("lr=0.05,0.1"), assigned("model=MLP(widths=(8,)),MLP")[1][1].widths
    (('lr', (0.05, 0.1)), (64, 64, 64))
    """
    name, _, right = text.partition("=")
    if name.strip() != "model" or not right.strip():
        return assignment(text, KNOWN)
    return "model", tuple(part_of("model", one) for one in split_values(f"({right})") if one)


def _user_network(written: str) -> UserNetwork:
    """Return the network of `file.py:NAME` or `file.py:NAME(width=8)`."""
    spec, bracket, rest = written.partition("(")
    given = expression(f"given({rest}", {"given": Given}).values if bracket else {}
    return UserNetwork.of(spec, given)


class Given:
    """The arguments in brackets after the name of a function of the user's."""

    def __init__(self, **values: Any) -> None:
        self.values = values


def pairs(plain: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the names and values in the part `set` of a YAML file."""
    if not isinstance(plain, Mapping):
        raise BadInput(f"set: a mapping of names to values is needed, not {plain!r}")
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
        path = userfile.file_of(part.partition("(")[0])
        return (
            f"{folder / path}{part[len(str(path)) :]}" if (folder / path).exists() and not path.is_absolute() else part
        )

    whole = {
        name: found(part) if name in ("data", "test", "model", "checkpoints") else part for name, part in file.items()
    }
    axes = file.get("set")
    if not isinstance(axes, Mapping) or "model" not in axes:
        return whole
    models = split_values(f"({axes['model']})") if isinstance(axes["model"], str) else axes["model"]
    several = models if isinstance(models, list) else [models]
    models = [found(one) if userfile.is_userfile(str(one).partition("(")[0]) else one for one in several]
    return {**whole, "set": {**axes, "model": models}}
