"""The figures: those of a study, in the order of the page, and measures through training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatlens.errors import needs
from flatlens.progress import Aside

with needs("study", "a figure or a page"):
    from flatlens.report.figures.figure import Figure, Grid
    from flatlens.report.figures.measured import tracked_figure, tracked_frame
    from flatlens.report.figures.study import (
        GAP_PANELS,
        gap_forest,
        gap_panels,
        layer_profiles,
        scatter_matrix,
        training_curves,
    )

if TYPE_CHECKING:
    from flatlens.experiments import StudyResult

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
