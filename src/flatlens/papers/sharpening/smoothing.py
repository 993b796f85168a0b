"""Label smoothing in X6 and X10."""

from __future__ import annotations

import pandas as pd

from flatlens.experiments.settings import Axis
from flatlens.papers.evidence import Table, where
from flatlens.papers.experiment import Scale
from flatlens.papers.units import trained_ones

SMOOTHING = "label_smoothing"


def smoothings(scale: Scale) -> Axis:
    """Return the axis of B.1's strengths."""
    return Axis(SMOOTHING, (0.0, 0.5) if scale == "smoke" else (0.0, 0.5, 0.75))


def of_smoothing(table: Table, smoothed: bool, *, fastest: bool = False) -> Table:
    """Return the networks with label smoothing, or those without; with `fastest`, only at the largest learning rate."""

    def chosen(networks: pd.DataFrame) -> pd.Series:
        rows = (networks[SMOOTHING] > 0) == smoothed
        return rows & (networks["lr"] == trained_ones(networks)[0]["lr"].max()) if fastest else rows

    return where(table, chosen)
