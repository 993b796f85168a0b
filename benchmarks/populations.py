"""The populations of `benchmarks.sizes`: tables of networks with the dependence of the papers' studies, at random."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.papers.evidence import CASE, UNIT
from flatlens.statistics.correlations import COEFFICIENTS
from flatlens.statistics.statistic import Array

Rng: TypeAlias = np.random.Generator
LRS = 3
"""Networks of a unit, one per learning rate."""
EACH = 4
"""Cases, or rivals, of a statistic over several."""


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


def groups(
    paired: bool, each: int, rng: Rng, units: int, effect: float, *, more: int = 1, deviation: float = 1.0
) -> pd.DataFrame:
    """Return x in two groups of `units` seeds, `each` networks a seed; the second group has `effect` more.

    Of paired groups the seeds are the same, with 70% of the variance. The second group has `more` times the seeds, and
    `deviation` times the standard deviation.
    """
    seed = rng.normal(size=units)
    parts = []
    for group, count in enumerate((units, units * more)):
        of_seed = seed if paired else rng.normal(size=count)
        x = 0.7**0.5 * np.repeat(of_seed, each) + 0.3**0.5 * rng.normal(size=count * each)
        table = networks(count, each, x=(deviation if group else 1.0) * x + effect * group)
        parts.append(table.assign(group=group, unit_of=table[UNIT] if paired else f"{group} " + table[UNIT]))
    return pd.concat(parts, ignore_index=True)


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


def trajectories(changes: int, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return r and rho of the changes of two measures in each network's trajectory; the first change is the largest."""
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


def all_but_one(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return cases as `kinds` does: r is .8 in all but one, and .8 times the effect in that one."""
    of, strong = kinds(EACH, rng, units, effect), kinds(EACH, rng, units, 1.0)
    return pd.concat([of[of[CASE] == "case 0"], strong[strong[CASE] != "case 0"]], ignore_index=True)


def skewed(sigma: float, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return lognormal numbers less their mean, one network a seed."""
    x = np.exp(sigma * rng.normal(size=units)) - np.exp(sigma**2 / 2)
    return networks(units, 1, x=x + effect * x.std())


def uneven(rng: Rng, units: int, effect: float, first: int = 12) -> pd.DataFrame:
    """Return what holds or not, the same in all networks of a seed: the first seed has 12, each other one has one."""
    holds = rng.random(units) < 0.5 + 0.45 * effect
    labels = np.repeat(np.arange(units), [first, *[1] * (units - 1)])
    return pd.DataFrame({UNIT: [f"seed {unit}" for unit in labels], "x": holds[labels].astype(float)})


def taus(rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return Kendall's tau of one line of three a seed: -1 in a quarter of the seeds, 1/3 in the others."""
    return networks(units, 1, x=np.where(rng.random(units) < 0.25 * (1 - effect), -1.0, 1 / 3))


def both_skewed(sigma: float, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return two independent lognormal columns."""
    a, b = np.exp(sigma * rng.normal(size=(2, units)))
    return networks(units, 1, a=a + effect * b, b=b)


def two_valued(count: int, rng: Rng, units: int, effect: float) -> pd.DataFrame:
    """Return a column of which `count` networks have one value and all others another, and one of normal numbers."""
    a = (np.arange(units) < count).astype(float)
    return networks(units, 1, a=a, b=rng.normal(size=units) + 2 * effect * a)
