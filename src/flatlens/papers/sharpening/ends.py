"""X7 and X8: the end of training under cross-entropy, by weight decay, and by learning rate and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import BATCH_SIZE, LEARNING_RATE, Quantity, in_words
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import VGG11, Architecture, ResNet18
from flatlens.papers.contrasts import of_each_case, with_over_without
from flatlens.papers.evidence import (
    CASE,
    UNIT,
    Evidence,
    Table,
    alike_in,
    by_line,
    complete,
    over_groups,
    reached,
    trained_in,
    trained_ones,
    word_of,
)
from flatlens.papers.experiment import Plot, Results, Scale, Side, deferred, seed_axis
from flatlens.papers.figures import BANDS, banded, pairwise
from flatlens.papers.sharpening.networks import (
    ABSOLUTE_GAP,
    BATCH_SHARPNESS,
    JACOBIAN,
    NARROW_RESNET,
    NARROW_VGG,
    RESNET,
    VGG,
    measured_in,
)
from flatlens.statistics import Statistic, partial_correlation
from flatlens.training import SGD, Steps, Training, Until


def small_resnet(scale: Scale) -> tuple[DataSettings, ResNet18]:
    """Return digits of 8 x 8 pixels, and a narrow ResNet-18 with BatchNorm on them."""
    train, width = (20, 0.03125) if scale == "smoke" else (200, 0.125)
    return DataSettings("digits", train=train, flat=False), ResNet18(classes=10, channels=1, width=width)


SHARP, NORM, GAP = BATCH_SHARPNESS.column, JACOBIAN.column, ABSOLUTE_GAP.column
END_MEASURES = (SHARP, NORM, "loss", "accuracy", "test_accuracy", GAP)
_PANELS = {"Jacobian norm": NORM, "sharpness": SHARP, "|test loss - training loss|": GAP}
"""The panels of Fig. 2 to 4 and 12 to 19."""


def ends(
    networks: pd.DataFrame,
    name: str,
    x: str,
    line: str,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool | tuple[str, ...] = True,
) -> Plot:
    """Return curves over the setting `x`: one line per value of the setting `line`."""
    networks = networks.rename(columns={x: "x", line: "line"})
    rows = pd.concat([networks.assign(panel=panel, y=networks[column]) for panel, column in _PANELS.items()])
    caption = f"At the end of training. {BANDS}."
    return banded(rows, name, title, caption, in_words(x), in_words(line), log_x=log_x, log_y=log_y)


def at_least(table: Table, x: str, y: str, same: Sequence[str]) -> Evidence:
    """Return the mean of log(a / b) over groups equal in `same`: a is y where x is least, b y's mean elsewhere."""

    def log_ratio(group: pd.Series) -> float:
        a, *others = group.sort_index()
        b = np.mean(others) if others else 0
        return float(np.log(a / b)) if a > 0 and b > 0 else np.nan

    return over_groups(table, x, y, same, log_ratio, f"log of {y} where {x} is least over its mean elsewhere")


NOT_FLATTEST = "the one with the least gap is not the flattest"


@deferred
def best_of(results: Results, table: Table, gap: str, same: Sequence[str]) -> pd.DataFrame:
    """Return a row per group equal in `same`, with NOT_FLATTEST: 1 or 0."""
    groups = alike_in(trained_ones(table(results))[0], same)
    least = [[of[column].astype(float).idxmin() for column in (SHARP, gap)] for of in groups]
    return pd.DataFrame({NOT_FLATTEST: [float(a != b) for a, b in least], UNIT: [of[UNIT].iloc[0] for of in groups]})


@deferred
def given(results: Results, table: Table, x: str, y: str, control: str) -> Statistic:
    """Return Pearson's partial correlation of two columns given a third, over units."""
    kept = complete(table(results), [x, y, control])
    own = kept.table
    units = own[UNIT]
    one = partial_correlation(own[x], own[y], own[[control]], names=(x, y), units=units, unit=word_of(units))
    return replace(one, excluded=kept.excluded)


DECAY = "weight_decay"


def by_decay(column: str, side: Side) -> Evidence:
    """Return the log of a column with a weight decay over that without, for each decay and learning rate of Fig. 2."""
    networks = by_line(trained_in("resnet"), "lr")

    def each(results: Results) -> pd.DataFrame:
        table = networks(results)
        parts = [
            table[table[DECAY].isin([0, decay])].assign(**{CASE: lambda of, d=decay: of[CASE] + f", decay {d}"})
            for decay in sorted(table[DECAY].unique())[1:]
        ]
        return pd.concat(parts, ignore_index=True)

    name = f"log of {column} with {DECAY} over that without, in each line"
    return of_each_case(each, lambda one: with_over_without(one, DECAY, column, ["seed"]), name, side=side)


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


def _x7_plots(results: Results) -> list[Plot]:
    networks = trained_in("resnet")(results)
    shown = ends(networks, "fig2", DECAY, "lr", "Fig. 2: weight decay, by learning rate")
    return [shown, pairwise("resnet", results["resnet"])]


# ---- X8: learning rate and batch size

_DATA = "data+model.classes+loss_below"
_KINDS = {"resnet": "ResNet-18", "vgg": "VGG-11"}


def _x8(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, seeds = {
        "smoke": ((0.1, 0.03), (5, 10), 2),
        "laptop": ((0.1, 0.03, 0.01), (8, 32, 128), 6),
        "desk": ((0.1, 0.03, 0.01), (8, 32, 128), 10),
        "paper": ((0.1, 0.01, 0.001), (64, 128, 256, 512, 1024), 5),
    }[scale]
    every, window, steps, samples = {
        "smoke": (10, 1, 4, 10),
        "laptop": (10, 5, 4000, 40),
        "desk": (50, 5, 4000, 100),
        "paper": (100, 10, 200_000, 2000),
    }[scale]
    # patches of photographs, and a narrow VGG-11 with BatchNorm on them
    train, width = (20, 0.03125) if scale == "smoke" else (200, 0.0625)
    small_vgg = DataSettings("patches", train=train, test=200), VGG11(classes=2, width=width)
    below = None if scale == "smoke" else 0.01
    studies = {}
    for name, (data, model), narrow, published in (
        ("resnet", small_resnet(scale), NARROW_RESNET, RESNET),
        ("vgg", small_vgg, NARROW_VGG, VGG),
    ):
        sets: tuple[tuple[DataSettings, int, float | None], ...] = ((data, model.classes, below),)
        network: Architecture = model
        if scale == "desk":
            sets, network = ((DataSettings("cifar10", train=200, test=1000), 10, 0.01),), narrow
        if scale == "paper":
            sets = ((DataSettings("cifar10"), 10, 0.01), (DataSettings("cifar100"), 100, 0.02))
            network = published
        until = Until(loss_below=sets[0][2], loss_window=window)
        training = Training(
            SGD(lrs[0], weight_decay=1e-4), batch_size=batches[0], until=until, max_steps=steps, check_every=every
        )
        varies = (Quantity("local variation of the Jacobian", LOCAL_VARIATION),) if name == "resnet" else ()
        measures = (*END_MEASURES, *(one.column for one in varies))
        base = NetworkSettings(sets[0][0], network, training, measures, samples=samples, dtype=measured_in(scale))
        axes = (Axis(_DATA, sets), Axis("lr", lrs), Axis("batch_size", batches), seed_axis(seeds))
        shown = (ABSOLUTE_GAP, BATCH_SHARPNESS, JACOBIAN, *varies, LEARNING_RATE, BATCH_SIZE)
        studies[name] = Study(_KINDS[name], base, axes, shown, scale=scale)
    return studies


LOCAL_VARIATION = "local_variation(delta=1.0, restarts=1, steps=3)"
"""Eq. 5 within a distance of 1, about a tenth of that between two samples; a search finds it, from below."""
ALIKE = {"lr": ("batch_size", _DATA, "seed"), "batch_size": ("lr", _DATA, "seed")}
"""Settings that the networks of a line share: in Fig. 3 and 12 to 15, and in Fig. 4 and 16 to 19."""
_FIGURES = {
    ("resnet", "lr"): ("3, 12", "13"),
    ("resnet", "batch_size"): ("4, 16", "17"),
    ("vgg", "lr"): ("14", "15"),
    ("vgg", "batch_size"): ("18", "19"),
}
"""Figures of each network and setting on CIFAR-10 and on CIFAR-100."""


@deferred
def by_data(results: Results, table: Table) -> pd.DataFrame:
    """Return the table with the data set as its case."""
    networks = table(results)
    return networks.assign(**{CASE: networks[_DATA].map(_data_in) if _DATA in networks else ""})


def _x8_plots(results: Results) -> list[Plot]:
    plots = []
    for study, kind in _KINDS.items():
        networks = reached(study)(results)
        sets = networks[_DATA].map(_data_in) if _DATA in networks else pd.Series("", index=networks.index)
        for name, among in networks.groupby(sets):
            at, on = (f"{study}_{name}", f"{kind} on {name}") if name else (study, kind)
            logarithmic = ("sharpness",) if study == "resnet" else True  # as the caption of Fig. 4 says
            for setting, line, log_y in (("lr", "batch_size", True), ("batch_size", "lr", logarithmic)):
                on_10, on_100 = _FIGURES[study, setting]
                figures = {"cifar10": on_10, "cifar100": on_100}.get(str(name), f"{on_10}, {on_100}")
                said = f"Fig. {figures}: {on}, {in_words(setting)} by {in_words(line)}"
                short = setting.removesuffix("_size")
                plots.append(ends(among, f"{at}_{short}", setting, line, said, log_x=True, log_y=log_y))
        plots.append(pairwise(study, results[study]))
    return plots


def _data_in(cell: str) -> str:
    """Return the name of the data set in a cell that holds its settings.

    >>> _data_in("(DataSettings(name='cifar10', train=None), 10, 0.01)")
    'cifar10'
    """
    return cell.partition("name='")[2].partition("'")[0]
