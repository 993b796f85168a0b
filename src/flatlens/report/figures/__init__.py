"""The figures: those of a study, in the order of the page, measures through training, and charts for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from flatlens.comparing import Comparison, GroupComparison
from flatlens.errors import BadInput, needs
from flatlens.estimate import Report
from flatlens.experiments import StudyResult
from flatlens.landscape import LossPath, LossPlane
from flatlens.progress import Aside
from flatlens.statistics import Relations
from flatlens.tracking import Tracker

with needs("study", "a figure or a page"):
    from flatlens.report.figures.compared import groups_figure, values_figure
    from flatlens.report.figures.figure import Figure, Grid
    from flatlens.report.figures.landscape import one_below_other, path_figure, plane_figure, slices_figure
    from flatlens.report.figures.measured import layers_figure, tracked_figure, tracked_frame
    from flatlens.report.figures.offline import offline
    from flatlens.report.figures.study import (
        GAP_PANELS,
        gap_forest,
        gap_panels,
        layer_profiles,
        relations_figure,
        scatter_matrix,
        training_curves,
    )

if TYPE_CHECKING:
    from flatlens.report.figures.figure import Drawing

__all__ = [
    "GAP_PANELS",
    "Figure",
    "Grid",
    "gap_forest",
    "gap_panels",
    "layer_profiles",
    "scatter_matrix",
    "study_figures",
    "tracked_figure",
    "tracked_frame",
    "training_curves",
]


def study_figures(result: StudyResult) -> list[Figure]:
    """Return every figure of the page; each has its data, even if there is nothing to draw.

    One that cannot be drawn is a warning, and is left out.
    """
    trained = [] if "trained elsewhere" in set(result.networks["outcome"]) else [training_curves]
    figures: list[Figure] = []
    for draw in (gap_forest, gap_panels, scatter_matrix, layer_profiles, *trained):
        Aside(f"the picture {draw.__name__}", lambda: figures.append(draw(result)))()  # noqa: B023 (called at once)
    return figures


_Drawn: TypeAlias = Report | Comparison | GroupComparison | Tracker | StudyResult | Relations | LossPath | LossPlane


def picture(of: _Drawn, target: str | None = None) -> Drawing:
    """Return an Altair chart, which needs no network to be shown or saved.

    It shows a map of layers by measures, values of networks, measures through training, each measure against the gap,
    the correlations of all columns of a table with one of them, the `target`, or the loss along paths or on a plane.

    Raises:
        BadInput: a report has values at fewer than two layers.
        UnknownName: the table has no such column.
    """
    if isinstance(of, StudyResult):
        figure = gap_panels(of)
    elif isinstance(of, Relations):
        figure = relations_figure(of, target)
    elif isinstance(of, GroupComparison):
        figure = groups_figure(of)
    elif isinstance(of, Comparison):
        figure = values_figure(of)
    elif isinstance(of, LossPath):
        figure = path_figure(of)
    elif isinstance(of, LossPlane):
        return offline(one_below_other([slices_figure(of), plane_figure(of)]))
    elif isinstance(of, Tracker):
        figure = tracked_figure({"run": of.history})
    else:
        figure = layers_figure(of)
        if figure.data["row"].nunique() < 2:
            told = "no measure has values at two layers or more; report.frame() has the numbers"
            raise BadInput(f"Report.plot(): {told}")
    return offline(figure.whole)
