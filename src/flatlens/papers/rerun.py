"""Re-run of a study with other seeds and sizes, to see whether an outcome depends on them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from flatlens.experiments.settings import Axis, Study
from flatlens.experiments.vary import TOGETHER, last_field

SHIFT = 1000
"""Number added to every seed."""

_SIZES = ("train", "test")
SIZE = 1.5
"""Factor on the numbers of training and test samples, where a study sets them."""

IN_WORDS = f"every seed {SHIFT} higher, {SIZE:g} times as many samples"


def rerun(study: Study) -> Study:
    """Return the study with other seeds and 1.5 times as many samples.

    >>> second = rerun(Study.digits("smoke"))
    >>> second.base.data.train, second.base.data.seed, second.axes[-1].values
    (300, 1000, (1000, 1001))
    """
    axes = [Axis(axis.name, tuple(_shifted(axis.name.split(TOGETHER), v) for v in axis.values)) for axis in study.axes]
    return replace(study, base=_another(study.base), axes=tuple(axes))


def _shifted(names: list[str], value: Any) -> Any:
    """Return the re-run's value for a value of an axis: a seed, a size, several joint settings, or nested settings."""
    if len(names) > 1:
        return tuple(_shifted([name], its) for name, its in zip(names, value, strict=True))
    return _changed(last_field(names[0]), value)


def _changed(name: str, value: Any) -> Any:
    if name == "seed":
        return value + SHIFT
    return round(SIZE * value) if name in _SIZES and value is not None else _another(value)


def _another(settings: Any) -> Any:
    """Return the settings with every seed and size replaced, at any depth."""
    if isinstance(settings, tuple):
        return tuple(map(_another, settings))
    if not is_dataclass(settings) or isinstance(settings, type):
        return settings
    return replace(settings, **{f.name: _changed(f.name, getattr(settings, f.name)) for f in fields(settings)})
