"""Settings as plain JSON and back: nested frozen dataclasses, each with its type's name beside its fields.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Point:
...     at: tuple[int, ...]
>>> as_plain(Point((1, 2)))
{'type': 'Point', 'at': [1, 2]}
>>> from_plain({'type': 'Point', 'at': [1, 2]}, {"Point": Point})
Point(at=(1, 2))
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from flatlens.errors import BadInput, FlatlensError, UnknownName, one_line


class Options(dict[str, Any]):
    """Named values that are part of settings, such as the arguments of a user's function; hashable, never changed."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none, because it may change
        return hash(frozenset(self.items()))


def as_plain(value: Any) -> Any:
    """Return a value as dicts, lists, strings, numbers, booleans and None; BadInput where it has no such form."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **{f.name: as_plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [as_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): as_plain(each) for key, each in value.items()}
    if value is None or isinstance(value, str | int | float):
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"settings contain {value}: only finite numbers are allowed")
        return value
    if isinstance(value, np.generic):
        return as_plain(value.item())
    allowed = "only numbers, strings, tuples and frozen dataclasses are allowed"
    raise BadInput(f"settings contain a {type(value).__name__}: {allowed}")


def from_plain(plain: Any, known: Mapping[str, type]) -> Any:
    """Return what `as_plain` was given, of `known` types; lists come back as tuples, fields left out have defaults."""
    if isinstance(plain, list):
        return tuple(from_plain(each, known) for each in plain)
    if not isinstance(plain, dict):
        return plain
    values = {key: from_plain(each, known) for key, each in plain.items() if key != "type"}
    if "type" not in plain:
        return values
    if plain["type"] not in known:
        raise BadInput(f"unknown settings type {plain['type']!r}: choose from {', '.join(sorted(known))}")
    return made(known[plain["type"]], values)


def made(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return `kind(**values)`, settings whose values have the types that its fields ask for; else raise BadInput.

    >>> from dataclasses import make_dataclass
    >>> made(make_dataclass("Point", [("x", int)]), {"x": "east"})
    Traceback (most recent call last):
        ...
    flatlens.errors.BadInput: Point(x='east'): expected a whole number of at most 64 bits
    """
    # Each value has a field, and each field without a default its value
    if is_dataclass(kind):
        of, known = getattr(kind, "__name__", str(kind)), {field.name: field for field in fields(kind) if field.init}
        for name in values:
            if name not in known:
                raise UnknownName.among("setting", name, known, where=f"of {of}")
        needed = [n for n, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
        if missing := [name for name in needed if name not in values]:
            raise BadInput(f"{of} needs {' and '.join(missing)}: write {of}({', '.join(f'{n}=...' for n in missing)})")
    # Each value has its field's type
    hints = _hints(kind)
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            raise BadInput(f"{kind.__name__}({name}={_shown(value)}): expected {_in_words(hints[name])}")
    try:
        return kind(**values)
    except FlatlensError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"the settings of a {kind.__name__} do not fit: {one_line(error)}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    if not is_dataclass(kind):
        return {}
    try:
        return get_type_hints(kind)
    except NameError:  # imported for the type checker alone
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type; whole numbers have 64 bits."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inside)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inside)
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        several = inside[:1] * len(value) if inside[1:] == (...,) else inside
        return len(several) == len(value) and all(map(fits, value, several))
    if origin is list:
        return isinstance(value, list) and all(fits(one, inside[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inside[0]) and fits(v, inside[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63
    return isinstance(value, hint) if isinstance(hint, type) and origin is None else True


_NUMBERS = {float: "a number", int: "a whole number of at most 64 bits"}
_WORDS = {**_NUMBERS, str: "a word", bool: "True or False", NoneType: "None"}


def _in_words(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, inside))
    if origin is tuple:
        return "several values in brackets, such as (1, 2)," if inside[1:] == (...,) else f"{len(inside)} values"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits; a list that contains itself
        text = "..."
    return text if len(text) <= 40 else f"{text[:37]}..."


def require_setting(settings: object, name: str, holds: bool, what: str) -> None:
    """Refuse the value of a setting unless it `holds`; called by the settings themselves, after they are made.

    >>> from dataclasses import make_dataclass
    >>> require_setting(make_dataclass("Disc", ["radius"])(-1.0), "radius", False, "it must not be negative")
    Traceback (most recent call last):
        ...
    flatlens.errors.BadInput: Disc(radius=-1.0): it must not be negative
    """
    if not holds:
        raise BadInput(what, argument=name, value=getattr(settings, name), call=type(settings).__name__)


def check(settings: object, sizes: Sequence[str] = (), **known: Iterable[object]) -> None:
    """Refuse settings that are not among the known values, and `sizes` that are not whole numbers of at least 1.

    >>> from dataclasses import make_dataclass
    >>> Net = make_dataclass("Net", ["width", "activation"])
    >>> check(Net(0, "sine"), ["width"])
    Traceback (most recent call last):
        ...
    flatlens.errors.BadInput: Net(width=...): every size must be a whole number of at least 1, not 0
    >>> check(Net(2, "sine"), ["width"], activation=["relu", "tanh"])
    Traceback (most recent call last):
        ...
    flatlens.errors.BadInput: Net(activation='sine'): choose from relu, tanh
    """
    values = [getattr(settings, name) for name in sizes]
    flat = [size for value in values for size in (value if isinstance(value, tuple) else (value,))]
    if not all(isinstance(size, int) and size >= 1 for size in flat):
        named = ", ".join(f"{name}=..." for name in sizes)
        shown = flat[0] if len(flat) == 1 else tuple(flat)
        told = f"{type(settings).__name__}({named})"
        raise BadInput(f"{told}: every size must be a whole number of at least 1, not {shown}")
    for name, choices in known.items():
        listed = list(choices)
        require_setting(settings, name, getattr(settings, name) in listed, f"choose from {', '.join(map(str, listed))}")


def canonical(plain: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal settings give equal text."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(settings: Any) -> str:
    """Return twelve hexadecimal digits of the hash of the settings alone, without versions, host or date."""
    return hashlib.sha256(canonical(as_plain(settings)).encode()).hexdigest()[:12]
