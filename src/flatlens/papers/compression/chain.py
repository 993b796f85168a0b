"""X3: the steps of the bound from MLS to sharpness (Eq. 48's chain, first layer), for longer and longer training."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.papers.compression.networks import DIGITS, FIXED_BATCH, FIXED_LR, mlp, samples
from flatlens.papers.contrasts import mean_of, stronger
from flatlens.papers.evidence import reached
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import banded
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import SMOKE_ONLY
from flatlens.training import SGD, Training

CHAIN = {
    "A": "mls_chain.A_B.lhs[fc1]",
    "B": "mls_chain.B_C.lhs[fc1]",
    "C": "mls_chain.C_D.lhs[fc1]",
    "D": "mls_chain.C_D.rhs[fc1]",
}


def _x3(scale: Scale) -> Mapping[str, Study]:
    steps = {
        "smoke": (1, 40),
        "laptop": (1, 30, 100, 300, 1000, 3000, 10_000),
        "paper": (1, 100, 1000, 10_000, 100_000),
    }
    data, model = mlp(scale)
    training = Training(SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=1)
    base = NetworkSettings(data, model, training, ("mls", "loss"), ("mls_chain",), samples=samples(data))
    seeds = {"smoke": 2, "laptop": 5, "paper": 5}[scale]
    trained = Study("tightness", base, (Axis("max_steps", steps[scale]), Axis("seed", tuple(range(seeds)))))
    return {"tightness": trained}


_EVERY = 0.99
"""Share of networks above which a statement counts as true for all."""
ROUNDED = 1 + 1e-9
"""Factor by which rounding may violate an inequality."""


def _steps(results: Results) -> pd.DataFrame:
    """Return the networks with how much looser and wider the chain's last step is than the other two, and `holds`.

    `loose` compares logarithms of ratios, `wide` differences; `holds` is 1 where no step decreases by more than
    rounding.
    """
    networks = reached("tightness")(results)
    a, b, c, d = (networks[column] for column in CHAIN.values())
    loose = np.log(d / c) - np.maximum(np.log(b / a), np.log(c / b))
    holds = (a <= b * ROUNDED) & (b <= c * ROUNDED) & (c <= d * ROUNDED)
    return networks.assign(loose=loose, wide=(d - c) - np.maximum(b - a, c - b), holds=holds.astype(float))


def _x3_plots(results: Results) -> list[Plot]:
    networks = results["tightness"].networks.assign(panel="mean over the samples")
    long = networks.melt(["panel", "max_steps", "seed"], list(CHAIN.values()), "line", "y")
    long["line"] = long["line"].map({column: name for name, column in CHAIN.items()})
    caption = (
        "A <= B <= C <= D of Eq. 48 at the first layer. Lines are means over seeds, bands one standard deviation to "
        "either side."
    )
    return [banded(long.rename(columns={"max_steps": "x"}), "tightness", "The steps of the bound", caption, "step")]


EXPERIMENTS = (
    Experiment(
        "X3",
        "How tight each step is from the sensitivity of an MLP to its sharpness",
        "compression Fig. G.4",
        _x3,
        (
            Prediction(
                "C_D_is_the_loose_step",
                "The gap between C and D is large compared to those between A and B, and B and C, as ratios: D/C is "
                "above B/A and C/B.",
                "compression Fig. G.4",
                mean_of(_steps, "loose"),
            ),
            Prediction(
                "C_D_is_the_wide_step",
                "The same of the differences: D - C is above B - A and C - B.",
                "compression Fig. G.4",
                mean_of(_steps, "wide"),
            ),
            Prediction(
                "inequalities_hold",
                f"A <= B <= C <= D holds in every network: in more than {_EVERY:.0%} of them.",
                "compression Fig. G.4",
                mean_of(_steps, "holds"),
                "above",
                _EVERY,
            ),
            Prediction(
                "C_is_more_indicative",
                "C, of the gradient of the first layer's weights alone, tells the change of MLS better than D: its r "
                "with MLS over lengths of training is larger.",
                "compression Fig. G.4",
                stronger(reached("tightness"), [CHAIN["C"]], [CHAIN["D"]], "mls"),
            ),
        ),
        _x3_plots,
        {
            "smoke": (SMOKE_ONLY, DIGITS),
            "laptop": (
                DIGITS,
                "A network of its own for each number of steps, from the same start: the same training.",
            ),
            "paper": ("Widths are not given: 784 in every layer.",),
        },
    ),
)
