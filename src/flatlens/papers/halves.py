"""Both halves of an experiment's units: a replication that needs no second run."""

from __future__ import annotations

from dataclasses import replace

from flatlens.experiments.result import StudyResult
from flatlens.papers.predictions import Results
from flatlens.papers.units import column_of_units

HALVES = "each half of the independent units by itself: every other seed"
_TABLES = ("networks", "layers", "curves", "histories", "functions", "values")


def halves(results: Results) -> tuple[Results, Results]:
    """Return the results of every other unit: seeds in order; networks, by their keys, if no seed varies.

    The seed may be any that the study varies, such as `model.seed`. A seed is in the same half in every study, so that
    what its networks share stays in one half. Keys are hashes: their order has nothing to do with the settings.
    """
    of_seeds = [one.networks[column] for one in results.values() if (column := column_of_units(one)) != "key"]
    seeds = {seed for column in of_seeds for seed in column}
    every_other = set(sorted(seeds)[::2])
    return tuple({name: _half(result, odd, every_other) for name, result in results.items()} for odd in (False, True))  # type: ignore[return-value]


def _half(result: StudyResult, odd: bool, every_other: set[int]) -> StudyResult:
    networks, column = result.networks, column_of_units(result)
    units = networks[column]
    first = units.rank(method="dense") % 2 == 1 if column == "key" else units.isin(every_other)
    keys = networks.loc[first != odd, "key"]
    tables = {name: getattr(result, name) for name in _TABLES}
    return replace(
        result,
        **{name: table[table["key"].isin(keys)].reset_index(drop=True) for name, table in tables.items() if len(table)},
    )
