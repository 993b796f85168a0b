"""Tables of correlations (fl.relate), and correlations within groups: Pearson's r, the granulated Kendall coefficient.

The latter asks whether a measure follows the gap when only one hyperparameter changes: Jiang et al., "Fantastic
generalization measures and where to find them" (ICLR 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from flatlens.errors import BadInput, UnknownName
from flatlens.result import Result, of_report
from flatlens.statistics.correlations import (
    UNIT_LABELS,
    bootstrapped,
    of_units,
    over_units,
    require_counts,
    undefined_because,
)
from flatlens.statistics.inference import FEWEST_DESCRIBED, clustered
from flatlens.statistics.resampling import (
    FEWEST_POINTS,
    Coefficient,
    GroupNumbers,
    Seed,
    draws,
    from_median,
    generator,
    kendall,
    no_interval,
    pearson,
    permutations,
    signs,
    standardised,
)
from flatlens.statistics.statistic import NAN, Array, Statistic, as_columns, keep

FEWEST_WITHIN = 10  #: smallest number of points minus number of groups for a correlation within groups
_NOTHING = (np.nan, np.nan, np.nan)


def relate_all(table: pd.DataFrame, units: pd.Series | None = None) -> pd.DataFrame:
    """Return Pearson's r and Kendall's tau of every pair of columns, over the points that are finite in both.

    `units` labels the independent unit of each row, such as its seed; by default each row is one. The intervals are
    `clustered`'s. The columns: x, y, n, units (their number), pearson, pearson_low, pearson_high, kendall, kendall_low,
    kendall_high.
    """
    rows = []
    for names in combinations(table.columns, 2):
        kept = _usable(table, *names, units)
        x, y = table[list(names)][kept].to_numpy(dtype=np.float64).T
        labels = _labels(table, units)[kept]
        each: list[float] = []
        undefined = undefined_because(pd.DataFrame({"x": x, "y": y}))
        for coefficient, ordered in ((pearson, ()), (kendall, (x, y))):
            each += _NOTHING if undefined else _interval(partial(coefficient, x, y), labels, ordered)
        rows.append((*names, len(x), len(pd.unique(labels)), *each))
    coefficients = [f"{name}{end}" for name in ("pearson", "kendall") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["x", "y", "n", "units", *coefficients])


def relate_within(
    table: pd.DataFrame, target: str, groupings: Mapping[str, pd.Series], units: pd.Series | None = None
) -> pd.DataFrame:
    """Return the pooled Pearson's r within groups, of every other column with `target`; NaN if too few points are left.

    `groupings` gives, by name, each row's group label; `units` is as for `relate_all`. The columns: x, y, group (the
    grouping's name), groups (their number), n, units, pearson, pearson_low, pearson_high.
    """
    rows = []
    for grouping, name in product(groupings, table.columns.drop(target)):
        kept = _usable(table, name, target, units)
        x, y = table[[name, target]][kept].to_numpy(dtype=np.float64).T
        numbers, labels = pd.factorize(groupings[grouping][kept], use_na_sentinel=False)
        within, known = partial(pearson, x, y, groups=numbers), _labels(table, units)[kept]
        r = _interval(within, known) if len(x) - len(labels) >= FEWEST_WITHIN else _NOTHING
        rows.append((name, target, grouping, len(labels), len(x), len(pd.unique(known)), *r))
    ends = ["pearson", "pearson_low", "pearson_high"]
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "n", "units", *ends])


def _interval(
    coefficient: Coefficient, units: NDArray[np.object_], ordered: Sequence[Array] = ()
) -> tuple[float, float, float]:
    # `ordered`: the columns whose ranks it correlates
    found = clustered("", coefficient, units, fisher=True, fewest=FEWEST_DESCRIBED, ordered=ordered)
    return found.value, found.low, found.high


def _labels(table: pd.DataFrame, units: pd.Series | None) -> NDArray[np.object_]:
    return np.asarray(np.arange(len(table)) if units is None else units.to_numpy(), dtype=object)


def _usable(table: pd.DataFrame, x: str, y: str, units: pd.Series | None) -> NDArray[np.bool_]:
    # The rows with two finite numbers and, where units are given, a unit
    finite = np.isfinite(table[[x, y]].to_numpy(dtype=np.float64)).all(1)
    return np.asarray(finite if units is None else finite & units.notna().to_numpy())


USUAL_TARGET = "generalisation_gap"


class Relations(Result):
    """Correlations of every pair of columns; `frame()` is the table, `plot()` a picture of those with one of them.

    >>> import pandas as pd, flatlens as fl
    >>> table = pd.DataFrame({"mls": [1.0, 2.0, 3.0, 4.0], "gap": [0.1, 0.2, 0.4, 0.3], "seed": [0, 1, 2, 3]})
    >>> fl.relate(table, units="seed").of("gap")[["x", "pearson"]].round(9).to_dict("records")
    [{'x': 'mls', 'pearson': 0.8}]
    """

    _KIND = "table of relations"

    def __init__(self, pairs: pd.DataFrame, about: Mapping[str, Any]) -> None:
        self._pairs = pairs
        self.about = dict(about)  #: the number of rows, the columns, that of independent units, and what is left out

    def frame(self) -> pd.DataFrame:
        """Return one row for each pair, with the columns of `relate_all`."""
        return self._pairs.copy()

    def of(self, target: object = None) -> pd.DataFrame:
        """Return the pairs with one column, which is called y; by default the gap, or else the table's last column.

        Raises:
            UnknownName: there is no such column.
        """
        columns = self.about["columns"]
        usual = USUAL_TARGET if USUAL_TARGET in columns else columns[-1]
        target = usual if target is None else str(target)  # names are text here, also those of numbered columns
        if target not in columns:
            raise UnknownName.among("column", target, columns, where="in these relations")
        pairs = self._pairs[(self._pairs["x"] == target) | (self._pairs["y"] == target)]
        other = pairs["x"].where(pairs["y"] == target, pairs["y"])
        return pairs.assign(x=other, y=target).reset_index(drop=True)

    def plot(self, target: str | None = None) -> Any:
        """Return an Altair chart of the correlations with one column, the `target`; a notebook shows it by itself."""
        return of_report("figures.picture")(self, target)

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"pairs": self._pairs.to_dict("list")}, {}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls(pd.DataFrame(content["pairs"]), content["about"])


def relate(table: pd.DataFrame, *, units: Any = None) -> Relations:
    """Return the correlations of all columns of numbers, over the rows that are finite in both.

    Of skewed columns, such as norms over several powers of ten, believe Pearson's interval only if Spearman's
    (`correlate`) or Kendall's agrees, or take logarithms: docs/sizes.md has the error rates.

    Args:
        table: One row for each network, such as measured values and settings; `about["left_out"]` has the columns of
            other types, with the reason.
        units: The column that names the independent unit of each row, such as "seed", or one label for each row (a
            list, array or Series); without it, each row is one. The intervals are over units.

    >>> table = pd.DataFrame({"mls": [1.0, 2.0, 3.0, 4.0], "gap": [0.1, 0.2, 0.3, 0.4], "name": list("abcd")})
    >>> found = relate(table)
    >>> found.of("gap")[["x", "pearson", "kendall", "n"]].to_dict("records")
    [{'x': 'mls', 'pearson': 1.0, 'kendall': 1.0, 'n': 4}]
    >>> list(found.about["left_out"])
    ['name']

    Raises:
        BadInput: it is not a table with at least two columns of numbers, or there is not one unit for each row.
        UnknownName: it has no column of the units' name.
    """
    if not isinstance(table, pd.DataFrame):
        raise BadInput(f"expected a pandas DataFrame, got {type(table).__name__}", call="relate")
    # The column that names the units, None if labels are given, and the unit of each row
    column, labels = None, None
    if pd.api.types.is_list_like(units) and not (isinstance(units, tuple) and units in table):
        if len(units) != len(table):
            raise BadInput(f"relate(units=...): expected one label for each of {len(table)} rows, got {len(units)}")
        labels = pd.Series(np.asarray(units, dtype=object), index=table.index)
    elif units is not None:
        if units not in table:
            raise UnknownName.among("column", str(units), map(str, table.columns), where="in this table")
        if (table.columns == units).sum() > 1:
            raise BadInput(f"relate(units={units!r}): expected one column of this name, the table has several")
        column, labels = units, table[units]
    columns = table if column is None else table.drop(columns=[column])
    numbers = columns.select_dtypes("number", exclude=["timedelta", "complex"])
    # Columns of other types have no correlations, nor have numbers that are stored as objects
    left_out = {}
    for name, one in columns.items():
        if name not in numbers:
            parsed = pd.to_numeric(one, errors="coerce") if one.dtype == object else pd.Series()
            stored = one.dtype == object and parsed.notna().sum() == one.notna().sum() > 0
            why = "numbers stored as objects: convert them with pd.to_numeric" if stored else f"no numbers: {one.dtype}"
            left_out[str(name)] = why
    numbers.columns = numbers.columns.map(str)
    if numbers.shape[1] < 2 or not numbers.columns.is_unique:
        names = ", ".join(numbers.columns) or "none"
        others = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        without = f" (left out: {others})" if others else ""
        expected = "expected at least two columns of numbers with names of their own"
        raise BadInput(f"relate(...): {expected}, got {names}{without}")
    pairs = relate_all(numbers, labels)
    named = "one label for each row" if column is None and labels is not None else column
    about = {"rows": len(table), "columns": list(numbers.columns), "units": named, "left_out": left_out}
    return Relations(pairs, about)


def within_groups(
    x: Any,
    y: Any,
    groups: Any,
    *,
    names: tuple[str, str] = ("x", "y"),
    resampled: int = 2000,
    permuted: int = 999,
    seed: Seed = 0,
) -> Statistic:
    """Return Pearson's r of the differences from the group's mean, pooled over groups.

    `groups` has the group label of each network. The number of networks minus that of groups must be at least 10. p
    permutes y within groups. The interval resamples networks, not whole groups.

    >>> x = np.array([0, 1, 2, 3, 4, 5, 6.0] * 2)
    >>> y = np.repeat([0.0, 100.0], 7) - x
    >>> within_groups(x, y, np.repeat(["a", "b"], 7), resampled=0, permuted=0)
    Pearson r of x and y within groups = -1 (n = 14; 2 groups)
    """
    require_counts(resampled=resampled, permuted=permuted)
    if len({*names, "group"}) < 3:
        raise BadInput(f"within_groups(names={names!r}): expected two names, neither of them 'group'")
    kept = keep(as_columns(**{names[0]: x, names[1]: y}, group=groups), names, present=["group"])
    n = len(kept.table)
    title = f"Pearson r of {names[0]} and {names[1]} within groups"
    labels, known = pd.factorize(kept.table["group"])
    if n - len(known) < FEWEST_WITHIN:
        why = f"{n} networks in {len(known)} groups, which leave {n - len(known)} points; {FEWEST_WITHIN} are needed"
        return Statistic(title, NAN, n, excluded=kept.excluded, note=why)
    a, b = (kept.table[name].to_numpy() for name in names)
    r = partial(pearson, a, b, groups=labels)
    if np.isnan(r(np.ones((1, n)))[0]):
        note = f"{names[0]} or {names[1]} is constant within each group"
        return Statistic(title, NAN, n, excluded=kept.excluded, note=note)
    # Interval from resamples, p from orders of y within the groups
    counts, orders = draws(n, seed, resampled, permuted, labels)
    sizes, near = np.bincount(labels), (from_median(v, labels) for v in (a, b))
    inside_a, inside_b = (standardised(v - (np.bincount(labels, v) / sizes)[labels]) for v in near)
    return bootstrapped(
        title, r, counts, inside_b[orders] @ inside_a / n, kept.excluded, f"{len(known)} groups",
        of="permutations within groups", groups=labels,
    )  # fmt: skip


_LARGEST = 10**7  #: largest number of entries held at once, for pairs of networks in permutations


def granulated_kendall(
    x: Any,
    y: Any,
    axes: pd.DataFrame,
    *,
    names: tuple[str, str] = ("x", "y"),
    resampled: int = 2000,
    permuted: int = 999,
    seed: Seed = 0,
    units: Any = None,
    unit: str = "unit",
) -> Statistic:
    r"""Return Psi = mean over hyperparameters i of psi_i; psi_i = mean over groups of Kendall's tau in the group.

    A group of hyperparameter i holds the networks that differ in i alone. As published, tau is the mean of
    sign(x - x') sign(y - y') over pairs; a tie counts as a pair with the value 0. Only networks with different values
    of i are compared, so replicates of one setting are not. A cell missing from the grid makes its groups smaller; a
    group without pairs does not count, and a hyperparameter without groups is left out of Psi; the notes say how many.
    `parts` holds the psi_i. The p of psi_i permutes y within groups; the p of Psi permutes y over all networks. The
    intervals resample networks, so cells with one network become empty: with few networks intervals are rough. With
    `units`, intervals and p are those of `clustered`, as in `correlate`.

    Args:
        x: One number per network, such as a measure.
        y: One number per network, such as the generalisation gap.
        axes: One row per network, one column per hyperparameter; any values.
        names: The names of x and y.
        resampled: The number of bootstrap resamples; 0 for no interval.
        permuted: The number of permutations; 0 for no p.
        seed: A seed or a generator.
        units: The label of each network's independent unit, such as its seed; networks are independent by default.
        unit: What a unit is, in one word.

    >>> grid = pd.DataFrame({"lr": [1, 1, 2, 2], "width": [8, 16, 8, 16]})
    >>> psi = granulated_kendall([1, 2, 3, 4], [1, 2, 0, 1], grid, resampled=0, permuted=0)
    >>> psi.parts["lr"].value, psi.parts["width"].value, psi.value
    (-1.0, 1.0, 0.0)
    """
    require_counts(resampled=resampled, permuted=permuted)
    held = {f"hyperparameter {name}": axes[name].to_numpy() for name in axes}
    if not held or names[0] == names[1]:
        raise BadInput("give two different names, and at least one column of a setting", call="granulated_kendall")
    labels = of_units(x, units)
    kept = keep(as_columns(**{names[0]: x, names[1]: y}, **held, **labels), names, present=[*held, *labels])
    a, b = (kept.table[name].to_numpy() for name in names)
    title, n = f"Granulated Kendall of {names[0]} and {names[1]}", len(kept.table)
    whose: dict[str, Any] = {"units": kept.table[UNIT_LABELS].nunique(), "unit": unit} if labels else {}
    if n < FEWEST_POINTS:
        why = f"{n} networks are left, at least {FEWEST_POINTS} are needed"
        return Statistic(title, NAN, n, excluded=kept.excluded, note=why, **whose)
    levels = {str(name): pd.factorize(kept.table[f"hyperparameter {name}"])[0] for name in axes}
    groupings = {name: _groups(levels, name) for name in levels}
    rng = generator(seed)
    counts, orders = draws(n, rng, resampled, permuted)
    # psi of each hyperparameter
    parts = {}
    for name, (groups, compared) in groupings.items():
        psi, along = partial(_psi, a, b, groups, compared), f"{title}, along {name}"
        used, known = len(np.unique(groups[compared.any(1)])), len(np.unique(groups))
        remark = f"{used} of {known} groups have networks to compare"
        if labels:
            parts[name] = over_units(along, psi, kept, unit, note=remark)
            continue
        under_null = _permuted(a, b, [(groups, compared)], permutations(n, rng, permuted, groups))
        parts[name] = bootstrapped(
            along, psi, counts, under_null, kept.excluded, remark,
            of="permutations within groups", groups=groups,
        )  # fmt: skip
    # Psi, their mean over those that have one
    counted = [groupings[name] for name, part in parts.items() if part.value == part.value]
    skipped = [f"{name} not counted: {part.note}" for name, part in parts.items() if part.value != part.value]
    if not counted:
        return Statistic(title, NAN, n, excluded=kept.excluded, note="; ".join(skipped), parts=parts, **whose)
    note = "; ".join([f"the mean over {', '.join(k for k, s in parts.items() if s.value == s.value)}", *skipped])

    def whole(c: Array) -> Array:
        return _mean([_psi(a, b, g, d, c) for g, d in counted])

    if labels:
        return replace(over_units(title, whole, kept, unit, note=note), parts=parts)
    note, under_null = "; ".join(filter(None, [note, no_interval(resampled, n)])), _permuted(a, b, counted, orders)
    found = bootstrapped(title, whole, counts, under_null, kept.excluded, note)
    return replace(found, parts=parts)


def _groups(levels: dict[str, GroupNumbers], axis: str) -> tuple[GroupNumbers, Array]:
    """Each network's group number, (n,), and 1 for pairs in one group that differ along the axis, (n, n)."""
    others = [values for name, values in levels.items() if name != axis]
    n = len(levels[axis])
    labels = np.unique(np.stack(others, axis=1), axis=0, return_inverse=True)[1].ravel() if others else np.zeros(n)
    groups = labels.astype(np.int64)
    return groups, ((groups[:, None] == groups) & (levels[axis][:, None] != levels[axis])).astype(np.float64)


def _psi(x: Array, y: Array, groups: GroupNumbers, compared: Array, counts: Array) -> Array:
    """psi, the mean over groups of the mean of sign times sign, in each resample, (B,)."""
    member = np.eye(1 + int(groups.max()))[groups]
    both = ((counts @ (signs(x) * signs(y) * compared)) * counts) @ member  # (B, groups)
    return _mean_of_groups(both, ((counts @ compared) * counts) @ member)


def _permuted(x: Array, y: Array, groupings: list[tuple[GroupNumbers, Array]], orders: NDArray[np.int64]) -> Array:
    """Psi of x with y in each of the orders, (B,), over the axes of these groupings."""
    found = []
    for groups, compared in groupings:
        i, j = np.nonzero(np.triu(compared))
        member = np.eye(1 + int(groups.max()))[groups[i]]  # (pairs, groups)
        sign_x = np.sign(x[i] - x[j])
        pieces = np.array_split(orders, 1 + len(orders) * len(i) // _LARGEST)
        both = [(np.sign(y[piece[:, i]] - y[piece[:, j]]) * sign_x) @ member for piece in pieces]
        found.append(_mean_of_groups(np.concatenate(both), member.sum(0, keepdims=True)))
    return _mean(found)


def _mean_of_groups(both: Array, pairs: Array) -> Array:
    # The mean of both / pairs over groups that have a pair; NaN if none has
    taus = np.where(pairs > 0, both / np.where(pairs > 0, pairs, 1.0), 0.0)
    known = (pairs > 0).sum(1)
    return np.asarray(np.where(known > 0, taus.sum(1) / np.maximum(known, 1), np.nan))


def _mean(psis: list[Array]) -> Array:
    # Over axes that have a pair in the resample; NaN if none has
    stacked = np.stack(psis)
    known = np.isfinite(stacked).sum(0)
    return np.where(known > 0, np.nansum(stacked, axis=0) / np.maximum(known, 1), np.nan)
