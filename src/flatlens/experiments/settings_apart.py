"""The differences between two studies, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flatlens.experiments.settings import without_places


def settings_apart(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return how two studies differ, given as plain settings: their first two differences; "" if there are none.

    >>> settings_apart({"scale": "smoke", "base": {"samples": 40}}, {"scale": "smoke", "base": {"samples": None}})
    'base.samples: 40 there, null asked for'
    """
    before, now = _by_name(without_places(there)), _by_name(without_places(here))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(_apart(name, before.get(name), now.get(name)) for name in names[:2])


def _by_name(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a study's settings by dotted name, and its axes by name."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if key == "axes":
            found |= {axis["name"]: axis["values"] for axis in value}
        elif isinstance(value, dict):
            found |= _by_name(value, f"{prefix}{key}.")
        elif key != "type":
            found[f"{prefix}{key}"] = value
    return found


def _apart(name: str, there: Any, here: Any) -> str:
    """Return how two settings differ, in words; of long ones the first part that does."""
    if _short(there) != _short(here):
        return f"{name}: {_short(there)} there, {_short(here)} asked for"
    if isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            return f"{name}: {len(there)} values there, {len(here)} asked for"
        there, here = (dict(enumerate(values)) for values in (there, here))
    if isinstance(there, dict) and isinstance(here, dict):
        part = next(key for key in {**there, **here} if there.get(key) != here.get(key))
        return _apart(f"{name}.{part}", there.get(part), here.get(part))
    return f"{name} differs"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
