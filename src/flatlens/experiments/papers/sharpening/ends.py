"""What X7 and X8 measure where training ends, and how their figures show it."""

from __future__ import annotations

import pandas as pd

from flatlens.experiments.experiment import Plot
from flatlens.experiments.papers.sharpening.networks import GAP, JACOBIAN, SHARPNESS
from flatlens.experiments.plots import banded
from flatlens.experiments.quantities import in_words

MEASURES = (SHARPNESS.column, JACOBIAN.column, "loss", "accuracy", "test_accuracy", GAP.column)
PANELS = {"Jacobian norm": JACOBIAN.column, "sharpness": SHARPNESS.column, "|test loss - training loss|": GAP.column}
"""What Fig. 2 to 4 and 12 to 19 show."""
NO_DECAY = "Sharpness leaves weight decay out of the loss."


def ends(networks: pd.DataFrame, name: str, x: str, line: str, title: str, *, log_x: bool = False) -> Plot:
    """A line a value of the setting `line`, over the values of the setting `x`."""
    networks = networks.rename(columns={x: "x", line: "line"})
    rows = pd.concat([networks.assign(panel=panel, y=networks[column]) for panel, column in PANELS.items()])
    caption = "At the end of training. Lines are means over trials, bands from the least to the largest."
    return banded(rows, name, title, caption, in_words(x), in_words(line), log_x=log_x)
