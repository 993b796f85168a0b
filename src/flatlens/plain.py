"""Settings as plain JSON and back: frozen dataclasses inside one another, each with its type's name beside its fields.

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
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from flatlens.errors import BadInput


def as_plain(value: Any) -> Any:
    """Dicts, lists, strings, numbers, booleans and None.

    Raises:
        BadInput: something that has no such form.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **{f.name: as_plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [as_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): as_plain(each) for key, each in value.items()}
    if value is None or isinstance(value, str | int | float):
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"settings hold {value}: finite numbers are needed")
        return value
    if isinstance(value, np.generic):
        return as_plain(value.item())
    raise BadInput(
        f"settings hold a {type(value).__name__}: numbers, strings, tuples and frozen dataclasses are needed"
    )


def from_plain(plain: Any, known: Mapping[str, type]) -> Any:
    """What `as_plain` wrote; lists come back as tuples. Fields left out have their defaults.

    Raises:
        BadInput: a type that is not `known`, or fields that do not fit it.
    """
    if isinstance(plain, list):
        return tuple(from_plain(each, known) for each in plain)
    if not isinstance(plain, dict):
        return plain
    values = {key: from_plain(each, known) for key, each in plain.items() if key != "type"}
    if "type" not in plain:
        return values
    if plain["type"] not in known:
        raise BadInput(f"no settings are called {plain['type']!r}: known are {', '.join(sorted(known))}")
    try:
        return known[plain["type"]](**values)
    except TypeError as error:
        raise BadInput(f"the settings of a {plain['type']} do not fit: {error}") from error


def canonical(plain: Any) -> str:
    """JSON with sorted keys and no blanks: equal settings give equal text."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(settings: Any) -> str:
    """Twelve hexadecimal digits of the hash of the settings alone: no version, host or date enters."""
    return hashlib.sha256(canonical(as_plain(settings)).encode()).hexdigest()[:12]
