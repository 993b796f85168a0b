"""The figures: those of a study, in the order of the page, measures through training, and charts for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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


_FIGURES: Mapping[type, Callable[[Any], Figure]] = {
    StudyResult: gap_panels,
    GroupComparison: groups_figure,
    Comparison: values_figure,
    LossPath: path_figure,
    Tracker: lambda of: tracked_figure({"run": of.history}),
    Report: layers_figure,
}


def picture(of: object, target: str | None = None) -> Drawing:
    """Return an Altair chart, which needs no network to be shown or saved; `target` is a column of relations."""
    if isinstance(of, LossPlane):
        return offline(one_below_other([slices_figure(of), plane_figure(of)]))
    if isinstance(of, Relations):
        return offline(relations_figure(of, target).whole)
    figure = next(draw for kind, draw in _FIGURES.items() if isinstance(of, kind))(of)
    if isinstance(of, Report) and figure.data["row"].nunique() < 2:
        raise BadInput("Report.plot(): no measure has values at two layers or more; report.frame() has the numbers")
    return offline(figure.whole)
