"""The data of figures, from the tables of studies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.experiments.experiment import Plot
from flatlens.experiments.result import StudyResult
from flatlens.statistics import average


def pairwise(name: str, result: StudyResult) -> Plot:
    """Every quantity of a study against every other, over the networks that reached the end of their training."""
    names = [q.name for q in result.quantities if q.name in result.values]
    data = result.values.loc[result.values["included"], names].reset_index(drop=True)
    return Plot(
        name=f"pairs_{name}",
        title=f"Everything against everything: {name}",
        caption=f"One mark a network, {len(data)} of them. Above the diagonal Pearson's r.",
        kind="matrix",
        data=data,
        study=name,
    )


def followed_curves(result: StudyResult, setting: str, measures: Mapping[str, str], held: str) -> Plot:
    """What was followed in training, a line a value of the setting: the mean over seeds, with its extremes."""
    table = result.histories
    table = table[(table["layer"] == "") & table["measure"].isin(measures)]
    panels = table["measure"].map(measures)
    grouped = table.assign(panel=panels).groupby(["panel", "step", setting], sort=True)["value"]
    data = grouped.agg(y="mean", low="min", high="max").reset_index()
    data = data.rename(columns={"step": "x", setting: "line"})
    order = list(dict.fromkeys(measures.values()))
    data = data.sort_values("panel", key=lambda p: p.map(order.index), kind="stable").reset_index(drop=True)
    words = {"lr": "learning rate", "batch_size": "batch size"}.get(setting, setting.replace("_", " "))
    seeds = result.networks["seed"].nunique()
    return Plot(
        name=f"through_training_{setting}",
        title=f"Through training, by {words}",
        caption=f"Lines are means over {seeds} seeds at one {words}, bands from the least to the largest; {held}.",
        kind="curves",
        data=data[["panel", "x", "line", "y", "low", "high"]],
        x="step",
        y=words,
    )


def bars(data: pd.DataFrame, name: str, title: str, caption: str, x: str, y: str) -> Plot:
    """A bar a panel, x and group, with the 95% interval of its mean; `data` has panel, x, group and value."""
    rows = []
    for key, values in data.groupby(["panel", "x", "group"], sort=False)["value"]:
        found = average(values.to_numpy())
        mean = found.value if found.value == found.value else float(np.nanmean(values))
        rows.append((*key, mean, found.low, found.high))
    return Plot(
        name, title, caption, "bars", pd.DataFrame(rows, columns=["panel", "x", "group", "y", "low", "high"]), x, y
    )
