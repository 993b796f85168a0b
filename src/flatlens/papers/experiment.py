"""Experiments: studies at four scales, predictions about them from a paper, and the data of its figures.

A prediction is a claim of a paper as a statistic that can be computed; its outcome follows from the interval.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import pandas as pd

from flatlens.experiments.result import StudyResult
from flatlens.experiments.settings import Axis, Study
from flatlens.statistics import Statistic
from flatlens.statistics.inference import two_sided
from flatlens.statistics.statistic import NAN

SHARED_WORDS = {
    "SMOKE_ONLY": "Far too short and small to show the effects: it only tests that the experiment runs.",
    "FEW_SEEDS": (
        "Five seeds are five independent units, and fewer than six give no interval and no verdict: of claims about "
        "these networks only the values are shown."
    ),
    "ONE_DRAW": (
        "All networks have the same images: intervals are of starts and orders of batches, not of the draw of images."
    ),
    "JPEG": (
        "The images of CIFAR-10 went through JPEG at quality 75. Its effect is not measurable here: that needs colour "
        "images of raw quality, and scikit-learn's two photographs are JPEGs, too. `flatlens data fetch` loads the "
        "original images."
    ),
    "COEFFICIENT": "The paper does not say which correlation it gives: Pearson's here.",
}
"""Differences from the paper that experiments of several papers share."""

SUMMED_GAP = "generalisation_gap(convention='summed_x5')"
"""The gap as both papers of Petzka et al. compute it."""
MOVED = "layerwise"
"""The reparametrisation after which their networks are measured again."""
MOVED_NEURONS = "neuronwise"
"""The second one: single neurons."""
LEAST_CHANGE = 1e-6
"""Largest |log(after / before)| of a number that does not change but for rounding."""
LEAST_CHANGE_SEARCHED = 1e-3
"""The same of an eigenvalue, which is found to a residual of a thousandth."""
WEAK = 0.3
"""Largest |r| that counts as "weak" or "does not correlate": below it, less than a tenth of the variance is shared."""
STEADY = math.log(0.9)
"""A quantity that falls by less than a tenth (in the logarithm) over the later half counts as no longer decreasing."""
STRONG = 0.7
"""Smallest r that counts as "strongly", as in App. C of reparam2019."""


def seed_axis(count: int) -> Axis:
    """Return the axis of `count` seeds; one seed sets the sample, the network and the order of its batches."""
    return Axis("data.seed+model.seed+training.seed", tuple((seed, seed, seed) for seed in range(count)))


def own_seeds(name: str, values: Sequence[tuple[Any, ...]], count: int) -> Axis:
    """Return the axis of `count` networks of each setting, every network with a seed of its own.

    So no two networks share initial weights or the order of batches.

    >>> own_seeds("batch_size+lr", [(4, 0.1), (8, 0.2)], 2).values
    ((4, 0.1, 0), (4, 0.1, 1), (8, 0.2, 2), (8, 0.2, 3))
    """
    each = ((*value, number * count + seed) for number, value in enumerate(values) for seed in range(count))
    return Axis(f"{name}+seed", tuple(each))


Results: TypeAlias = Mapping[str, StudyResult]
"""An experiment's studies by name."""
_First = TypeVar("_First")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def deferred(function: Callable[Concatenate[_First, _P], _R]) -> Callable[_P, Callable[[_First], _R]]:
    """Return the function without its first argument, which is given later: f(b)(a) is function(a, b)."""

    @wraps(function)
    def given(*args: _P.args, **kwargs: _P.kwargs) -> Callable[[_First], _R]:
        return lambda first: function(first, *args, **kwargs)

    return given


class NotRun(Exception):
    """A study that a prediction reads has not been run: its protocol is declared, its networks are not trained."""


class _Ran(dict[str, StudyResult]):
    """Studies by name, and which of them were read."""

    def __init__(self, results: Results) -> None:
        super().__init__(results)
        self.read: set[str] = set()

    def __getitem__(self, study: str) -> StudyResult:
        if study not in self:
            raise NotRun(f"the study {study!r} has not been run")
        self.read.add(study)
        return super().__getitem__(study)


Side: TypeAlias = Literal["above", "below"]
Conclusion: TypeAlias = Literal[
    "reproduced", "not reproduced", "at most weak", "depends on the reading", "open", "not tested"
]
PredictionKind: TypeAlias = Literal["theorem", "claim", "reading", "number", "variation"]
"""Kind of a prediction: proved, and so a check of the code; a sentence of the paper; our reading; a printed number; the
sentence about networks of a protocol that neither the text nor the authors' code has."""
NO_OUTCOMES: tuple[PredictionKind, ...] = ("theorem", "variation")
"""Kinds that say nothing of the paper's sentence: a theorem checks the code."""

LEVEL = 0.025
"""Share of wrong outcomes on each side that is accepted."""
DECISIONS: tuple[Conclusion, ...] = ("reproduced", "not reproduced", "at most weak", "depends on the reading")
MARKS: Mapping[Conclusion, str] = {
    "reproduced": "✓",
    "not reproduced": "✗",
    "at most weak": "≈",
    "depends on the reading": "±",
    "open": "?",
    "not tested": "–",
}


@dataclass(frozen=True)
class Prediction:
    """A claim of a paper as a statistic, which is above or below a number if the claim is true.

    A theorem cannot fail: its value alone decides, as it is not an estimate of anything beyond these networks.
    """

    name: str  #: unique within its experiment
    says: str  #: the claim, in our words
    source: str  #: place in the paper, of the quote
    statistic: Callable[[Results], Statistic]
    side: Side = "above"
    than: float = 0.0
    kind: PredictionKind = "reading"
    quote: str = ""  #: the paper's own words; of a reading: the sentence that it reads, if there is one
    reason: str = ""  #: the reason why we read it so; for readings only
    decided_by: str = ""  #: what would decide it, and how many hours it takes, where that is known
    not_run: str = ""  #: readings and protocols of its sentence that are not run, with their hours
    headline: bool = False  #: one of the paper's main claims, one to five a paper
    value_is: str = ""  #: what the value is, where the statistic's name says it too shortly for a page
    accepted: str = ""  #: of a main claim: whether its authors would accept this test of it, in a few words
    objections: str = ""  #: of a main claim: what its authors could object, and what other rows say to it

    def weigh(self, results: Results) -> Outcome:
        """Compute the statistic from the studies, and return the outcome: open where one of them has not been run."""
        ran = _Ran(results)
        try:
            found = self.statistic(ran)
        except NotRun as lacking:
            return Outcome(self, Statistic("not run", NAN, 0, note=str(lacking)), "open")
        weighed = replace(found, low=found.value, high=found.value, tails=None) if self.kind == "theorem" else found
        return Outcome(self, found, conclusion_of(weighed, self.side, self.than), frozenset(ran.read))


@dataclass(frozen=True)
class Outcome:
    """The result of a prediction."""

    prediction: Prediction
    statistic: Statistic
    conclusion: Conclusion
    studies: frozenset[str] = frozenset()  #: names of the studies that the statistic reads

    @property
    def p(self) -> float:
        """The two-sided p of the statistic against the prediction's number; NaN for a theorem, or without interval.

        Of a correlation that is at most weak it is the larger one of both against 0.3 and -0.3.
        """
        tails = self.statistic.tails
        if tails is None or self.prediction.kind == "theorem":
            return NAN
        if self.conclusion == "at most weak":
            return min(1.0, 2 * max(tails(WEAK)[1], tails(-WEAK)[0]))
        return two_sided(tails(self.prediction.than))

    @property
    def tested_as(self) -> str:
        """The statistic, and what is predicted of it: "Pearson r of mls and gap, above 0"."""
        return f"{self.statistic.name}, {self.prediction.side} {self.prediction.than:g}"

    @property
    def sided(self) -> Conclusion:
        """The conclusion that the value alone would give, without its interval; "open" for NaN."""
        value = self.statistic.value
        if value != value or value == self.prediction.than:
            return "open"
        above = value > self.prediction.than
        return "reproduced" if above == (self.prediction.side == "above") else "not reproduced"

    def agrees(self, half: Outcome) -> bool:
        """Return whether the value in half of the units is where this conclusion says; of each decided reading."""
        if self.statistic.readings:
            pairs = zip(*(map(one._of, one.statistic.parts.values()) for one in (self, half)), strict=True)
            return all(one.agrees(other) for one, other in pairs if one.conclusion != "open")
        return abs(half.statistic.value) < WEAK if self.conclusion == "at most weak" else half.sided == self.conclusion

    def _of(self, reading: Statistic) -> Outcome:
        return Outcome(self.prediction, reading, conclusion_of(reading, self.prediction.side, self.prediction.than))

    @property
    def open_because(self) -> str:
        """Why the outcome is on no side although the whole interval is; an empty string if neither is so.

        Of several cases of which one is at most weak, how many there are; of several readings, those that are open.
        """
        s, than = self.statistic, self.prediction.than
        if s.readings:
            undecided = [name for name, part in s.parts.items() if self._of(part).conclusion == "open"]
            return f"in {', '.join(undecided)}" if self.conclusion == "open" and undecided else ""
        if self.conclusion == "at most weak" and s.parts:
            return f"in one of {len(s.parts)} cases"
        if self.conclusion not in ("open", "at most weak") or not (s.low > than or s.high < than):
            return ""
        known = {part.value: part for part in s.parts.values() if part.value == part.value}
        shown = known.get(s.value, s)
        if shown.tails is not None and (not s.parts or min(shown.tails(than)) > LEVEL):
            return "ranks do not agree" if shown.of_ranks == shown.of_ranks else f"too few units differ from {than:g}"
        weakest = s.value == (min(known) if s.low > than else max(known))
        return "another case is open" if weakest else "not after Holm's correction"

    @property
    def marked(self) -> str:
        """The conclusion behind its mark, and why it is open if the interval does not say so: "✓ reproduced"."""
        return with_mark(self.conclusion, self.open_because)

    def as_json(self) -> dict[str, Any]:
        """Return claim, statistic, interval, n, who was left out, and conclusion as plain values; None for NaN."""
        s, prediction = self.statistic, self.prediction
        numbers = (s.value, s.low, s.high, self.p, s.of_ranks, *s.leave_one_out)
        value, low, high, p, ranks, least, most = (None if number != number else number for number in numbers)
        return {
            "claim": prediction.name, "says": prediction.says, "kind": prediction.kind, "quote": prediction.quote,
            "reason": prediction.reason, "headline": prediction.headline, "source": prediction.source,
            "outcome": self.conclusion,
            "statistic": s.name, "value": value, "low": low, "high": high, "p": p, "n": s.n,
            "units": s.units, "unit": s.unit,
            "p_against": WEAK if self.conclusion == "at most weak" else prediction.than,
            "predicted": f"{prediction.side} {prediction.than:g}", "of_ranks": ranks, "leave_one_out": [least, most],
            "why": s.why, "method": s.method, "note": s.note,
            "cases": {case: one.in_words for case, one in s.parts.items()},
        }  # fmt: skip


def with_mark(conclusion: Conclusion, why: str = "") -> str:
    """Return a conclusion behind its mark, and why: "✓ reproduced", "? open: ranks do not agree"."""
    return f"{MARKS[conclusion]} {conclusion}{f': {why}' if why else ''}"


def conclusion_of(found: Statistic, side: Side, than: float) -> Conclusion:
    """Return "reproduced" if the truth is on the predicted side at 2.5%, "not reproduced" if on the other.

    That is so where the whole 95% interval is on the side; beside a Pearson correlation ranks have to agree, and of
    several cases p is corrected for their number. Without an interval it is "open".

    A correlation (Pearson's or Spearman's) that is predicted to be above or below 0, and of which neither is found, is
    "at most weak" if it is believed, in the same way, to be below 0.3 and above -0.3; of "all" cases if one case is
    below 0.3 (after Holm's correction) and every case above -0.3.

    Where no network has what the claim is about, it is "not tested". Where the text can be read in several ways
    (`in_readings`), it is the conclusion that all of them have; "depends on the reading" if one is "reproduced" and
    another is not; else "open".

    >>> conclusion_of(Statistic("r", 0.5, 40, 0.2, 0.7), "above", 0.0)
    'reproduced'
    >>> conclusion_of(Statistic("r", 0.5, 9), "above", 0.0)  # without an interval
    'open'
    >>> conclusion_of(Statistic("r", float("nan"), 0), "above", 0.0)
    'not tested'
    """
    if found.n == 0:
        return "not tested"
    if found.readings:
        each = {conclusion_of(part, side, than) for part in found.parts.values()}
        if len(each) == 1:
            return each.pop()
        return "depends on the reading" if {"reproduced"} < each - {"open", "not tested"} else "open"
    if found.tails is None:
        above, below = found.low > than, found.high < than  # both False where there is no interval
    else:
        above, below = (p <= LEVEL for p in found.tails(than))
    if above == below:
        if found.tails is None or not found.correlation or than != 0:
            return "open"
        weak = found.tails(WEAK)[1] <= LEVEL and found.tails(-WEAK)[0] <= LEVEL
        return "at most weak" if weak else "open"
    return "reproduced" if above == (side == "above") else "not reproduced"


def replicated(found: Outcome, again: Outcome | None, halves: Iterable[Outcome] = ()) -> Conclusion:
    """Return the conclusion, if the replication agrees; else "open". A theorem needs none.

    The re-run has to come to the same conclusion. Each half of the units has to have its value on the side of the
    conclusion: it has too few units for one of its own.
    """
    pair = tuple(halves)
    if found.conclusion == "not tested" or (found.prediction.kind == "theorem" and again is None):
        return found.conclusion
    if pair:
        agree = all(found.agrees(half) for half in pair)
    else:
        agree = again is not None and again.conclusion == found.conclusion
    return found.conclusion if agree else "open"


def counted(conclusions: Iterable[Conclusion]) -> dict[Conclusion, int]:
    """Return the number of each conclusion."""
    every = list(conclusions)
    return {conclusion: every.count(conclusion) for conclusion in MARKS}


Scale: TypeAlias = Literal["smoke", "laptop", "desk", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "desk", "paper")
ON_PAPERS_DATA: tuple[Scale, ...] = ("desk", "paper")
"""Scales on the papers' own data, which have to be fetched."""


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
    kind: Literal["matrix", "curves", "scatter", "bars", "table"]
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
class Setting:
    """A setting of an experiment in three protocols: as the text prints it, as the authors code it, and ours."""

    what: str  #: the setting: "labels of CIFAR-10"
    printed: str  #: in the paper's text
    ours: str  #: here, at desk scale; of several studies, each
    coded: str = ""  #: in the authors' published code, where it has the experiment


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
    protocol: tuple[Setting, ...] = ()  #: every setting that differs between text, code and here
    code: str = ""  #: where the authors' code is, or that none is known

    @property
    def claims(self) -> tuple[Prediction, ...]:
        """Deprecated name of `predictions`."""
        warnings.warn("Experiment.claims is now called predictions", DeprecationWarning, stacklevel=2)
        return self.predictions

    @property
    def protocol_table(self) -> tuple[tuple[str, ...], ...]:
        """The heading and the rows of the table of settings; without "as coded" where no code has the experiment."""
        heading = Setting("setting", "as printed", "ours, at desk scale", "as coded")
        rows = [(row.what, row.printed, row.coded, row.ours) for row in (heading, *self.protocol)]
        coded = any(row.coded for row in self.protocol)
        return tuple(row if coded else (*row[:2], row[3]) for row in rows)

    @property
    def paper(self) -> str:
        """The paper's key in the list of sources."""
        return self.reproduces.partition(" ")[0]
