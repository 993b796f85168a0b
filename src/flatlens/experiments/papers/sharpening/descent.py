"""X6 and X10: progressive sharpening under label smoothing, by full-batch gradient descent and by SGD."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.claims import Claim, Results
from flatlens.experiments.contrasts import mean_of
from flatlens.experiments.courses import (
    agreement,
    along,
    fall,
    growth_beyond,
    in_course,
    largest,
    last,
    late,
    rise,
    until_partner,
)
from flatlens.experiments.evidence import Table, changes, histories, reached
from flatlens.experiments.experiment import Experiment, Plot, Scale
from flatlens.experiments.papers.remarks import QUICK
from flatlens.experiments.papers.sharpening.networks import GHOSTS, RESNET, ROWS, SHARPNESS, SOFTMAXED, VGG, rows
from flatlens.experiments.plots import course_curves
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.training import SGD, Training

SMOOTHING = "label_smoothing"
SMOOTHINGS = (0.0, 0.5, 0.75)
EXCESS = Quantity("loss less label entropy", "loss(excess=True)")
OUTPUTS = Quantity("output norm", "output_norm")


def _unsmoothed(table: Table, at: str = "least") -> Table:
    """The networks without label smoothing ("least"), the others, or those without at the largest learning rate."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        chosen = (networks[SMOOTHING] > networks[SMOOTHING].min()) == (at == "others")
        if at == "fastest":
            chosen &= networks["lr"] == networks["lr"].max()
        kept: pd.DataFrame = networks[chosen]
        return kept

    return found


# X6: full-batch gradient descent, until the network without label smoothing has 99% accuracy

ALIKE = ("model", "lr", "seed")
FITTED = until_partner(SMOOTHING, "accuracy", 0.99, ALIKE)
HOVERS = 1.5
"""How far above 2/lr sharpness may be in the mean and still be said to oscillate around it."""


def _x6(scale: Scale) -> Mapping[str, Study]:
    data, model = rows(scale)
    models: tuple[Architecture, ...] = (model,)
    paces: tuple[tuple[float, int, int], ...] = {
        "smoke": ((0.08, 40, 20),),
        "laptop": ((0.08, 150, 5), (0.04, 300, 10), (0.02, 600, 20)),
        "paper": ((0.08, 1000, 5), (0.04, 2000, 10), (0.02, 4000, 20)),
    }[scale]
    seeds, samples, ghosts = {"smoke": (4, None, None), "laptop": (5, None, None), "paper": (5, 2500, 5000)}[scale]
    if scale == "paper":
        data, models = DataSettings("cifar10", standardise="component"), (VGG, RESNET)
    shown = (EXCESS, SHARPNESS, SOFTMAXED)
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
        Axis(SMOOTHING, SMOOTHINGS[:2] if scale == "smoke" else SMOOTHINGS),
        Axis("seed", tuple(range(seeds))),
    )
    return {"descent": Study("full-batch gradient descent", base, axes, (GAP, *shown), scale=scale)}


def _x6_claims() -> tuple[Claim, ...]:
    sharp, jacobian, edge = SHARPNESS.column, SOFTMAXED.column, "edge"
    table = in_course(
        "descent",
        {
            "sharpness / (2/lr), largest": largest(sharp, edge),
            "sharpness / (2/lr), later half": late(sharp, edge),
            "rise of sharpness": rise(sharp),
            "rise of the Jacobian norm": rise(jacobian),
            "tau of sharpness and Jacobian norm": agreement(sharp, jacobian),
            "tau of loss and Jacobian norm": agreement(EXCESS.column, jacobian),
            "growth of the Jacobian norm beyond 2/lr": growth_beyond(jacobian, sharp, edge),
        },
        FITTED,
    )
    fastest, figures = _unsmoothed(table, "fastest"), "Fig. 1, 6-11"
    return (
        Claim(
            "sharpness.reaches_edge",
            "At the largest learning rate and without label smoothing sharpness rises to 2/lr.",
            f"sharpening section 2, {figures}",
            mean_of(fastest, "sharpness / (2/lr), largest"),
            "above",
            1.0,
        ),
        Claim(
            "sharpness.halts",
            f"There the increase halts at around 2/lr: in the later half its mean is below {HOVERS:g} of it.",
            f"sharpening section 2, {figures}",
            mean_of(fastest, "sharpness / (2/lr), later half"),
            "below",
            HOVERS,
        ),
        Claim(
            "sharpness.rises",
            "Sharpness rises in the course of training: progressive sharpening.",
            f"sharpening section 5, {figures}",
            mean_of(table, "rise of sharpness"),
        ),
        Claim(
            "sharpness.smoothing",
            "Smoother labels are associated with a less severe increase in sharpness.",
            f"sharpening B.1, {figures}",
            along(table, SMOOTHING, "rise of sharpness", ALIKE),
            "below",
        ),
        Claim(
            "jacobian.smoothing",
            "Smoother labels are associated with a less severe increase in the softmaxed Jacobian norm.",
            f"sharpening B.1, {figures}",
            along(table, SMOOTHING, "rise of the Jacobian norm", ALIKE),
            "below",
        ),
        Claim(
            "jacobian.follows_sharpness",
            "Through training sharpness and softmaxed Jacobian norm rise together.",
            f"sharpening section 5, {figures}",
            mean_of(table, "tau of sharpness and Jacobian norm"),
        ),
        Claim(
            "jacobian.loss",
            "Training that reduces the loss over all data increases the largest Jacobian norm.",
            "sharpening section 5, Thm 5.1",
            mean_of(table, "tau of loss and Jacobian norm"),
            "below",
        ),
        Claim(
            "jacobian.beyond_edge",
            "At the edge of stability the Jacobian norm need not plateau as sharpness does: it keeps growing there.",
            "sharpening section 5",
            mean_of(fastest, "growth of the Jacobian norm beyond 2/lr"),
        ),
    )


def _x6_plots(results: Results) -> list[Plot]:
    networks, courses = reached("descent")(results), FITTED(results["descent"])
    kinds = networks["model"] if "model" in networks else pd.Series("", index=networks.index)
    plots = []
    for _, same in networks.groupby([kinds.str.partition("(")[0], "lr"], sort=False):
        kind, lr = str(kinds[same.index[0]]).partition("(")[0], float(same["lr"].iloc[0])
        of = f"{kind}, " if kind else ""
        plots.append(
            course_curves(
                same,
                courses,
                SMOOTHING,
                (EXCESS, SHARPNESS, SOFTMAXED),
                f"{kind.lower()}_lr_{lr:g}".strip("_").replace(".", "_"),
                f"{of}learning rate {lr:g}",
                "Until the network without label smoothing has 99% accuracy. Lines are means over seeds, bands from "
                "least to largest; dashed is 2/lr.",
                {SHARPNESS.name: "edge"},
            )
        )
    return plots


# X10: SGD, its first epoch and the whole of it

COLLAPSED = 0.1
"""The share of its largest value below which a measure is taken to have collapsed."""


def _x10(scale: Scale) -> Mapping[str, Study]:
    data, model = rows(scale)
    batch, epoch, every, epochs, seeds = {
        "smoke": (5, 4, 2, 3, 4),
        "laptop": (10, 30, 1, 90, 5),
        "paper": (128, 391, 5, 90, 5),
    }[scale]
    lr, samples = (0.1, 2500) if scale == "paper" else (0.02, None)
    training = Training(SGD(lr), batch_size=batch, max_epochs=1, check_every=100)
    shown = (SHARPNESS, SOFTMAXED, OUTPUTS)
    followed = tuple(q.column for q in shown)
    axes = (
        Axis(SMOOTHING, SMOOTHINGS[:2] if scale == "smoke" else SMOOTHINGS),
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


def _x10_claims() -> tuple[Claim, ...]:
    sharp, jacobian, outputs = SHARPNESS.column, SOFTMAXED.column, OUTPUTS.column
    first = in_course("first_epoch", {"rise of sharpness": rise(sharp), "rise of the Jacobian norm": rise(jacobian)})
    whole = in_course(
        "training",
        {
            "log(last / largest sharpness)": fall(sharp),
            "log(last / largest Jacobian norm)": fall(jacobian),
            "last output norm": last(outputs),
        },
    )
    plain, smooth, share = _unsmoothed(whole), _unsmoothed(whole, "others"), f"{COLLAPSED:.0%}"
    return (
        Claim(
            "first_epoch.sharpness",
            "In the first epoch smoother labels are associated with less severe progressive sharpening.",
            "sharpening C.1, Fig. 28",
            along(first, SMOOTHING, "rise of sharpness", ["seed"]),
            "below",
        ),
        Claim(
            "first_epoch.jacobian",
            "In the first epoch they are associated with a less severe increase of the softmaxed Jacobian norm.",
            "sharpening C.1, Fig. 28",
            along(first, SMOOTHING, "rise of the Jacobian norm", ["seed"]),
            "below",
        ),
        Claim(
            "collapse.sharpness",
            f"Over all epochs sharpness collapses with unsmoothed labels, to below {share} of its largest value.",
            "sharpening C.1, Fig. 29",
            mean_of(plain, "log(last / largest sharpness)"),
            "below",
            log(COLLAPSED),
        ),
        Claim(
            "plateau.sharpness",
            f"With smoothed labels it plateaus: it ends above {share} of its largest value.",
            "sharpening C.1, Fig. 29",
            mean_of(smooth, "log(last / largest sharpness)"),
            "above",
            log(COLLAPSED),
        ),
        Claim(
            "collapse.jacobian",
            f"With unsmoothed labels the softmaxed Jacobian norm collapses, too, to below {share} of its largest.",
            "sharpening C.1, Fig. 29",
            mean_of(plain, "log(last / largest Jacobian norm)"),
            "below",
            log(COLLAPSED),
        ),
        Claim(
            "outputs.grow",
            "The norm of the output grows in training.",
            "sharpening C.1, Fig. 29",
            changes("training", outputs),
        ),
        Claim(
            "outputs.smoothing",
            "It ends the larger, the less the labels are smoothed.",
            "sharpening C.1, Fig. 29",
            along(whole, SMOOTHING, "last output norm", ["seed"]),
            "below",
        ),
    )


def _x10_plots(results: Results) -> list[Plot]:
    return [
        course_curves(
            reached(study)(results),
            histories(results[study]),
            SMOOTHING,
            (SHARPNESS, SOFTMAXED, OUTPUTS),
            name,
            title,
            "SGD. Lines are means over seeds, bands from the least to the largest.",
        )
        for study, name, title in (
            ("first_epoch", "fig28", "The first epoch, by label smoothing"),
            ("training", "fig29", "The whole training, by label smoothing"),
        )
    ]


UP_TO = (
    "Every network is trained on, and its curves are cut where the one without label smoothing first has 99% accuracy "
    "on the points that are measured: the paper trains for as many iterations as that takes."
)
UNSAID_10 = (
    "Learning rate 0.1, no momentum and no weight decay, label smoothing 0, 0.5 and 0.75, 5 trials, 2500 points to "
    "measure on, every epoch: the paper gives none of these."
)

EXPERIMENTS = (
    Experiment(
        "X6",
        "Progressive sharpening, and less of it the smoother the labels",
        "sharpening Fig. 1, 6, 7, 8, 9, 10, 11",
        _x6,
        _x6_claims(),
        _x6_plots,
        {
            "smoke": (QUICK, ROWS),
            "laptop": (
                ROWS,
                "300 patches, all of them measured on. At the lower learning rates 2/lr is above what the sharpness "
                "reaches before 99% accuracy.",
                UP_TO,
            ),
            "paper": (UP_TO, "1000, 2000 and 4000 iterations at most.", GHOSTS),
        },
    ),
    Experiment(
        "X10",
        "The cost function between Jacobian and sharpness: the first epoch, and all of them",
        "sharpening Fig. 28, 29",
        _x10,
        _x10_claims(),
        _x10_plots,
        {
            "smoke": (QUICK, ROWS),
            "laptop": (
                ROWS,
                "Batches of 10 of 300 patches at learning rate 0.02, measured at every step, then every epoch.",
            ),
            "paper": (UNSAID_10, GHOSTS),
        },
    ),
)
