"""X10: the link from Jacobian to sharpness through the loss, in the first epoch of SGD and in the whole training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.papers.contrasts import mean_of, with_over_without
from flatlens.papers.evidence import Table, along, histories, reached, trained_in
from flatlens.papers.experiment import (
    FEW_SEEDS,
    ONE_DRAW,
    SMOKE_ONLY,
    Experiment,
    Plot,
    Prediction,
    Results,
    Scale,
    Side,
    claim,
    tested,
)
from flatlens.papers.figures import BANDS, course_curves
from flatlens.papers.sharpening.networks import (
    BATCH_SHARPNESS,
    GHOSTS,
    NARROW_VGG,
    PATCH_ROWS,
    SMOOTHING,
    SOFTMAXED,
    UNTOLD_INIT,
    VGG,
    measured_in,
    of_smoothing,
    rows,
    smoothings,
)
from flatlens.papers.trajectories import Number, correlated_changes, in_course, largest, last, rise
from flatlens.training import SGD, Training

_OUTPUTS = Quantity("output norm", "output_norm")
_FACTORS = "layer_factors(blocks=False)"
_CURVATURE = Quantity("norm of C", f"{_FACTORS}.loss_curvature")
"""||C||, the square root of the loss's second derivative in Eq. 4."""

_COLLAPSED = 0.1
"""Share of its largest value below which the sharpness counts as collapsed."""


def _on(scale: Scale) -> tuple[DataSettings, Architecture]:
    """Return the data and the network."""
    if scale == "paper":
        return DataSettings("cifar10", standardise="channel"), VGG
    if scale == "desk":
        return DataSettings("cifar10", train=2000, test=tested(scale), standardise="channel"), NARROW_VGG
    data, model = rows(scale)
    return (replace(data, train=600) if scale == "laptop" else data), model


def _x10(scale: Scale) -> Mapping[str, Study]:
    data, network = _on(scale)
    lr, batch, often, seldom, epochs, seeds, samples = {
        "smoke": (0.02, 5, 2, 4, 3, 4, None),
        "laptop": (0.02, 5, 5, 120, 30, 8, 300),
        "desk": (0.1, 64, 2, 64, 60, 10, 500),
        "paper": (0.1, 128, 5, 391, 90, 5, 2500),
    }[scale]
    training = Training(SGD(lr), batch_size=batch, max_epochs=1, check_every=100)
    shown = (BATCH_SHARPNESS, SOFTMAXED, _OUTPUTS)
    followed = tuple(q.column for q in shown)
    axes = (
        smoothings(scale),
        Axis("seed", tuple(range(seeds))),
    )
    base = NetworkSettings(
        data,
        network,
        training,
        (*followed, "loss", "accuracy", "generalisation_gap"),
        samples=samples,
        followed=Followed(followed, often, samples),
        dtype=measured_in(scale),
    )
    first = Study("the first epoch", base, axes, (GAP, *shown), scale=scale)
    whole = first.setting("max_epochs", epochs).setting("every", seldom)
    with_curvature = replace(whole.base, followed=Followed((*followed, _FACTORS), seldom, samples))
    return {"first_epoch": first, "training": replace(whole, base=with_curvature)}


def _share(column: str) -> Number:
    """Return the last value as a share of the largest: 1 if the column ends there, near 0 if it has collapsed."""
    return lambda course: last(column)(course) / largest(column)(course)


def _x10_predictions() -> tuple[Prediction, ...]:
    sharp, jacobian, outputs = BATCH_SHARPNESS.column, SOFTMAXED.column, _OUTPUTS.column
    whole = in_course(
        "training",
        {
            "share of the largest sharpness": _share(sharp),
            "share of the largest Jacobian norm": _share(jacobian),
            "share of the largest norm of C": _share(_CURVATURE.column),
            "rise of the output norm": rise(outputs),
            "r of the changes of output norm and norm of C": correlated_changes(outputs, _CURVATURE.column),
            "of ranks": correlated_changes(outputs, _CURVATURE.column, "spearman"),
        },
        networks=trained_in,
    )
    plain = of_smoothing(whole, False)
    return (
        *_first_epoch(),
        *_collapse(whole),
        claim(
            "outputs.grow",
            "With unsmoothed labels the norm of the output grows.",
            _LATE,
            mean_of(plain, "rise of the output norm"),
            "the norm of the network output grows to infinity in the unsmoothed case (Figure 29)",
        ),
        Prediction(
            "curvature.collapses",
            "The norm of C falls to a smaller share of its largest value with unsmoothed labels than with others.",
            _LATE,
            with_over_without(whole, SMOOTHING, "share of the largest norm of C", ["seed"]),
            quote="the decay of the C terms in Equation (4) begins to overtake growth in Jacobian norm",
            reason="What overtakes is not weighed: that the C terms decay more where labels are not smoothed is.",
        ),
        claim(
            "curvature.follows_outputs",
            "With unsmoothed labels the norm of C falls as the norm of the output grows.",
            _LATE,
            mean_of(plain, "r of the changes of output norm and norm of C", "of ranks"),
            "this growth in output corresponds to a vanishing of the C term",
            "below",
        ),
    )


def _first_epoch() -> tuple[Prediction, ...]:
    """Return what is claimed of the first epoch."""
    numbers = {
        "rise of sharpness": rise(BATCH_SHARPNESS.column),
        "rise of the Jacobian norm": rise(SOFTMAXED.column),
    }
    first, source = in_course("first_epoch", numbers), "sharpening C.1, Fig. 28"
    return (
        claim(
            "first_epoch.sharpens",
            "In the first epoch sharpness rises, as under gradient descent.",
            source,
            mean_of(first, "rise of sharpness"),
            _SAME,
        ),
        claim(
            "first_epoch.jacobian_rises",
            "And so does the softmaxed Jacobian norm.",
            source,
            mean_of(first, "rise of the Jacobian norm"),
            _SAME,
        ),
        claim(
            "first_epoch.sharpness",
            "In the first epoch smoother labels are associated with less severe progressive sharpening.",
            source,
            along(first, SMOOTHING, "rise of sharpness", ["seed"]),
            _LESS_SEVERE,
            "below",
        ),
        claim(
            "first_epoch.jacobian",
            "In the first epoch they are associated with a less severe increase of the softmaxed Jacobian norm.",
            source,
            along(first, SMOOTHING, "rise of the Jacobian norm", ["seed"]),
            _LESS_SEVERE,
            "below",
        ),
    )


def _collapse(whole: Table) -> tuple[Prediction, ...]:
    """Return what is said of the end of training: sharpness and Jacobian norm as shares of their largest values."""
    share = f"{_COLLAPSED:.0%}"

    def reading(name: str, says: str, smoothed: bool, side: Side) -> Prediction:
        return Prediction(
            name, says, _LATE, mean_of(of_smoothing(whole, smoothed), "share of the largest sharpness"), side,
            _COLLAPSED, quote=_COLLAPSE,
            reason=f"A collapse to zero takes for ever: below {share} of the largest value counts as one.",
        )  # fmt: skip

    return (
        claim(
            "collapse.sharpness",
            "Over all epochs sharpness falls to a smaller share of its largest value with unsmoothed labels than with "
            "smoothed ones.",
            _LATE,
            with_over_without(whole, SMOOTHING, "share of the largest sharpness", ["seed"]),
            _COLLAPSE,
        ),
        reading(
            "collapse.sharpness.size",
            f"With unsmoothed labels sharpness collapses to below {share} of its largest value.",
            False,
            "below",
        ),
        reading(
            "plateau.sharpness.size",
            f"With smoothed labels it plateaus: it ends above {share} of its largest value.",
            True,
            "above",
        ),
        claim(
            "collapse.jacobian",
            "The softmaxed Jacobian norm collapses, too, to a smaller share of its largest value.",
            _LATE,
            with_over_without(whole, SMOOTHING, "share of the largest Jacobian norm", ["seed"]),
            "this growth is also to blame for the eventual collapse of the norm of the Jacobian of the softmaxed model",
        ),
    )


_LATE = "sharpening C.1, Fig. 29"
_SAME = (
    "observing exactly the same relationship between label smoothing, Jacobian norm and sharpness as predicted in "
    "Section 5"
)
_LESS_SEVERE = (
    "the smoother labels are associated with less severe increase of the Jacobian and less severe progressive "
    "sharpening"
)
_COLLAPSE = (
    "ultimately causing the sharpness with unsmoothed labels to collapse to zero, where as sharpness values for "
    "smoothed labels plateau at nonzero values"
)


def _x10_plots(results: Results) -> list[Plot]:
    return [
        course_curves(
            reached(study)(results),
            histories(results[study]),
            SMOOTHING,
            (BATCH_SHARPNESS, SOFTMAXED, _OUTPUTS, *more),
            name,
            title,
            f"SGD. {BANDS}.",
        )
        for study, name, title, more in (
            ("first_epoch", "fig28", "Fig. 28: the first epoch, by label smoothing", ()),
            ("training", "fig29", "Fig. 29: the whole training, by label smoothing; and the norm of C", (_CURVATURE,)),
        )
    ]


_MECHANISM = "Not weighed: that the Jacobian's own Lipschitz constant grows as its norm on the samples collapses."
_UNSAID = (
    "Learning rate 0.1, no momentum and no weight decay, label smoothing 0, 0.5 and 0.75, 5 seeds, 2500 points to "
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
                _MECHANISM,
            ),
            "desk": (
                "VGG-11 with an eighth of its channels.",
                "2000 images of CIFAR-10, 500 of them measured on; batches of 64, 60 epochs, 10 seeds; measured in "
                "float32, over the whole training after every second epoch.",
                UNTOLD_INIT,
                ONE_DRAW,
                _MECHANISM,
            ),
            "paper": (_UNSAID, FEW_SEEDS, _MECHANISM, UNTOLD_INIT, GHOSTS),
        },
    ),
)
