"""Names that are checked before torch is imported, which takes seconds: they are read from flatlens' own source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from flatlens.errors import BadInput, UnknownName
from flatlens.userfile import YAML, is_userfile

DATA_SETS = (
    "digits", "patches", "clusters", "inverted_clusters", "eight_points", "waves_interval", "waves_square",
    "waves_cube", "waves_circle", "waves_sphere", "waves_sheet", "imagenet", "mnist", "fashion_mnist", "cifar10",
    "cifar100",
)  # fmt: skip
NETWORKS = ("MLP", "LeNet5", "VGG11", "SmallVGG", "ResNet18", "ViT", "CoordinateNet", "Published")
SOURCE = Path(__file__).parent.parent


def measures() -> set[str]:
    """Return the names of all measures: functions with a decorator in the modules of measures."""
    return {
        node.name
        for node in _nodes("measures/*.py")
        if isinstance(node, ast.FunctionDef) and any(isinstance(each, ast.Call) for each in node.decorator_list)
        if not node.name.startswith("_")  # those that others read
    }


def settings() -> set[str]:
    """Return the names of all settings: fields of dataclasses of training, networks and data."""
    return {
        field.target.id
        for node in _nodes("training/*.py", "models/*.py", "data/*.py", "experiments/settings.py")
        if isinstance(node, ast.ClassDef) and node.decorator_list
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _nodes(*patterns: str) -> Iterator[ast.stmt]:
    for pattern in patterns:
        for file in sorted(SOURCE.glob(pattern)):
            yield from ast.parse(file.read_text()).body


def require_names(data: str, model: str | None, names: Sequence[str], given: Sequence[str]) -> None:
    """Refuse at once a mistyped data set, architecture, measure or setting.

    Settings are those `given` as NAME=VALUE; with a network of the user's own they may be any.

    Raises:
        UnknownName: nothing has this name.
        BadInput: there is no such YAML file.
    """
    yaml = data.endswith(YAML)
    if yaml and not Path(data).expanduser().is_file():
        raise BadInput(f"the study {data!r} cannot be read: there is no such file")
    if not (yaml or is_userfile(data) or Path(data).expanduser().is_dir()) and data not in DATA_SETS:
        raise UnknownName.among("data set to study (nor is it a folder, nor file.py:NAME)", data, DATA_SETS)
    architecture = (model or "").partition("(")[0].strip()
    if architecture.isidentifier() and architecture not in NETWORKS:
        raise UnknownName.among("architecture", architecture, NETWORKS)
    for name in names:
        if name.partition("(")[0].strip() not in measures():
            raise UnknownName.among("measure", name.partition("(")[0].strip(), measures())
    if yaml or is_userfile(architecture) or any(each.startswith("model=") and is_userfile(each) for each in given):
        return  # the arguments of a function of the user's are settings
    for each in given:
        for name in each.partition("=")[0].split("+"):
            last = name.strip().rpartition(".")[2]
            if last.isidentifier() and last not in settings():
                raise UnknownName.among("setting", name.strip(), settings())
