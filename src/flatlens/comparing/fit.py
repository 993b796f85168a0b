"""Which networks fit the data as well as the best one: flatness compares nothing but networks at equal loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flatlens.curvature.probes import student
from flatlens.estimate import Report

_TIMES = 2.0
"""Ratio of training losses beyond which the larger one is not as good a fit."""
_POINTS = 0.02
"""Difference of accuracies beyond which the smaller one is not as good a fit."""


@dataclass(frozen=True)
class NotRanked:
    """A network that does not fit the data as well as the best one."""

    network: str
    reason: str
    loss: float
    accuracy: float  #: NaN where the targets are not class labels


def not_ranked(reports: Mapping[str, Report]) -> dict[str, NotRanked]:
    """Return the networks that fit the data worse than the one of the smallest training loss.

    The 95% interval of the paired difference of the losses excludes 0, and the loss is over twice the smallest one or
    the accuracy over 2 points lower; or the loss is not finite.
    """
    reports = {name: report for name, report in reports.items() if ("loss", None) in report}
    losses = {name: report["loss"].value for name, report in reports.items()}
    known = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    if not known:
        return {}
    best = min(known, key=lambda name: known[name])
    found = {}
    for name, report in reports.items():
        reason = _reason(report, reports[best], best)
        if reason:
            found[name] = NotRanked(name, reason, losses[name], _accuracy(report))
    return found


def _reason(report: Report, best: Report, name: str) -> str:
    """Return why a network does not fit as well as the best one; "" if it does."""
    mine, its = report["loss"], best["loss"]
    if not math.isfinite(mine.value):
        return f"training loss {mine.value:g}"
    if mine.samples is None or its.samples is None or len(mine.samples) < 2:
        return ""
    difference, stderr = student(mine.samples - its.samples)
    larger = mine.value > its.value + (_TIMES - 1) * abs(its.value)
    accuracies = _accuracy(report), _accuracy(best)
    worse = accuracies[0] < accuracies[1] - _POINTS  # False where there is none
    if not (difference > 1.96 * stderr and (larger or worse)):
        return ""
    told = f"training loss {mine.value:.3g} against {its.value:.3g} of {name}"
    return f"{told}, accuracy {accuracies[0]:.0%} against {accuracies[1]:.0%}" if worse else told


def _accuracy(report: Report) -> float:
    return report["accuracy"].value if ("accuracy", None) in report else math.nan
