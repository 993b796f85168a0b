"""Independent units: the networks of one unit share random draws, and count once.

A unit is a label such as "seed 3" in the column UNIT of a table of networks. Networks with the same seed share their
initial weights, the order of their batches, and often their data, so they are one unit, also across the cases of a
study: different architectures of one seed share the data and the order of the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from flatlens.errors import BadInput
from flatlens.experiments.result import StudyResult
from flatlens.experiments.tables import unit_column

UNIT = "unit"
"""Name of the column with the unit of each network."""
CASE = "case"
"""Name of the column with the kind of each network, where kinds are never pooled."""
_NETWORK = "network"
WHY_LEFT_OUT = "left out"
"""Name of the column that says why a network is left out of every statistic, though it reached the end; "" if not."""
LEARNT = 0.1
"""Share of the way from chance to accuracy 1 that a network has to come, or it never trained."""


def column_of_units(result: StudyResult) -> str:
    """Return the column of the networks that says which are one unit: "seed" if the study varies it, else "key"."""
    return unit_column([axis["name"] for axis in result.settings["axes"] if len(axis["values"]) > 1])


def with_units(result: StudyResult, networks: pd.DataFrame) -> pd.DataFrame:
    """Return the networks with their units: the seed, or the network itself if the study does not vary the seed.

    Networks are rows with a column `key`, and a column `seed` if the study varies it.
    """
    column = column_of_units(result)
    return labelled(networks, [column], _NETWORK if column == "key" else "seed")


def labelled(table: pd.DataFrame, columns: Sequence[str], word: str = "") -> pd.DataFrame:
    """Return the table with units: rows that agree in these columns are one unit. `word` is what a unit is.

    >>> labelled(pd.DataFrame({"seed": [0, 1, 0]}), ["seed"])["unit"].tolist()
    ['seed 0', 'seed 1', 'seed 0']
    """
    word = word or " and ".join(columns)
    if " " in word or not columns or not set(columns) <= set(table):
        raise BadInput(
            f"independent({list(columns)}, unit={word!r}): columns of the table and one word for what a unit is are "
            f"needed; the table has {', '.join(map(str, table))}"
        )
    values = table[list(columns)].astype(str).agg(", ".join, axis=1) if len(table) else pd.Series(dtype=str)
    return table.assign(**{UNIT: f"{word} " + values})


def units_in(table: pd.DataFrame) -> pd.Series:
    """Return the unit of each row.

    Raises:
        BadInput: the table has no units.
    """
    if UNIT not in table:
        raise BadInput(
            f"the table has no column {UNIT!r}: keep that of reached(...), or name the columns whose values make a "
            "unit with independent(table, ...)"
        )
    units: pd.Series = table[UNIT]
    return units


def word_of(units: Iterable[str]) -> str:
    """Return what a unit is, from their labels: "seed".

    >>> word_of(pd.Series(["seed 0", "seed 1"]))
    'seed'
    """
    words = dict.fromkeys(str(unit).partition(" ")[0] for unit in units)
    return next(iter(words)) if len(words) == 1 else "unit"


def units_of_groups(groups: Sequence[set[str]]) -> list[str]:
    """Return the unit of each group of networks, from the units of its networks: groups that share one are one unit.

    >>> units_of_groups([{"seed 0"}, {"seed 1"}, {"seed 0"}])
    ['seed 0', 'seed 1', 'seed 0']
    >>> units_of_groups([{"seed 0", "seed 1"}, {"seed 1", "seed 2"}, {"seed 3"}])
    ['group seed 0', 'group seed 0', 'group seed 3']
    """
    joined: list[set[str]] = []
    for group in groups:
        apart = [one for one in joined if not one & group]
        joined = [*apart, set(group).union(*(one for one in joined if one & group))]
    word = "" if all(len(one) == 1 for one in joined) else "group "
    return [f"{word}{min(next(one for one in joined if one & group))}" for group in groups]


def trained_ones(table: pd.DataFrame) -> tuple[pd.DataFrame, tuple[tuple[str, int], ...]]:
    """Return the networks without those marked as left out, and (reason, number) of these."""
    if WHY_LEFT_OUT not in table:
        return table, ()
    marked = table[WHY_LEFT_OUT] != ""
    counts = table.loc[marked, WHY_LEFT_OUT].value_counts(sort=False)
    return table[~marked], tuple((str(why), int(number)) for why, number in counts.items())


def marked_untrained(networks: pd.DataFrame, chance: float, settings: Sequence[str] = ()) -> pd.DataFrame:
    """Return the networks, with those that never trained marked as left out.

    The rule: the training accuracy is less than a tenth of the way from chance (one over the number of classes) to 1.
    A network without an accuracy is not marked. `settings`: columns whose values name a network, seeds apart.

    >>> marked_untrained(pd.DataFrame({"accuracy": [0.09, 1.0]}), 0.1)["left out"].tolist()
    ['it never trained: accuracy below 0.19', '']
    >>> marked_untrained(pd.DataFrame({"accuracy": [0.09], "rho": [0.2]}), 0.1, ["rho"])["left out"].tolist()
    ['it never trained: accuracy below 0.19 (rho 0.2)']
    """
    least = chance + LEARNT * (1 - chance)
    untrained = networks["accuracy"].astype(float) < least
    named = [column for column in settings if column in networks]
    why = pd.Series(f"it never trained: accuracy below {least:.3g}", index=networks.index)
    if named:
        which = networks[named].apply(lambda row: ", ".join(f"{name} {value}" for name, value in row.items()), axis=1)
        why += " (" + which + ")"
    return mark_left_out(networks, untrained, why)


def mark_left_out(networks: pd.DataFrame, those: pd.Series, why: str | pd.Series) -> pd.DataFrame:
    """Return the networks, with `those` marked as left out for this reason, in place of an earlier one."""
    before = networks[WHY_LEFT_OUT] if WHY_LEFT_OUT in networks else pd.Series("", index=networks.index)
    return networks.assign(**{WHY_LEFT_OUT: before.mask(those, why)})
