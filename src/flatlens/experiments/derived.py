"""Tables and sentences derived from a study's networks, kept beside them with the digest of their inputs.

It is derived again where that has changed, or flatlens's own source. Whatever cannot be read is derived again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flatlens.files import write_whole

_OF = "derived_from"
_SOURCE = Path(__file__).parent.parent


def digest_of(*parts: Any) -> str:
    """Return the hash of tables and plain values, and of the source that derives from them.

    >>> digest_of({"a": 1}, pd.DataFrame({"b": [1.0]})) == digest_of({"a": 1}, pd.DataFrame({"b": [1.0 + 1e-15]}))
    False
    """
    digest = hashlib.sha256(_source().encode())
    for part in parts:
        if isinstance(part, pd.DataFrame):
            digest.update(repr([*map(str, part.columns)]).encode())
            digest.update(np.ascontiguousarray(pd.util.hash_pandas_object(part, index=False).to_numpy()).data)
        else:
            digest.update(json.dumps(part, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


@cache
def _source() -> str:
    digest = hashlib.sha256()
    for file in sorted(_SOURCE.rglob("*")):
        if file.suffix in (".py", ".j2", ".css", ".js"):
            digest.update(file.relative_to(_SOURCE).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def read_derived(file: Path, of: str) -> dict[str, Any] | None:
    """Return what `write_derived` kept, if it was derived from what has the digest `of`; else None."""
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain.pop(_OF) != of:
            return None
        tables = {name: pd.DataFrame(columns) for name, columns in plain.pop("tables").items()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    return {**plain, **tables}


def write_derived(file: Path, of: str, derived: Mapping[str, Any]) -> None:
    """Keep tables and plain values that were derived from what has the digest `of`."""
    tables = {name: one.to_dict("list") for name, one in derived.items() if isinstance(one, pd.DataFrame)}
    plain = {name: one for name, one in derived.items() if name not in tables}
    write_whole(file, json.dumps({_OF: of, **plain, "tables": tables}, default=float) + "\n")
