"""The measures, each a short function with a card; `Lens` and `measure` run them.

A measure of the catalogue is an attribute of this package by its name: `flatlens.measures.mls`.
"""

from typing import Any

from flatlens.measures.definition import (
    FUNCTION,
    HEADWISE,
    LAYERWISE,
    MEASURES,
    NEURONWISE,
    PERMUTATION,
    UNITS_AND_ORDER,
    Card,
    Measure,
    NetworkMeasure,
    PassMeasure,
)
from flatlens.measures.lens import Lens
from flatlens.measures.pipeline import about, catalogue, measure, named

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
    "about",
    "catalogue",
    "measure",
    "named",
]


def __getattr__(name: str) -> Any:
    if name in MEASURES:
        return MEASURES[name]
    raise AttributeError(f"module 'flatlens.measures' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *MEASURES])
