"""X12: networks from R to R through eight points, with starts of a high and of a low frequency.

The paper does not name the loss. The mean squared error is used here, at 8 times the printed learning rate of 1e-4.
This makes the same steps as the sum over the eight points at 1e-4; the sharpness of the sum is 8 times that of the
mean. Then ReLU networks of a low start come as near to the points as single precision allows, and their sharpness has
the printed size. With the mean at 1e-4, one was still at an error of 0.026 after 40,000 steps, and the sharpness of the
other kinds was less than a fifth of the printed one.

The printed "Jacobian norm" of Tables 1 and 2 is most likely lambda_max(J^T J), which the power method of A.1 finds,
without its root: the sizes agree with max_i f'(x_i)^2, not with max_i |f'(x_i)|. Both are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.data.synthetic import POINTS
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import CoordinateNet
from flatlens.papers.contrasts import changed, mean_of, side_by_side
from flatlens.papers.evidence import Evidence, labelled, with_units
from flatlens.papers.experiment import Plot, Results, Scale, deferred, seed_axis
from flatlens.training import REACHED, SGD, Training, Until

TABLE_OF = {"gaussian": "Table 1", "relu": "Table 2"}
ACTIVATION_NAMES = {"gaussian": "Gaussian", "relu": "ReLU"}
STARTS = ("high", "low")
_JACOBIAN_NORM, SQUARED, SUMMED_SHARPNESS = "jacobian_norm", "jacobian_norm^2", "sharpness of the sum"
FIRST_LAYER, TOTAL_VARIATION = "weight_norm[fc1]", "total variation"
PUBLISHED: Mapping[str, Mapping[str, tuple[tuple[float, float], ...]]] = {
    "gaussian": {
        "Jacobian norm": ((326.80, 182.51), (84.07, 49.30)),
        "sharpness": ((13517.61, 3871.97), (18353.54, 5751.98)),
        "first layer's norm": ((9.09, 0.34), (0.56, 0.02)),
    },
    "relu": {
        "Jacobian norm": ((121.59, 80.79), (42.96, 7.82)),
        "sharpness": ((14211.05, 4767.26), (9922.45, 3330.37)),
        "first layer's norm": ((9.61, 0.28), (9.56, 0.16)),
    },
}
"""Tables 1 and 2: mean and standard deviation over 10 seeds, for a high and for a low start."""
COMPARED: Mapping[str, Mapping[str, str]] = {
    "Jacobian norm": {"": _JACOBIAN_NORM, ", without the root": SQUARED},
    "sharpness": {"": SUMMED_SHARPNESS, " of the mean": "sharpness"},
    "first layer's norm": {"": FIRST_LAYER},
}
"""Rows of the tables, and the columns that may hold them here, by what is said of each."""


@deferred
def measured(results: Results, study: str) -> pd.DataFrame:
    """Return the networks, with the square of the Jacobian norm, and the sharpness of the error summed over points.

    The total variation is that of the network's function between 0 and 1: how far its graph goes up and down. Networks
    that took all the steps count, too: the paper's protocol is a number of steps.
    """
    every = results[study].networks
    ended = every[every["outcome"].isin([*REACHED, "out of steps"])].reset_index(drop=True)
    networks = with_units(results[study], ended)
    squared, summed = networks[_JACOBIAN_NORM] ** 2, POINTS * networks["sharpness"]
    graphs = results[study].functions.sort_values("x").groupby("key")["y"]
    variations = networks["key"].map(graphs.agg(lambda y: float(np.abs(np.diff(y)).sum())))
    return networks.assign(**{SQUARED: squared, SUMMED_SHARPNESS: summed, TOTAL_VARIATION: variations})


def of_seeds(results: Results) -> pd.DataFrame:
    """Return one row per seed: `root` and `square`, the mean distance of Jacobian norms from the printed ones.

    A distance is |log(here / printed)|, its mean that over activations and starts; `first_layer.gaussian` and
    `first_layer.relu` are |log(low / high)| of the first layer's norm.
    """
    distances: dict[str, list[pd.Series]] = {_JACOBIAN_NORM: [], SQUARED: []}
    columns = {}
    for study, table in PUBLISHED.items():
        pairs = side_by_side(measured(study), "start")(results).set_index("seed")
        for start, (mean, _) in zip(STARTS, table["Jacobian norm"], strict=True):
            for column, known in distances.items():
                known.append((pairs[f"{column}, {start}"] / mean).map(np.log).abs())
        ratio = pairs[f"{FIRST_LAYER}, low"] / pairs[f"{FIRST_LAYER}, high"]
        columns[f"first_layer.{study}"] = ratio.map(np.log).abs()
    for name, column in (("root", _JACOBIAN_NORM), ("square", SQUARED)):
        columns[name] = pd.concat(distances[column], axis=1).mean(axis=1, skipna=False)
    found = pd.DataFrame(columns).reset_index()
    return labelled(found.assign(**{"root less square": found["root"] - found["square"]}), ["seed"])


def beside_printed(results: Results) -> Plot:
    """Return the tables of our numbers beside the printed ones, with the ratios of the two starts."""
    cells = []
    for study, table in PUBLISHED.items():
        networks = measured(study)(results)
        panel = f"{TABLE_OF[study]}: {ACTIVATION_NAMES[study]} networks"
        for row, printed in table.items():
            for said, column in COMPARED[row].items():
                # mean, standard deviation and number of seeds after each start
                after = (networks.loc[networks["start"] == start, column].dropna() for start in STARTS)
                here = [(float(values.mean()), float(values.std()), len(values)) for values in after]
                for source, (high, low) in (("here", here), ("paper", [(*numbers, 10) for numbers in printed])):
                    ratio = low[0] / high[0]
                    spread = abs(ratio) * math.hypot(low[1] / low[0], high[1] / high[0])
                    for of, (m, s, n) in (("high", high), ("low", low), ("low / high", (ratio, spread, low[2]))):
                        cells.append({
                            "panel": panel, "row": f"{row}{said}, {of}", "column": source,
                            "text": f"{m:,.2f} ± {s:,.2f}", "mean": m, "deviation": s, "n": n,
                        })  # fmt: skip
    caption = (
        "Means and standard deviations over the seeds, here and in the paper, and the ratio of the means after the "
        "low and after the high start, with the deviation that follows. The eight targets are not published: sizes "
        "cannot be compared one by one. The Jacobian norm stands without the power method's root, too; the sharpness "
        "is that of the error summed over the points, and that of its mean: the paper says neither."
    )
    return Plot("tables", "Tables 1 and 2, here and in the paper", caption, "table", pd.DataFrame(cells))


_SHOWN = (
    GAP,
    Quantity("Jacobian norm", "jacobian_norm"),
    Quantity("sharpness", "sharpness"),
    Quantity("norm of the first layer's weight", "weight_norm[fc1]"),
    Quantity("Jacobian norm above the first layer", "layer_factors.jacobian[fc1]"),
)
_MEASURES = ("jacobian_norm", "sharpness", "weight_norm", "layer_factors", "loss", "test_loss", "generalisation_gap")
SPLINE = "spline"


def _x12(scale: Scale) -> Mapping[str, Study]:
    sizes = {
        "smoke": {"gaussian": (4, 200), "relu": (4, 200)},
        "laptop": {"gaussian": (10, 10_000), "relu": (10, 100_000)},
        "desk": {"gaussian": (20, 10_000), "relu": (20, 100_000)},
        "paper": {"gaussian": (10, 10_000), "relu": (10, 100_000)},
    }[scale]
    models = {"gaussian": CoordinateNet("gaussian", "low"), "relu": CoordinateNet("relu", "low")}
    if scale == "smoke":
        models = {name: replace(model, width=16, steps=20, points=16) for name, model in models.items()}
    # below a mean squared error of 1e-9 training is practically finished
    until = Until(loss_below=1e-9) if scale in ("laptop", "desk") else Until()
    studies = {}
    for name, (seeds, steps) in sizes.items():
        optimiser = SGD(POINTS * 1e-4, momentum=0.9)
        training = Training(optimiser, loss="mse", until=until, max_steps=steps, check_every=500)
        base = NetworkSettings(DataSettings("eight_points"), models[name], training, _MEASURES)
        studies[name] = Study(name, base, (Axis("start", STARTS), seed_axis(seeds)), _SHOWN, scale=scale)
    return studies


def low_over_high(study: str, column: str) -> Evidence:
    """Return the mean log ratio of a number after the low start to that after the high start."""
    return changed(side_by_side(measured(study), "start"), f"{column}, high", f"{column}, low")


def low_less_high(study: str, column: str) -> Evidence:
    """Return the mean over seeds of a number after the low start less that after the high start."""

    def both(results: Results) -> pd.DataFrame:
        pairs = side_by_side(measured(study), "start")(results)
        return pairs.assign(**{name: pairs[f"{column}, low"] - pairs[f"{column}, high"]})

    name = f"{column}, low less high"
    return mean_of(both, name)


def _x12_plots(results: Results) -> list[Plot]:
    parts = []
    for study, name in ACTIVATION_NAMES.items():
        result = results[study]
        graphs = result.functions.merge(result.networks[["key", "start"]], on="key")
        first = int(graphs["seed"].min())
        parts.append(graphs[graphs["seed"] == first].assign(panel=name, line=graphs["start"]))
        split = DataSettings("eight_points", seed=first).load()
        spline = {"x": split.test_x.flatten().numpy(), "y": split.test_y.flatten().numpy()}
        parts.append(pd.DataFrame(spline).assign(panel=name, line=SPLINE))
    rows = pd.concat(parts, ignore_index=True)
    drawn = rows.assign(low=rows["y"], high=rows["y"])[["panel", "x", "line", "y", "low", "high"]]
    said = "The networks of the first seed, from a high and a low start; dashed, the natural spline through the points."
    title = "Fig. 32: interpolations of eight points"
    return [Plot("fig32", title, said, "curves", drawn, "x", "start", dashed=(SPLINE,)), beside_printed(results)]
