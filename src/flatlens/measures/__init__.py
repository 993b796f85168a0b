"""The measures, each a short function with a card; `Lens` and `measure` run them.

A measure of the catalogue is an attribute of this package by its name: `flatlens.measures.mls`. What an own measure
needs is here, too: the decorators `per_sample` and `on_lens`, and reductions from samples.
"""

from importlib import import_module
from typing import Any

from flatlens.measures.definition import (
    FUNCTION,
    HEADWISE,
    LAYERWISE,
    MEASURE_MODULES,
    MEASURES,
    NEURONWISE,
    PERMUTATION,
    UNITS_AND_ORDER,
    Card,
    Measure,
    NetworkMeasure,
    PassMeasure,
    Reduced,
    Run,
    catalogue,
    largest,
    mean,
    mean_of_finite,
    named,
    on_lens,
    per_sample,
)
from flatlens.measures.lens import Lens
from flatlens.measures.pipeline import about, measure

for _module in MEASURE_MODULES:  # each registers its measures
    import_module(f"flatlens.measures.{_module}")

__all__ = [
    "FUNCTION",
    "HEADWISE",
    "LAYERWISE",
    "MEASURES",
    "NEURONWISE",
    "PERMUTATION",
    "UNITS_AND_ORDER",
    "Card",
    "Lens",
    "Measure",
    "NetworkMeasure",
    "PassMeasure",
    "Reduced",
    "Run",
    "about",
    "catalogue",
    "largest",
    "mean",
    "mean_of_finite",
    "measure",
    "named",
    "on_lens",
    "per_sample",
]


def __getattr__(name: str) -> Any:
    if name in MEASURES:
        return MEASURES[name]
    raise AttributeError(f"module 'flatlens.measures' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *MEASURES])
