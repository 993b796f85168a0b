"""Summary of many predictions: both runs, outcomes decided by chance, and which stay significant after a correction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

import numpy as np
from scipy.optimize import bisect

from flatlens.papers.experiment import (
    DECISIONS,
    LEVEL,
    MARKS,
    NO_OUTCOMES,
    WEAK,
    Conclusion,
    Outcome,
    PredictionKind,
    conclusion_of,
    replicated,
    with_mark,
)
from flatlens.papers.reproduction import Reproduction
from flatlens.statistics import benjamini_hochberg
from flatlens.statistics.statistic import NAN

DISCOVERY = 0.05
"""Largest expected share of wrong outcomes among the significant ones."""
FARTHEST = 1000
"""With more times the units, how many is not said: the value lies at the predicted number, but for chance."""
SIGNIFICANT = "*"
"""Mark of an outcome that is significant after the correction."""

_WORST: tuple[Conclusion, ...] = (
    "not reproduced", "at most weak", "depends on the reading", "open", "reproduced", "not tested",
)  # fmt: skip
"""Conclusions, the worst for a sentence first."""
_SIDES: set[Conclusion] = {"reproduced", "not reproduced"}

Counts: TypeAlias = Mapping[PredictionKind, Mapping[Conclusion, int]]


@dataclass(frozen=True)
class Row:
    """A prediction with its outcome, and those of its replication: a re-run, or both halves of the units."""

    outcome: Outcome
    again: Outcome | None
    halves: tuple[Outcome, ...] = ()
    significant: bool = False  #: decided, and still so after Benjamini and Hochberg's correction over all rows

    @property
    def decided(self) -> Conclusion:
        """The conclusion, if the replication agrees, as in `replicated`."""
        return replicated(self.outcome, self.again, self.halves)

    @property
    def p(self) -> float:
        """The larger p of the two runs: that of an outcome which both of them reach."""
        return self.outcome.p if self.again is None else float(np.maximum(self.outcome.p, self.again.p))  # NaN stays

    @property
    def marked(self) -> str:
        """The conclusion behind its mark, why it is on no side, and whether it stays significant: "✓ reproduced *"."""
        return self._with_mark(self.open_because)

    @property
    def in_short(self) -> str:
        """The conclusion as in `marked`, without why it is on no side."""
        return self._with_mark("")

    def _with_mark(self, why: str) -> str:
        return with_mark(self.decided, why) + f" {SIGNIFICANT}" * self.significant

    @property
    def times(self) -> float:
        """Return how many times the units would decide an open row if all values stay; NaN where that is not known.

        Values of ranks and of all cases stay, too. A re-run is not asked.
        """
        s, than = self.outcome.statistic, self.outcome.prediction.than
        grown = s.grown
        if self.again is not None or self.outcome.conclusion != "open" or grown is None:
            return NAN

        def open_still(times: float) -> bool:
            return conclusion_of(replace(s, tails=grown(times)), self.outcome.prediction.side, than) == "open"

        if open_still(FARTHEST):
            return np.inf
        return float(10 ** bisect(lambda power: open_still(10**power) - 0.5, 0.0, np.log10(FARTHEST), xtol=1e-4))

    def would_decide(self, hours: float) -> str:
        """Return in words what would decide an open row, where the present units took `hours`; empty if not known."""
        if self.decided in ("open", "not tested") and self.outcome.prediction.decided_by:
            return self.outcome.prediction.decided_by
        if self.times != self.times:
            return ""
        if self.times > FARTHEST:
            return f"{FARTHEST} times the units would not decide it if all values stay"
        took = f", {_short(self.times * hours)} h on two cores" if hours else ""
        return f"some {_short(self.times)} times the units would decide it if all values stay{took}"

    @property
    def open_because(self) -> str:
        """Why the decided outcome is on no side, or that its replication differs; empty where it is on one."""
        first = self.outcome.conclusion
        if self.decided != "open":
            return self.outcome.open_because
        if self.again is not None and self.again.conclusion != first:
            return "the runs differ"
        if self.halves and first != "open":
            return "the halves differ"
        return self.outcome.open_because


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{number:,.0f}"


def rows_of(found: Sequence[Reproduction]) -> list[list[Row]]:
    """Return the rows of each experiment; p-values are corrected over all of them (Benjamini and Hochberg 1995)."""
    rows = []
    for one in found:
        count = len(one.outcomes)
        runs = zip(one.outcomes, one.again or [None] * count, one.halves or [()] * count, strict=True)
        rows.append([Row(*each) for each in runs])
    rates = iter(benjamini_hochberg(np.array([row.p for each in rows for row in each])))
    return [
        [replace(row, significant=bool(next(rates) <= DISCOVERY and row.decided in DECISIONS)) for row in each]
        for each in rows
    ]


def of_papers(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose outcome is one of the paper's sentences (all but `NO_OUTCOMES`)."""
    return [row for row in rows if row.outcome.prediction.kind not in NO_OUTCOMES]


def _sentences(rows: Iterable[Row]) -> Mapping[tuple[PredictionKind, str], set[Conclusion]]:
    """Return the decided conclusions of the rows of each of the papers' sentences, by kind and quote."""
    found: dict[tuple[PredictionKind, str], set[Conclusion]] = {}
    for row in of_papers(rows):
        prediction = row.outcome.prediction
        found.setdefault((prediction.kind, prediction.quote or prediction.says), set()).add(row.decided)
    return found


def _of_rows(decided: set[Conclusion]) -> Conclusion:
    return "depends on the reading" if decided >= _SIDES else min(decided, key=_WORST.index)


def counted_by_kind(rows: Iterable[Row]) -> Counts:
    """Return the number of the papers' sentences with each decided conclusion, by kind; kinds without one are left out.

    Rows with one quote are one sentence. It depends on the reading, or on the networks, if it is reproduced by a row
    and not by another; else it has the conclusion of the row that is worst for it. Rows that are no outcomes of the
    papers are left out.
    """
    counts = Counter((kind, _of_rows(decided)) for (kind, _), decided in _sentences(rows).items())
    kinds: tuple[PredictionKind, ...] = get_args(PredictionKind)
    return {
        kind: {conclusion: counts[kind, conclusion] for conclusion in MARKS}
        for kind in kinds
        if any(of == kind for of, _ in counts)
    }


def by_chance(rows: Sequence[Row]) -> str:
    """Return in words how many rows chance would decide if nothing had an effect, and how many stand."""
    tested = [row for row in rows if row.outcome.p == row.outcome.p]
    if not tested:
        return "No row has a p-value: too few units."
    one = 2 * LEVEL * len(tested)
    both = sum(2 * LEVEL ** (1 if row.again is None else 2) for row in tested)
    significant = sum(row.significant for row in rows)
    weak = sum(row.decided == "at most weak" for row in tested)
    decided = sum(row.decided in DECISIONS for row in tested) - weak
    return (
        f"{len(tested)} rows have a p-value. Without any effect, chance would decide at most {one:.1f} of them in one "
        f"run, and {both:.1f} together with a replication (a split half is hardly a replication). {decided} are "
        f"decided, and their replication agrees. {weak} more are at most weak: a true correlation of {WEAK:g}, which "
        f"their p is against, is called so by chance in at most {LEVEL:.1%} of cases. {significant} of all these are "
        f"significant after Benjamini and Hochberg's correction at {DISCOVERY:.0%} over all rows, and are marked "
        f"{SIGNIFICANT}."
    )
