"""X7 and X8: where training ends, by weight decay, learning rate and batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.claims import Claim, Results, Side
from flatlens.experiments.contrasts import stronger
from flatlens.experiments.courses import along
from flatlens.experiments.evidence import Table, correlated
from flatlens.experiments.experiment import Experiment, Plot, Scale
from flatlens.experiments.papers.remarks import COEFFICIENT, QUICK, SEEDS
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
    at_the_end,
    small_resnet,
    small_vgg,
)
from flatlens.experiments.plots import banded, pairwise
from flatlens.experiments.quantities import BATCH_SIZE, LEARNING_RATE, Quantity
from flatlens.experiments.quantities import GAP as GAP_SHOWN
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.training import SGD, Steps, Training, Until

MEASURES = (SHARPNESS.column, JACOBIAN.column, "loss", "accuracy", "test_accuracy", "generalisation_gap")
PANELS = {"Jacobian norm": JACOBIAN.column, "sharpness": SHARPNESS.column, "|test loss - training loss|": GAP}
"""What Fig. 2 to 4 and 12 to 19 show."""


def _ends(name: str, table: Table, x: str, line: str, title: str, caption: str, results: Results) -> Plot:
    """A line a value of `line`, over the values of x: means over trials, bands from the least to the largest."""
    networks = table(results).rename(columns={x: "x", line: "line"})
    parts = [networks.assign(panel=panel, y=networks[column]) for panel, column in PANELS.items()]
    drawn = banded(pd.concat(parts, ignore_index=True), name, title, caption, _WORDS[x], _WORDS[line])
    return replace(drawn, log_x=x != DECAY)


BANDS = "At the end of training. Lines are means over trials, bands from the least to the largest."
DECAY = "weight_decay"
_WORDS = {DECAY: "weight decay", "lr": "learning rate", "batch_size": "batch size"}


# X7: weight decay under cross-entropy


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
    shown = (GAP_SHOWN, SHARPNESS, JACOBIAN, Quantity("weight decay", DECAY, role="setting"), LEARNING_RATE)
    axes = (Axis("lr", lrs), Axis(DECAY, decays), Axis(SEEDS, _trials(seeds)))
    base = NetworkSettings(data, model, training, MEASURES, samples=samples)
    return {"resnet": Study("ResNet-18 and weight decay", base, axes, shown, scale=scale)}


def _trials(count: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((seed, seed, seed) for seed in range(count))


def _x7_claims() -> tuple[Claim, ...]:
    table, alike, source = at_the_end("resnet"), ("lr", "seed"), "sharpening section 6, Fig. 2"
    return (
        Claim(
            "gap",
            "Networks trained with more weight decay generalise better: the gap is smaller.",
            source,
            along(table, DECAY, GAP, alike),
            "below",
        ),
        Claim(
            "sharpness",
            "They do so despite converging to sharper minima; without weight decay sharpness vanishes.",
            source,
            along(table, DECAY, SHARPNESS.column, alike),
        ),
        Claim(
            "jacobian",
            "Weight decay regularises the Jacobian norm, which is relatively large without it.",
            source,
            along(table, DECAY, JACOBIAN.column, alike),
            "below",
        ),
        Claim(
            "jacobian.stronger",
            "The Jacobian norm correlates better with the gap than sharpness does.",
            "sharpening section 6",
            stronger(table, [JACOBIAN.column], [SHARPNESS.column], GAP),
        ),
    )


def _x7_plots(results: Results) -> list[Plot]:
    shown = _ends("fig2", at_the_end("resnet"), DECAY, "lr", "Weight decay, by learning rate", BANDS, results)
    return [shown, pairwise("resnet", results["resnet"])]


# X8: learning rate and batch size

DATA = "data+model.classes+loss_below"
GRIDS: Mapping[Scale, tuple[tuple[float, ...], tuple[int, ...], int]] = {
    "smoke": ((0.1, 0.03), (5, 10), 2),
    "laptop": ((0.1, 0.03, 0.01), (8, 32, 128), 3),
    "paper": ((0.1, 0.01, 0.001), (64, 128, 256, 512, 1024), 5),
}
KINDS = {"resnet": "ResNet-18", "vgg": "VGG-11"}


def _x8(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, seeds = GRIDS[scale]
    every, window, steps, samples = {
        "smoke": (2, 1, 40, 10),
        "laptop": (10, 5, 4000, 100),
        "paper": (100, 10, 200_000, 2000),
    }[scale]
    studies = {}
    for name, (data, model), published in (
        ("resnet", small_resnet(scale), RESNET),
        ("vgg", small_vgg(scale), VGG),
    ):
        sets: tuple[tuple[DataSettings, int, float], ...] = ((data, model.classes, 10.0 if scale == "smoke" else 0.01),)
        network: Architecture = model
        if scale == "paper":
            sets = ((DataSettings("cifar10"), 10, 0.01), (DataSettings("cifar100"), 100, 0.02))
            network = published
        until = Until(loss_below=sets[0][2], loss_window=window)
        training = Training(
            SGD(lrs[0], weight_decay=1e-4), batch_size=batches[0], until=until, max_steps=steps, check_every=every
        )
        base = NetworkSettings(sets[0][0], network, training, MEASURES, samples=samples)
        axes = (Axis(DATA, sets), Axis("lr", lrs), Axis("batch_size", batches), Axis(SEEDS, _trials(seeds)))
        shown = (GAP_SHOWN, SHARPNESS, JACOBIAN, LEARNING_RATE, BATCH_SIZE)
        studies[name] = Study(KINDS[name], base, axes, shown, scale=scale)
    return studies


def _of_rates(table: Table, largest: bool) -> Table:
    """The networks of the largest learning rate, or of all smaller ones."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        kept: pd.DataFrame = networks[(networks["lr"] == networks["lr"].max()) == largest]
        return kept

    return found


WORDS = {"sharpness": SHARPNESS.column, "Jacobian norm": JACOBIAN.column, "generalisation gap": GAP}
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
        table = at_the_end(study)
        slow, fast = (_of_rates(table, largest) for largest in (False, True))
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
                correlated(table, JACOBIAN.column, GAP),
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
        whole = at_the_end(study)
        names = whole(results).get(DATA, pd.Series([""])).unique()
        for number, name in enumerate(names):

            def of(results: Results, name: str = name, whole: Table = whole) -> pd.DataFrame:
                networks = whole(results)
                return networks[networks[DATA] == name] if DATA in networks else networks

            at = f"{study}{number + 1}" if len(names) > 1 else study
            on = f"{kind} on {_data_in(name)}" if name else kind
            plots += [
                _ends(f"{at}_lr", of, "lr", "batch_size", f"{on}: learning rate, by batch size", BANDS, results),
                _ends(f"{at}_batch", of, "batch_size", "lr", f"{on}: batch size, by learning rate", BANDS, results),
            ]
        plots.append(pairwise(study, results[study]))
    return plots


def _data_in(cell: str) -> str:
    """The data set's name in a cell that spells its settings.

    >>> _data_in("(DataSettings(name='cifar10', train=None), 10, 0.01)")
    'cifar10'
    """
    return cell.partition("name='")[2].partition("'")[0]


UNSAID_7 = (
    "CIFAR-10, B.3's settings (batch 128, momentum 0.9, learning rate / 10 after epochs 50 and 80, 1000 points), "
    "5 trials, learning rates 0.1 and 0.01, weight decay 0 to 0.002: the paper gives none of these for Fig. 2."
)
WHOLE_GAP = "Sharpness leaves weight decay out of the loss; the gap is of the losses over all data."

EXPERIMENTS = (
    Experiment(
        "X7",
        "Weight decay: sharper minima that generalise better",
        "sharpening Fig. 2",
        _x7,
        _x7_claims(),
        _x7_plots,
        {
            "smoke": (QUICK, DIGIT_RESNET),
            "laptop": (
                DIGIT_RESNET,
                "Batches of 25, learning rates 0.1 and 0.02, weight decay to 0.008, 3 trials, measured on 100 points.",
                WHOLE_GAP,
                COEFFICIENT,
            ),
            "paper": (UNSAID_7, GHOSTS, WHOLE_GAP, COEFFICIENT),
        },
    ),
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
                "the mean of 5 is below 0.01; 3 trials, measured on 100 points.",
                WHOLE_GAP,
                COEFFICIENT,
            ),
            "paper": (UNTOLD_INIT, GHOSTS, "200,000 steps at most.", WHOLE_GAP, COEFFICIENT),
        },
    ),
)
