"""Both halves of an experiment's units: a replication that needs no second run."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from flatlens.experiments.result import StudyResult
from flatlens.experiments.tables import unit_column
from flatlens.papers.predictions import Results

HALVES = "each half of the independent units by itself: every other seed"
_TABLES = ("networks", "layers", "curves", "histories", "functions", "values")


def halves(results: Results) -> tuple[Results, Results]:
    """Return the results of the even and of the odd units: seeds in order, or networks if the seed does not vary.

    A seed is in the same half in every study, so that what its networks share stays in one half.
    """
    return tuple({name: _half(result, odd) for name, result in results.items()} for odd in (False, True))  # type: ignore[return-value]


def _half(result: StudyResult, odd: bool) -> StudyResult:
    varied = [axis["name"] for axis in result.settings["axes"] if len(axis["values"]) > 1]
    networks = result.networks
    by_seed = unit_column(varied) == "seed"
    numbers = networks["seed"].rank(method="dense") - 1 if by_seed else pd.Series(range(len(networks)))
    keys = networks.loc[numbers.to_numpy() % 2 == odd, "key"]
    tables = {name: getattr(result, name) for name in _TABLES}
    return replace(
        result,
        **{name: table[table["key"].isin(keys)].reset_index(drop=True) for name, table in tables.items() if len(table)},
    )
