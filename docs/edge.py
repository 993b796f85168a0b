"""The edge of stability on digits: `python docs/edge.py` draws docs/images/edge_of_*.png anew.

Full-batch training on 600 digits, tanh network 64-64-64-10, half squared error, by four optimisers at three learning
rates each, three seeds. The sharpness in each optimiser's own geometry rises until a quadratic's steps would begin to
grow, and stays there while the loss continues to fall (Cohen et al. 2021 and 2022; sharpening Fig. 1). The same network
by plain SGD in batches of three sizes: batch sharpness rises to the edge (Andreyev and Beneventano 2024). Some fifteen
minutes.

docs/tables/edge.csv gets a row for each run: the step at which it came to its edge, and the median of sharpness over
edge from there on. The picture has the first seed.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import altair as alt
import pandas as pd
import torch

import flatlens as fl
from flatlens.data import digits
from flatlens.models import MLP
from flatlens.report.figures import tracked_figure
from flatlens.report.figures.figure import Figure
from flatlens.report.page import write_figures
from flatlens.training import SGD, Adam, RMSProp, Training, train
from flatlens.training.optimisers import Stepping

SHARPNESS = "preconditioned_sharpness"
STEPS, EVERY = 2000, 20
SEEDS = (0, 1, 2)
BATCH_SIZES, BATCH_LR = (8, 32, 128), 0.4
TABLE = Path(__file__).parent / "tables" / "edge.csv"
OPTIMISERS: dict[str, tuple[Stepping, ...]] = {
    "gradient descent": (SGD(0.4), SGD(0.25), SGD(0.16)),
    "gradient descent, momentum 0.9": (SGD(0.6, momentum=0.9), SGD(0.4, momentum=0.9), SGD(0.3, momentum=0.9)),
    "Adam": (Adam(2e-3), Adam(1.5e-3), Adam(1e-3)),
    "RMSProp": (RMSProp(1.5e-4), RMSProp(1e-4), RMSProp(7e-5)),
}


def history(optimiser: Stepping, steps: int = STEPS, seed: int = 0) -> pd.DataFrame:
    """Return loss and sharpness through one run."""
    split = digits(train=600)
    model = MLP(64, (64, 64), 10, activation="tanh", seed=seed).build()
    problem = fl.Problem(model, "half_squared_error", split.train)
    tracker = fl.Tracker(problem, [SHARPNESS, "loss"], EVERY, live=False)
    train(model, split.train, Training(optimiser, loss="half_squared_error", max_steps=steps), watch=tracker)
    return tracker.history


def settled(table: pd.DataFrame) -> tuple[float, float]:
    """Return the first step at which the sharpness is above the edge, and the median of their ratio from there on.

    Both are NaN where it is never above.
    """
    rows = table[table["measure"] == SHARPNESS].set_index("step")
    ratio = rows["value"] / rows["edge"]
    above = ratio.index[ratio > 1]
    return (float(above[0]), float(ratio.loc[above[0] :].median())) if len(above) else (math.nan, math.nan)


def of_batches(batch: int, steps: int = 12_000) -> pd.DataFrame:
    """Return sharpness and batch sharpness through a run of plain SGD."""
    split = digits(train=600)
    model = MLP(64, (64, 64), 10, activation="tanh").build()
    problem = fl.Problem(model, "half_squared_error", split.train)
    measures = [f"batch_sharpness(samples={batch})", "sharpness"]
    tracker = fl.Tracker(problem, measures, steps // 40, live=False)
    how = Training(SGD(BATCH_LR), batch_size=batch, loss="half_squared_error", max_steps=steps)
    train(model, split.train, how, watch=tracker)
    found = tracker.history
    return found.assign(measure=found["measure"].str.partition("(")[0])


def draw_batches() -> None:
    """Draw sharpness and batch sharpness of three batch sizes, and print where they end, over the edge."""
    every = {f"batches of {batch}": of_batches(batch) for batch in BATCH_SIZES}
    for run, table in every.items():
        late = table[table["step"] >= table["step"].max() / 2]
        median = (late["value"] * BATCH_LR / 2).groupby(late["measure"]).median()
        print(run, median.round(2).to_dict(), file=sys.stderr)
    _write(replace(tracked_figure(every), name="edge_of_batches"), len(every))


def _write(figure: Figure, colours: int) -> None:
    for path in write_figures([(figure, Path(__file__).parent / "images")], colours):
        if path.suffix != ".png":
            path.unlink()
        else:
            print(path, file=sys.stderr)


def main() -> None:
    """Draw the pictures, and write the table."""
    torch.set_num_threads(1)
    draw_batches()
    panels, data, runs = [], [], []
    for name, settings in OPTIMISERS.items():
        every = {(one.lr, seed): history(one, seed=seed) for one in settings for seed in SEEDS}
        runs += [(name, lr, seed, *settled(table)) for (lr, seed), table in every.items()]
        histories = {f"learning rate {lr:g}": table for (lr, seed), table in every.items() if seed == SEEDS[0]}
        only = {run: table[table["measure"] == SHARPNESS] for run, table in histories.items()}
        figure = tracked_figure(only)
        panels += [panel.properties(title=name, width=360) for panel in figure.panels]
        data.append(figure.data.assign(optimiser=name))
    columns = ["optimiser", "lr", "seed", "first step at the edge", "median of sharpness over edge"]
    pd.DataFrame(runs, columns=columns).to_csv(TABLE, index=False, float_format="%.4g")
    whole = alt.concat(*panels, columns=2).resolve_scale(color="independent", x="shared")
    drawn = replace(figure, name="edge_of_stability", data=pd.concat(data), whole=whole, panels=tuple(panels))
    _write(drawn, max(map(len, OPTIMISERS.values())))


if __name__ == "__main__":
    main()
