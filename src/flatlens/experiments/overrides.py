"""Overrides: one setting of a network changed by its name, for grids of settings.

A name is a path of fields (`training.optimiser.lr`), or its last part if this is unique (`lr`). `seed` means the seeds
of the initial weights and of the batches; that of the data is `data.seed`. Names joined by a plus are set together,
each to its own value: `batch_size+lr`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from flatlens.column import split_at_commas
from flatlens.errors import BadInput, UnknownName
from flatlens.settings_json import Options, made

_S = TypeVar("_S")
BOTH_SEEDS = ("model.seed", "training.seed")
TOGETHER = "+"
IDENTITY = ["key", "lr", "batch_size", "seed"]
"""The first columns of every table of networks."""


NONE = "none"
"""A setting that is None, in words."""


def setting_text(value: object) -> str:
    """Return a setting as text.

    >>> setting_text(None), setting_text(0.1), setting_text("relu")
    ('none', '0.1', 'relu')
    """
    return NONE if value is None else str(value)


def last_field(path: str) -> str:
    """Return the name of the last field of a path.

    >>> last_field("training.optimiser.lr"), last_field("seed")
    ('lr', 'seed')
    """
    return path.rpartition(".")[2]


def but_seeds(name: str) -> list[str]:
    """Return the settings that an axis changes, one by one, without seeds.

    >>> but_seeds("batchnorm+seed"), but_seeds("data.seed+model.seed")
    (['batchnorm'], [])
    """
    return [one for one in name.split(TOGETHER) if last_field(one) != "seed"]


def setting_columns(varied: Sequence[str]) -> list[str]:
    """Return the columns of the settings that vary, but those of every table; of several together, also each alone.

    >>> setting_columns(["lr", "batchnorm+seed", "model.width"])
    ['batchnorm+seed', 'batchnorm', 'model.width']
    """
    names = [one for name in varied for one in dict.fromkeys((name, *but_seeds(name)))]
    return [name for name in names if name not in IDENTITY]


def is_seed(name: str) -> bool:
    """Return whether an axis changes only seeds.

    >>> is_seed("data.seed+model.seed"), is_seed("lr+seed")
    (True, False)
    """
    return not but_seeds(name)


def vary(settings: _S, name: str, value: Any) -> _S:
    """Return the settings with another value of one of them.

    Raises:
        UnknownName: there is no setting of this name.
        BadInput: the name is ambiguous, or the value is impossible.
    """
    if TOGETHER in name:
        names = name.split(TOGETHER)
        if not isinstance(value, tuple | list) or len(value) != len(names):
            raise BadInput(
                f"the axis {name} sets {len(names)} settings together: each of its values must have {len(names)} "
                f"parts, not {value!r}"
            )
        for each, its in zip(names, value, strict=True):
            settings = vary(settings, each, its)
        return settings
    for path in paths(settings, name):
        settings = _replaced(settings, path.split("."), value)
    return settings


def value_of(settings: object, name: str) -> Any:
    """Return the value that `vary` would change."""
    if TOGETHER in name:
        return tuple(value_of(settings, each) for each in name.split(TOGETHER))
    found: Any = settings
    for part in paths(settings, name)[-1].split("."):
        found = _part(found, part)
    return found


def paths(settings: object, name: str) -> tuple[str, ...]:
    """Return the complete paths of the fields that a name stands for."""
    if TOGETHER in name:
        return tuple(path for each in name.split(TOGETHER) for path in paths(settings, each))
    known = list(_all(settings, ""))
    if name in known:
        return (name,)
    if name == "seed" and set(BOTH_SEEDS) <= set(known):
        return BOTH_SEEDS
    alike = [path for path in known if path.endswith(f".{name}")]
    if not alike:
        raise UnknownName.among("setting", name, {*known, *map(last_field, known)})
    if len(alike) > 1:
        raise BadInput(f"the setting {name!r} could be {' or '.join(alike)}: write the whole name")
    return (alike[0],)


def _part(settings: Any, name: str) -> Any:
    if isinstance(settings, tuple):
        return settings[int(name)]
    return settings.get(name) if isinstance(settings, Options) else getattr(settings, name)


def _all(settings: object, prefix: str) -> Iterator[str]:
    """Yield every path; tuples of settings are numbered, penalties.0.coefficient."""
    if isinstance(settings, Options):
        yield from (f"{prefix}{name}" for name in settings)
    elif is_dataclass(settings):
        for field in fields(settings):
            path = f"{prefix}{field.name}"
            yield path
            yield from _all(getattr(settings, field.name), f"{path}.")
    elif isinstance(settings, tuple) and settings and all(map(is_dataclass, settings)):
        for number, each in enumerate(settings):
            yield from _all(each, f"{prefix}{number}.")


def split_values(values: str) -> list[str]:
    """Return the values of settings that vary together, from their text in a table of networks.

    >>> split_values("(SGD(lr=0.1, momentum=0.0), 'normal', 4)")
    ['SGD(lr=0.1, momentum=0.0)', 'normal', '4']
    """
    return [part.strip("'") for part in split_at_commas(values.strip()[1:-1])]


def seedless(settings: str, seed: int | None = None) -> str:
    """Return settings in words without their seed; with `seed`, only where it is this one.

    >>> seedless("LeNet5(channels=3, seed=4, init='torch')"), seedless("ViT(seed=1, depth=2)")
    ("LeNet5(channels=3, init='torch')", 'ViT(depth=2)')
    >>> seedless("ViT(seed=12, depth=2)", 1)
    'ViT(seed=12, depth=2)'
    """
    number = r"\d+" if seed is None else rf"{seed}\b"
    return re.sub(rf"\bseed={number}, |(, )?\bseed={number}", "", settings)


def _replaced(settings: Any, path: list[str], value: Any) -> Any:
    first, rest = path[0], path[1:]
    if isinstance(settings, tuple):
        at = int(first)
        return (*settings[:at], _replaced(settings[at], rest, value), *settings[at + 1 :])
    inside = _replaced(_part(settings, first), rest, value) if rest else value
    if isinstance(settings, Options):
        return Options({**settings, first: inside})
    kept = {field.name: getattr(settings, field.name) for field in fields(settings) if field.init}
    return made(type(settings), {**kept, first: inside})
