"""Networks that do not fit the data equally well, and what held-out data says of those that do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import ttest_1samp

from flatlens.curvature.probes import student
from flatlens.estimate import Report
from flatlens.measures.answer import hardly_fits, has_random_weights

FIT_TIMES = 2.0  #: ratio of training losses beyond which the larger one is not as good a fit
FIT_POINTS = 0.02  #: difference of accuracies beyond which the smaller one is not as good a fit
_LEVEL = 0.05


@dataclass(frozen=True)
class NotRanked:
    """A network that does not fit the data as the others do."""

    network: str
    reason: str
    loss: float
    accuracy: float  #: NaN where the targets are not class labels


def not_ranked(reports: Mapping[str, Report]) -> dict[str, NotRanked]:
    """Networks that do not fit the data equally well, with the reason.

    - The training loss is not finite, or hardly better than chance while that of another network is.
    - Overfitted: the training loss is lower than that of the network with the lowest held-out loss, by the rule below,
      and the held-out loss is significantly higher (5%, corrected for the number of networks).
    - A worse fit than the best one of the others: the 95% interval of the paired difference of the training losses
      excludes 0, and the loss is over twice the smallest one or the accuracy over 2 points lower.
    """
    reports = {name: report for name, report in reports.items() if ("loss", None) in report}
    reasons = no_fit(reports)
    # Overfitted: against the best on held-out data
    left = {name: report for name, report in reports.items() if name not in reasons}
    if held := held_out(left):
        best = left[held.best]
        for name, report in left.items():
            if name != held.best and held.p[name] * len(held.p) < _LEVEL and worse_fit(best, report, name):
                train, test = (f"{report[of].value:.3g} against {best[of].value:.3g}" for of in ("loss", "test_loss"))
                reasons[name] = f"overfitted: training loss {train} of {held.best}, held-out loss {test}"
    # A worse fit than the best of the others
    left = {name: report for name, report in reports.items() if name not in reasons}
    if left:
        fittest = min(left, key=lambda name: left[name]["loss"].value)
        reasons |= {name: worse_fit(report, left[fittest], fittest) for name, report in left.items()}
    return {name: as_row(name, reports[name], reasons[name]) for name in reports if reasons.get(name)}


def as_row(name: str, report: Report, reason: str) -> NotRanked:
    """A network with the reason, its training loss and its accuracy."""
    return NotRanked(name, reason, report["loss"].value, accuracy_of(report))


def no_fit(reports: Mapping[str, Report]) -> dict[str, str]:
    """Networks whose training loss is not finite, or hardly better than chance while that of another network is."""
    losses = {name: report["loss"].value for name, report in reports.items()}
    reasons = {name: f"training loss {loss:g}" for name, loss in losses.items() if not math.isfinite(loss)}
    chance = {name: at_chance(report) for name, report in reports.items() if name not in reasons}
    return reasons if all(chance.values()) else reasons | {name: why for name, why in chance.items() if why}


def at_chance(report: Report) -> str:
    """Return the reason why a network counts as untrained; empty if it does not.

    >>> from flatlens.estimate import Estimate
    >>> about = {"n": 100, "constant": {"loss": 2.3, "share": 0.1}}
    >>> at_chance(Report({("loss", None): Estimate(2.31)}, about))
    'untrained or failed: training loss 2.31, 2.3 for the best constant prediction'
    """
    loss, constant = report["loss"].value, report.about.get("constant")
    if has_random_weights(report.about):
        return f"untrained: random weights, training loss {loss:.3g}"
    if constant and hardly_fits(loss, accuracy_of(report), report.about):
        return f"untrained or failed: training loss {loss:.3g}, {constant['loss']:.3g} for the best constant prediction"
    return ""


def worse_fit(report: Report, best: Report, name: str) -> str:
    """Return the reason why a network fits the training data worse than the named one; empty if it does not."""
    mine, its = report["loss"], best["loss"]
    if mine.samples is None or its.samples is None or min(len(mine.samples), len(its.samples)) < 2:
        return ""
    difference, stderr = student(mine.samples - its.samples)
    larger = mine.value > its.value + (FIT_TIMES - 1) * abs(its.value)
    accuracies = accuracy_of(report), accuracy_of(best)
    worse = accuracies[0] < accuracies[1] - FIT_POINTS  # False where there is none
    if not (difference > 1.96 * stderr and (larger or worse)):
        return ""
    words = f"training loss {mine.value:.3g} against {its.value:.3g} of {name}"
    return f"{words}, accuracy {accuracies[0]:.0%} against {accuracies[1]:.0%}" if worse else words


def accuracy_of(report: Report) -> float:
    """Accuracy on the training data; NaN where the targets are not class labels."""
    return report["accuracy"].value if ("accuracy", None) in report else math.nan


@dataclass(frozen=True)
class HeldOut:
    """The network with the lowest held-out loss, and the paired differences of the others to it."""

    best: str
    others: tuple[str, ...]  #: from the next best one
    difference: dict[str, float]  #: mean difference of the losses of single samples, by network
    interval: dict[str, tuple[float, float]]  #: 95%, Student's
    p: dict[str, float]

    @property
    def undecided(self) -> list[str]:
        """Networks whose interval includes 0, from the next best one."""
        return [name for name in self.others if not self.p[name] < _LEVEL]


def held_out(reports: Mapping[str, Report]) -> HeldOut | None:
    """Compare held-out losses, sample by sample; None where fewer than two networks have finite ones."""
    losses = {name: report["test_loss"] for name, report in reports.items() if ("test_loss", None) in report}
    known = [name for name, one in losses.items() if math.isfinite(one.value) and one.samples is not None]
    if len(known) < 2:
        return None
    best, *others = sorted(known, key=lambda name: losses[name].value)
    samples = {name: np.asarray(losses[name].samples, dtype=np.float64) for name in known}
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # losses that are all equal
        tests = {name: ttest_1samp(samples[name] - samples[best], 0.0) for name in others}
    intervals = {name: test.confidence_interval(0.95) for name, test in tests.items()}
    return HeldOut(
        best,
        tuple(others),
        {name: losses[name].value - losses[best].value for name in others},
        {name: (_known(float(of.low), 0.0), _known(float(of.high), 0.0)) for name, of in intervals.items()},
        {name: _known(float(test.pvalue), 1.0) for name, test in tests.items()},
    )


def _known(number: float, instead: float) -> float:
    # Samples that are all equal have no test: the difference is 0
    return number if number == number else instead
