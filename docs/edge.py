"""The edge of stability on digits: `python docs/edge.py` draws docs/images/edge_of_stability.png anew.

Full-batch training on 600 digits, tanh network 64-64-64-10, half squared error, by four optimisers at three learning
rates each, three seeds. The sharpness in each optimiser's own geometry rises until a quadratic's steps would begin to
grow, and stays there while the loss goes on falling (Cohen et al. 2021 and 2022; sharpening Fig. 1). Some twelve
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
from flatlens.report.page import write_figures
from flatlens.training import SGD, Adam, RMSProp, Training, train
from flatlens.training.optimisers import Stepping

SHARPNESS = "preconditioned_sharpness"
STEPS, EVERY = 2000, 20
SEEDS = (0, 1, 2)
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


def main() -> None:
    """Draw the picture, and write the table."""
    torch.set_num_threads(1)
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
    for path in write_figures([(drawn, Path(__file__).parent / "images")], max(map(len, OPTIMISERS.values()))):
        if path.suffix != ".png":
            path.unlink()
        else:
            print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
