"""Predictions: what a paper claims, as a statistic that can be computed, and the outcome of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from flatlens.experiments.result import StudyResult
from flatlens.statistics import Statistic

Results: TypeAlias = Mapping[str, StudyResult]
"""An experiment's studies by name."""

Side: TypeAlias = Literal["above", "below"]
Conclusion: TypeAlias = Literal["reproduced", "not reproduced", "inconclusive", "not tested"]
Kind: TypeAlias = Literal["theorem", "claim", "reading", "number"]
"""What a prediction is: proved, and so a check of the code; a sentence of the paper; our reading; a printed number."""

MARKS: Mapping[Conclusion, str] = {"reproduced": "✓", "not reproduced": "✗", "inconclusive": "?", "not tested": "–"}


@dataclass(frozen=True)
class Prediction:
    """A claim of a paper as a statistic, which is above or below a number if the claim is true.

    A theorem cannot fail: its value alone decides, as it is no estimate of anything beyond these networks.
    """

    name: str  #: unique within its experiment
    says: str  #: the claim, in our words
    source: str  #: place in the paper, of the quote
    statistic: Callable[[Results], Statistic]
    side: Side = "above"
    than: float = 0.0
    kind: Kind = "reading"
    quote: str = ""  #: the paper's own words; of a reading: the sentence that it reads, if there is one
    reason: str = ""  #: of a reading: why we read it so
    headline: bool = False  #: one of the paper's main claims, one to four a paper

    def weigh(self, results: Results) -> Outcome:
        """Compute the statistic from the studies, and return the outcome."""
        found = self.statistic(results)
        weighed = replace(found, low=found.value, high=found.value) if self.kind == "theorem" else found
        return Outcome(self, found, conclusion_of(weighed, self.side, self.than))


@dataclass(frozen=True)
class Outcome:
    """The result of a prediction."""

    prediction: Prediction
    statistic: Statistic
    conclusion: Conclusion

    @property
    def marked(self) -> str:
        """The conclusion behind its mark: "✓ reproduced"."""
        return f"{MARKS[self.conclusion]} {self.conclusion}"

    def as_json(self) -> dict[str, Any]:
        """Return claim, statistic, interval, n, who was left out, and conclusion as plain values; None for NaN."""
        s, prediction = self.statistic, self.prediction
        value, low, high = (None if number != number else number for number in (s.value, s.low, s.high))
        return {
            "claim": prediction.name, "says": prediction.says, "kind": prediction.kind, "quote": prediction.quote,
            "reason": prediction.reason, "headline": prediction.headline, "source": prediction.source,
            "outcome": self.conclusion,
            "statistic": s.name, "value": value, "low": low, "high": high, "n": s.n,
            "units": s.units, "unit": s.unit,
            "predicted": f"{prediction.side} {prediction.than:g}", "why": s.why, "method": s.method, "note": s.note,
        }  # fmt: skip


def conclusion_of(found: Statistic, side: Side, than: float) -> Conclusion:
    """Return "reproduced" if the whole 95% interval is on the predicted side, "not reproduced" if on the other.

    Where no network has what the claim is about, it is "not tested".

    >>> conclusion_of(Statistic("r", 0.5, 40, 0.2, 0.7), "above", 0.0)
    'reproduced'
    >>> conclusion_of(Statistic("r", 0.5, 9), "above", 0.0)  # without an interval
    'inconclusive'
    >>> conclusion_of(Statistic("r", float("nan"), 0), "above", 0.0)
    'not tested'
    """
    if found.n == 0:
        return "not tested"
    above, below = found.low > than, found.high < than  # both False where there is no interval
    if above == below:
        return "inconclusive"
    return "reproduced" if above == (side == "above") else "not reproduced"


def counted(outcomes: Iterable[Outcome]) -> dict[Conclusion, int]:
    """Return the number of outcomes with each conclusion."""
    conclusions = [outcome.conclusion for outcome in outcomes]
    return {conclusion: conclusions.count(conclusion) for conclusion in MARKS}
