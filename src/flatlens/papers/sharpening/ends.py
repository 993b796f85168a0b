"""The measures of X7 and X8 at the end of training, and their figures."""

from __future__ import annotations

import pandas as pd

from flatlens.experiments.quantities import in_words
from flatlens.papers.experiment import Plot
from flatlens.papers.plots import BANDS, banded
from flatlens.papers.sharpening.networks import ABSOLUTE_GAP, BATCH_SHARPNESS, JACOBIAN

END_MEASURES = (BATCH_SHARPNESS.column, JACOBIAN.column, "loss", "accuracy", "test_accuracy", ABSOLUTE_GAP.column)
_PANELS = {
    "Jacobian norm": JACOBIAN.column,
    "sharpness": BATCH_SHARPNESS.column,
    "|test loss - training loss|": ABSOLUTE_GAP.column,
}
"""The panels of Fig. 2 to 4 and 12 to 19."""
NO_DECAY = "Sharpness leaves weight decay out of the loss."


def ends(
    networks: pd.DataFrame,
    name: str,
    x: str,
    line: str,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool | tuple[str, ...] = True,
) -> Plot:
    """Return curves over the setting `x`: one line per value of the setting `line`."""
    networks = networks.rename(columns={x: "x", line: "line"})
    rows = pd.concat([networks.assign(panel=panel, y=networks[column]) for panel, column in _PANELS.items()])
    caption = f"At the end of training. {BANDS}."
    return banded(rows, name, title, caption, in_words(x), in_words(line), log_x=log_x, log_y=log_y)
