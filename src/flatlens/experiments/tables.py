"""Tables of a study, derived from its networks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import nan
from typing import Any

import pandas as pd

from flatlens.column import Column
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import NetworkSettings, facts
from flatlens.experiments.store import Record
from flatlens.experiments.vary import (
    IDENTITY,
    TOGETHER,
    but_seeds,
    is_seed,
    seedless,
    setting_columns,
    split_values,
    value_of,
)
from flatlens.tracking.history import TYPES
from flatlens.training import REACHED, TrainedElsewhere
from flatlens.userfile import short


def networks_table(records: Sequence[Record], varied: Sequence[str]) -> pd.DataFrame:
    """Return one row per network, in the order given: identity, other varied settings, outcome, steps, all numbers."""
    rows = []
    for record in records:
        own = {name: setting_of(record.settings, name) for name in setting_columns(varied)}
        row = {**_identity(record), **own, "outcome": record.result["outcome"]}
        if "steps" not in own:
            row["steps"] = record.result["steps"]
        row |= {str(Column.of(*key)): e.value for key, e in record.report.items()}
        if isinstance(record.settings.training, TrainedElsewhere):
            row |= record.settings.training.results
        rows.append(row)
    return pd.DataFrame(rows, columns=_columns_in_order(rows))


def layers_table(records: Sequence[Record]) -> pd.DataFrame:
    """Return the values of each layer, with its position in execution order; tidy."""
    rows = []
    for record in records:
        position = {layer: number for number, layer in enumerate(record.result["layers"])}
        rows += [
            {**_identity(record), "measure": name, "layer": layer, "position": position.get(layer, len(position))}
            | {"value": e.value, "kind": e.kind}
            for (name, layer), e in record.report.items()
            if layer is not None
        ]
    return pd.DataFrame(rows, columns=[*IDENTITY, "measure", "layer", "position", "value", "kind"])


def histories_table(records: Sequence[Record]) -> pd.DataFrame:
    """Return the measures followed during training, as a Tracker's history; `rate` is the step's learning rate."""
    columns = ["rate" if name == "lr" else name for name in TYPES if name != "seconds"]
    followed = [
        (record, record.history.rename(columns={"lr": "rate"})) for record in records if record.history is not None
    ]
    tables = [history[columns].assign(**_identity(record)) for record, history in followed]
    tables = [table[[*IDENTITY, *columns]] for table in tables]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*IDENTITY, *columns])


def curves_table(records: Sequence[Record]) -> pd.DataFrame:
    """Return the training curves; tidy."""
    columns = ["step", "loss", "accuracy", "test_loss"]
    tables = [
        pd.DataFrame({**_identity(record), **{name: record.curves[name].numpy() for name in columns}})
        for record in records
        if "step" in record.curves  # a training elsewhere left none
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*IDENTITY, *columns])


def functions_table(records: Sequence[Record]) -> pd.DataFrame:
    """Return test inputs and outputs of each network from R to R; tidy."""
    tables = [
        pd.DataFrame({**_identity(record), "x": record.curves["input"].numpy(), "y": record.curves["output"].numpy()})
        for record in records
        if "input" in record.curves
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*IDENTITY, "x", "y"])


def values_table(networks: pd.DataFrame, quantities: Sequence[Quantity]) -> pd.DataFrame:
    """Return the studied quantities, transformed; `included` is true if training reached its end."""
    identity = networks[IDENTITY].assign(included=networks["outcome"].isin(REACHED))
    return pd.concat([identity, pd.DataFrame({q.name: q.of(networks) for q in quantities})], axis=1)


def held_fixed(varied: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the useful ways of holding settings fixed: the first setting, all but the seed, the seed.

    >>> held_fixed(["lr", "batch_size", "seed"])
    [('lr',), ('lr', 'batch_size'), ('seed',)]
    >>> held_fixed(["batchnorm+seed"]), held_fixed(["lr", "model.seed"])
    ([('batchnorm',), ('seed',)], [('lr',)])
    """
    others = tuple(name for axis in varied if (name := TOGETHER.join(but_seeds(axis))))
    seed: list[tuple[str, ...]] = [("seed",)] if unit_column(varied) == "seed" else []
    return list(dict.fromkeys([others[:1], others, *seed])) if others else seed


def unit_column(varied: Sequence[str]) -> str:
    """Return the column that says which networks are one independent unit: the seed if it varies, else the key.

    Networks of one seed share their initial weights and the order of their batches. The column `seed` is that of the
    batches; where an axis of other seeds alone varies, it is that axis.

    >>> unit_column(["data.seed+model.seed+training.seed"]), unit_column(["lr"]), unit_column(["lr", "model.seed"])
    ('seed', 'key', 'model.seed')
    """
    if {"seed", "training.seed"} & {name for axis in varied for name in axis.split(TOGETHER)}:
        return "seed"
    return next(filter(is_seed, varied), "key")


def groupings(networks: pd.DataFrame, varied: Sequence[str]) -> dict[str, pd.Series]:
    """Return the group number of each row, for every way of holding settings fixed."""
    settings = without_seeds(networks, varied).assign(seed=networks["seed"])
    return {", ".join(names): settings.groupby(list(names), dropna=False).ngroup() for names in held_fixed(varied)}


def without_seeds(networks: pd.DataFrame, varied: Sequence[str]) -> pd.DataFrame:
    """Return the settings that vary, but seeds, as text: a column for each axis, also where it sets several together.

    >>> networks = pd.DataFrame({"lr": [0.1, None], "batchnorm+seed": ["(True, 3)", "(False, 3)"], "seed": [3, 3]})
    >>> without_seeds(networks, ["lr", "batchnorm+seed", "seed"]).to_dict("list")
    {'lr': ['0.1', 'nan'], 'batchnorm': ['True', 'False']}
    """
    columns = {}
    for axis in varied:
        if kept := but_seeds(axis):
            parts = [_words_of(networks, axis, name) for name in kept]
            columns[TOGETHER.join(kept)] = reduce(lambda one, other: one + ", " + other, parts)
    return pd.DataFrame(columns, index=networks.index)


def _words_of(networks: pd.DataFrame, axis: str, name: str) -> pd.Series:
    """Return one of the settings of an axis as text; older tables have those that vary together in one column alone."""
    if name in networks:
        return networks[name].map(str).map(seedless)
    return networks[axis].map(lambda values: seedless(split_values(values)[axis.split(TOGETHER).index(name)]))


def _cell(value: Any, seed: int | None) -> Any:
    """Return a setting as a cell of a table; nested settings as text, without the seed that has a column of its own."""
    return value if value is None or isinstance(value, int | float | str) else seedless(str(value), seed)


def setting_of(settings: NetworkSettings, name: str) -> Any:
    """Return a network's setting as a cell of a table."""
    elsewhere = isinstance(settings.training, TrainedElsewhere)
    return _cell(facts(settings).get(name) if elsewhere else value_of(settings, name), settings.training.seed)


def _identity(record: Record) -> dict[str, Any]:
    training = record.settings.training
    if isinstance(training, TrainedElsewhere):
        known = training.known
        return {
            "key": record.settings.key,
            "lr": known.get("lr", nan),
            "batch_size": known.get("batch_size", nan),
            "seed": nan if training.seed is None else training.seed,
            "weights": short(training.weights),
        }
    return {
        "key": record.settings.key,
        "lr": training.optimiser.lr,
        "batch_size": training.batch_size or record.result.get("samples", 0),
        "seed": training.seed,
    }


def _columns_in_order(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return all columns in the order of first appearance: a network that diverged has no measured ones."""
    return list(dict.fromkeys(name for row in rows for name in row))
