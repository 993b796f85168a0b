"""X8: where training ends, by learning rate and batch size."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.claims import Claim, Results, Side
from flatlens.experiments.evidence import Table, along, correlated, reached, where
from flatlens.experiments.experiment import Experiment, Plot, Scale
from flatlens.experiments.papers.remarks import COEFFICIENT, QUICK, trials
from flatlens.experiments.papers.sharpening.ends import MEASURES, NO_DECAY, ends
from flatlens.experiments.papers.sharpening.networks import (
    DIGIT_RESNET,
    GAP,
    GHOSTS,
    JACOBIAN,
    PATCH_VGG,
    RESNET,
    SHARPNESS,
    UNTOLD_INIT,
    VGG,
    small_resnet,
    small_vgg,
)
from flatlens.experiments.plots import pairwise
from flatlens.experiments.quantities import BATCH_SIZE, LEARNING_RATE
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.training import SGD, Training, Until

DATA = "data+model.classes+loss_below"
GRIDS: Mapping[Scale, tuple[tuple[float, ...], tuple[int, ...], int]] = {
    "smoke": ((0.1, 0.03), (5, 10), 4),
    "laptop": ((0.1, 0.03, 0.01), (8, 32, 128), 4),
    "paper": ((0.1, 0.01, 0.001), (64, 128, 256, 512, 1024), 5),
}
KINDS = {"resnet": "ResNet-18", "vgg": "VGG-11"}


def _x8(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, seeds = GRIDS[scale]
    every, window, steps, samples = {
        "smoke": (10, 1, 4, 10),
        "laptop": (10, 5, 4000, 100),
        "paper": (100, 10, 200_000, 2000),
    }[scale]
    studies = {}
    for name, (data, model), published in (
        ("resnet", small_resnet(scale), RESNET),
        ("vgg", small_vgg(scale), VGG),
    ):
        below = None if scale == "smoke" else 0.01
        sets: tuple[tuple[DataSettings, int, float | None], ...] = ((data, model.classes, below),)
        network: Architecture = model
        if scale == "paper":
            sets = ((DataSettings("cifar10"), 10, 0.01), (DataSettings("cifar100"), 100, 0.02))
            network = published
        until = Until(loss_below=sets[0][2], loss_window=window)
        training = Training(
            SGD(lrs[0], weight_decay=1e-4), batch_size=batches[0], until=until, max_steps=steps, check_every=every
        )
        base = NetworkSettings(sets[0][0], network, training, MEASURES, samples=samples)
        axes = (Axis(DATA, sets), Axis("lr", lrs), Axis("batch_size", batches), trials(seeds))
        shown = (GAP, SHARPNESS, JACOBIAN, LEARNING_RATE, BATCH_SIZE)
        studies[name] = Study(KINDS[name], base, axes, shown, scale=scale)
    return studies


WORDS = {"sharpness": SHARPNESS.column, "Jacobian norm": JACOBIAN.column, "generalisation gap": GAP.column}
ALIKE = {"lr": ("batch_size", DATA, "seed"), "batch_size": ("lr", DATA, "seed")}
"""What the networks of a line of Fig. 3 and 12 to 15 share, and of Fig. 4 and 16 to 19."""


def _line(study: str, name: str, says: str, among: Table, setting: str, word: str, side: Side) -> Claim:
    """Along the lines of a figure."""
    figures = "Fig. 3, 12-15" if setting == "lr" else "Fig. 4, 16-19"
    found = along(among, setting, WORDS[word], ALIKE[setting])
    slug = f"{study}.{name}.{word.split()[0].lower()}"
    return Claim(slug, f"{KINDS[study]}: {says} {word}.", f"sharpening section 6, {figures}", found, side)


def _x8_claims() -> tuple[Claim, ...]:
    claims = []
    for study, kind in KINDS.items():
        table = reached(study)
        slow = where(table, lambda t: t["lr"] < t["lr"].max())
        fast = where(table, lambda t: t["lr"] == t["lr"].max())
        for word in WORDS:
            says = "larger learning rates end at a smaller"
            claims.append(_line(study, "lr", says, table, "lr", word, "below"))
        for word in WORDS:
            says = "at the smaller learning rates larger batches end at a larger"
            claims.append(_line(study, "batch", says, slow, "batch_size", word, "above"))
        claims += [
            Claim(
                f"{study}.jacobian.gap",
                f"{kind}: the Jacobian norm is well correlated with the generalisation gap.",
                "sharpening B.2",
                correlated(table, JACOBIAN.column, GAP.column),
            ),
            Claim(
                f"{study}.jacobian.sharpness",
                f"{kind}: smaller sharpness goes with a smaller Jacobian norm.",
                "sharpening section 6, Fig. 3",
                correlated(table, SHARPNESS.column, JACOBIAN.column, "spearman"),
            ),
        ]
        at = "at the largest learning rate larger batches end at a"
        jacobian: tuple[str, Side] = ("smaller", "below") if study == "resnet" else ("larger", "above")
        claims += [
            _line(study, "fast", f"{at} {jacobian[0]}", fast, "batch_size", "Jacobian norm", jacobian[1]),
            _line(study, "fast", f"{at} larger", fast, "batch_size", "generalisation gap", "above"),
        ]
    return tuple(claims)


def _x8_plots(results: Results) -> list[Plot]:
    plots = []
    for study, kind in KINDS.items():
        networks = reached(study)(results)
        sets = networks[DATA].map(_data_in) if DATA in networks else pd.Series("", index=networks.index)
        for name, among in networks.groupby(sets):
            at, on = (f"{study}_{name}", f"{kind} on {name}") if name else (study, kind)
            plots += [
                ends(among, f"{at}_lr", "lr", "batch_size", f"{on}: learning rate, by batch size", log_x=True),
                ends(among, f"{at}_batch", "batch_size", "lr", f"{on}: batch size, by learning rate", log_x=True),
            ]
        plots.append(pairwise(study, results[study]))
    return plots


def _data_in(cell: str) -> str:
    """The data set's name in a cell that spells its settings.

    >>> _data_in("(DataSettings(name='cifar10', train=None), 10, 0.01)")
    'cifar10'
    """
    return cell.partition("name='")[2].partition("'")[0]


EXPERIMENTS = (
    Experiment(
        "X8",
        "Where training ends, by learning rate and batch size",
        "sharpening Fig. 3, 4, 12, 13, 14, 15, 16, 17, 18, 19",
        _x8,
        _x8_claims(),
        _x8_plots,
        {
            "smoke": (QUICK, DIGIT_RESNET, PATCH_VGG),
            "laptop": (
                DIGIT_RESNET,
                PATCH_VGG,
                "Learning rates 0.1, 0.03, 0.01 and batches of 8, 32, 128; the loss is looked at every 10 steps, until "
                "the mean of 5 is below 0.01; 4 trials, measured on 100 points.",
                NO_DECAY,
                COEFFICIENT,
            ),
            "paper": (UNTOLD_INIT, GHOSTS, "200,000 steps at most.", NO_DECAY, COEFFICIENT),
        },
    ),
)
