"""Settings as users write them: `SGD(lr=0.1)`, `lr=0.05,0.1`, `seed=0:5`, and a study as a small YAML file."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from flatlens.errors import BadInput, UnknownName, needs, one_line
from flatlens.plain import made

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
    whole = expression(f"({text},)", known)
    return tuple(whole)


def assignment(text: str, known: Mapping[str, type]) -> tuple[str, tuple[Any, ...]]:
    """Return the name and the values of an assignment such as `lr=0.05,0.1`."""
    name, equals, right = text.partition("=")
    if not equals or not name.strip():
        raise BadInput(f"--set {text}: write NAME=VALUE, NAME=VALUE,VALUE or NAME=FIRST:END")
    return name.strip(), values(right, known)


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        BadInput: the file is missing, or is not YAML or not a mapping.
    """
    with needs("study", "a study in YAML"):
        import yaml

    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader(path))
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
    _require_end(found, path)
    return found


def _loader(path: Path) -> Any:
    """Return a safe loader of YAML to which 1e-3 is a number, as in Python, and which refuses a name given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := next((key for at, key in enumerate(keys) if key in keys[:at]), None):
                raise BadInput(f"the study {str(path)!r} names {twice} twice: keep one of them")
            return node

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    return Loader


def _require_end(found: object, path: Path) -> None:
    """Raise BadInput for a file that contains itself, or too many values."""
    parts = [found]
    for count, part in enumerate(parts):  # the list grows during the loop
        if count > _MOST:
            raise BadInput(f"the study {str(path)!r} contains itself, or more than {_MOST:,} values")
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []


def _value(node: ast.expr, known: Mapping[str, type], text: str) -> Any:
    if isinstance(node, ast.Name):
        return made(known[node.id], {}) if node.id in known else node.id
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(each, known, text) for each in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _called(node, node.func.id, known, text)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise BadInput(
            f"{text!r} is not a setting: {ast.unparse(node)!r} must be a number, a word, or settings such as "
            f"SGD(lr=0.1)"
        ) from error


def _called(node: ast.Call, name: str, known: Mapping[str, type], text: str) -> Any:
    if name not in known:
        raise UnknownName.among("settings", name, known)
    plain = [_value(each, known, text) for each in node.args]
    named = {each.arg: _value(each.value, known, text) for each in node.keywords if each.arg is not None}
    kind = known[name]
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    if len(plain) > len(names) or set(names[: len(plain)]) & set(named):
        raise BadInput(f"{text!r}: give the settings of a {name} by name, once each")
    return made(kind, {**dict(zip(names, plain, strict=False)), **named})
