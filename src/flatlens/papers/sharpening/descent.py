"""X6: progressive sharpening under label smoothing, by full-batch gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.kinds import kinds_of
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.papers.cases import of_each_case
from flatlens.papers.contrasts import mean_of
from flatlens.papers.courses import (
    correlated_changes,
    growth_beyond,
    in_course,
    largest,
    late,
    rise,
    until_partner,
    up_to_edge,
)
from flatlens.papers.evidence import Evidence, Table, along, reached
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import BANDS, course_curves
from flatlens.papers.predictions import Prediction, Results, claim
from flatlens.papers.remarks import FEW_SEEDS, ONE_DRAW, SMOKE_ONLY
from flatlens.papers.sharpening.growth import bound_plot, bound_predictions, bound_studies
from flatlens.papers.sharpening.networks import (
    BATCH_SHARPNESS,
    GHOSTS,
    NARROW,
    NARROW_RESNET,
    NARROW_VGG,
    PATCH_ROWS,
    RESNET,
    SOFTMAXED,
    UNTOLD_INIT,
    VGG,
    rows,
)
from flatlens.papers.sharpening.smoothing import SMOOTHING, of_smoothing, smoothings
from flatlens.papers.sharpening.widths import width_plots, width_predictions, width_studies
from flatlens.papers.units import CASE, trained_ones
from flatlens.training import SGD, Training

_EXCESS = Quantity("loss less label entropy", "loss(excess=True)")

_ALIKE = ("model", "lr", "seed")
FITTED = until_partner(SMOOTHING, "accuracy", 0.99, _ALIKE)
_HOVERS = 1.5
"""Largest mean sharpness, as a multiple of 2/lr, that still counts as oscillating around it."""


def _x6(scale: Scale) -> Mapping[str, Study]:
    data, model = rows(scale)
    models: tuple[Architecture, ...] = (model,)
    paces: tuple[tuple[float, int, int], ...] = {
        "smoke": ((0.08, 60, 5),),
        "laptop": ((0.08, 150, 5), (0.04, 300, 10), (0.02, 600, 20)),
        "desk": ((0.08, 120, 10),),
        "paper": ((0.08, 1000, 5), (0.04, 2000, 10), (0.02, 4000, 20)),
    }[scale]
    seeds, samples, ghosts = {
        "smoke": (4, None, None),
        "laptop": (8, None, None),
        "desk": (10, 200, None),
        "paper": (5, 2500, 5000),
    }[scale]
    if scale == "desk":
        data = DataSettings("cifar10", train=500, test=1000, standardise="component")
        models = (NARROW_VGG, replace(NARROW_VGG, batchnorm=False), NARROW_RESNET)
    if scale == "paper":
        data, models = DataSettings("cifar10", standardise="component"), (VGG, RESNET)
    shown = (_EXCESS, BATCH_SHARPNESS, SOFTMAXED)
    followed = (*(q.column for q in shown), "accuracy")
    training = Training(SGD(0.08), ghost_batch=ghosts, max_steps=1)
    base = NetworkSettings(
        data,
        models[0],
        training,
        (*followed, "generalisation_gap"),
        samples=samples,
        followed=Followed(followed, 5, samples),
    )
    axes = (
        Axis("model", models),
        Axis("lr+max_steps+every", paces),
        smoothings(scale),
        Axis("seed", tuple(range(seeds))),
    )
    descent = Study("full-batch gradient descent", base, axes, (GAP, *shown), scale=scale)
    return {"descent": descent, **width_studies(scale), **bound_studies(scale)}


def _in_all_figures(table: Table, rise: str) -> Evidence:
    """Return Kendall's tau of the smoothing and a rise for each figure: a network at a learning rate."""

    def figures(results: Results) -> pd.DataFrame:
        networks = table(results)
        lrs = networks["lr"].astype(str)
        kinds = kinds_of(networks).astype(str)
        cases = networks.assign(**{CASE: lrs.where(kinds == "", kinds + ", " + lrs)})
        shown, _ = trained_ones(cases)  # a figure without curves is none
        return cases[cases[CASE].isin(set(shown[CASE]))]

    name = f"Kendall tau-b of {SMOOTHING} and {rise} in each figure"
    return of_each_case(figures, lambda case: along(case, SMOOTHING, rise, _ALIKE), name, side="below")


def _x6_predictions() -> tuple[Prediction, ...]:
    sharp, jacobian, edge = BATCH_SHARPNESS.column, SOFTMAXED.column, "edge"
    changes, of_ranks = correlated_changes(sharp, jacobian), correlated_changes(sharp, jacobian, "spearman")
    table = in_course(
        "descent",
        {
            "sharpness / (2/lr), largest": largest(sharp, edge),
            "sharpness / (2/lr), later half": late(sharp, edge),
            "rise of sharpness": rise(sharp),
            "rise of the Jacobian norm": rise(jacobian),
            "r of the changes of sharpness and Jacobian norm": changes,
            "of ranks": of_ranks,
            "r of these changes up to 2/lr": up_to_edge(changes, sharp, edge),
            "of ranks up to 2/lr": up_to_edge(of_ranks, sharp, edge),
            "growth of the Jacobian norm beyond 2/lr": growth_beyond(jacobian, sharp, edge),
            "growth of the loss beyond 2/lr": growth_beyond(_EXCESS.column, sharp, edge),
        },
        FITTED,
        without="the network without label smoothing never reached 99% accuracy",
    )
    fastest = of_smoothing(table, False, fastest=True)
    return (
        *_at_edge(fastest),
        *_rises(table),
        *_follows(table, fastest),
        *width_predictions(),
        *bound_predictions(),
    )


def _at_edge(fastest: Table) -> tuple[Prediction, ...]:
    """Return what is said of the edge of stability, of the networks with the largest learning rate."""
    source = "sharpening section 2, of Cohen et al. 2021"
    return (
        Prediction(
            "sharpness.reaches_edge",
            "At the largest learning rate and without label smoothing sharpness rises to 2/lr.",
            source,
            mean_of(fastest, "sharpness / (2/lr), largest"),
            "above",
            1.0,
            kind="claim",
            quote=_EDGE,
        ),
        Prediction(
            "sharpness.halts",
            f"There the increase halts at around 2/lr: in the later half its mean is below {_HOVERS:g} of it.",
            source,
            mean_of(fastest, "sharpness / (2/lr), later half"),
            "below",
            _HOVERS,
            quote=_EDGE,
            reason='The text says "around" 2/lr, and gives no width: half of it here.',
        ),
        claim(
            "loss.beyond_edge",
            "There the loss continues to decrease.",
            source,
            mean_of(fastest, "growth of the loss beyond 2/lr"),
            "while loss continued to decrease nonmonotonically",
            "below",
        ),
    )


def _rises(table: Table) -> tuple[Prediction, ...]:
    """Return what is claimed of the rise of sharpness and Jacobian norm, and of smoother labels."""
    return (
        claim(
            "sharpness.rises",
            "Sharpness rises in the course of training: progressive sharpening.",
            "sharpening section 5, Fig. 1, 6-11",
            mean_of(table, "rise of sharpness"),
            "a corresponding increase in the magnitude of the loss Hessian (see Appendix A.1): progressive sharpening",
        ),
        claim(
            "sharpness.smoothing",
            "In all figures smoother labels are associated with a less severe increase in sharpness.",
            "sharpening section 1, 3rd contribution; B.1, Fig. 1, 6-11",
            _in_all_figures(table, "rise of sharpness"),
            _LESS_SEVERE,
            "below",
            headline=True,
        ),
        claim(
            "jacobian.smoothing",
            "In all figures smoother labels are associated with a less severe increase in the softmaxed Jacobian norm.",
            "sharpening B.1, Fig. 1, 6-11",
            _in_all_figures(table, "rise of the Jacobian norm"),
            _LESS_SEVERE,
            "below",
        ),
    )


def _follows(table: Table, fastest: Table) -> tuple[Prediction, ...]:
    """Return what is said of the Jacobian norm beside the sharpness, through training and beyond the edge."""
    return (
        Prediction(
            "jacobian.follows_sharpness",
            "Through training sharpness and softmaxed Jacobian norm change together from step to step.",
            "sharpening section 1, 1st contribution; section 5, Fig. 1, 6-11",
            mean_of(table, "r of the changes of sharpness and Jacobian norm", "of ranks"),
            quote=_ANSATZ,
            reason="The text names no statistic, and no test of its conditions: step by step, whatever holds, is ours.",
            headline=True,
        ),
        Prediction(
            "jacobian.follows_sharpness.below_edge",
            "They do so until sharpness first reaches 2/lr; networks that are there within three measurements take no "
            "part.",
            "sharpening section 1, 1st contribution; section 5, Fig. 1, 6-11",
            mean_of(table, "r of these changes up to 2/lr", "of ranks up to 2/lr"),
            quote=_ANSATZ,
            reason="The text says that at the edge the Jacobian need not plateau as sharpness does.",
        ),
        claim(
            "jacobian.loss",
            "Training that reduces the loss over all data increases the largest Jacobian norm.",
            "sharpening section 5, Thm 5.1",
            mean_of(table, "rise of the Jacobian norm"),
            "any training procedure that reduces the loss over all data points will thus also increase the "
            "sample-maximum Jacobian norm from a low starting point",
        ),
        Prediction(
            "jacobian.beyond_edge",
            "At the edge of stability the Jacobian norm need not plateau as sharpness does: here, that it grows on.",
            "sharpening section 5",
            mean_of(fastest, "growth of the Jacobian norm beyond 2/lr"),
            quote="it *need not* cause the Jacobian to *plateau* in the same way that loss sharpness does",
            reason="A plateau would not contradict the text, which says that there need not be one.",
        ),
    )


_EDGE = "the sharpness increase halted at around $2/\\eta$ and oscillated there"
_LESS_SEVERE = (
    "In all cases, the smoother labels are associated with less severe increase in Jacobian and sharpness during "
    "training"
)
_ANSATZ = (
    "under certain conditions, the largest eigenvalues of the loss Hessian control the growth of the largest singular "
    "values of the model's input-output Jacobian"
)
_FIGURES: Mapping[float, Mapping[str, str]] = {
    0.08: {"VGG11": "Fig. 1, 6", "ResNet18": "Fig. 9"},
    0.04: {"VGG11": "Fig. 7", "ResNet18": "Fig. 10"},
    0.02: {"VGG11": "Fig. 8", "ResNet18": "Fig. 11"},
}
"""Figures by learning rate and network."""


def _x6_plots(results: Results) -> list[Plot]:
    courses = FITTED(results["descent"])
    networks = reached("descent")(results)
    networks = networks[networks["key"].isin(set(courses))]
    kinds = kinds_of(networks)
    plots = []
    for _, same in networks.groupby([kinds, "lr"], sort=False):
        kind, lr = str(kinds[same.index[0]]), float(same["lr"].iloc[0])
        figures = _FIGURES[lr].get(kind.partition(" ")[0]) or " and ".join(_FIGURES[lr].values())
        plots.append(
            course_curves(
                same,
                courses,
                SMOOTHING,
                (_EXCESS, BATCH_SHARPNESS, SOFTMAXED),
                f"{kind.lower().replace(' ', '_')}_lr_{lr:g}".strip("_").replace(".", "_"),
                f"{figures}: {f'{kind}, ' if kind else ''}learning rate {lr:g}",
                f"Until the network without label smoothing has 99% accuracy. {BANDS}; dashed is 2/lr.",
                {BATCH_SHARPNESS.name: ("2/lr", "edge")},
                log_y=(SOFTMAXED.name,),  # the caption of Fig. 1 names this axis alone
            )
        )
    return [*plots, *width_plots(results), bound_plot(results)]


_UP_TO = (
    "Every network is trained on, and its curves are cut where the one without label smoothing first has 99% accuracy "
    "on the points that are measured: the paper trains for as many iterations as that takes."
)

_SECTION_5 = (
    "Wide networks and linear models, for which section 5 cites Cohen et al. (2021), and Theorem 5.1's bound in the "
    "course of training are not shown in the paper: networks, learning rates and data are ours (of the former two, 300 "
    "patches of two photographs)."
)

EXPERIMENTS = (
    Experiment(
        "X6",
        "Progressive sharpening, and less of it the smoother the labels",
        "sharpening section 5, Fig. 1, 6, 7, 8, 9, 10, 11",
        _x6,
        _x6_predictions(),
        _x6_plots,
        {
            "smoke": (SMOKE_ONLY, PATCH_ROWS, _SECTION_5),
            "laptop": (
                PATCH_ROWS,
                "300 patches, all of them measured on. At the lower learning rates 2/lr is above what the sharpness "
                "reaches before 99% accuracy.",
                _UP_TO,
                _SECTION_5,
            ),
            "desk": (
                NARROW,
                "500 images of CIFAR-10, 200 of them measured on; learning rate 0.08 alone, 120 iterations at most, 10 "
                "seeds. VGG-11 was trained without BatchNorm, too, but did not reach 99% accuracy in them: it takes no "
                "part. Nor does ResNet-18 of four seeds, at 93 to 96.5%: what is said of it is of the other six.",
                _UP_TO,
                UNTOLD_INIT,
                ONE_DRAW,
                _SECTION_5,
            ),
            "paper": (
                _UP_TO,
                "1000, 2000 and 4000 iterations at most.",
                FEW_SEEDS,
                UNTOLD_INIT,
                GHOSTS,
                _SECTION_5,
            ),
        },
    ),
)
