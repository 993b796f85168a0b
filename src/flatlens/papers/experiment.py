"""Experiments: studies at four scales, predictions about them from a paper, and the data of its figures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pandas as pd

from flatlens.experiments.settings import Study
from flatlens.papers.predictions import Prediction, Results

Scale: TypeAlias = Literal["smoke", "laptop", "desk", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "desk", "paper")
ON_PAPERS_DATA: tuple[Scale, ...] = ("desk", "paper")
"""Scales on the papers' own data, which have to be fetched."""
FigureKind: TypeAlias = Literal["matrix", "curves", "scatter", "bars", "table"]


def tested(scale: Scale) -> int | None:
    """Return the number of test images of the papers' data: all (None) at paper scale, 2000 at desk scale."""
    return None if scale == "paper" else 2000


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Plot:
    """The tidy data of a figure, and the kind of figure; the report decides its looks.

    Kinds, and the columns of their data:

        matrix    one column per quantity: each against each, with Pearson's r
        curves    panel, x, line, y, low, high: one line per setting, with a band around it
        scatter   panel, x, y, group, key: one mark per network; the key is the name of its folder
        bars      panel, x, group, y, low, high
        table     panel, row, column, text: the content of each cell
    """

    name: str  #: the stem of its files
    title: str
    caption: str
    kind: FigureKind
    data: pd.DataFrame
    x: str = ""  #: titles of the axes
    y: str = ""
    group: str = ""  #: the setting that distinguishes the marks of a scatter plot
    log_y: bool | tuple[str, ...] = False
    """The panels with a logarithmic axis, where the paper names them; True: those of positive values over more than a
    decade."""
    log_x: bool = False
    dashed: tuple[str, ...] = ()  #: lines to compare the others with
    study: str = ""  #: the study whose quantities a matrix shows


@dataclass(frozen=True)
class Experiment:
    """The recipe of one row of the catalogue."""

    id: str  #: "X4"
    title: str
    reproduces: str  #: "compression Fig. G.5, G.6, G.7"
    studies: Callable[[Scale], Mapping[str, Study]]
    predictions: tuple[Prediction, ...]
    plots: Callable[[Results], list[Plot]]
    differs: Mapping[Scale, tuple[str, ...]]  #: differences from the paper, one sentence each

    @property
    def claims(self) -> tuple[Prediction, ...]:
        """Deprecated name of `predictions`."""
        warnings.warn("Experiment.claims is now called predictions", DeprecationWarning, stacklevel=2)
        return self.predictions

    @property
    def paper(self) -> str:
        """The paper's key in the list of sources."""
        return self.reproduces.partition(" ")[0]
