"""X8: the end of training, by learning rate and batch size."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import BATCH_SIZE, LEARNING_RATE
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.papers.cases import CASE, across, mean, ranked
from flatlens.papers.evidence import Table, along, reached, where
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import pairwise
from flatlens.papers.predictions import Prediction, Results, Side
from flatlens.papers.remarks import COEFFICIENT, SMOKE_ONLY, trial_axis
from flatlens.papers.sharpening.ends import END_MEASURES, NO_DECAY, ends
from flatlens.papers.sharpening.networks import (
    ABSOLUTE_GAP,
    BATCH_SHARPNESS,
    DIGIT_RESNET,
    GHOSTS,
    JACOBIAN,
    PATCH_VGG,
    RESNET,
    UNTOLD_INIT,
    VGG,
    small_resnet,
    small_vgg,
)
from flatlens.training import SGD, Training, Until

DATA = "data+model.classes+loss_below"
_GRIDS: Mapping[Scale, tuple[tuple[float, ...], tuple[int, ...], int]] = {
    "smoke": ((0.1, 0.03), (5, 10), 4),
    "laptop": ((0.1, 0.03, 0.01), (8, 32, 128), 4),
    "paper": ((0.1, 0.01, 0.001), (64, 128, 256, 512, 1024), 5),
}
_KINDS = {"resnet": "ResNet-18", "vgg": "VGG-11"}


def _x8(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, seeds = _GRIDS[scale]
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
        base = NetworkSettings(sets[0][0], network, training, END_MEASURES, samples=samples)
        axes = (Axis(DATA, sets), Axis("lr", lrs), Axis("batch_size", batches), trial_axis(seeds))
        shown = (ABSOLUTE_GAP, BATCH_SHARPNESS, JACOBIAN, LEARNING_RATE, BATCH_SIZE)
        studies[name] = Study(_KINDS[name], base, axes, shown, scale=scale)
    return studies


NORM = "Jacobian norm"
_WORDS = {"sharpness": BATCH_SHARPNESS.column, NORM: JACOBIAN.column, "generalisation gap": ABSOLUTE_GAP.column}
_ALIKE = {"lr": ("batch_size", DATA, "seed"), "batch_size": ("lr", DATA, "seed")}
"""Settings that the networks of a line share: in Fig. 3 and 12 to 15, and in Fig. 4 and 16 to 19."""


_FIGURES = {
    ("resnet", "lr"): "Fig. 3, 12, 13",
    ("resnet", "batch_size"): "Fig. 4, 16, 17",
    ("vgg", "lr"): "Fig. 14, 15",
    ("vgg", "batch_size"): "Fig. 18, 19",
}


def _line(study: str, name: str, says: str, among: Table, setting: str, word: str, side: Side) -> Prediction:
    """Return a prediction about the lines of a figure."""
    found = along(among, setting, _WORDS[word], _ALIKE[setting])
    slug, source = f"{study}.{name}.{word.split()[0].lower()}", f"sharpening section 6, {_FIGURES[study, setting]}"
    return Prediction(slug, f"{_KINDS[study]}: {says} {word}.", source, found, side)


def _by_data(table: Table) -> Table:
    """Return the table with the data set as its case."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        return networks.assign(**{CASE: networks[DATA].map(_data_in) if DATA in networks else ""})

    return found


def _x8_predictions() -> tuple[Prediction, ...]:
    return tuple(prediction for study in _KINDS for prediction in (*_lines(study), *_correlations(study)))


def _lines(study: str) -> list[Prediction]:
    table = reached(study)
    slow = where(table, lambda t: t["lr"] < t["lr"].max())
    fast = where(table, lambda t: t["lr"] == t["lr"].max())
    at = "at the largest learning rate larger batches end at a"
    predictions = [
        _line(study, "lr", "larger learning rates end at a smaller", table, "lr", word, "below") for word in _WORDS
    ] + [
        _line(study, "batch", "at the smaller learning rates larger batches end at a larger", slow, "batch_size", word,
              "above") for word in _WORDS
    ] + [
        _line(study, "fast", f"{at} larger", fast, "batch_size", word, "above") for word in _WORDS if word != NORM
    ]  # fmt: skip
    if study == "resnet":
        return [*predictions, _line(study, "fast", f"{at} smaller", fast, "batch_size", NORM, "below")]
    return [
        *predictions,
        _line(study, "fast", f"that is no exception here: {at} larger", fast, "batch_size", NORM, "above"),
    ]


def _correlations(study: str) -> list[Prediction]:
    kind, table = _KINDS[study], reached(study)
    exception = ""
    if study == "resnet":
        table, exception = where(table, lambda t: t["lr"] < t["lr"].max()), ", but at the largest learning rate"
    columns = (BATCH_SHARPNESS.column, JACOBIAN.column)
    ranks = ranked(_by_data(reached(study)), columns)
    return [
        Prediction(
            f"{study}.jacobian.gap",
            f"{kind}: the Jacobian norm is well correlated with the generalisation gap{exception}.",
            "sharpening B.2",
            across(_by_data(table), [(JACOBIAN.column, ABSOLUTE_GAP.column)], mean, "mean over data sets of Pearson r"),
        ),
        Prediction(
            f"{study}.jacobian.sharpness",
            f"{kind}: smaller sharpness goes with a smaller Jacobian norm.",
            f"sharpening section 6, {_FIGURES[study, 'lr']}",
            across(ranks, [columns], mean, "mean over data sets of Spearman's coefficient"),
        ),
    ]


def _x8_plots(results: Results) -> list[Plot]:
    plots = []
    for study, kind in _KINDS.items():
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
    """Return the name of the data set in a cell that holds its settings.

    >>> _data_in("(DataSettings(name='cifar10', train=None), 10, 0.01)")
    'cifar10'
    """
    return cell.partition("name='")[2].partition("'")[0]


VARIATION = (
    "Not weighed: that the Jacobian's local variation is larger after large batches at the largest learning rate, and "
    "that lines of both data sets show the same each."
)

EXPERIMENTS = (
    Experiment(
        "X8",
        "Where training ends, by learning rate and batch size",
        "sharpening Fig. 3, 4, 12, 13, 14, 15, 16, 17, 18, 19",
        _x8,
        _x8_predictions(),
        _x8_plots,
        {
            "smoke": (SMOKE_ONLY, DIGIT_RESNET, PATCH_VGG),
            "laptop": (
                DIGIT_RESNET,
                PATCH_VGG,
                "Learning rates 0.1, 0.03, 0.01 and batches of 8, 32, 128; the loss is looked at every 10 steps, until "
                "the mean of 5 is below 0.01; 4 trials, measured on 100 points.",
                NO_DECAY,
                COEFFICIENT,
                VARIATION,
            ),
            "paper": (UNTOLD_INIT, GHOSTS, "200,000 steps at most.", NO_DECAY, COEFFICIENT, VARIATION),
        },
    ),
)
