"""What a paper claims, as a statistic that can be computed, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from flatlens.experiments.result import StudyResult
from flatlens.statistics import Statistic

Results: TypeAlias = Mapping[str, StudyResult]
"""An experiment's studies by name."""

Side: TypeAlias = Literal["above", "below"]
Conclusion: TypeAlias = Literal["reproduced", "not reproduced", "inconclusive"]
MARKS: Mapping[Conclusion, str] = {"reproduced": "✓", "not reproduced": "✗", "inconclusive": "?"}


@dataclass(frozen=True)
class Prediction:
    """A sentence of a paper, and the statistic that is above or below a number if it is true."""

    name: str  #: within its experiment
    says: str  #: in our words
    source: str  #: where the paper says it
    statistic: Callable[[Results], Statistic]
    side: Side = "above"
    than: float = 0.0

    def weigh(self, results: Results) -> Outcome:
        """Reproduced where the whole 95% interval is on the claimed side, not reproduced where it is on the other."""
        found = self.statistic(results)
        return Outcome(self, found, conclusion_of(found, self.side, self.than))


@dataclass(frozen=True)
class Outcome:
    """What came of a claim."""

    claim: Prediction
    statistic: Statistic
    outcome: Conclusion

    @property
    def marked(self) -> str:
        """The outcome behind its mark."""
        return f"{MARKS[self.outcome]} {self.outcome}"

    def as_json(self) -> dict[str, Any]:
        """Plain: the claim, the statistic with its interval, n and who was left out, the outcome; None for NaN."""
        s = self.statistic
        value, low, high = (None if number != number else number for number in (s.value, s.low, s.high))
        return {
            "claim": self.claim.name, "says": self.claim.says, "source": self.claim.source, "outcome": self.outcome,
            "statistic": s.name, "value": value, "low": low, "high": high, "n": s.n,
            "predicted": f"{self.claim.side} {self.claim.than:g}", "why": s.why, "method": s.method, "note": s.note,
        }  # fmt: skip


def conclusion_of(found: Statistic, side: Side, than: float) -> Conclusion:
    """Where the interval lies.

    >>> conclusion_of(Statistic("r", 0.5, 40, 0.2, 0.7), "above", 0.0), conclusion_of(Statistic("r", 0.5, 9), "above", 0.0)
    ('reproduced', 'inconclusive')
    """
    above, below = found.low > than, found.high < than  # both False where there is no interval
    if above == below:
        return "inconclusive"
    return "reproduced" if above == (side == "above") else "not reproduced"


def counted(verdicts: Iterable[Outcome]) -> dict[Conclusion, int]:
    """How many there are of each outcome."""
    outcomes = [verdict.outcome for verdict in verdicts]
    return {outcome: outcomes.count(outcome) for outcome in MARKS}
