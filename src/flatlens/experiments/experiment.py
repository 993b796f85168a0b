"""An experiment: studies at three scales, what a paper claims of them, and what its figures show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pandas as pd

from flatlens.experiments.predictions import Prediction, Results
from flatlens.experiments.settings import Study

Scale: TypeAlias = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")
Kind: TypeAlias = Literal["matrix", "curves", "scatter", "bars", "table"]


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Plot:
    """The data of a figure, tidy, and what kind of picture it makes; how it looks is the report's.

    Kinds, and the columns of their data:

        matrix    one column a quantity: each against each, with Pearson's r
        curves    panel, x, line, y, low, high: a line a setting, a band round it
        scatter   panel, x, y, group, key: a mark a network, whose folder the key names
        bars      panel, x, group, y, low, high
        table     panel, row, column, text: what stands in each cell
    """

    name: str  #: the stem of its files
    title: str
    caption: str
    kind: Kind
    data: pd.DataFrame
    x: str = ""  #: the axes' titles
    y: str = ""
    group: str = ""  #: what the marks of a scatter differ in
    log_y: bool = False  #: panels of positive values over more than a decade have a logarithmic axis
    log_x: bool = False
    dashed: tuple[str, ...] = ()  #: those lines of curves that the others are held against
    study: str = ""  #: whose quantities a matrix shows


@dataclass(frozen=True)
class Experiment:
    """One row of the catalogue, as a recipe."""

    id: str  #: "X4"
    title: str
    reproduces: str  #: "compression Fig. G.5, G.6, G.7"
    studies: Callable[[Scale], Mapping[str, Study]]
    claims: tuple[Prediction, ...]
    plots: Callable[[Results], list[Plot]]
    differs: Mapping[Scale, tuple[str, ...]]  #: from the paper, a sentence each

    @property
    def paper(self) -> str:
        """The paper's key in the list of sources."""
        return self.reproduces.partition(" ")[0]
