"""What a study measures on each network, and which of it is related to which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

Transform: TypeAlias = Literal["identity", "sqrt", "log"]
Role: TypeAlias = Literal["result", "measure", "setting"]

MEASURES = (
    "loss",
    "accuracy",
    "test_loss",
    "test_accuracy",
    "generalisation_gap",
    "interpolation_sharpness",
    "ggn_trace",
    "mls",
    "nmls",
    "jacobian_norm",
    "local_volume",
    "log_volume",
    "network_volume",
    "local_dimension",
    "relative_flatness",
    "relative_flatness_ggn",
)


@dataclass(frozen=True)
class Quantity:
    """One axis of the comparison: a column of the table of networks, transformed, under the name it is shown by.

    Its role says whether it is what one would like to predict, what was measured to predict it, or what was set.
    """

    name: str
    column: str
    transform: Transform = "identity"
    role: Role = "measure"

    def of(self, networks: pd.DataFrame) -> pd.Series:
        """Its values; NaN where the column is missing, or the root or logarithm undefined.

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


GAP = Quantity("generalisation gap", "generalisation_gap", role="result")
SHARPNESS = Quantity("sqrt sharpness", "interpolation_sharpness", "sqrt")
LEARNING_RATE = Quantity("learning rate (log)", "lr", "log", role="setting")
BATCH_SIZE = Quantity("batch size (log)", "batch_size", "log", role="setting")
QUANTITIES = (
    GAP,
    Quantity("test loss", "test_loss", role="result"),
    SHARPNESS,
    Quantity("GGN trace", "ggn_trace"),
    Quantity("MLS", "mls"),
    Quantity("NMLS", "nmls"),
    Quantity("Jacobian norm", "jacobian_norm"),
    Quantity("log volume", "log_volume"),
    Quantity("local volume (log)", "local_volume", "log"),
    Quantity("network volume (log)", "network_volume", "log"),
    Quantity("local dimension", "local_dimension"),
    Quantity("relative flatness, last layer", "relative_flatness"),
    Quantity("relative flatness, first layer", "relative_flatness[fc1]"),
    Quantity("relative flatness, all layers", "relative_flatness.sum"),
    LEARNING_RATE,
    BATCH_SIZE,
)
