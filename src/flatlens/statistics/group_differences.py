"""Differences between groups of networks, such as SGD and SAM: Welch's, or over pairs, and Holm's correction.

A column of positive numbers is compared as logarithms: its difference is a ratio. Networks of one unit (a seed) count
once. docs/sizes.md has the simulated error rates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import ttest_ind

from flatlens.errors import BadInput
from flatlens.statistics.inference import FEWEST_DESCRIBED, ROUNDING_SHARE, clustered, holm
from flatlens.statistics.resampling import GroupNumbers
from flatlens.statistics.statistic import NAN, Array, as_columns

_Scale: TypeAlias = Literal["ratio", "difference"]
SIGNIFICANCE = 0.05  #: a difference is significant where its corrected p is below this


@dataclass(frozen=True)
class GroupDifference:
    """The difference of a column between a group and the first group.

    >>> GroupDifference("sharpness", "SAM", "SGD", 0.5, 0.4, 0.6, "ratio", p=0.001, p_holm=0.004).significant
    True
    """

    name: str  #: the column's
    group: str
    reference: str  #: the first group
    value: float  #: ratio of geometric means (group / reference), or difference of means (group - reference)
    low: float = NAN  #: lower end of its 95% interval, not corrected; NaN where there is none
    high: float = NAN  #: upper end
    scale: _Scale = "difference"
    p: float = NAN  #: two-sided; NaN where there is no interval
    p_holm: float = NAN  #: p corrected for the number of tests in its family; NaN where not tested
    n: int = 0  #: number of units: pairs, or independent networks of both groups
    smaller: int = 0  #: number of pairs in which the group has the smaller value; 0 if not paired
    note: str = ""  #: why there is no interval; what was left out

    @property
    def significant(self) -> bool:
        """True if the groups differ at 5%, after Holm's correction."""
        return self.p_holm < SIGNIFICANCE


def group_differences(
    values: Mapping[str, Any],
    groups: Any,
    pairs: Any = None,
    units: Any = None,
    *,
    first: Collection[str] = (),
    untested: Collection[str] = (),
    linear: Collection[str] = (),
) -> list[GroupDifference]:
    """Differences of each column between each group and the first one, with 95% intervals.

    With `pairs` the interval is Student's of the differences within pairs, else Welch's. Either needs 3 units. Columns
    of which all values are positive are compared as logarithms, unless they are in `linear`. Holm's correction is over
    the columns in `first`, and over the other ones on their own: name in `first` what decides, and claim nothing from
    the rest.

    Args:
        values: columns by name, one number per network, (n,); networks without a finite number are left out.
        groups: label of each network's group, (n,); the first label is the reference, None reads "none".
        pairs: label of each network's pair, (n,): networks of one label differ in the group alone. None: not paired.
        units: label of each network's independent unit, (n,), such as its seed: values of one unit are averaged.
            None: each pair, or each network, is a unit.
        first: names of the columns that decide; the other ones have a correction of their own.
        untested: names of columns that are described, with interval and p, and not corrected.
        linear: names of columns that are compared without logarithms, such as logarithms themselves.

    Raises:
        BadInput: fewer than two groups, or columns of unequal lengths.

    >>> sgd, sam = [4.0, 5.0, 6.0, 8.0], [2.1, 2.4, 3.2, 3.9]
    >>> found, = group_differences({"trace": sgd + sam}, ["SGD"] * 4 + ["SAM"] * 4, pairs=[*range(4)] * 2)
    >>> found.group, round(found.value, 2), found.scale, found.smaller, found.significant
    ('SAM', 0.51, 'ratio', 4, True)
    """
    labels = np.array(["none" if label is None else str(label) for label in groups], dtype=object)
    columns = as_columns(group=labels, **{f"={name}": np.asarray(of, float) for name, of in values.items()})
    group, names = pd.factorize(labels)
    if len(names) < 2:
        raise BadInput(f"expected at least two groups, got {', '.join(names) or 'none'}")
    every = np.arange(len(columns))
    pair: GroupNumbers = every if pairs is None else _numbered(pairs)
    unit: GroupNumbers = pair if units is None else _numbered(units)
    found = []
    for name in values:
        # Positive numbers as logarithms
        x = columns[f"={name}"].to_numpy()
        x = np.where(np.isfinite(x), x, np.nan)
        known = x[x == x]
        scale: _Scale = "ratio" if name not in linear and len(known) and bool((known > 0).all()) else "difference"
        x = np.log(x) if scale == "ratio" else x
        for other in range(1, len(names)):
            one = GroupDifference(name, names[other], names[0], NAN)
            if pairs is None:
                mine, theirs = (_unit_means(x[group == of], unit[group == of]) for of in (other, 0))
                one = _welch(mine, theirs, one)
                left = int(np.isnan(x[(group == other) | (group == 0)]).sum())
                left_out = f"{left} {'network' if left == 1 else 'networks'} left out: a value is missing"
            else:
                here = [(group == of) & (x == x) for of in (other, 0)]
                mine, theirs = (_means(x[of], pair[of], int(pair.max()) + 1) for of in here)  # NaN where there is none
                unit_of = np.zeros(pair.max() + 1, dtype=np.int64)
                unit_of[pair] = unit
                one = _paired(_unit_means(mine - theirs, unit_of), one)
                there = np.unique(pair[(group == other) | (group == 0)])
                left = int(np.isnan((mine - theirs)[there]).sum())
                left_out = f"{left} {'pair' if left == 1 else 'pairs'} left out: a value is missing"
            one = replace(one, note="; ".join(filter(None, [left_out if left else "", one.note])))
            if scale == "ratio":
                ratio, low, high = (float(np.exp(end)) for end in (one.value, one.low, one.high))
                one = replace(one, value=ratio, low=low, high=high, scale=scale)
            found.append(one)
    # Each of the two families has Holm's correction of its own
    tested = [(at, one.p, one.name in first) for at, one in enumerate(found) if one.name not in untested]
    p_holm = dict[int, float]()
    for family in (True, False):
        p_of = {at: p for at, p, decides in tested if decides == family and p == p}
        p_holm |= dict(zip(p_of, holm(np.array(list(p_of.values()))).tolist(), strict=True))
    return [replace(one, p_holm=p_holm.get(at, NAN)) for at, one in enumerate(found)]


def _numbered(labels: Any) -> GroupNumbers:
    return np.asarray(pd.factorize(np.asarray(labels, dtype=object))[0], dtype=np.int64)


def _unit_means(x: Array, unit: GroupNumbers) -> Array:
    """Means over the values of each unit that has one."""
    known = x == x
    numbers = np.asarray(np.unique(unit[known], return_inverse=True)[1], dtype=np.int64)
    return _means(x[known], numbers, int(numbers.max(initial=-1)) + 1)


def _means(x: Array, at: GroupNumbers, n: int) -> Array:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(at, x, n) / np.bincount(at, minlength=n))


def _paired(x: Array, empty: GroupDifference) -> GroupDifference:
    # The delete-one jackknife of a mean is Student's interval
    found = clustered(
        empty.name, lambda counts: counts @ x / counts.sum(1), np.arange(len(x)), fewest=FEWEST_DESCRIBED, unit="pair"
    )
    return replace(empty, value=found.value, low=found.low, high=found.high, p=found.p, n=len(x),
                   smaller=int((x < 0).sum()), note=found.note)  # fmt: skip


def _welch(mine: Array, theirs: Array, empty: GroupDifference) -> GroupDifference:
    value = float(mine.mean() - theirs.mean()) if len(mine) and len(theirs) else NAN
    empty = replace(empty, value=value, n=len(mine) + len(theirs))
    # An interval needs a spread in a group
    if min(len(mine), len(theirs)) < FEWEST_DESCRIBED:
        return replace(empty, note=f"fewer than {FEWEST_DESCRIBED} networks in a group")
    if max(np.ptp(of) / max(abs(of).max(), 1e-300) for of in (mine, theirs)) < ROUNDING_SHARE:
        return replace(empty, note="the values within each group are equal")
    test = ttest_ind(mine, theirs, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return replace(empty, low=float(low), high=float(high), p=float(test.pvalue))


def as_frame(differences: Collection[GroupDifference]) -> pd.DataFrame:
    """The tidy table of differences: one row per column and group."""
    return pd.DataFrame(map(asdict, differences), columns=[column.name for column in fields(GroupDifference)])
