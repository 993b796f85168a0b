"""The tables of a study, derived from its networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from flatlens.experiments.quantities import Quantity
from flatlens.experiments.store import Record
from flatlens.training import REACHED

IDENTITY = ["key", "lr", "batch_size", "seed"]
GROUPINGS = {"lr": ["lr"], "lr, batch_size": ["lr", "batch_size"], "seed": ["seed"]}


def networks_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a network, in the order given: identity, outcome, steps, and every measured number as a column."""
    rows = []
    for record in records:
        row = {**_identity(record), "outcome": record.result["outcome"], "steps": record.result["steps"]}
        row |= {name if layer is None else f"{name}[{layer}]": e.value for (name, layer), e in record.report.items()}
        rows.append(row)
    return pd.DataFrame(rows, columns=_columns_in_order(rows))


def layers_table(records: Sequence[Record]) -> pd.DataFrame:
    """Tidy: the values measured for each layer, with the layer's position in execution order."""
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


def curves_table(records: Sequence[Record]) -> pd.DataFrame:
    """Tidy: the training curves."""
    columns = ["step", "loss", "accuracy", "test_loss"]
    tables = [
        pd.DataFrame({**_identity(record), **{name: record.curves[name].numpy() for name in columns}})
        for record in records
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=[*IDENTITY, *columns])


def values_table(networks: pd.DataFrame, quantities: Sequence[Quantity]) -> pd.DataFrame:
    """The studied quantities, transformed; `included` where training reached its end."""
    identity = networks[IDENTITY].assign(included=networks["outcome"].isin(REACHED))
    return pd.concat([identity, pd.DataFrame({q.name: q.of(networks) for q in quantities})], axis=1)


def groupings(values: pd.DataFrame) -> dict[str, pd.Series]:
    """The number of each row's group, for every way of holding settings fixed."""
    return {name: values.groupby(columns).ngroup() for name, columns in GROUPINGS.items()}


def _identity(record: Record) -> dict[str, Any]:
    training = record.settings.training
    return {
        "key": record.settings.key,
        "lr": training.optimiser.lr,
        "batch_size": training.batch_size,
        "seed": training.seed,
    }


def _columns_in_order(rows: Sequence[dict[str, Any]]) -> list[str]:
    """All columns in the order they first appear: a network that diverged has no measured ones."""
    return list(dict.fromkeys(name for row in rows for name in row))
