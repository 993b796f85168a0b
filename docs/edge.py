"""The edge of stability on digits: `python docs/edge.py` draws docs/images/edge_of_stability.png anew.

Full-batch training on 600 digits, tanh network 64-64-64-10, half squared error, by four optimisers at three learning
rates each. The sharpness in each optimiser's own geometry rises until a quadratic's steps would begin to grow, and
stays there while the loss goes on falling (Cohen et al. 2021 and 2022; sharpening Fig. 1). Some four minutes.
"""

from __future__ import annotations

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
from flatlens.report.render import write_figure
from flatlens.training import SGD, Adam, RMSProp, Training, train
from flatlens.training.optimisers import Stepping

SHARPNESS = "preconditioned_sharpness"
STEPS, EVERY = 2000, 20
OPTIMISERS: dict[str, tuple[Stepping, ...]] = {
    "gradient descent": (SGD(0.4), SGD(0.25), SGD(0.16)),
    "gradient descent, momentum 0.9": (SGD(0.6, momentum=0.9), SGD(0.4, momentum=0.9), SGD(0.3, momentum=0.9)),
    "Adam": (Adam(2e-3), Adam(1.5e-3), Adam(1e-3)),
    "RMSProp": (RMSProp(1.5e-4), RMSProp(1e-4), RMSProp(7e-5)),
}


def history(optimiser: Stepping, steps: int = STEPS) -> pd.DataFrame:
    """Loss and sharpness through one run."""
    split = digits(train=600)
    model = MLP(64, (64, 64), 10, activation="tanh").build()
    problem = fl.Problem(model, "half_squared_error", split.train)
    tracker = fl.Tracker(problem, [SHARPNESS, "loss"], EVERY, live=False)
    train(model, split.train, Training(optimiser, loss="half_squared_error", max_steps=steps), watch=tracker)
    return tracker.history


def main() -> None:
    """Draw it."""
    torch.set_num_threads(1)
    panels, data = [], []
    for name, settings in OPTIMISERS.items():
        histories = {f"learning rate {one.lr:g}": history(one) for one in settings}
        only = {run: table[table["measure"] == SHARPNESS] for run, table in histories.items()}
        figure = tracked_figure(only)
        panels += [panel.properties(title=name, width=360) for panel in figure.panels]
        data.append(figure.data.assign(optimiser=name))
    whole = alt.concat(*panels, columns=2).resolve_scale(color="independent", x="shared")
    drawn = replace(figure, name="edge_of_stability", data=pd.concat(data), whole=whole, panels=tuple(panels))
    for path in write_figure(drawn, Path(__file__).parent / "images", max(map(len, OPTIMISERS.values()))):
        if path.suffix != ".png":
            path.unlink()
        else:
            print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
