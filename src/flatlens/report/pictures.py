"""Pictures from Python: the chart of a report, of a comparison, or of a tracker's history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatlens.comparing import Comparison
from flatlens.errors import BadInput
from flatlens.estimate import Report
from flatlens.report.figures import tracked_figure
from flatlens.report.figures.depth import depth_figure
from flatlens.report.figures.ranks import ranks_figure
from flatlens.tracking import Tracker

if TYPE_CHECKING:
    from flatlens.report.figures.figure import Drawing


def picture(of: Report | Comparison | Tracker) -> Drawing:
    """Return an Altair chart: measures over the depth, ranks of networks, or measures through training.

    Raises:
        BadInput: a report has no measure with values at two depths.
    """
    if isinstance(of, Comparison):
        return ranks_figure(of).whole
    if isinstance(of, Tracker):
        return tracked_figure({"run": of.history}).whole
    figure = depth_figure(of)
    if not (figure.data.groupby("measure")["depth"].nunique() > 1).any():
        raise BadInput("Report.plot(): no measure has values at two layers or more; report.frame() has the numbers")
    return figure.whole
