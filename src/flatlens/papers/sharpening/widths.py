"""X6: the end of section 5. Wide networks sharpen less, and linear models not at all while their Jacobian grows.

The paper shows no experiment of this: it cites Cohen et al. (2021). Networks and data are those of X6 at laptop scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.papers.contrasts import mean_of
from flatlens.papers.courses import in_course, rise
from flatlens.papers.evidence import Table, along, histories, reached
from flatlens.papers.experiment import Plot, Scale
from flatlens.papers.plots import BANDS, course_curves
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.sharpening.networks import BATCH_SHARPNESS, SOFTMAXED, rows
from flatlens.training import SGD, Training

_SHOWN = (Quantity("training loss", "loss"), BATCH_SHARPNESS, SOFTMAXED)
_SIZES: Mapping[Scale, tuple[tuple[int, ...], int, int, int]] = {
    "smoke": ((4, 8), 20, 20, 4),
    "laptop": ((16, 48, 144), 400, 80, 8),
    "desk": ((16, 48, 144), 400, 40, 12),
    "paper": ((16, 64, 256, 1024), 400, 20, 8),
}
"""Widths, steps, steps between measurements, and seeds."""
WIDTH = "width"


def width_studies(scale: Scale) -> dict[str, Study]:
    """Return networks of three hidden layers by their width, and linear models at a learning rate that suits them."""
    data, model = rows("smoke" if scale == "smoke" else "laptop")
    widths, steps, every, seeds = _SIZES[scale]
    followed = tuple(q.column for q in _SHOWN)
    training = Training(SGD(0.02), max_steps=steps)
    base = NetworkSettings(
        data,
        model,
        training,
        (*followed, "accuracy", "generalisation_gap"),
        followed=Followed(followed, every),
    )
    seed = Axis("seed", tuple(range(seeds)))
    wide = Axis("model.widths", tuple((width,) * 3 for width in widths))
    linear = replace(base, model=replace(model, widths=()), training=replace(training, optimiser=SGD(0.001)))
    shown = (GAP, *_SHOWN)
    return {
        "width": Study("full-batch gradient descent, by width", base, (wide, seed), shown, scale=scale),
        "linear": Study("full-batch gradient descent, linear models", linear, (seed,), shown, scale=scale),
    }


def with_width(table: Table) -> Table:
    """Return the networks with a column `width`: the size of the first hidden layer."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        sizes = networks["model.widths"].astype(str).str.extract(r"(\d+)", expand=False)
        return networks.assign(**{WIDTH: sizes.astype(int)})

    return found


_LESS = "wide networks exhibit less severe sharpening, and linear (kernel) models exhibit none at all"
_GROW = "these models nonetheless must increase in Jacobian norm during training by Theorem 5.1"


def width_predictions() -> tuple[Prediction, ...]:
    """Return section 5's claims about wide networks and linear models."""
    numbers = {
        "rise of sharpness": rise(BATCH_SHARPNESS.column),
        "rise of the Jacobian norm": rise(SOFTMAXED.column),
    }
    wide, linear = with_width(in_course("width", numbers)), in_course("linear", numbers)
    section = "sharpening section 5"
    return (
        Prediction(
            "width.sharpness",
            "The wider the network, the less the sharpness rises.",
            section,
            along(wide, WIDTH, "rise of sharpness", ["seed"]),
            "below",
            kind="claim",
            quote=_LESS,
        ),
        Prediction(
            "linear.sharpness",
            "The sharpness of linear models does not rise: it falls.",
            section,
            mean_of(linear, "rise of sharpness"),
            "below",
            kind="claim",
            quote=_LESS,
        ),
        Prediction(
            "linear.jacobian",
            "The softmaxed Jacobian norm of linear models rises nevertheless.",
            section,
            mean_of(linear, "rise of the Jacobian norm"),
            kind="claim",
            quote=_GROW,
        ),
    )


def width_plots(results: Results) -> list[Plot]:
    """Return the curves of networks by their width, and of linear models."""
    caption = f"Full-batch gradient descent. {BANDS}. {{}} The paper has no such figure."
    plots = []
    for study, title, said in (
        ("width", "Section 5: networks by their width", "Learning rate 0.02."),
        ("linear", "Section 5: linear models", "Learning rate 0.001."),
    ):
        networks = reached(study)(results)
        lines = with_width(reached(study))(results) if study == "width" else networks.assign(**{WIDTH: "linear"})
        courses = histories(results[study])
        plots.append(course_curves(lines, courses, WIDTH, _SHOWN, f"by_{study}", title, caption.format(said)))
    return plots
