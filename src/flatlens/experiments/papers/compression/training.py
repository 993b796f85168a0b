"""X1 to X3: sharpness, compression and the steps of the bound through training.

As in the paper's figures sharpness is sqrt(S) and volume its logarithm; by name also the volume of the three largest
eigenvalues and the logarithm of the dimension, which the authors' code draws. Eq. 48's chain is of the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flatlens.data.named import DataSettings
from flatlens.experiments.claims import Claim, Results, Side
from flatlens.experiments.evidence import changes, together, trend
from flatlens.experiments.experiment import Experiment, Plot, Scale
from flatlens.experiments.papers.compression.networks import (
    DIGITS,
    FIXED_BATCH,
    FIXED_LR,
    INTERPOLATES,
    LOG_DIMENSION,
    LOG_VOLUME,
    PATCHES,
    SMALL,
    TOP_THREE,
    mlp,
    samples,
    top_three,
    vgg,
)
from flatlens.experiments.papers.remarks import QUICK
from flatlens.experiments.plots import banded, followed_curves
from flatlens.experiments.quantities import SHARPNESS, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.statistics import Statistic, average
from flatlens.training import SGD, Training

LRS, BATCHES = (0.05, 0.1, 0.2), (8, 20, 32)
IN_TRAINING = (
    Quantity("training loss", "loss"),
    Quantity("NMLS", "nmls"),
    SHARPNESS,
    LOG_VOLUME,
    Quantity("MLS", "mls"),
    Quantity("local dimension", "local_dimension"),
    LOG_DIMENSION,
)
"""What Fig. 1 shows, from left to right, and the last once more as the authors' code draws it."""


# X1 and X2: through training, at three learning rates and three batch sizes


def _through_training(base: NetworkSettings, seeds: int) -> dict[str, Study]:
    trial = Axis("seed", tuple(range(seeds)))
    both = Study("", base, ()).setting("lr", FIXED_LR).setting("batch_size", FIXED_BATCH).base
    return {
        "learning_rates": Study("learning rates", both, (Axis("lr", LRS), trial)),
        "batch_sizes": Study("batch sizes", both, (Axis("batch_size", BATCHES), trial)),
    }


def _x1(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (30, 15, 1), "laptop": (2000, 100, 5), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*vgg(scale), steps, every), seeds)


def _x2(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (40, 20, 1), "laptop": (10_000, 400, 5), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*mlp(scale), steps, every), seeds)


def _followed(data: DataSettings, model: Architecture, steps: int, every: int) -> NetworkSettings:
    training = Training(SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=steps)
    shown = tuple(dict.fromkeys(q.column for q in in_training(model)))
    measures = (*shown, "generalisation_gap", "test_accuracy", "accuracy")
    followed = Followed(shown, every, samples(data))
    return NetworkSettings(data, model, training, measures, samples=samples(data), followed=followed)


def in_training(model: Architecture) -> tuple[Quantity, ...]:
    """What is followed of a network: with more than three classes also the volume of the three largest eigenvalues."""
    return (*IN_TRAINING, *top_three(model))


def _in_training_claims(figures: str, *, top: bool) -> tuple[Claim, ...]:
    sharp, late = SHARPNESS.column, INTERPOLATES
    volumes = {"volume": LOG_VOLUME.column}
    if top:
        volumes["volume_of_top_3"] = TOP_THREE.column
    claims = []
    sides: tuple[tuple[str, str, str, Side], ...] = (
        ("learning_rates", "lr", "Higher learning rates", "below"),
        ("batch_sizes", "batch_size", "Larger batches", "above"),
    )
    for study, setting, larger, side in sides:
        over = study.replace("_", " ")
        less, compression = ("lower", "stronger") if side == "below" else ("higher", "weaker")
        claims += [
            Claim(
                f"{study}.mls_follows_sharpness",
                f"Over three {over}: MLS follows sharpness.",
                f"compression {figures}, section 4.1",
                together(study, sharp, "mls", below=late),
            ),
            Claim(
                f"{study}.sharpness",
                f"{larger} lead to {less} sharpness.",
                f"compression {figures}",
                trend(study, setting, sharp),
                side,
            ),
            Claim(
                f"{study}.dimension",
                f"Over three {over}: local dimension decreases as the loss decreases to near 0.",
                "compression section 4.2",
                changes(study, "local_dimension"),
                "below",
            ),
        ]
        for name, column in volumes.items():
            coded = "" if name == "volume" else " (the three largest eigenvalues', as in the authors' code)"
            claims += [
                Claim(
                    f"{study}.{name}_follows_sharpness",
                    f"Over three {over}: once the loss is minimised, sharpness and volume{coded} decrease together.",
                    f"compression {figures}",
                    together(study, sharp, column, below=late),
                ),
                Claim(
                    f"{study}.{name}",
                    f"{larger} lead to {compression} compression of volume{coded}.",
                    f"compression {figures}",
                    trend(study, setting, column),
                    side,
                ),
            ]
    return tuple(claims)


def _in_training_plots(results: Results) -> list[Plot]:
    plots = []
    for study, setting, held in (
        ("learning_rates", "lr", f"batch size {FIXED_BATCH}"),
        ("batch_sizes", "batch_size", f"learning rate {FIXED_LR:g}"),
    ):
        result = results[study]
        measured = set(result.histories["measure"])
        shown = [q for q in (*IN_TRAINING, TOP_THREE) if q.column in measured]
        plots.append(followed_curves(result, setting, shown, held))
    return plots


# X3: the steps of the bound, network by network trained longer

CHAIN = {
    "A": "mls_chain.A_B.lhs[fc1]",
    "B": "mls_chain.B_C.lhs[fc1]",
    "C": "mls_chain.C_D.lhs[fc1]",
    "D": "mls_chain.C_D.rhs[fc1]",
}


def _x3(scale: Scale) -> Mapping[str, Study]:
    steps = {
        "smoke": (1, 40),
        "laptop": (1, 30, 100, 300, 1000, 3000, 10_000),
        "paper": (1, 100, 1000, 10_000, 100_000),
    }
    data, model = mlp(scale)
    training = Training(SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=1)
    base = NetworkSettings(data, model, training, ("mls", "loss"), ("mls_chain",), samples=samples(data))
    seeds = {"smoke": 2, "laptop": 5, "paper": 5}[scale]
    trained = Study("tightness", base, (Axis("max_steps", steps[scale]), Axis("seed", tuple(range(seeds)))))
    return {"tightness": trained}


def _looseness(results: Results) -> Statistic:
    """How much looser the last step of the chain is than the looser of the other two, in logarithms."""
    a, b, c, d = (np.log(results["tightness"].networks[column]) for column in CHAIN.values())
    return average((d - c) - np.maximum(b - a, c - b), name="log(D/C) - max(log(B/A), log(C/B))")


def _x3_plots(results: Results) -> list[Plot]:
    networks = results["tightness"].networks.assign(panel="mean over the samples")
    long = networks.melt(["panel", "max_steps", "seed"], list(CHAIN.values()), "line", "y")
    long["line"] = long["line"].map({column: name for name, column in CHAIN.items()})
    caption = "A <= B <= C <= D of Eq. 48 at the first layer. Lines are means over seeds, bands from least to largest."
    return [banded(long.rename(columns={"max_steps": "x"}), "tightness", "The steps of the bound", caption, "step")]


TWO_OUTPUTS = (
    "Of two outputs the volume of the three largest eigenvalues, as in the authors' figures, is the whole volume."
)

EXPERIMENTS = (
    Experiment(
        "X1",
        "Sharpness, volume and sensitivity through the training of a VGG",
        "compression Fig. 1, 2",
        _x1,
        _in_training_claims("Fig. 1, 2", top=False),
        _in_training_plots,
        {"smoke": (QUICK, PATCHES), "laptop": (PATCHES, SMALL, TWO_OUTPUTS), "paper": (SMALL, TWO_OUTPUTS)},
    ),
    Experiment(
        "X2",
        "Sharpness, volume and sensitivity through the training of a 4-layer MLP",
        "compression Fig. H.8, H.9",
        _x2,
        _in_training_claims("Fig. H.8, H.9", top=True),
        _in_training_plots,
        {"smoke": (QUICK, DIGITS), "laptop": (DIGITS,), "paper": ("Widths are not given: 784 in every layer.",)},
    ),
    Experiment(
        "X3",
        "How tight each step is from the sensitivity of an MLP to its sharpness",
        "compression Fig. G.4",
        _x3,
        (
            Claim(
                "C_D_is_the_loose_step",
                "The gap between C and D is large compared to those between A and B, and B and C.",
                "compression Fig. G.4",
                _looseness,
            ),
        ),
        _x3_plots,
        {
            "smoke": (QUICK, DIGITS),
            "laptop": (
                DIGITS,
                "A network of its own for each number of steps, from the same start: the same training.",
            ),
            "paper": ("Widths are not given: 784 in every layer.",),
        },
    ),
)
