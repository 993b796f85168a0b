"""What the networks of a study left behind: the part of its result that is read, from which the rest is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from flatlens.experiments.result import StudyResult
from flatlens.experiments.settings import NetworkSettings
from flatlens.experiments.store import Record
from flatlens.experiments.tables import (
    curves_table,
    functions_table,
    histories_table,
    layers_table,
    networks_table,
    setting_of,
)
from flatlens.experiments.vary import IDENTITY, setting_columns
from flatlens.training import REACHED, Training

_TABLES = ("networks", "layers", "curves", "histories", "functions")
_AND = " | "


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Finished:
    """The tables of some networks, and what is known of their runs; each as in `StudyResult`."""

    networks: pd.DataFrame
    layers: pd.DataFrame
    curves: pd.DataFrame
    histories: pd.DataFrame
    functions: pd.DataFrame
    versions: dict[str, str]
    excluded: list[tuple[str, str]]
    alone: list[tuple[str, int]]
    seconds: float

    @classmethod
    def of_records(cls, records: Sequence[Record], varied: Sequence[str]) -> Finished:
        """Return what is in the folders of these networks."""
        return cls(
            networks=networks_table(records, varied),
            layers=layers_table(records),
            curves=curves_table(records),
            histories=histories_table(records),
            functions=functions_table(records),
            versions=_merged([record.result["versions"] for record in records]),
            excluded=[(r.settings.key, _why(r)) for r in records if r.result["outcome"] not in REACHED],
            alone=sorted(Counter(why for r in records if (why := r.result.get("trained_alone"))).items()),
            seconds=_summed([r.result["seconds_training"] + r.result["seconds_measuring"] for r in records]),
        )

    @classmethod
    def of_result(cls, result: StudyResult, networks: Sequence[NetworkSettings], varied: Sequence[str]) -> Finished:
        """Return what a result holds of these networks; its seconds are shared out evenly.

        Its study may have varied other settings: the columns of settings are those of `varied`.
        """
        of = {settings.key: settings for settings in networks}
        tables = {name: getattr(result, name) for name in _TABLES}
        rows = {name: table[table["key"].isin(set(of))].reset_index(drop=True) for name, table in tables.items()}
        rows["networks"] = _with_settings(rows["networks"], of, varied, former=result.varied)
        share = len(rows["networks"]) / max(len(result.networks), 1)
        return cls(
            **rows,
            versions=result.versions,
            excluded=[(key, why) for key, why in result.excluded if key in of],
            alone=[(why, round(number * share)) for why, number in result.alone],
            seconds=result.seconds * share,
        )

    def with_others(self, others: Finished, keys: Sequence[str]) -> Finished:
        """Return both together, with the rows of each table in the order of `keys`."""
        order = {key: number for number, key in enumerate(keys)}
        alone = Counter(dict(self.alone)) + Counter(dict(others.alone))
        return Finished(
            **{name: _in_order([getattr(self, name), getattr(others, name)], order) for name in _TABLES},
            versions=_merged([one.versions for one in (self, others) if len(one.networks)]),
            excluded=sorted((*self.excluded, *others.excluded), key=lambda one: order[one[0]]),
            alone=sorted(alone.items()),
            seconds=self.seconds + others.seconds,
        )


def _summed(seconds: Sequence[float]) -> float:
    """Return the sum, no network with more than ten medians: the clock runs on where a process or machine is halted.

    >>> _summed([1.0, 2.0, 2.0, 3000.0])
    25.0
    """
    return sum(min(one, 10 * median(seconds)) for one in seconds)


def _with_settings(
    table: pd.DataFrame, networks: Mapping[str, NetworkSettings], varied: Sequence[str], former: Sequence[str]
) -> pd.DataFrame:
    """Return a table of networks with columns of the settings that vary here, in place of those that varied there."""
    columns = setting_columns(varied)
    results = [name for name in table if name not in {*IDENTITY, *setting_columns(former), *columns}]
    own = {name: [setting_of(networks[key], name) for key in table["key"]] for name in columns}
    return pd.concat([table[IDENTITY], pd.DataFrame(own, index=table.index), table[results]], axis=1)


def _in_order(tables: Sequence[pd.DataFrame], order: dict[str, int]) -> pd.DataFrame:
    """Return the rows of both tables in the order of their networks; an empty table has no types to give."""
    whole = pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)
    return whole.sort_values("key", key=lambda keys: keys.map(order), kind="stable", ignore_index=True)


def _why(record: Record) -> str:
    training, result = record.settings.training, record.result
    assert isinstance(training, Training)  # a training elsewhere is at its end
    batch = "full batch" if training.batch_size is None else f"batch size {training.batch_size}"
    where = f"learning rate {training.optimiser.lr:g}, {batch}, seed {training.seed}"
    if result["outcome"] == "diverged":
        return f"diverged after {result['steps']} steps ({where})"
    right = "" if math.isnan(result["accuracy"]) else f", accuracy {result['accuracy']:.3g}"  # NaN: a regression
    return f"loss {result['loss']:.3g}{right} after {result['steps']} steps ({where})"


def _merged(all_versions: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the versions of each package, joined by " | " where networks were computed with several."""
    names = dict.fromkeys(name for recorded in all_versions for name in recorded)
    each = {name: {one for v in all_versions for one in str(v.get(name, "unknown")).split(_AND)} for name in names}
    return {name: _AND.join(sorted(versions)) for name, versions in each.items()}
