"""X11: the effect of scaling the inputs on Jacobian norm, sharpness and features.

Jacobian norms are of the network itself and of its softmax, as in the paper's other figures of the Jacobian norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import MLP, Activation
from flatlens.papers.evidence import along, reached
from flatlens.papers.experiment import FEW_SEEDS, SMOKE_ONLY, Experiment, Plot, Prediction, Results, Scale, Side, tested
from flatlens.papers.figures import followed_curves
from flatlens.papers.sharpening.networks import JACOBIAN, SOFTMAXED
from flatlens.papers.trajectories import in_course, largest, last, rise, rise_to_peak
from flatlens.training import SGD, Training

_SCALINGS = (0.5, 1.0, 1.5)
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


_INCREASING = (JACOBIAN.column, SOFTMAXED.column, "sharpness")
NUMBERS = {
    **{f"rise of {column}": rise(column) for column in _INCREASING},
    **{f"rise to the peak of {column}": rise_to_peak(column) for column in _INCREASING},
    **{f"last {column}": last(column) for column in _FEATURES},
    **{f"largest {column}": largest(column) for column in _INCREASING},
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
    measures = ("loss", JACOBIAN.column, SOFTMAXED.column, "sharpness", "feature_norm")
    axes = (Axis("scale", _SCALINGS), Axis("seed", tuple(range(seeds))))
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


_LOGITS = "The text does not say whether the Jacobian is the softmaxed network's, as in Fig. 1: both are shown."
_SEVERE = "while Jacobian growth *is* more severe for the smaller scalings, the sharpness growth is *less*"
_LARGER = "these matrices are *larger* for the larger scaling values"
_PUSHES = "which pushes the sharpness upwards despite Jacobian norm being smaller"


@dataclass(frozen=True)
class _Row:
    """A claim that a number of the course rises, or falls, with the scale of the inputs."""

    name: str
    number: str
    side: Side
    says: str
    quote: str
    reason: str = ""


_INCREASES = {
    "": ("rise", "to its mean over the later half of training"),
    ".peak": ("rise to the peak", "to its largest value"),
}
"""Two measures of an increase: the name's suffix, the number of the course, and where the increase ends, in words."""
_GROWN: tuple[tuple[str, str, Side, str, str], ...] = (
    ("jacobian", JACOBIAN.column, "below", "Jacobian norm", "more"),
    ("jacobian.softmaxed", SOFTMAXED.column, "below", "softmaxed network's Jacobian norm", "more"),
    ("sharpness", "sharpness", "above", "sharpness", "less"),
)
"""What increases: the row's name, the column, its side over the scale, in words, and how severely at small scales."""
_TWO_WAYS = (
    "The paper shows curves and gives no number for an increase. The rise to the later half of training and the rise "
    "to the peak may order the scalings differently, so both are shown."
)

_ROWS = (
    *(
        _Row(f"{name}{suffix}", f"{number} of {column}", side,
             f"where the data is scaled closer together, the increase of the {said}, {end}, is {more} severe",
             _SEVERE, _TWO_WAYS)
        for suffix, (number, end) in _INCREASES.items()
        for name, column, side, said, more in _GROWN
    ),
    _Row("sharpness.level", "largest sharpness", "above",
         "where the data is scaled closer together, the largest sharpness is lower", _PUSHES),
    _Row("jacobian.level", f"largest {JACOBIAN.column}", "below",
         "despite that the largest Jacobian norm is higher there", _PUSHES),
    _Row("jacobian.softmaxed.level", f"largest {SOFTMAXED.column}", "below",
         "despite that the largest Jacobian norm of the softmaxed network is higher there", _PUSHES, _LOGITS),
    *(
        _Row(f"features.{number}", f"last {column}", "above",
             f"at larger scalings the matrix of the features of hidden layer {number} has a larger spectral norm, at "
             "the end of the training", _LARGER)
        for number, column in enumerate(_FEATURES, start=1)
    ),
)  # fmt: skip


def _predictions() -> tuple[Prediction, ...]:
    return tuple(
        Prediction(
            f"{study}.{row.name}",
            f"{_SPOKEN[study]} networks: {row.says}.",
            f"sharpening C.2, {figure}",
            along(in_course(study, NUMBERS), "scale", row.number, ["seed"]),
            row.side,
            kind="reading" if row.reason else "claim",
            quote=row.quote,
            reason=row.reason,
        )
        for study, figure in _FIGURES.items()
        for row in _ROWS
    )


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


SEVERE = (
    "How severe an increase is: how far the mean over the later half of training, or the largest value, is above the "
    "first; the paper shows curves and no number."
)
EXPERIMENTS = (
    Experiment(
        "X11",
        "The scale of the inputs: steeper networks that are flatter",
        "sharpening Fig. 30, 31",
        _x11,
        _predictions(),
        _plots,
        {
            "smoke": (SMOKE_ONLY, SEVERE),
            "laptop": (
                "scikit-learn's digits in place of CIFAR-10, 600 to train on, all pixels divided by one deviation.",
                SEVERE, _LOGITS, "Measured every 5 steps at first, every 20 from step 60 on.",
            ),
            "desk": (
                SEVERE, _LOGITS, "10 seeds, 2000 test images.",
                "Measured every 20 steps on 1000 points; the paper does not say how often.",
            ),
            "paper": (FEW_SEEDS, SEVERE, _LOGITS, "Measured every 10 steps; the paper does not say how often."),
        },
    ),
)  # fmt: skip
