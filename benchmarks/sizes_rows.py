"""The rows of `benchmarks.sizes`: every statistic, and the populations that it is simulated on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.populations import (
    EACH,
    LRS,
    Rng,
    all_but_one,
    alternating,
    both_skewed,
    figures,
    groups,
    holding,
    kinds,
    layers,
    lines,
    means,
    pairs_of_cases,
    parted,
    related,
    rivals,
    schemes,
    settings,
    shares,
    sharing,
    sharing_layers,
    skewed,
    taus,
    trajectories,
    two_lines,
    two_valued,
    unequal_kinds,
    uneven,
)
from flatlens.papers import contrasts, evidence
from flatlens.papers.evidence import CASE, UNIT
from flatlens.papers.reparam2019 import within
from flatlens.statistics import (
    Statistic,
    average,
    correlate,
    granulated_kendall,
    group_differences,
    in_cases,
    partial_correlation,
    resamples,
    share,
    with_interval,
)
from flatlens.statistics.correlations import COEFFICIENTS, CoefficientName
from flatlens.statistics.resampling import FEWEST_POINTS

UNITS = (6, 8, 10, 12, 20)
"""Numbers of independent units."""
MANY = (100, 400)
"""Those of X16; more than 200 are joined to 200 groups."""
DISCRETE = "discrete: few values are possible"
JOINT = "ranks have to agree, too"
CASES_DECIDE = "several cases decide, and the truth is at the edge in each"
ONE = "one case of several is at the edge: below, corrected for their number; ranks have to agree, too"
SPREAD = "two variances are compared, whose jackknife errors are too large where true spreads are near 0"
PAIRS = "few values are possible, and many pairs share a network"
CASES = "few cases give a wide interval, and ranks have to agree"
FOLDED = "sizes are compared, whose jackknife errors are too large where the true correlations are near 0"


@dataclass(frozen=True)
class Row:
    """A statistic and the populations it is simulated on."""

    statistic: str
    design: str
    table: Callable[[Rng, int, float], pd.DataFrame]  #: (random numbers, units, effect); effect 0 is the null
    weigh: Callable[[evidence.Table], evidence.Evidence]
    than: float = 0.0
    effect: float = 1.0  #: that of the alternative, at which the power is given
    conservative: str = ""  #: why wrong verdicts may be rarer than 1.5%
    units: tuple[int, ...] = UNITS


def share_of(table: evidence.Table) -> evidence.Evidence:
    return lambda results: share(table(results)["x"], table(results)[UNIT])


def _correlations() -> Iterator[Row]:
    designs: tuple[tuple[str, float, int, bool, str], ...] = (
        ("one network a seed", 1.0, 1, False, JOINT),
        ("3 learning rates, 30% of the variance between seeds", 0.3, LRS, False, JOINT),
        ("3 learning rates, 88% between seeds", 0.88, LRS, False, JOINT),
        ("the same, learning rates with effects", 0.88, LRS, True, JOINT),
    )
    for design, of_seed, each, of_lr, why in designs:
        draw = partial(related, of_seed, each, 0.0, of_lr=of_lr)
        yield Row("Pearson r, ranks agreeing", design, draw, lambda t: evidence.correlated(t, "a", "b"),
                  conservative=why)  # fmt: skip
    yield Row("Pearson r, ranks agreeing", "lognormal columns, 30% between seeds",
              partial(related, 0.3, LRS, 0.0, skewed=True), lambda t: evidence.correlated(t, "a", "b"),
              conservative="of skewed columns r above 0 is rare, and ranks have to agree")  # fmt: skip
    for design, of_seed, each, _, _ in designs[:3]:
        for said, than in ((".3", 0.3), (".5", 0.5)):
            yield Row(f"Pearson r against {said}", design, partial(related, of_seed, each, than),
                      lambda t: evidence.correlated(t, "a", "b"), than, conservative=JOINT)  # fmt: skip
        for name, title in (("spearman", "Spearman rho"), ("kendall", "Kendall tau-b, two measures")):
            yield Row(title, design, partial(related, of_seed, each, 0.0),
                      lambda t, name=name: evidence.correlated(t, "a", "b", name), conservative=DISCRETE)  # fmt: skip
        yield Row("difference of two z, and r above 0", f"{design}, both r .6", partial(related, of_seed, each, 0.6),
                  lambda t: contrasts.stronger(t, ["a"], ["c"], "b"), conservative=JOINT)  # fmt: skip
    for start, why in ((0.0, FOLDED), (0.6, JOINT)):
        yield Row("difference of two |z|", f"{designs[1][0]}, both r {start:g}", partial(related, 0.3, LRS, start),
                  lambda t: contrasts.weaker(t, ["c"], ["a"], "b"), conservative=why)  # fmt: skip
    yield Row("|Pearson r| against .5", designs[2][0], partial(related, 0.88, LRS, 0.5),
              lambda t: contrasts.strength(t, "a", "b"), 0.5, conservative=JOINT)  # fmt: skip


def _means() -> Iterator[Row]:
    for of_seed in (0.3, 0.88):
        said = f"3 learning rates, {of_seed:.0%} of the variance between seeds"
        yield Row("mean", said, partial(means, of_seed), lambda t: contrasts.mean_of(t, "x"))
    for each in (2, 3, 5):
        yield Row("mean of Kendall's tau over lines", f"one line of {each} learning rates a seed",
                  partial(lines, each, 0.5), lambda t: evidence.along(t, "lr", "x", [UNIT]),
                  conservative=DISCRETE if each < 5 else "")  # fmt: skip
    yield Row("mean of Kendall's tau over lines", "two lines of 2 learning rates a seed", two_lines,
              lambda t: evidence.along(t, "lr", "x", [UNIT, "line"]), conservative=DISCRETE)  # fmt: skip
    yield Row("mean over kinds", "two kinds, one with all seeds and one with two thirds of them", unequal_kinds,
              lambda t: contrasts.mean_of(t, "x"))  # fmt: skip
    yield Row("share of units", "true share one half", shares, share_of, 0.5, conservative=DISCRETE)


def _several() -> Iterator[Row]:
    for values in (3, 6):
        yield Row("slope of z over a setting", f"{values} settings of the same seeds", partial(settings, values),
                  lambda t: contrasts.rising(t, "setting", "a", "b"), conservative=JOINT)  # fmt: skip
    pair, both = [("a", "b")], [("a", "b"), ("c", "b")]
    for count in (4,):
        said, draw = f"{count} cases of the same seeds", partial(kinds, count)
        yield Row("mean of z over cases", said, draw,
                  lambda t: contrasts.across(t, pair, contrasts.mean_correlation, "r"), conservative=JOINT)  # fmt: skip
        yield Row("mean difference of two z over cases", said, draw,
                  lambda t: contrasts.across(t, both, contrasts.margin, "z"), conservative=JOINT)  # fmt: skip
        yield Row("r in all cases", f"{said}, r 0 in each", draw, lambda t: contrasts.in_each_case(t, pair, "r"),
                  conservative=CASES_DECIDE)  # fmt: skip
        yield Row("r in some case", f"{said}, r 0 in each", draw,
                  lambda t: contrasts.in_each_case(t, pair, "r", "some"), conservative=CASES_DECIDE)  # fmt: skip
    yield Row("z of a part less z of all", "3 learning rates, the part without the first",
              parted,
              lambda t: contrasts.by_part(t, lambda n: n["lr"] > 0, "a", "b", "z"), conservative=JOINT)  # fmt: skip
    for start in (0.0, 0.3):
        yield Row("variance of z over layers, less that over others", f"one network a seed, all r {start:g}",
                  partial(layers, start),
                  lambda t: contrasts.steadier(t, ["u0", "u1", "u2", "u3"], ["v0", "v1", "v2", "v3"], "gap"),
                  conservative=SPREAD)  # fmt: skip
    yield Row("variance of z over layers, less that over others", "one network a seed, u's noise mostly shared",
              sharing_layers,
              lambda t: contrasts.steadier(t, ["u0", "u1", "u2", "u3"], ["v0", "v1", "v2", "v3"], "gap"),
              conservative=SPREAD)  # fmt: skip


def tau_in_each(table: evidence.Table) -> evidence.Evidence:
    """Return the mean of Kendall's tau in each case, as X6 asks for in each figure."""

    def found(results: Any) -> Statistic:
        of = table(results)
        parts = {case: evidence.along(lambda _, mine=mine: mine, "lr", "x", [UNIT])({})  # type: ignore[misc]
                 for case, mine in of.groupby(CASE)}  # fmt: skip
        return in_cases(parts, "all", "tau in each case")

    return found


def all_and_some(table: evidence.Table) -> evidence.Evidence:
    """Return r of a and b in all cases, and of c and b in some: the two together, as X4's contribution 3."""

    def found(results: Any) -> Statistic:
        with_all = contrasts.in_each_case(table, [("a", "b")], "r")(results)
        with_some = contrasts.in_each_case(table, [("c", "b")], "r", "some")(results)
        return in_cases({"all": with_all, "some": with_some}, "all", "both")

    return found


def _joint() -> Iterator[Row]:
    """Yield statistics of statistics, and those of designs of one experiment."""
    four = [f"v{i}" for i in range(EACH)]
    yield Row("difference of two z for all of 4 rivals, and r above 0", "one network a seed, all r .3", rivals,
              lambda t: contrasts.stronger(t, ["u"], four, "gap"), conservative=CASES_DECIDE)  # fmt: skip
    yield Row("difference of two |z| for all of 4 rivals", "one network a seed, all r .3", rivals,
              lambda t: contrasts.weaker(t, four, ["u"], "gap"), conservative=CASES_DECIDE)  # fmt: skip
    yield Row("r in all cases and another r in some", f"{EACH} cases of the same seeds, r 0 in each",
              pairs_of_cases, all_and_some, conservative=CASES_DECIDE)  # fmt: skip
    yield Row("mean of Kendall's tau in each of 3 cases", f"one line of {LRS} learning rates a seed and case",
              figures, tau_in_each, conservative=CASES_DECIDE)  # fmt: skip
    yield Row("|Pearson r| against .2", "one network a seed", partial(related, 1.0, 1, 0.2),
              lambda t: contrasts.strength(t, "a", "b"), 0.2, conservative=FOLDED)  # fmt: skip
    yield Row("mean of z of ranks over cases", f"{EACH} cases of the same seeds", partial(kinds, EACH),
              lambda t: contrasts.across(
                  contrasts.ranked(t, ("a", "b")), [("a", "b")], contrasts.mean_correlation, "rho"
              ), conservative=JOINT)  # fmt: skip
    yield Row("mean of what holds or not", "16 networks a seed, true share one half", holding,
              lambda t: contrasts.mean_of(t, "x"), 0.5, conservative=DISCRETE)  # fmt: skip
    yield Row("r in all cases", f"{EACH} cases, r 0 in one, .8 in the others", all_but_one,
              lambda t: contrasts.in_each_case(t, [("a", "b")], "r"), conservative=ONE)  # fmt: skip


def granulated(table: evidence.Table) -> evidence.Evidence:
    def found(results: Any) -> Statistic:
        of = table(results)
        return granulated_kendall(of["a"], of["b"], of[["lr"]], units=of[UNIT])

    return found


def given_lr(table: evidence.Table) -> evidence.Evidence:
    def found(results: Any) -> Statistic:
        of = table(results)
        return partial_correlation(of["a"], of["b"], of[["lr"]], units=of[UNIT])

    return found


def _of_studies() -> Iterator[Row]:
    """Yield the coefficients of gap.csv that the predictions do not use."""
    for of_seed in (0.3, 0.88):
        said = f"3 learning rates with effects, {of_seed:.0%} of the variance between seeds"
        draw = partial(related, of_seed, LRS, 0.0, of_lr=True)
        yield Row("granulated Kendall", said, draw, granulated, conservative=PAIRS)
        yield Row("partial Pearson r, given the learning rate", said, draw, given_lr)


def _of_training() -> Iterator[Row]:
    yield Row("mean r of changes, ranks agreeing", "courses of 8 changes, the first 30 times as large",
              partial(trajectories, 8), lambda t: contrasts.mean_of(t, "pearson", "spearman"),
              conservative=JOINT)  # fmt: skip
    yield Row("Pearson r within groups, ranks agreeing", "one network a seed, two groups of other mean and deviation",
              schemes, lambda t: evidence.correlated(within(t, "init", ["a", "b"]), "a", "b"),
              conservative=JOINT)  # fmt: skip
    yield Row("r over cases of two z", "6 cases, one network of each a seed", alternating,
              lambda t: contrasts.across(t, [("a", "b"), ("c", "b")], contrasts.alike, "r"),
              conservative=CASES)  # fmt: skip
    yield Row("r over cases of two z", "8 cases, two networks of each a seed, most noise shared", sharing,
              lambda t: contrasts.across(t, [("a", "b"), ("c", "b")], contrasts.alike, "r"),
              conservative=CASES)  # fmt: skip
    yield Row("share of units", "true share .9", partial(shares, true=0.9), share_of, 0.9, conservative=DISCRETE)
    yield Row("slope of z over a setting", "6 settings of the same seeds, as many as X16's", partial(settings, 6),
              lambda t: contrasts.rising(t, "setting", "a", "b"), units=MANY)  # fmt: skip


ROWS = (*_means(), *_correlations(), *_several(), *_of_studies(), *_of_training(), *_joint())
SKEWED = tuple(
    Row("mean", f"lognormal numbers, sigma {sigma:g}, one network a seed", partial(skewed, sigma),
        lambda t: contrasts.mean_of(t, "x"))
    for sigma in (0.5, 1.0)
)  # fmt: skip
"""Means that are wrongly believed to be below a number too often."""


def mean_tau(table: evidence.Table) -> evidence.Evidence:
    return lambda results: average(table(results)["x"], table(results)[UNIT], correlations=True)


UNEVEN = (
    Row("mean of what holds or not", "12 networks of one seed, one of each other, true share one half", uneven,
        lambda t: contrasts.mean_of(t, "x", shares=True), 0.5),
    Row("mean of Kendall's tau over lines", "tau is -1 in a quarter of the seeds, 1/3 in the others", taus, mean_tau),
)  # fmt: skip
"""Means over seeds that are far from normal."""


def of_columns(name: CoefficientName, table: evidence.Table) -> evidence.Evidence:
    """Return a correlation by itself, as in relations.csv and gap.csv: no other has to agree."""

    def found(results: Any) -> Statistic:
        of = table(results)
        return correlate(of["a"], of["b"], name, units=of[UNIT])

    return found


ALONE = tuple(
    Row(said, f"two independent lognormal columns, sigma {sigma:g}", partial(both_skewed, sigma), weigh, units=(10, 30))
    for sigma in (0.5, 1.0, 2.0)
    for said, weigh in (
        ("Pearson r by itself", partial(of_columns, "pearson")),
        ("Spearman rho", partial(of_columns, "spearman")),
        ("Kendall tau-b", partial(of_columns, "kendall")),
        ("Pearson r, ranks agreeing", lambda t: evidence.correlated(t, "a", "b")),
    )
)
"""Correlations of skewed columns."""
TWO_VALUED = tuple(
    Row(said, f"{count} of the networks have one value, the others another", partial(two_valued, count),
        partial(of_columns, name), units=units)
    for count, units in ((2, (10, 14, 20)), (3, (6, 8, 9, 10)), (5, (10, 20)))
    for said, name in (("Spearman rho", "spearman"), ("Kendall tau-b", "kendall"))
)  # fmt: skip
"""Correlations of a column that has two values."""


def resampled(name: CoefficientName, table: evidence.Table) -> evidence.Evidence:
    """Return a correlation with its bootstrap interval over networks, also where they are too few for one."""

    def found(results: Any) -> Statistic:
        a, b = table(results)[["a", "b"]].to_numpy().T
        drawn = resamples(len(a), len(a), 999)
        one = with_interval(partial(COEFFICIENTS[name], a, b), drawn, min(FEWEST_POINTS, len(a) - 2))
        return Statistic(name, one.value, one.n, one.low, one.high)

    return found


RESAMPLED = tuple(
    Row(f"{said}, bootstrap over networks", f"true r {r:g}", partial(related, 1.0, 1, r), partial(resampled, name),
        r if name == "pearson" else 2 / np.pi * float(np.arcsin(r)), units=(4, 6, 8, 10, 20, 30))
    for r in (0.0, 0.8)
    for said, name in (("Pearson r", "pearson"), ("Kendall tau-b", "kendall"))
)  # fmt: skip
"""Intervals of `correlate` without units; fewer than 6 networks have none in flatlens."""


def between_groups(paired: bool, table: evidence.Table) -> evidence.Evidence:
    """Return the difference of the second group to the first, over pairs of one seed and learning rate, or networks."""

    def found(results: Any) -> Statistic:
        of = table(results)
        pairs = of[UNIT] + of["lr"].astype(str) if paired else None
        (one,) = group_differences({"x": of["x"]}, of["group"], pairs, of["unit_of"], linear=["x"])
        return Statistic("difference", one.value, one.n, one.low, one.high)

    return found


FEW = (3, 4, 6, 10, 20)
GROUPS = tuple(
    Row(f"difference of two groups, {'paired' if paired else 'not paired'}", design, draw,
        partial(between_groups, paired), units=FEW, conservative=why)
    for paired, design, draw, why in (
        (True, "one pair a seed, 70% of the variance between seeds", partial(groups, True, 1), ""),
        (True, "3 pairs a seed, at 3 learning rates", partial(groups, True, LRS), ""),
        (False, "as many networks in either", partial(groups, False, 1), "Welch's interval of few networks is wide"),
        (False, "the second with 3 times the deviation", partial(groups, False, 1, deviation=3.0), ""),
        (False, "3 times as many networks in the second", partial(groups, False, 1, more=3), ""),
        (False, "3 learning rates a seed", partial(groups, False, LRS), ""),
    )
)  # fmt: skip
"""Differences between groups; units are seeds of the first group."""
