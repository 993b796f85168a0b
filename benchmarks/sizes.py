"""Simulated error rates of every statistic of the papers' predictions: `python -m benchmarks.sizes > docs/sizes.md`.

Populations have the dependence of the papers' studies: networks of one seed share an effect, learning rates have
effects of their own. Under the null hypothesis a statistic's true value is the number it is held against; a wrong
verdict is "reproduced" or "not reproduced", each nominally in 2.5%. Some twenty minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from flatlens.papers import cases, contrasts, evidence
from flatlens.papers.predictions import conclusion_of
from flatlens.papers.reparam2019.layer_five import within
from flatlens.papers.units import CASE, UNIT
from flatlens.statistics import (
    Statistic,
    average,
    correlate,
    granulated_kendall,
    in_cases,
    partial_correlation,
    resamples,
    share,
    with_interval,
)
from flatlens.statistics.bootstrap import FEWEST_POINTS
from flatlens.statistics.coefficients import Array
from flatlens.statistics.correlations import COEFFICIENTS, CoefficientName

Rng: TypeAlias = np.random.Generator
LEAST, MOST, AGAIN = 1.5, 3.5, 6
"""Percentages of misses outside which a statistic is simulated again, and how many times as often."""
UNITS = (6, 8, 10, 12, 20)
"""Numbers of independent units."""
MANY = (100, 400)
"""Those of X16; more than 200 are joined to 200 groups."""
LRS = 3
EACH = 4
"""Cases, or rivals, of a statistic over several."""
"""Networks of a unit, one per learning rate."""
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


def effects(rng: Rng, units: int, of_seed: float, each: int = LRS) -> Array:
    """Return a standard normal number per network, (units * each,); `of_seed` is the seeds' share of its variance."""
    return np.repeat(rng.normal(size=units), each) * of_seed**0.5 + rng.normal(size=units * each) * (1 - of_seed) ** 0.5


def networks(units: int, each: int = LRS, **columns: Array) -> pd.DataFrame:
    """Return a table of networks with their units and learning rates."""
    labels = [f"seed {unit}" for unit in np.repeat(np.arange(units), each)]
    return pd.DataFrame({UNIT: labels, "lr": np.tile(np.arange(float(each)), units), **columns})


def related(of_seed: float, each: int, start: float, rng: Rng, units: int, effect: float, *,
            skewed: bool = False, of_lr: bool = False) -> pd.DataFrame:  # fmt: skip
    """Return columns a and b with correlation `start` (at effect 1 .8, or .95), and c with correlation `start` to b."""
    b, noise, other = (effects(rng, units, of_seed, each) for _ in range(3))
    r = start + effect * ((0.8 if start < 0.5 else 0.95) - start)
    a, c = r * b + (1 - r**2) ** 0.5 * noise, start * b + (1 - start**2) ** 0.5 * other
    if of_lr:  # effects of learning rates, that of a uncorrelated with that of b
        a, b = a + np.tile([-1.0, 0.0, 1.0], units), b + np.tile([1.0, -2.0, 1.0], units) / 3**0.5
    return networks(units, each, **({"a": np.exp(a), "b": np.exp(b)} if skewed else {"a": a, "b": b, "c": c}))


def means(of_seed: float, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    return networks(units, x=effects(rng, units, of_seed) + effect)


def lines(each: int, of_seed: float, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return x over learning rates, in one line per seed."""
    x = effects(rng, units, of_seed, each) + effect * np.tile(np.arange(each), units)
    return networks(units, each, x=x)


def two_lines(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return x at two learning rates, in two lines per seed."""
    parts = [lines(2, 0.5, rng, units, effect).assign(line=line) for line in range(2)]
    return pd.concat(parts, ignore_index=True)


def unequal_kinds(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return x of two kinds of networks, of means -2 and 2; the first has all seeds, the second two thirds of them."""
    parts = [
        networks(seeds, 1, x=level + rng.normal(size=seeds) + effect, **{CASE: np.full(seeds, f"case {level}")})
        for level, seeds in ((-2.0, units), (2.0, max(2 * units // 3, 2)))
    ]
    return pd.concat(parts, ignore_index=True)


def layers(start: float, rng: Rng, units: int, effect: float, count: int = 4) -> pd.DataFrame:
    """Return gap, and columns u0 to u3 and v0 to v3 with correlation `start` to it; at effect 1, v with other ones."""
    gap = rng.normal(size=units)
    columns = {}
    for name in "uv":
        for i in range(count):
            r = start + (effect * (0.2 * i if i % 2 else -0.3 * i) if name == "v" else 0.0)
            columns[f"{name}{i}"] = r * gap + (1 - r**2) ** 0.5 * rng.normal(size=units)
    return networks(units, 1, gap=gap, **columns)


def sharing_layers(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return gap, and u0 to u3 and v0 to v3 with correlations .4 to .6 to it; most noise of all u is the same."""
    gap, common = rng.normal(size=(2, units))
    columns = {}
    for name, shared in (("u", 0.9), ("v", 0.0)):
        for i, r in enumerate((0.4, 0.47, 0.53, 0.6)):
            r += effect * 0.3 * (i - 2) * (name == "v")
            noise = shared**0.5 * common + (1 - shared) ** 0.5 * rng.normal(size=units)
            columns[f"{name}{i}"] = r * gap + (1 - r**2) ** 0.5 * noise
    return networks(units, 1, gap=gap, **columns)


def settings(values: int, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return a and b at several settings; the same seeds are at each, and r rises with the setting."""
    of_a, of_b = rng.normal(size=(2, units))
    parts = []
    for value in range(values):
        a = (of_a + rng.normal(size=units)) / 2**0.5
        r = effect * value / (values - 1) * 0.95
        b = r * a + (1 - r**2) ** 0.5 * (of_b + rng.normal(size=units)) / 2**0.5
        parts.append(networks(units, 1, a=a, b=b, setting=np.full(units, float(value))))
    return pd.concat(parts, ignore_index=True)


def kinds(count: int, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return cases that share seeds: a related to b by effect .8, c not; levels differ from case to case."""
    base = rng.normal(size=(3, units))
    parts = []
    for case in range(count):
        a, noise, c = (0.6 * np.repeat(one, 2) + 0.8 * effects(rng, units, 0.4, 2) + 10 * case for one in base)
        r = 0.8 * effect
        b = r * (a - 10 * case) + (1 - r**2) ** 0.5 * (noise - 10 * case)
        parts.append(networks(units, 2, a=a, b=b, c=c, **{CASE: np.full(2 * units, f"case {case}")}))
    return pd.concat(parts, ignore_index=True)


def alternating(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return six cases: r of a and b is -.8 to .8; that of c and b is unrelated to it, at effect 1 equal."""
    rising, other = np.linspace(-0.8, 0.8, 6), np.array([0.5, -0.5, -0.5, -0.5, -0.5, 0.5])
    parts = []
    for case, (r, s) in enumerate(zip(rising, other + effect * (rising - other), strict=True)):
        b, for_a, for_c = rng.normal(size=(3, units))
        a, c = r * b + (1 - r**2) ** 0.5 * for_a, s * b + (1 - s**2) ** 0.5 * for_c
        parts.append(networks(units, 1, a=a, b=b, c=c, **{CASE: np.full(units, f"case {case}")}))
    return pd.concat(parts, ignore_index=True)


def sharing(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return eight cases: r of a and b is unrelated to that of c and b, at effect 1 equal; a and c share most noise."""
    of_a, of_c = np.tile([0.0, 0.8], 4), np.repeat([0.0, 0.8], 4)
    parts = []
    for case, (r, s) in enumerate(zip(of_a, of_c + effect * (of_a - of_c), strict=True)):
        b, noise, for_a, for_c = rng.normal(size=(4, 2 * units))
        a, c = (slope * b + 0.9 * noise + 0.44 * own for slope, own in ((r, for_a), (s, for_c)))
        parts.append(networks(units, 2, a=a, b=b, c=c, **{CASE: np.full(2 * units, f"case {case}")}))
    return pd.concat(parts, ignore_index=True)


def parted(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return a and b with correlation .4; at effect 1 it is .8 at all learning rates but the first, and there -.8."""
    b, noise = effects(rng, units, 0.5), effects(rng, units, 0.5)
    r = np.tile([0.4 - 1.2 * effect, *[0.4 + 0.4 * effect] * (LRS - 1)], units)
    return networks(units, a=r * b + (1 - r**2) ** 0.5 * noise, b=b)


def shares(rng: Rng, units: int, effect: float, true: float = 0.5) -> pd.DataFrame:
    holds = rng.random(units) < true + (0.95 - true) * effect
    return networks(units, 1, x=holds.astype(float))


def courses(changes: int, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return r and rho of the changes of two measures in each network's course, whose first change is the largest."""
    large = np.where(np.arange(changes) == 0, 30.0, 1.0)
    a, noise = rng.normal(size=(2, units, changes)) * large
    r = 0.8 * effect
    pairs = list(zip(a, r * a + (1 - r**2) ** 0.5 * noise, strict=True))
    once = np.ones((1, changes))
    found = {name: np.array([of(x, y, once)[0] for x, y in pairs]) for name, of in COEFFICIENTS.items()}
    return networks(units, 1, **found)


def schemes(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return a and b of two initialisation schemes with other means and deviations of both; one network a seed."""
    scheme = np.arange(units) % 2
    of = related(1.0, 1, 0.0, rng, units, effect)
    return of.assign(init=scheme, **{name: of[name] * 10.0**scheme + 5 * scheme for name in "ab"})


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
        yield Row("mean of z over cases", said, draw, lambda t: cases.across(t, pair, cases.mean, "r"),
                  conservative=JOINT)  # fmt: skip
        yield Row("mean difference of two z over cases", said, draw,
                  lambda t: cases.across(t, both, cases.margin, "z"), conservative=JOINT)  # fmt: skip
        yield Row("r in all cases", f"{said}, r 0 in each", draw, lambda t: cases.in_each_case(t, pair, "r"),
                  conservative=CASES_DECIDE)  # fmt: skip
        yield Row("r in some case", f"{said}, r 0 in each", draw,
                  lambda t: cases.in_each_case(t, pair, "r", "some"), conservative=CASES_DECIDE)  # fmt: skip
    yield Row("z of a part less z of all", "3 learning rates, the part without the first",
              parted,
              lambda t: cases.by_part(t, lambda n: n["lr"] > 0, "a", "b", "z"), conservative=JOINT)  # fmt: skip
    for start in (0.0, 0.3):
        yield Row("variance of z over layers, less that over others", f"one network a seed, all r {start:g}",
                  partial(layers, start),
                  lambda t: contrasts.steadier(t, ["u0", "u1", "u2", "u3"], ["v0", "v1", "v2", "v3"], "gap"),
                  conservative=SPREAD)  # fmt: skip
    yield Row("variance of z over layers, less that over others", "one network a seed, u's noise mostly shared",
              sharing_layers,
              lambda t: contrasts.steadier(t, ["u0", "u1", "u2", "u3"], ["v0", "v1", "v2", "v3"], "gap"),
              conservative=SPREAD)  # fmt: skip


def rivals(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return u, and four columns v with correlation .3 to a gap; that of u is .3, at effect 1 .95."""
    gap, r = rng.normal(size=units), 0.3 + 0.65 * effect
    columns = {f"v{i}": 0.3 * gap + 0.91**0.5 * rng.normal(size=units) for i in range(EACH)}
    return networks(units, 1, gap=gap, u=r * gap + (1 - r**2) ** 0.5 * rng.normal(size=units), **columns)


def figures(rng: Rng, units: int, effect: float, count: int = 3) -> pd.DataFrame:
    """Return x over learning rates, in one line per seed, in three cases of the same seeds."""
    parts = [lines(LRS, 0.5, rng, units, effect).assign(**{CASE: f"case {case}"}) for case in range(count)]
    return pd.concat(parts, ignore_index=True)


def holding(rng: Rng, units: int, effect: float, each: int = 16) -> pd.DataFrame:
    """Return x, 1 in half of the networks; seeds differ in how often, between 30 and 70%; at effect 1 in 90%."""
    often = np.repeat(rng.uniform(0.3, 0.7, size=units), each) * (1 - effect) + 0.9 * effect
    return networks(units, each, x=(rng.random(units * each) < often).astype(float))


def pairs_of_cases(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return cases as `kinds` does, in which c, too, is related to b by the effect."""
    of = kinds(EACH, rng, units, effect)
    return of.assign(c=of["c"] + 2 * effect * (of["b"] - of.groupby(CASE)["b"].transform("mean")))


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
        with_all = cases.in_each_case(table, [("a", "b")], "r")(results)
        with_some = cases.in_each_case(table, [("c", "b")], "r", "some")(results)
        return in_cases({"all": with_all, "some": with_some}, "all", "both")

    return found


def all_but_one(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return cases as `kinds` does: r is .8 in all but one, and .8 times the effect in that one."""
    of, strong = kinds(EACH, rng, units, effect), kinds(EACH, rng, units, 1.0)
    return pd.concat([of[of[CASE] == "case 0"], strong[strong[CASE] != "case 0"]], ignore_index=True)


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
              lambda t: cases.across(cases.ranked(t, ("a", "b")), [("a", "b")], cases.mean, "rho"),
              conservative=JOINT)  # fmt: skip
    yield Row("mean of what holds or not", "16 networks a seed, true share one half", holding,
              lambda t: contrasts.mean_of(t, "x"), 0.5, conservative=DISCRETE)  # fmt: skip
    yield Row("r in all cases", f"{EACH} cases, r 0 in one, .8 in the others", all_but_one,
              lambda t: cases.in_each_case(t, [("a", "b")], "r"), conservative=ONE)  # fmt: skip


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
              partial(courses, 8), lambda t: contrasts.mean_of(t, "pearson", "spearman"),
              conservative=JOINT)  # fmt: skip
    yield Row("Pearson r within groups, ranks agreeing", "one network a seed, two groups of other mean and deviation",
              schemes, lambda t: evidence.correlated(within(t, "init", ["a", "b"]), "a", "b"),
              conservative=JOINT)  # fmt: skip
    yield Row("r over cases of two z", "6 cases, one network of each a seed", alternating,
              lambda t: cases.across(t, [("a", "b"), ("c", "b")], cases.alike, "r"), conservative=CASES)  # fmt: skip
    yield Row("r over cases of two z", "8 cases, two networks of each a seed, most noise shared", sharing,
              lambda t: cases.across(t, [("a", "b"), ("c", "b")], cases.alike, "r"), conservative=CASES)  # fmt: skip
    yield Row("share of units", "true share .9", partial(shares, true=0.9), share_of, 0.9, conservative=DISCRETE)
    yield Row("slope of z over a setting", "6 settings of the same seeds, as many as X16's", partial(settings, 6),
              lambda t: contrasts.rising(t, "setting", "a", "b"), units=MANY)  # fmt: skip


ROWS = (*_means(), *_correlations(), *_several(), *_of_studies(), *_of_training(), *_joint())


def skewed(sigma: float, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return lognormal numbers less their mean, one network a seed."""
    x = np.exp(sigma * rng.normal(size=units)) - np.exp(sigma**2 / 2)
    return networks(units, 1, x=x + effect * x.std())


SKEWED = tuple(
    Row("mean", f"lognormal numbers, sigma {sigma:g}, one network a seed", partial(skewed, sigma),
        lambda t: contrasts.mean_of(t, "x"))
    for sigma in (0.5, 1.0)
)  # fmt: skip
"""Means that are wrongly believed to be below a number too often."""


def uneven(rng: Rng, units: int, effect: float, first: int = 12) -> pd.DataFrame:
    """Return what holds or not, the same in all networks of a seed: the first seed has 12, each other one has one."""
    holds = rng.random(units) < 0.5 + 0.45 * effect
    labels = np.repeat(np.arange(units), [first, *[1] * (units - 1)])
    return pd.DataFrame({UNIT: [f"seed {unit}" for unit in labels], "x": holds[labels].astype(float)})


def taus(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return Kendall's tau of one line of three a seed: -1 in a quarter of the seeds, 1/3 in the others."""
    return networks(units, 1, x=np.where(rng.random(units) < 0.25 * (1 - effect), -1.0, 1 / 3))


def mean_tau(table: evidence.Table) -> evidence.Evidence:
    return lambda results: average(table(results)["x"], table(results)[UNIT], correlations=True)


UNEVEN = (
    Row("mean of what holds or not", "12 networks of one seed, one of each other, true share one half", uneven,
        lambda t: contrasts.mean_of(t, "x", shares=True), 0.5),
    Row("mean of Kendall's tau over lines", "tau is -1 in a quarter of the seeds, 1/3 in the others", taus, mean_tau),
)  # fmt: skip
"""Means over seeds that are far from normal."""


def both_skewed(sigma: float, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return two independent lognormal columns."""
    a, b = np.exp(sigma * rng.normal(size=(2, units)))
    return networks(units, 1, a=a + effect * b, b=b)


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


def two_valued(count: int, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return a column of which `count` networks have one value and all others another, and one of normal numbers."""
    a = (np.arange(units) < count).astype(float)
    return networks(units, 1, a=a, b=rng.normal(size=units) + 2 * effect * a)


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


def verdicts(row: Row, units: int, effect: float, repeats: int, seed: int = 0) -> tuple[int, int]:
    """Return in how many repeats the statistic is believed above its number, and below it."""
    rng = np.random.default_rng([seed, units, EVERY.index(row)])
    found = []
    for _ in range(repeats):
        table = row.table(rng, units, effect)
        statistic = row.weigh(lambda _, table=table: table)({})  # type: ignore[misc]
        found.append(conclusion_of(statistic, "above", row.than))
    return found.count("reproduced"), found.count("not reproduced")


INTRODUCTION = """\
# Simulated error rates of the papers' statistics

Written by `python -m benchmarks.sizes > docs/sizes.md`. Each statistic is simulated {repeats} times where its true
value is the number that it is held against, on populations with the dependence of the papers' studies.

- *Miss above* is the share of populations whose true value is believed to be above, *miss below* the share of those
  where it is believed to be below: nominally 2.5% each, with a standard error of {error:.1f} points. A statistic may
  miss in at most 3.5%. Where it misses in more, or in fewer than 1.5% without a reason in the last column, the row
  is simulated again, {again} times as often, and has these rates.
- *Power* is the share of right decisions at one alternative ({fewer} repeats):
  - a mean: one standard deviation;
  - a correlation: .8, or .95 against .5 or .6;
  - a slope: one deviation per learning rate;
  - a share: .95;
  - correlations at several settings: from 0 to .95;
  - a correlation in one part of the networks: .8, and -.8 in the rest;
  - correlations of four layers: 0, .2, -.6 and .6;
  - a correlation against those of four rivals: .95 against .3;
  - what holds or not: in 90% of the networks.
- *Units* are independent seeds; more than 200 are left out in 200 groups.

"Granulated" and "partial" are coefficients of a study's `gap.csv`. `tests/statistics/test_sizes.py` asks for these
rates.

| statistic | design | units | miss above, % | miss below, % | power, % | conservative because |
|---|---|---:|---:|---:|---:|---|"""
RATES = """
| statistic | design | units | miss above, % | miss below, % |
|---|---|---:|---:|---:|"""
LIMIT = """
## Where a mean errs

Of few numbers that are positive and very skewed, most lie below their mean, and so does Student's interval. Their mean
is believed to be below a number too often, and above it too rarely. Most predictions about positive numbers are
therefore about logarithms. Of the others those that say "below" need a value far below their number: the atlas has
both."""
OF_UNEVEN = """
If one seed has many more networks than the others, the mean is mostly that seed's, and its interval is too narrow:
give each seed as many networks. Where all seeds agree in sign, the mean of Kendall's tau has the p of a sign test. This
is about the median: if tau is strongly negative in few seeds and weakly positive in most, its mean is believed to be
above 0 too often."""
OF_ALONE = """
## Where a correlation errs

Student's interval of Pearson's r is for columns that are not very skewed. `relations.csv`, `gap.csv` and `fl.relate`
give it by itself: of skewed columns believe it only if that of ranks (Spearman, Kendall) agrees, or take
logarithms. The papers' predictions always ask for both."""
OF_TWO_VALUED = """
A column of two values has few orders. Intervals of Spearman's and Kendall's coefficients need 80 of them; a column
with fewer has none, and a rate of 0. If only two networks differ from all others, they are too narrow, still."""
OF_RESAMPLED = """
Without units `correlate` and its kin resample networks. Of 4 networks such an interval would miss in some 20% on one
side: it needs 6, and each control of a partial correlation adds one."""
LIMITS = (
    (LIMIT, SKEWED), (OF_UNEVEN, UNEVEN), (OF_ALONE, ALONE), (OF_TWO_VALUED, TWO_VALUED), (OF_RESAMPLED, RESAMPLED),
)  # fmt: skip
"""What is said of designs in which a statistic errs, and their rows."""
EVERY = (*ROWS, *chain.from_iterable(rows for _, rows in LIMITS))


def page(repeats: int, rows: tuple[Row, ...] = ROWS) -> Iterator[str]:
    """Yield the lines of docs/sizes.md."""
    fewer = max(repeats // 10, 1)
    yield INTRODUCTION.format(repeats=repeats, fewer=fewer, again=AGAIN, error=100 * (0.025 * 0.975 / repeats) ** 0.5)
    for row in rows:
        for units in row.units:
            rates = misses(row, units, repeats)
            if max(rates) > MOST or (min(rates) < LEAST and not row.conservative):  # by chance, most likely
                rates = misses(row, units, AGAIN * repeats, seed=2)
            power = 100 * verdicts(row, units, row.effect, fewer, seed=1)[0] / fewer
            why = row.conservative if min(rates) < LEAST else ""
            cells = (row.statistic.replace("|", "\\|"), row.design, units, *map("{:.1f}".format, rates))
            yield f"| {' | '.join(map(str, cells))} | {power:.0f} | {why} |"


def limits(repeats: int) -> Iterator[str]:
    """Yield the lines about designs in which a statistic errs."""
    for said, rows in LIMITS:
        yield said + "\n" + RATES
        for row in rows:
            for units in row.units:
                above, below = misses(row, units, repeats)
                yield f"| {row.statistic} | {row.design} | {units} | {above:.1f} | {below:.1f} |"


def misses(row: Row, units: int, repeats: int, seed: int = 0) -> tuple[float, float]:
    """Return in how many percent the statistic is wrongly believed above its number, and below it."""
    above, below = verdicts(row, units, 0.0, repeats, seed)
    return 100 * above / repeats, 100 * below / repeats


def main(**options: Any) -> None:
    """Print the page, line by line."""
    for line in chain(page(**options), limits(**options)):
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    main(**vars(parser.parse_args()))
