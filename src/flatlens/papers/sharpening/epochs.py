"""X10: the link from Jacobian to sharpness through the loss, in the first epoch of SGD and in the whole training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.papers.claims import experiment
from flatlens.papers.evidence import (
    Number,
    correlated_changes,
    histories,
    in_trajectory,
    last,
    peak,
    reached,
    rise,
    trained_in,
)
from flatlens.papers.experiment import Plot, Results, Scale, tested
from flatlens.papers.figures import BANDS, trajectory_curves
from flatlens.papers.sharpening.networks import (
    BATCH_SHARPNESS,
    NARROW_VGG,
    SMOOTHING,
    SOFTMAXED,
    VGG,
    measured_in,
    of_smoothing,
    rows,
    smoothings,
)
from flatlens.training import SGD, Training

_OUTPUTS = Quantity("output norm", "output_norm")
_FACTORS = "layer_factors(blocks=False)"
_CURVATURE = Quantity("norm of C", f"{_FACTORS}.loss_curvature")
"""||C||, the square root of the loss's second derivative in Eq. 4."""


def _on(scale: Scale) -> tuple[DataSettings, Architecture]:
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
    axes = (smoothings(scale), Axis("seed", tuple(range(seeds))))
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
    return lambda trajectory: last(column)(trajectory) / peak(column)(trajectory)


_SHARP, _NORM = BATCH_SHARPNESS.column, SOFTMAXED.column
training = in_trajectory(
    "training",
    {
        "share of the largest sharpness": _share(_SHARP),
        "share of the largest Jacobian norm": _share(_NORM),
        "share of the largest norm of C": _share(_CURVATURE.column),
        "rise of the output norm": rise(_OUTPUTS.column),
        "r of the changes of output norm and norm of C": correlated_changes(_OUTPUTS.column, _CURVATURE.column),
        "of ranks": correlated_changes(_OUTPUTS.column, _CURVATURE.column, "spearman"),
    },
    networks=trained_in,
)
unsmoothed, smoothed = of_smoothing(training, False), of_smoothing(training, True)
first_epoch = in_trajectory(
    "first_epoch", {"rise of sharpness": rise(_SHARP), "rise of the Jacobian norm": rise(_NORM)}
)


def _x10_plots(results: Results) -> list[Plot]:
    plots = []
    for study, name, title, more in (
        ("first_epoch", "fig28", "Fig. 28: the first epoch, by label smoothing", ()),
        ("training", "fig29", "Fig. 29: the whole training, by label smoothing; and the norm of C", (_CURVATURE,)),
    ):
        shown, networks, known = (BATCH_SHARPNESS, SOFTMAXED, _OUTPUTS, *more), reached(study)(results), results[study]
        plots.append(trajectory_curves(networks, histories(known), SMOOTHING, shown, name, title, f"SGD. {BANDS}."))
    return plots


EXPERIMENTS = (experiment("sharpening", "X10", _x10, _x10_plots, globals()),)
