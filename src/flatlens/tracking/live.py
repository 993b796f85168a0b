"""The live line of a tracker on stderr."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass

from flatlens.column import Column
from flatlens.estimate import Estimate, Report
from flatlens.problem.ranks import in_first_process
from flatlens.tracking.stability import WITH_EDGE, Edge

_PAUSE = 15.0
"""Seconds between two lines if stderr is not a terminal (a log file); the 1st, 2nd, 4th, ... comes in any case."""


@dataclass(frozen=True, eq=False)
class Moment:
    """A measurement of a training run."""

    step: int
    report: Report
    edge: Edge


class Live:
    """The default `live`: on a terminal one line that is rewritten in place, elsewhere a new line now and then."""

    def __init__(self) -> None:
        self._spoke, self._moments = -float("inf"), 0

    def __call__(self, moment: Moment) -> None:
        """Show the moment; where processes train together, in the first one alone."""
        if not in_first_process():
            return
        line = as_line(moment)
        self._moments += 1
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            # the cursor returns to the line's start, so that other output overwrites it
            print(f"\x1b[2K{line[: width - 1]}\r", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._spoke >= _PAUSE or self._moments & (self._moments - 1) == 0:
            self._spoke = time.monotonic()
            print(f"flatlens: {line}", file=sys.stderr, flush=True)


def as_line(moment: Moment) -> str:
    """Return the step and each measure's value; beside a sharpness, its share of the edge.

    >>> report = Report({("sharpness", None): Estimate(38.1), ("loss", None): Estimate(0.25)}, {})
    >>> as_line(Moment(200, report, Edge(0.05, 40.0, "2/lr")))
    'step 200: sharpness 38.1, 2/lr = 40 (95%); loss 0.25'
    """
    said = [
        f"{name} {_value(estimate)}{_beside(name, estimate, moment.edge)}"
        for (name, layer), estimate in moment.report.items()
        if layer is None and not Column.parse(name).part
    ]
    return f"step {moment.step}: {'; '.join(said)}"


def _value(estimate: Estimate) -> str:
    if estimate.kind == "undefined":
        return "undefined"
    return f"{estimate.value:.3g}" + (f" +- {1.96 * estimate.stderr:.1g}" if estimate.stderr else "")


def _beside(name: str, estimate: Estimate, edge: Edge) -> str:
    measure = Column.parse(name).name
    beside = edge.beside(measure)
    if measure not in WITH_EDGE or estimate.kind == "undefined" or not beside > 0:
        return ""
    formula = "2/lr" if measure == "critical_sharpness" else edge.formula
    label = formula if len(formula) <= len("2(1+momentum)/lr") else "edge"
    return f", {label} = {beside:.3g} ({estimate.value / beside:.0%})"
