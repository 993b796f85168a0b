"""X11: the effect of scaling the inputs on Jacobian norm, sharpness and features.

Jacobian norms are of the network itself and of its softmax, as in the paper's other figures of the Jacobian norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import MLP, Activation
from flatlens.papers.claims import experiment
from flatlens.papers.evidence import Evidence, along, in_trajectory, last, peak, reached, rise, rise_to_peak
from flatlens.papers.experiment import Plot, Results, Scale, tested
from flatlens.papers.figures import followed_curves
from flatlens.papers.sharpening.networks import JACOBIAN, SOFTMAXED
from flatlens.training import SGD, Training

NORM, SOFTMAXED_NORM = JACOBIAN.column, SOFTMAXED.column
_FEATURES = ("feature_norm[fc2]", "feature_norm[fc3]")
_SHOWN = (
    Quantity("training loss", "loss"),
    JACOBIAN,
    SOFTMAXED,
    Quantity("sharpness", "sharpness"),
    Quantity("norm of the first layer's features", _FEATURES[0]),
    Quantity("norm of the second layer's features", _FEATURES[1]),
)
_OFTEN_AT_FIRST = (*range(0, 60, 5), *range(60, 301, 20))
"""Steps at which networks are measured; often at first, as the sharpness on digits is largest in the first steps."""
_FIGURES: Mapping[Activation, str] = {"relu": "Fig. 30", "tanh": "Fig. 31"}
_SPOKEN = {"relu": "ReLU", "tanh": "tanh"}


_INCREASING = (NORM, SOFTMAXED_NORM, "sharpness")
NUMBERS = {
    **{f"rise of {column}": rise(column) for column in _INCREASING},
    **{f"rise to the peak of {column}": rise_to_peak(column) for column in _INCREASING},
    **{f"last {column}": last(column) for column in _FEATURES},
    **{f"largest {column}": peak(column) for column in _INCREASING},
}
"""Numbers of each network, from its measures followed in training."""


_FIRST_5000 = DataSettings(
    "cifar10", train=5000, order="first", standardise="component", statistics="all", scale=1.0, flat=True
)


def _x11(scale: Scale) -> Mapping[str, Study]:
    sizes: Mapping[Scale, tuple[DataSettings, MLP, int, int | tuple[int, ...], int]] = {
        "smoke": (DataSettings("digits", train=60, scale=1.0), MLP(64, (20, 20), 10), 40, 20, 2),
        "laptop": (DataSettings("digits", train=600, scale=1.0), MLP(64, (200, 200), 10), 300, _OFTEN_AT_FIRST, 8),
        "desk": (replace(_FIRST_5000, test=tested(scale)), MLP(3072, (200, 200), 10), 300, 20, 10),
        "paper": (_FIRST_5000, MLP(3072, (200, 200), 10), 300, 10, 5),
    }
    data, model, steps, every, seeds = sizes[scale]
    samples = 1000 if scale == "desk" else None
    measures = ("loss", NORM, SOFTMAXED_NORM, "sharpness", "feature_norm")
    axes = (Axis("scale", (0.5, 1.0, 1.5)), Axis("seed", tuple(range(seeds))))
    training = Training(SGD(0.2), loss="cross_entropy", max_steps=steps, check_every=10)
    studies: dict[str, Study] = {}
    for name in _FIGURES:
        network = replace(model, activation=name)
        base = NetworkSettings(
            data,
            network,
            training,
            (*measures, "generalisation_gap"),
            samples=samples,
            followed=Followed(measures, every, samples),
        )
        studies[name] = Study(name, base, axes, (GAP, *_SHOWN), scale=scale)
    return studies


def over_scales(study: str, number: str) -> Evidence:
    """Return the mean over seeds of Kendall's tau-b of the scale of the inputs and a number."""
    return along(in_trajectory(study, NUMBERS), "scale", number, ["seed"])


def _plots(results: Results) -> list[Plot]:
    plots = []
    for study, figure in _FIGURES.items():
        name, title = figure.replace(". ", "").lower(), f"{figure}: input scaling, {_SPOKEN[study]} networks"
        plots.append(
            followed_curves(
                results[study], reached(study)(results), "scale", _SHOWN, name, f"{title} through training",
                "gradient descent at a learning rate of 0.2",
            )
        )  # fmt: skip
    return plots


EXPERIMENTS = (experiment("sharpening", "X11", _x11, _plots, globals()),)
