"""X10: the link from Jacobian to sharpness through the loss, in the first epoch of SGD and in the whole training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.papers.contrasts import mean_of
from flatlens.papers.courses import fall, in_course, rise
from flatlens.papers.evidence import along, histories, reached
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import course_curves
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import SMOKE_ONLY
from flatlens.papers.sharpening.networks import (
    BATCH_SHARPNESS,
    GHOSTS,
    PATCH_ROWS,
    SOFTMAXED,
    UNTOLD_INIT,
    VGG,
    rows,
)
from flatlens.papers.sharpening.smoothing import SMOOTHING, of_smoothing, smoothings
from flatlens.training import SGD, Training

_OUTPUTS = Quantity("output norm", "output_norm")

COLLAPSED = 0.1
"""Share of its largest value below which a measure counts as collapsed."""


def _x10(scale: Scale) -> Mapping[str, Study]:
    data, model = rows(scale)
    batch, epoch, every, epochs, seeds = {
        "smoke": (5, 4, 2, 3, 4),
        "laptop": (5, 120, 5, 30, 5),
        "paper": (128, 391, 5, 90, 5),
    }[scale]
    lr, samples = (0.1, 2500) if scale == "paper" else (0.02, None)
    if scale == "laptop":
        data, samples = replace(data, train=600), 300
    training = Training(SGD(lr), batch_size=batch, max_epochs=1, check_every=100)
    shown = (BATCH_SHARPNESS, SOFTMAXED, _OUTPUTS)
    followed = tuple(q.column for q in shown)
    axes = (
        smoothings(scale),
        Axis("seed", tuple(range(seeds))),
    )
    base = NetworkSettings(
        data if scale != "paper" else DataSettings("cifar10", standardise="channel"),
        model if scale != "paper" else VGG,
        training,
        (*followed, "loss", "accuracy", "generalisation_gap"),
        samples=samples,
        followed=Followed(followed, every, samples),
    )
    first = Study("the first epoch", base, axes, (GAP, *shown), scale=scale)
    whole = first.setting("max_epochs", epochs).setting("every", epoch)
    return {"first_epoch": first, "training": whole}


def _x10_predictions() -> tuple[Prediction, ...]:
    sharp, jacobian, outputs = BATCH_SHARPNESS.column, SOFTMAXED.column, _OUTPUTS.column
    first = in_course("first_epoch", {"rise of sharpness": rise(sharp), "rise of the Jacobian norm": rise(jacobian)})
    whole = in_course(
        "training",
        {
            "log(last / largest sharpness)": fall(sharp),
            "log(last / largest Jacobian norm)": fall(jacobian),
            "rise of the output norm": rise(outputs),
        },
    )
    plain, smooth, share = of_smoothing(whole, False), of_smoothing(whole, True), f"{COLLAPSED:.0%}"
    return (
        Prediction(
            "first_epoch.sharpens",
            "In the first epoch sharpness rises, as under gradient descent.",
            "sharpening C.1, Fig. 28",
            mean_of(first, "rise of sharpness"),
        ),
        Prediction(
            "first_epoch.jacobian_rises",
            "And so does the softmaxed Jacobian norm.",
            "sharpening C.1, Fig. 28",
            mean_of(first, "rise of the Jacobian norm"),
        ),
        Prediction(
            "first_epoch.sharpness",
            "In the first epoch smoother labels are associated with less severe progressive sharpening.",
            "sharpening C.1, Fig. 28",
            along(first, SMOOTHING, "rise of sharpness", ["seed"]),
            "below",
        ),
        Prediction(
            "first_epoch.jacobian",
            "In the first epoch they are associated with a less severe increase of the softmaxed Jacobian norm.",
            "sharpening C.1, Fig. 28",
            along(first, SMOOTHING, "rise of the Jacobian norm", ["seed"]),
            "below",
        ),
        Prediction(
            "collapse.sharpness",
            f"Over all epochs sharpness collapses with unsmoothed labels, to below {share} of its largest value.",
            "sharpening C.1, Fig. 29",
            mean_of(plain, "log(last / largest sharpness)"),
            "below",
            log(COLLAPSED),
        ),
        Prediction(
            "plateau.sharpness",
            f"With smoothed labels it plateaus: it ends above {share} of its largest value.",
            "sharpening C.1, Fig. 29",
            mean_of(smooth, "log(last / largest sharpness)"),
            "above",
            log(COLLAPSED),
        ),
        Prediction(
            "collapse.jacobian",
            f"With unsmoothed labels the softmaxed Jacobian norm collapses, too, to below {share} of its largest.",
            "sharpening C.1, Fig. 29",
            mean_of(plain, "log(last / largest Jacobian norm)"),
            "below",
            log(COLLAPSED),
        ),
        Prediction(
            "outputs.grow",
            "With unsmoothed labels the norm of the output grows.",
            "sharpening C.1, Fig. 29",
            mean_of(plain, "rise of the output norm"),
        ),
    )


def _x10_plots(results: Results) -> list[Plot]:
    return [
        course_curves(
            reached(study)(results),
            histories(results[study]),
            SMOOTHING,
            (BATCH_SHARPNESS, SOFTMAXED, _OUTPUTS),
            name,
            title,
            "SGD. Lines are means over seeds, bands one standard deviation to either side.",
        )
        for study, name, title in (
            ("first_epoch", "fig28", "The first epoch, by label smoothing"),
            ("training", "fig29", "The whole training, by label smoothing"),
        )
    ]


MECHANISM = (
    "Not weighed: that the growth of the output is a vanishing of the loss's curvature, and that the Jacobian's own "
    "Lipschitz constant grows."
)
_UNSAID = (
    "Learning rate 0.1, no momentum and no weight decay, label smoothing 0, 0.5 and 0.75, 5 trials, 2500 points to "
    "measure on, every epoch: the paper gives none of these."
)

EXPERIMENTS = (
    Experiment(
        "X10",
        "The cost function between Jacobian and sharpness: the first epoch, and all of them",
        "sharpening Fig. 28, 29",
        _x10,
        _x10_predictions(),
        _x10_plots,
        {
            "smoke": (SMOKE_ONLY, PATCH_ROWS),
            "laptop": (
                PATCH_ROWS,
                "600 patches, 300 of them measured on; batches of 5, learning rate 0.02, 30 epochs. In an epoch of 30 "
                "steps the sharpness has not begun to rise.",
                MECHANISM,
            ),
            "paper": (_UNSAID, MECHANISM, UNTOLD_INIT, GHOSTS),
        },
    ),
)
