"""Both halves of an experiment's units: a replication that needs no second run."""

from __future__ import annotations

from dataclasses import replace

from flatlens.experiments.result import StudyResult
from flatlens.papers.predictions import Results
from flatlens.papers.units import column_of_units

HALVES = "each half of the independent units by itself: every other seed"
_TABLES = ("networks", "layers", "curves", "histories", "functions", "values")


def halves(results: Results) -> tuple[Results, Results]:
    """Return the results of every other unit: seeds in order; networks, by their keys, if the seed does not vary.

    A seed is in the same half in every study, so that what its networks share stays in one half. Keys are hashes: their
    order has nothing to do with the settings.
    """
    seeds = {seed for one in results.values() if column_of_units(one) == "seed" for seed in one.networks["seed"]}
    every_other = set(sorted(seeds)[::2])
    return tuple({name: _half(result, odd, every_other) for name, result in results.items()} for odd in (False, True))  # type: ignore[return-value]


def _half(result: StudyResult, odd: bool, every_other: set[int]) -> StudyResult:
    networks = result.networks
    by_seed = column_of_units(result) == "seed"
    first = networks["seed"].isin(every_other) if by_seed else networks["key"].rank(method="dense") % 2 == 1
    keys = networks.loc[first != odd, "key"]
    tables = {name: getattr(result, name) for name in _TABLES}
    return replace(
        result,
        **{name: table[table["key"].isin(keys)].reset_index(drop=True) for name, table in tables.items() if len(table)},
    )
