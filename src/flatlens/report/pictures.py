"""Pictures from Python: charts of reports, comparisons, trackers, studies and of the correlations of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatlens.comparing import Comparison
from flatlens.errors import BadInput
from flatlens.estimate import Report
from flatlens.experiments import StudyResult
from flatlens.report.figures import tracked_figure
from flatlens.report.figures.measured import deep_measures, depth_figure, ranks_figure
from flatlens.report.figures.study import gap_panels, relations_figure
from flatlens.statistics import Relations
from flatlens.tracking import Tracker

if TYPE_CHECKING:
    from flatlens.report.figures.figure import Drawing


def picture(of: Report | Comparison | Tracker | StudyResult | Relations, target: str | None = None) -> Drawing:
    """Return an Altair chart.

    It shows measures over the depth, ranks of networks, measures through training, each measure against the gap, or
    the correlations of all columns of a table with one of them, the `target`.

    Raises:
        BadInput: a report has no measure with values at two depths.
        UnknownName: the table has no such column.
    """
    if isinstance(of, StudyResult):
        return gap_panels(of).whole
    if isinstance(of, Relations):
        return relations_figure(of, target).whole
    if isinstance(of, Comparison):
        return ranks_figure(of).whole
    if isinstance(of, Tracker):
        return tracked_figure({"run": of.history}).whole
    figure = depth_figure(of)
    if not deep_measures(figure.data):
        raise BadInput("Report.plot(): no measure has values at two layers or more; report.frame() has the numbers")
    return figure.whole
