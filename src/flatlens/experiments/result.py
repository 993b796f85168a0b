"""The result of a study: the tables from which the page is made."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from flatlens.experiments.quantities import Quantity
from flatlens.progress import count_of
from flatlens.result import of_report


@dataclass(frozen=True, eq=False, repr=False)  # repr would show every table, eq would compare tables
class StudyResult:
    """A finished or unfinished study as tidy tables; every number can be computed again from the folders alone."""

    networks: pd.DataFrame
    """One row a network, sorted by lr, batch_size, seed: key, lr, batch_size, seed, outcome ("converged", "finished",
    "out of steps" or "diverged"), steps, then a column per network-level measure by its name in the report ("mls",
    "relative_flatness.sum") and one per layer ("relative_flatness[fc1]")."""
    layers: pd.DataFrame
    """Tidy: key, lr, batch_size, seed, measure, layer, position (execution order, from 0), value, kind."""
    curves: pd.DataFrame
    """Tidy: key, lr, batch_size, seed, step, loss, accuracy, test_loss."""
    histories: pd.DataFrame
    """Tidy, the measures followed in training: key, lr, batch_size, seed, step, rate (the learning rate of that step),
    edge (2 / rate), measure, layer, value, stderr, kind, products, note."""
    functions: pd.DataFrame
    """Tidy, of networks from R to R: key, lr, batch_size, seed, x, y, the outputs at the test inputs."""
    values: pd.DataFrame
    """One row a network in the order of `networks`: key, lr, batch_size, seed, included, then the studied quantities,
    transformed, one column each under the name shown. Rows that are not included stand outside every relation."""
    relations: pd.DataFrame
    """Every pair of quantities: x, y, n, units (independent ones: seeds, or networks), pearson, pearson_low,
    pearson_high, kendall, kendall_low, kendall_high."""
    within: pd.DataFrame
    """Each quantity against the gap inside groups of equal settings (means of the groups taken out): x, y, group
    ("lr", "lr, batch_size" or "seed"), groups, n, units, pearson, pearson_low, pearson_high."""
    gap_correlations: pd.DataFrame
    """Each measure with the gap, by every coefficient: kind, quantity, coefficient, value, low, high, p, n, units,
    given, why, note; `kind` is "" over all networks, else the kind of networks that it is over. Computed by the
    function of this name."""
    findings: list[str]
    """Sentences of the main results, with numbers and 95% intervals."""
    quantities: tuple[Quantity, ...]
    settings: dict[str, Any]
    """The study's settings, as in study.json, but without the folders of files."""
    versions: dict[str, str]
    """Versions that computed it: flatlens, torch, numpy, python, device, threads; several values joined by " | "."""
    excluded: list[tuple[str, str]]
    """(key, why) of the networks left out of `relations`, `within`, `gap_correlations` and the findings."""
    failed: list[tuple[str, str]]
    """(key, last line of the traceback) of the runs that ended in an error."""
    unfinished: int
    """Networks of the grid that have neither finished nor failed."""
    alone: list[tuple[str, int]] = field(default_factory=list)
    """(why, how many) of the networks that could not be trained in a stack with others."""
    varied: list[str] = field(default_factory=list)
    """The settings in which the networks differ: columns of `networks`."""
    answers: list[tuple[str, str]] = field(default_factory=list)
    """The study in three lines, each with its heading: what goes with the gap, how surely, what to beware of."""
    seconds: float = 0.0
    """Seconds of training and measuring, added up over the networks; 0 where they are not known."""

    def __repr__(self) -> str:
        """Return the study's name and the number of its networks, and of those that are missing in the relations."""
        counts = {"left out": len(self.excluded), "failed": len(self.failed), "unfinished": self.unfinished}
        told = [f"{number} {how}" for how, number in counts.items() if number]
        networks = count_of(len(self.networks), "network")
        return f"<StudyResult of {self.settings.get('name', 'a study')}: {', '.join([networks, *told])}>"

    def plot(self) -> Any:
        """Return an Altair chart of each measure against the gap; a notebook shows it by itself."""
        return of_report("pictures.picture")(self)

    @property
    def against(self) -> pd.DataFrame:
        """Deprecated name of `gap_correlations`."""
        warnings.warn("StudyResult.against is now called gap_correlations", DeprecationWarning, stacklevel=2)
        return self.gap_correlations
