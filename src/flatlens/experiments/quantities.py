"""Quantities of a study: what it measures on each network, and which of these it relates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.experiments.overrides import last_field
from flatlens.measures import MEASURES
from flatlens.measures.definition import RISK_FAMILY
from flatlens.progress import by_key

AxisTransform: TypeAlias = Literal["identity", "sqrt", "log"]
QuantityRole: TypeAlias = Literal["result", "measure", "setting"]


@dataclass(frozen=True)
class Quantity:
    """A column of the table of networks, how to transform it, and the name to show.

    The role is "result" (to be predicted), "measure" (a candidate predictor) or "setting".

    >>> Quantity("sharpness", "sharpness", "log10").name
    'sharpness'
    """

    name: str
    column: str
    transform: AxisTransform = "identity"
    role: QuantityRole = "measure"

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", str(Column.parse(self.column)))

    def of(self, networks: pd.DataFrame) -> pd.Series:
        """Return the values; NaN if the column is missing, or the root or logarithm undefined.

        >>> Quantity("log batch size", "batch_size", "log").of(pd.DataFrame({"batch_size": [1, 0]})).tolist()
        [0.0, nan]
        """
        if self.column not in networks:
            return pd.Series(np.nan, index=networks.index)
        values = networks[self.column].astype(float)
        if self.transform == "sqrt":
            return values.where(values >= 0) ** 0.5
        if self.transform == "log":
            return pd.Series(np.log(values.where(values > 0)), index=networks.index)
        return values

    def with_first(self, layer: str) -> Quantity:
        """Return this quantity for a network whose first layer has another name than FIRST."""
        column = Column.parse(self.column)
        return replace(self, column=str(replace(column, layer=layer))) if column.layer == FIRST else self


FIRST = "fc1"
"""Name of the first layer in the columns below."""

GAP = Quantity("generalisation gap", "generalisation_gap", role="result")
SHARPNESS = Quantity("sqrt sharpness", "interpolation_sharpness", "sqrt")
LEARNING_RATE = Quantity("learning rate (log)", "lr", "log", role="setting")
BATCH_SIZE = Quantity("batch size (log)", "batch_size", "log", role="setting")
LEFT_OUT = {
    "relative_flatness_ggn": "the same number as relative_flatness",
    "neuron_flatness_ggn": "the same number as neuron_flatness",
    "parameter_jacobian_frobenius": "the same number as interpolation_sharpness",
    "input_invariant_mls": "the same number as neuron_flatness of the first layer",
    "jacobian_frobenius": "from the same singular values as mls, so that both change together",
    "output_norm": "determined by the targets, which all networks interpolate",
    "feature_norm": "a factor of layer_factors, and says little without the others",
}
"""Measures that add nothing for ReLU networks that interpolate under the half squared error, with the reason."""

STUDIED = tuple(name for name, one in MEASURES.items() if not one.on_request and name not in LEFT_OUT)
"""Measures of a study by default: those that need no curvature products and are not left out."""

_SHOWN = by_key(
    (Column.parse(one.column).measure, one)
    for one in (
        Quantity("test loss", "test_loss", role="result"),
        SHARPNESS,
        Quantity("GGN trace", "ggn_trace"),
        Quantity("MLS", "mls"),
        Quantity("NMLS", "nmls"),
        Quantity("Jacobian norm", "jacobian_norm"),
        Quantity("local volume (log)", "local_volume", "log"),
        Quantity("network volume (log)", "network_volume", "log"),
        Quantity("relative flatness, last layer", "relative_flatness"),
        Quantity("relative flatness, first layer", "relative_flatness[fc1]"),
        Quantity("relative flatness, all layers", "relative_flatness.sum"),
        Quantity("adaptive sharpness", "adaptive_sharpness_ggn"),
        Quantity("matrix-normalised sharpness", "matrix_normalized_sharpness"),
        Quantity("normalised sharpness", "normalized_sharpness"),
        Quantity("normalised MLS", "normalized_mls"),
        Quantity("Fisher-Rao norm", "fisher_rao"),
    )
)
"""Quantities of each measure whose own name does not suffice."""


def measure_names(quantities: Sequence[Quantity]) -> list[str]:
    """Return the names of those quantities that are measures."""
    return [quantity.name for quantity in quantities if quantity.role == "measure"]


def in_words(setting: str) -> str:
    """Return the name of a setting in words.

    >>> in_words("lr"), in_words("label_smoothing")
    ('learning rate', 'label smoothing')
    """
    return "learning rate" if setting == "lr" else setting.replace("_", " ")


def setting(name: str, values: Sequence[object]) -> Quantity | None:
    """Return a setting as an axis of the comparison; None for a seed or values that are not numbers.

    >>> setting("label_smoothing", (0.0, 0.5)).name, setting("seed", (0, 1)), setting("activation", ("relu", "tanh"))
    ('label smoothing', None, None)
    """
    known = {"lr": LEARNING_RATE, "batch_size": BATCH_SIZE}
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if last_field(name) == "seed" or not numbers:
        return None
    return known.get(name) or Quantity(in_words(last_field(name)), name, role="setting")


def quantities(
    measures: Sequence[str], settings: Sequence[Quantity] = (LEARNING_RATE, BATCH_SIZE), first_layer: str = FIRST
) -> tuple[Quantity, ...]:
    """Return the axes of the comparison: the gap, the measures, the settings.

    >>> [q.name for q in quantities(["local_dimension", "loss"])]
    ['generalisation gap', 'local dimension', 'learning rate (log)', 'batch size (log)']
    """
    risk = {name for name, one in MEASURES.items() if one.card.family == RISK_FAMILY}
    axes = [
        axis
        for name in measures
        if name in _SHOWN or name not in risk
        for axis in _SHOWN.get(name, [Quantity(name.replace("_", " "), name)])
    ]
    return GAP, *(axis.with_first(first_layer) for axis in axes), *settings
