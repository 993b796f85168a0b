"""X1 to X3: sharpness, compression and the steps of the bound through training.

As in the paper's figures volume is its logarithm; Eq. 48's chain is of the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flatlens.data.named import DataSettings
from flatlens.experiments.claims import Claim, Results
from flatlens.experiments.evidence import changes, together, trend
from flatlens.experiments.experiment import Experiment, Plot, Scale
from flatlens.experiments.papers.compression.networks import (
    DIGITS,
    FIXED_BATCH,
    FIXED_LR,
    INTERPOLATES,
    PATCHES,
    SMALL,
    mlp,
    samples,
    vgg,
)
from flatlens.experiments.papers.remarks import QUICK
from flatlens.experiments.plots import banded, followed_curves
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.statistics import Statistic, average
from flatlens.training import SGD, Training

LRS, BATCHES = (0.05, 0.1, 0.2), (8, 20, 32)
IN_TRAINING = ("loss", "nmls", "interpolation_sharpness", "log_volume", "mls", "local_dimension")
TITLES = {
    "loss": "training loss",
    "nmls": "NMLS",
    "interpolation_sharpness": "S",
    "log_volume": "log volume",
    "mls": "MLS",
    "local_dimension": "local dimension",
}


# X1 and X2: through training, at three learning rates and three batch sizes


def _through_training(base: NetworkSettings, seeds: int) -> dict[str, Study]:
    trial = Axis("seed", tuple(range(seeds)))
    both = Study("", base, ()).setting("lr", FIXED_LR).setting("batch_size", FIXED_BATCH).base
    return {
        "learning_rates": Study("learning rates", both, (Axis("lr", LRS), trial)),
        "batch_sizes": Study("batch sizes", both, (Axis("batch_size", BATCHES), trial)),
    }


def _x1(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (40, 20, 1), "laptop": (2000, 100, 3), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*vgg(scale), steps, every), seeds)


def _x2(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (40, 20, 1), "laptop": (10_000, 400, 5), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*mlp(scale), steps, every), seeds)


def _followed(data: DataSettings, model: Architecture, steps: int, every: int) -> NetworkSettings:
    training = Training(SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=steps)
    measures = (*IN_TRAINING, "generalisation_gap", "test_accuracy", "accuracy")
    followed = Followed(IN_TRAINING, every, samples(data))
    return NetworkSettings(data, model, training, measures, samples=samples(data), followed=followed)


def _in_training_claims(figures: str) -> tuple[Claim, ...]:
    sharp, late = "interpolation_sharpness", INTERPOLATES
    claims = []
    for study, setting, side in (("learning_rates", "lr", "below"), ("batch_sizes", "batch_size", "above")):
        larger = {"lr": "Higher learning rates", "batch_size": "Larger batches"}[setting]
        less = "lower" if side == "below" else "higher"
        claims += [
            Claim(
                f"{study}.volume_follows_sharpness",
                "Once the loss is minimised, sharpness and volume decrease together.",
                f"compression {figures}",
                together(study, sharp, "log_volume", below=late),
            ),
            Claim(
                f"{study}.mls_follows_sharpness",
                "MLS follows sharpness.",
                f"compression {figures}, section 4.1",
                together(study, sharp, "mls", below=late),
            ),
            Claim(
                f"{study}.sharpness",
                f"{larger} lead to {less} sharpness.",
                f"compression {figures}",
                trend(study, setting, sharp),
                side,  # type: ignore[arg-type]
            ),
            Claim(
                f"{study}.volume",
                f"{larger} lead to {'stronger' if side == 'below' else 'weaker'} compression of volume.",
                f"compression {figures}",
                trend(study, setting, "log_volume"),
                side,  # type: ignore[arg-type]
            ),
            Claim(
                f"{study}.dimension",
                "Local dimension decreases as the loss decreases to near 0.",
                "compression section 4.2",
                changes(study, "local_dimension"),
                "below",
            ),
        ]
    return tuple(claims)


def _in_training_plots(results: Results) -> list[Plot]:
    return [
        followed_curves(results["learning_rates"], "lr", TITLES, f"batch size {FIXED_BATCH}"),
        followed_curves(results["batch_sizes"], "batch_size", TITLES, f"learning rate {FIXED_LR:g}"),
    ]


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


EXPERIMENTS = (
    Experiment(
        "X1",
        "Sharpness, volume and sensitivity through the training of a VGG",
        "compression Fig. 1, 2",
        _x1,
        _in_training_claims("Fig. 1, 2"),
        _in_training_plots,
        {"smoke": (QUICK, PATCHES), "laptop": (PATCHES, SMALL, "3 seeds."), "paper": (SMALL,)},
    ),
    Experiment(
        "X2",
        "The same through the training of a 4-layer MLP",
        "compression Fig. H.8, H.9",
        _x2,
        _in_training_claims("Fig. H.8, H.9"),
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
