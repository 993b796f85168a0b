"""The edge of stability on digits: `python docs/edge.py` draws docs/images/edge_of_stability.png anew.

Gradient descent on 600 digits, all of them in every step, tanh network 64-64-64-10, half squared error. The sharpness
rises until it is 2 / learning rate, where a quadratic's steps would begin to grow, and stays there while the loss goes
on falling (Cohen et al. 2021; sharpening Fig. 1). Half a minute.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

import flatlens as fl
from flatlens.data import digits
from flatlens.models import MLP
from flatlens.report.figures import tracked_figure
from flatlens.report.render import write_figure
from flatlens.training import SGD, Training, train

LEARNING_RATES = (0.4, 0.25, 0.16)
STEPS, EVERY = 2000, 20


def history(lr: float, steps: int = STEPS) -> pd.DataFrame:
    """Loss and sharpness through one run."""
    split = digits(train=600)
    model = MLP(64, (64, 64), 10, activation="tanh").build()
    problem = fl.Problem(model, "half_squared_error", split.train)
    tracker = fl.Tracker(problem, ["sharpness", "loss"], EVERY, live=False)
    train(model, split.train, Training(SGD(lr), loss="half_squared_error", max_steps=steps), watch=tracker)
    return tracker.history


def main() -> None:
    """Draw it."""
    torch.set_num_threads(1)
    figure = tracked_figure({f"learning rate {lr:g}": history(lr) for lr in LEARNING_RATES})
    folder = Path(__file__).parent / "images"
    for path in write_figure(replace(figure, name="edge_of_stability"), folder, len(LEARNING_RATES)):
        if path.suffix != ".png":
            path.unlink()
        else:
            print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
