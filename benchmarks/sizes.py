"""Simulated error rates of every statistic of the papers' predictions: `python -m benchmarks.sizes > docs/sizes.md`.

Populations have the dependence of the papers' studies: networks of one seed share an effect, learning rates have
effects of their own. Under the null hypothesis a statistic's true value is the number it is held against; a wrong
verdict is "reproduced" or "not reproduced", each nominally in 2.5%. Some twenty minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.claims import QUESTIONS, right, wrong
from benchmarks.sizes_rows import ALONE, GROUPS, RESAMPLED, ROWS, SKEWED, TWO_VALUED, UNEVEN, Row
from flatlens.papers.experiment import conclusion_of

LEAST, MOST, AGAIN = 1.5, 3.5, 6
"""Percentages of misses outside which a statistic is simulated again, and how many times as often."""


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

- *Miss above* is the share of populations in which the true value is believed to be above, *miss below* the share in
  which it is believed to be below: nominally 2.5% each, with a standard error of {error:.1f} points. A statistic may
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
  - a correlation against the correlations of four rivals: .95 against .3;
  - a property that holds or not: in 90% of the networks.
- *Units* are independent seeds; the jackknife omits more than 200 in 200 groups.

"Granulated" and "partial" are coefficients of a study's `gap.csv`. `tests/statistics/test_sizes.py` asks for these
rates.
"""
POWERS = """
| statistic | design | units | miss above, % | miss below, % | power, % | conservative because |
|---|---|---:|---:|---:|---:|---|"""
RATES = """
| statistic | design | units | miss above, % | miss below, % |
|---|---|---:|---:|---:|"""
LIMIT = """
## Where a mean errs

Most of a few positive and very skewed numbers lie below their mean, and so does Student's interval: their mean is
believed to be below a number too often, and above it too rarely. Most predictions about positive numbers are therefore
about logarithms; the others that say "below" need a value far below their number."""
OF_UNEVEN = """
If one seed has many more networks than the others, the interval of the mean is too narrow: give each seed as many
networks. Where all seeds agree in sign, the mean of Kendall's tau has the p of a sign test, which is about the median:
if tau is strongly negative in few seeds and weakly positive in most, its mean is believed to be above 0 too often."""
OF_ALONE = """
## Where a correlation errs

Student's interval of Pearson's r is for columns that are not very skewed. `relations.csv`, `gap.csv` and `fl.relate`
report it alone: for skewed columns believe it only if the ranks' interval (Spearman, Kendall) agrees, or take
logarithms. The papers' predictions always ask for both."""
OF_TWO_VALUED = """
A column of two values has few orders. Intervals of Spearman's and Kendall's coefficients need 80 of them; a column
with fewer has none, and a rate of 0. If only two networks differ from all others, they are still too narrow."""
OF_RESAMPLED = """
Without units, `correlate` and similar functions resample networks. With 4 networks such an interval would miss in some
20% on one side: it needs 6, and each control of a partial correlation adds one."""
LIMITS = (
    (LIMIT, SKEWED), (OF_UNEVEN, UNEVEN), (OF_ALONE, ALONE), (OF_TWO_VALUED, TWO_VALUED), (OF_RESAMPLED, RESAMPLED),
)  # fmt: skip
"""What is said of designs in which a statistic errs, and their rows."""
EVERY = (*ROWS, *chain.from_iterable(rows for _, rows in LIMITS), *GROUPS)


def page(repeats: int, rows: tuple[Row, ...] = ROWS) -> Iterator[str]:
    """Yield the lines of docs/sizes.md."""
    fewer = max(repeats // 10, 1)
    yield INTRODUCTION.format(repeats=repeats, fewer=fewer, again=AGAIN, error=100 * (0.025 * 0.975 / repeats) ** 0.5)
    yield from powers(rows, repeats)


def powers(rows: tuple[Row, ...], repeats: int) -> Iterator[str]:
    """Yield a table of the statistics' rates and powers."""
    yield POWERS.removeprefix("\n")
    fewer = max(repeats // 10, 1)
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


BETWEEN = """
## Differences between groups

Groups of networks, such as SGD and SAM (`fl.compare(groups=...)`, and the axes of words of a study). Networks of one
seed are averaged. The power is at a difference of one standard deviation.
"""
SAID = """
## What an answer claims

Answers of `fl.compare` and of studies on simulated numbers, without and with a difference or correlation ({repeats} and
{fewer} repeats). At most 6.5% may claim one where there is none; at least 80% must name an existing one.
`tests/comparing/test_honest.py` asks for these rates.

| question | design | claims without it, % | difference | right, % |
|---|---|---:|---|---:|"""


def answers(repeats: int) -> Iterator[str]:
    """Yield the lines about differences between groups, and about what answers claim."""
    yield BETWEEN
    yield from powers(GROUPS, repeats)
    fewer = repeats // 2
    yield SAID.format(repeats=2 * repeats, fewer=fewer)
    for one in QUESTIONS:
        rates = 100 * wrong(one, 2 * repeats) / (2 * repeats), 100 * right(one, fewer) / fewer
        yield f"| {one.question} | {one.design} | {rates[0]:.1f} | {one.difference} | {rates[1]:.0f} |"


def misses(row: Row, units: int, repeats: int, seed: int = 0) -> tuple[float, float]:
    """Return in how many percent the statistic is wrongly believed above its number, and below it."""
    above, below = verdicts(row, units, 0.0, repeats, seed)
    return 100 * above / repeats, 100 * below / repeats


def main(**options: Any) -> None:
    """Print the page, line by line."""
    for line in chain(page(**options), limits(**options), answers(**options)):
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    main(**vars(parser.parse_args()))
