"""X7: the end of training under cross-entropy, by weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import LEARNING_RATE, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.papers.cases import by_part, with_over_without
from flatlens.papers.contrasts import mean_of, stronger
from flatlens.papers.evidence import reached, where
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import pairwise
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import COEFFICIENT, SMOKE_ONLY, trial_axis
from flatlens.papers.sharpening.ends import END_MEASURES, NO_DECAY, ends
from flatlens.papers.sharpening.networks import (
    ABSOLUTE_GAP,
    BATCH_SHARPNESS,
    DIGIT_RESNET,
    GHOSTS,
    JACOBIAN,
    RESNET,
    UNTOLD_INIT,
    small_resnet,
)
from flatlens.training import SGD, Steps, Training

DECAY = "weight_decay"


def _x7(scale: Scale) -> Mapping[str, Study]:
    data, model = small_resnet(scale)
    decays, lrs, seeds, batch = {
        "smoke": ((0.0, 5e-3), (0.1, 0.02), 2, 10),
        "laptop": ((0.0, 5e-4, 2e-3, 8e-3), (0.1, 0.02), 3, 25),
        "paper": ((0.0, 1e-4, 5e-4, 1e-3, 2e-3), (0.1, 0.01), 5, 128),
    }[scale]
    if scale == "paper":
        data, model = DataSettings("cifar10"), RESNET
    epochs, drops = (3, (2,)) if scale == "smoke" else (90, (50, 80))
    training = Training(
        SGD(0.1, momentum=0.9), batch_size=batch, schedule=Steps(drops), max_epochs=epochs, check_every=100
    )
    samples = {"smoke": 10, "laptop": 100, "paper": 1000}[scale]
    shown = (ABSOLUTE_GAP, BATCH_SHARPNESS, JACOBIAN, Quantity("weight decay", DECAY, role="setting"), LEARNING_RATE)
    axes = (Axis("lr", lrs), Axis(DECAY, decays), trial_axis(seeds))
    base = NetworkSettings(data, model, training, END_MEASURES, samples=samples)
    return {"resnet": Study("ResNet-18 and weight decay", base, axes, shown, scale=scale)}


VANISHED = 0.1
"""Share of the sharpness with decay; a smaller one counts as vanished."""
NEAR_ZERO = 0.01
"""A "near-zero" loss: at this loss B.2 takes training as finished."""


def _x7_predictions() -> tuple[Prediction, ...]:
    table, alike, source = reached("resnet"), ("lr", "seed"), "sharpening section 6, Fig. 2"
    without = where(table, lambda t: t[DECAY] == 0)
    return (
        Prediction(
            "loss",
            f"Without weight decay SGD finds a solution with near-zero loss: below {NEAR_ZERO:g} in the mean.",
            "sharpening Fig. 2",
            mean_of(without, "loss"),
            "below",
            NEAR_ZERO,
        ),
        Prediction(
            "sharpness.vanishes",
            f"And with vanishing sharpness: less than {VANISHED:g} of that with weight decay.",
            "sharpening Fig. 2",
            with_over_without(table, DECAY, BATCH_SHARPNESS.column, alike),
            "above",
            -log(VANISHED),
        ),
        Prediction(
            "gap",
            "Networks trained with weight decay generalise better than those without: the gap is smaller.",
            source,
            with_over_without(table, DECAY, ABSOLUTE_GAP.column, alike),
            "below",
        ),
        Prediction(
            "sharpness",
            "They do so despite converging to sharper minima.",
            source,
            with_over_without(table, DECAY, BATCH_SHARPNESS.column, alike),
        ),
        Prediction(
            "jacobian",
            "Weight decay regularises the Jacobian norm, which is relatively large without it.",
            source,
            with_over_without(table, DECAY, JACOBIAN.column, alike),
            "below",
        ),
        Prediction(
            "jacobian.stronger",
            "The Jacobian norm correlates better with the gap than sharpness does.",
            "sharpening section 6",
            stronger(table, [JACOBIAN.column], [BATCH_SHARPNESS.column], ABSOLUTE_GAP.column),
        ),
        Prediction(
            "sharpness.worse",
            "The collapse of the Hessian without weight decay makes the correlation of sharpness and gap worse: it is "
            "larger among the networks with decay than among all.",
            "sharpening B.3",
            by_part(
                table, lambda t: t[DECAY] > 0, BATCH_SHARPNESS.column, ABSOLUTE_GAP.column,
                "Pearson r of sharpness and gap: with decay less that of all networks",
            ),
        ),
    )  # fmt: skip


def _x7_plots(results: Results) -> list[Plot]:
    networks = reached("resnet")(results)
    shown = ends(networks, "fig2", DECAY, "lr", "Weight decay, by learning rate")
    return [shown, pairwise("resnet", results["resnet"])]


_UNSAID = (
    "CIFAR-10, B.3's settings (batch 128, momentum 0.9, learning rate / 10 after epochs 50 and 80, 1000 points), "
    "5 trials, learning rates 0.1 and 0.01, weight decay 0 to 0.002: the paper gives none of these for Fig. 2."
)

EXPERIMENTS = (
    Experiment(
        "X7",
        "Weight decay: sharper minima that generalise better",
        "sharpening Fig. 2",
        _x7,
        _x7_predictions(),
        _x7_plots,
        {
            "smoke": (SMOKE_ONLY, DIGIT_RESNET),
            "laptop": (
                DIGIT_RESNET,
                "Batches of 25, learning rates 0.1 and 0.02, weight decay to 0.008, 3 trials, measured on 100 points.",
                NO_DECAY,
                COEFFICIENT,
            ),
            "paper": (_UNSAID, UNTOLD_INIT, GHOSTS, NO_DECAY, COEFFICIENT),
        },
    ),
)
