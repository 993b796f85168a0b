"""X7: the end of training under cross-entropy, by weight decay."""

from __future__ import annotations

from collections.abc import Mapping

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import LEARNING_RATE, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.papers.contrasts import by_part, mean_of, stronger, with_over_without
from flatlens.papers.evidence import trained_in, where
from flatlens.papers.experiment import (
    COEFFICIENT,
    FEW_SEEDS,
    SMOKE_ONLY,
    Experiment,
    Plot,
    Prediction,
    Results,
    Scale,
    claim,
    seed_axis,
)
from flatlens.papers.figures import pairwise
from flatlens.papers.sharpening.ends import END_MEASURES, NO_DECAY, ends
from flatlens.papers.sharpening.networks import (
    ABSOLUTE_GAP,
    BATCH_SHARPNESS,
    DIGIT_RESNET,
    GHOSTS,
    JACOBIAN,
    NARROW_RESNET,
    RESNET,
    UNTOLD_INIT,
    measured_in,
    small_resnet,
)
from flatlens.training import SGD, Steps, Training

DECAY = "weight_decay"


def _x7(scale: Scale) -> Mapping[str, Study]:
    data, model = small_resnet(scale)
    decays, lrs, seeds, batch = {
        "smoke": ((0.0, 5e-3), (0.1, 0.02), 2, 10),
        "laptop": ((0.0, 5e-4, 2e-3, 8e-3), (0.1, 0.02), 8, 25),
        "desk": ((0.0, 5e-4, 2e-3), (0.1, 0.02), 10, 50),
        "paper": ((0.0, 1e-4, 5e-4, 1e-3, 2e-3), (0.1, 0.01), 5, 128),
    }[scale]
    if scale == "desk":
        data, model = DataSettings("cifar10", train=300, test=1000), NARROW_RESNET
    if scale == "paper":
        data, model = DataSettings("cifar10"), RESNET
    epochs, drops = {"smoke": (3, (2,)), "desk": (360, (200, 320))}.get(scale, (90, (50, 80)))
    training = Training(
        SGD(0.1, momentum=0.9), batch_size=batch, schedule=Steps(drops), max_epochs=epochs, check_every=100
    )
    samples = {"smoke": 10, "laptop": 100, "desk": 100, "paper": 1000}[scale]
    shown = (ABSOLUTE_GAP, BATCH_SHARPNESS, JACOBIAN, Quantity("weight decay", DECAY, role="setting"), LEARNING_RATE)
    axes = (Axis("lr", lrs), Axis(DECAY, decays), seed_axis(seeds))
    base = NetworkSettings(data, model, training, END_MEASURES, samples=samples, dtype=measured_in(scale))
    return {"resnet": Study("ResNet-18 and weight decay", base, axes, shown, scale=scale)}


_NEAR_ZERO = 0.01
"""A "near-zero" loss: at this loss B.2 takes training as finished."""


def _x7_predictions() -> tuple[Prediction, ...]:
    table, alike = trained_in("resnet"), ("lr", "seed")
    without = where(table, lambda t: t[DECAY] == 0)
    caption, section = "sharpening Fig. 2", "sharpening section 6, Fig. 2"
    sharp, jacobian, gap = BATCH_SHARPNESS.column, JACOBIAN.column, ABSOLUTE_GAP.column

    return (
        Prediction(
            "loss",
            f"Without weight decay SGD finds a solution with near-zero loss: below {_NEAR_ZERO:g} in the mean.",
            caption,
            mean_of(without, "loss"),
            "below",
            _NEAR_ZERO,
            quote=_SOLUTION,
            reason="How near to zero is not said; at this loss B.2 ends the training on CIFAR-10.",
        ),
        claim(
            "gap",
            "Networks trained with weight decay generalise better than those without: the gap is smaller.",
            section,
            with_over_without(table, DECAY, gap, alike),
            _GRANZIOL,
            "below",
        ),
        claim(
            "sharpness",
            "They do so despite converging to sharper minima.",
            section,
            with_over_without(table, DECAY, sharp, alike),
            _GRANZIOL,
        ),
        claim(
            "jacobian",
            "Weight decay regularises the Jacobian norm, which is relatively large without it.",
            section,
            with_over_without(table, DECAY, jacobian, alike),
            "weight decay also implicitly regularises the Jacobian of the model, leading to better generalisation",
            "below",
        ),
        claim(
            "jacobian.stronger",
            "The Jacobian norm correlates better with the gap than sharpness does.",
            "sharpening section 6",
            stronger(table, [jacobian], [sharp], gap),
            "empirical Jacobian norm consistently correlates better with generalisation than does sharpness for all "
            "regularisation measures we studied",
        ),
        Prediction(
            "sharpness.worse",
            "The collapse of the Hessian without weight decay makes the correlation of sharpness and gap worse: it is "
            "larger among the networks with decay than among all.",
            "sharpening B.3",
            by_part(
                table, lambda t: t[DECAY] > 0, sharp, gap,
                "Pearson r of sharpness and gap: with decay less that of all networks",
            ),
            quote="This would make the correlation between sharpness and generalisation gap even worse.",
            reason="The text says so of the networks of its Fig. 5; networks with decay are held against all here.",
        ),
    )  # fmt: skip


_SOLUTION = (
    "Without weight decay, SGD finds a solution with near-zero loss and vanishing sharpness, but for which Jacobian "
    "norm and generalisation gap are relatively large."
)
_GRANZIOL = (
    "networks trained with weight decay generalised better than those trained without, despite converging to sharper "
    "minima"
)


def _x7_plots(results: Results) -> list[Plot]:
    networks = trained_in("resnet")(results)
    shown = ends(networks, "fig2", DECAY, "lr", "Fig. 2: weight decay, by learning rate")
    return [shown, pairwise("resnet", results["resnet"])]


_UNSAID = (
    "CIFAR-10, B.3's settings (batch 128, momentum 0.9, learning rate / 10 after epochs 50 and 80, 1000 points), "
    "5 seeds, learning rates 0.1 and 0.01, weight decay 0 to 0.002: the paper gives none of these for Fig. 2."
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
                "Batches of 25, learning rates 0.1 and 0.02, weight decay to 0.008, 8 seeds, measured on 100 points.",
                NO_DECAY,
                COEFFICIENT,
            ),
            "desk": (
                "ResNet-18 with a sixteenth of its channels, on 300 images of CIFAR-10; batches of 50, learning rates "
                "0.1 and 0.02, weight decay to 0.002; 360 epochs, as 90 leave open which losses vanish; the learning "
                "rate falls after 200 and 320; 10 seeds, measured on 100 points, in float32.",
                UNTOLD_INIT,
                NO_DECAY,
                COEFFICIENT,
            ),
            "paper": (_UNSAID, FEW_SEEDS, UNTOLD_INIT, GHOSTS, NO_DECAY, COEFFICIENT),
        },
    ),
)
