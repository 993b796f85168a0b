"""X8: the end of training, by learning rate and batch size; and the measures and figures that X7 shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import BATCH_SIZE, LEARNING_RATE, Quantity, in_words
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import Architecture
from flatlens.papers.contrasts import across, mean, ranked
from flatlens.papers.evidence import CASE, Table, along, reached, where
from flatlens.papers.experiment import (
    COEFFICIENT,
    FEW_SEEDS,
    SMOKE_ONLY,
    Experiment,
    Plot,
    Prediction,
    Results,
    Scale,
    Side,
    seed_axis,
)
from flatlens.papers.figures import BANDS, banded, pairwise
from flatlens.papers.sharpening.networks import (
    ABSOLUTE_GAP,
    BATCH_SHARPNESS,
    DIGIT_RESNET,
    GHOSTS,
    JACOBIAN,
    NARROW,
    NARROW_RESNET,
    NARROW_VGG,
    PATCH_VGG,
    RESNET,
    UNTOLD_INIT,
    VGG,
    measured_in,
    small_resnet,
    small_vgg,
)
from flatlens.training import SGD, Training, Until

END_MEASURES = (BATCH_SHARPNESS.column, JACOBIAN.column, "loss", "accuracy", "test_accuracy", ABSOLUTE_GAP.column)
_PANELS = {
    "Jacobian norm": JACOBIAN.column,
    "sharpness": BATCH_SHARPNESS.column,
    "|test loss - training loss|": ABSOLUTE_GAP.column,
}
"""The panels of Fig. 2 to 4 and 12 to 19."""
NO_DECAY = "Sharpness leaves weight decay out of the loss."


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


_DATA = "data+model.classes+loss_below"
_GRIDS: Mapping[Scale, tuple[tuple[float, ...], tuple[int, ...], int]] = {
    "smoke": ((0.1, 0.03), (5, 10), 2),
    "laptop": ((0.1, 0.03, 0.01), (8, 32, 128), 6),
    "desk": ((0.1, 0.03, 0.01), (8, 32, 128), 10),
    "paper": ((0.1, 0.01, 0.001), (64, 128, 256, 512, 1024), 5),
}
_KINDS = {"resnet": "ResNet-18", "vgg": "VGG-11"}


def _x8(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, seeds = _GRIDS[scale]
    every, window, steps, samples = {
        "smoke": (10, 1, 4, 10),
        "laptop": (10, 5, 4000, 40),
        "desk": (50, 5, 4000, 100),
        "paper": (100, 10, 200_000, 2000),
    }[scale]
    studies = {}
    for name, (data, model), narrow, published in (
        ("resnet", small_resnet(scale), NARROW_RESNET, RESNET),
        ("vgg", small_vgg(scale), NARROW_VGG, VGG),
    ):
        below = None if scale == "smoke" else 0.01
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
        varies = (Quantity(_VARIATION, _LOCAL_VARIATION),) if name == "resnet" else ()
        measures = (*END_MEASURES, *(one.column for one in varies))
        base = NetworkSettings(sets[0][0], network, training, measures, samples=samples, dtype=measured_in(scale))
        axes = (Axis(_DATA, sets), Axis("lr", lrs), Axis("batch_size", batches), seed_axis(seeds))
        shown = (ABSOLUTE_GAP, BATCH_SHARPNESS, JACOBIAN, *varies, LEARNING_RATE, BATCH_SIZE)
        studies[name] = Study(_KINDS[name], base, axes, shown, scale=scale)
    return studies


_NORM, _GAP, _VARIATION = "Jacobian norm", "generalisation gap", "local variation of the Jacobian"
_WORDS = {"sharpness": BATCH_SHARPNESS.column, _NORM: JACOBIAN.column, _GAP: ABSOLUTE_GAP.column}
_LOCAL_VARIATION = "local_variation(delta=1.0, restarts=1, steps=3)"
"""Eq. 5 within a distance of 1, about a tenth of that between two samples; a search finds it, from below."""
_SHOWN = {**_WORDS, _VARIATION: _LOCAL_VARIATION}
_ALIKE = {"lr": ("batch_size", _DATA, "seed"), "batch_size": ("lr", _DATA, "seed")}
"""Settings that the networks of a line share: in Fig. 3 and 12 to 15, and in Fig. 4 and 16 to 19."""


_FIGURES = {
    ("resnet", "lr"): "Fig. 3, 12, 13",
    ("resnet", "batch_size"): "Fig. 4, 16, 17",
    ("vgg", "lr"): "Fig. 14, 15",
    ("vgg", "batch_size"): "Fig. 18, 19",
}


@dataclass(frozen=True)
class _Row:
    """A claim about the lines of a figure: how a number goes with the setting on its x axis."""

    name: str
    says: str
    setting: str
    side: Side
    words: tuple[str, ...]
    quote: str
    chosen: Callable[[pd.DataFrame], pd.Series] = lambda t: t["lr"] > 0
    source: str = "section 6"

    @property
    def place(self) -> str:
        """Return the place of the quote: a section, or the caption of a figure."""
        return f"caption of {self.source}" if self.source.startswith("Fig.") else self.source


def _slow(t: pd.DataFrame) -> pd.Series:
    return t["lr"].lt(t["lr"].max())


def _fast(t: pd.DataFrame) -> pd.Series:
    return t["lr"].eq(t["lr"].max())


_FLATTER = (
    "on the whole, the claim that smaller batch sizes and larger learning rates lead to flatter minima and better "
    "generalisation is supported by our experiments"
)
_SMALLER_RATES = (
    "At least for the smaller learning rates, increasing batch size typically increases sharpness, Jacobian norm and "
    "generalisation gap"
)
_INVERSE = (
    "with the exception of Jacobian norm being reduced with larger batch size at the highest learning rate while "
    "generalisation gap increases (Figure 4)"
)
_NOT_VGG = "architecture-dependent (we do not observe this problem with VGG11 on either CIFAR10 or CIFAR100)"
_NO_PROBLEM = "The problem is that the norm falls while the gap rises: without it they rise and fall together."
_OF_RESNET = "The caption is that of ResNet-18's figure; B.2 shows VGG-11 beside it, and does not repeat the sentence."
_VARIES = (
    "this local variation term is increased during (impractical) large batch training of skip-connected architectures "
    "using a constant high learning rate"
)
_RATES_VARY = "larger learning rates tend to increase the local variation of the model's Jacobian"
_AT = "at the largest learning rate larger batches end at a"
_OF_BOTH = (
    _Row("lr", "larger learning rates end at a smaller", "lr", "below", ("sharpness", _GAP), _FLATTER, source="B.2"),
    _Row("lr", "larger learning rates end at a smaller", "lr", "below", (_NORM,),
         "The downward pressure on sharpness and generalisation gap correlates with smaller Jacobian norms",
         source="Fig. 3"),
    _Row("batch", "at the smaller learning rates larger batches end at a larger", "batch_size", "above", tuple(_WORDS),
         _SMALLER_RATES, _slow, "Fig. 4"),
)  # fmt: skip
_ROWS: Mapping[str, tuple[_Row, ...]] = {
    "resnet": (
        *_OF_BOTH,
        _Row("fast", f"{_AT} larger", "batch_size", "above", (_GAP,), _INVERSE, _fast),
        _Row("fast", f"{_AT} smaller", "batch_size", "below", (_NORM,), _INVERSE, _fast),
        _Row("fast", f"{_AT} larger", "batch_size", "above", (_VARIATION,), _VARIES, _fast),
        _Row("lr", "larger learning rates end at a larger", "lr", "above", (_VARIATION,), _RATES_VARY, source="Fig. 4"),
    ),
    "vgg": _OF_BOTH,
}


def _by_data(table: Table) -> Table:
    """Return the table with the data set as its case."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        return networks.assign(**{CASE: networks[_DATA].map(_data_in) if _DATA in networks else ""})

    return found


def _x8_predictions() -> tuple[Prediction, ...]:
    return tuple(prediction for study in _KINDS for prediction in (*_lines(study), *_correlations(study)))


def _of_caption(study: str) -> str:
    """Return why a caption's sentence is a reading for this kind of network; an empty string if it is about it."""
    return _OF_RESNET if study == "vgg" else ""


def _lines(study: str) -> list[Prediction]:
    """Return the claims about the lines of the figures."""
    return [
        Prediction(
            f"{study}.{row.name}.{word.split()[0].lower()}",
            f"{_KINDS[study]}: {row.says} {word}.",
            f"sharpening {row.place}, {_FIGURES[study, row.setting]}",
            along(where(reached(study), row.chosen), row.setting, _SHOWN[word], _ALIKE[row.setting]),
            row.side,
            kind="reading" if row.source.startswith("Fig.") and _of_caption(study) else "claim",
            quote=row.quote,
            reason=_of_caption(study) if row.source.startswith("Fig.") else "",
        )
        for row in _ROWS[study]
        for word in row.words
    ]


def _correlations(study: str) -> list[Prediction]:
    kind, table = _KINDS[study], reached(study)
    exception = ""
    if study == "resnet":
        table, exception = where(table, _slow), ", without the largest learning rate"
    columns = (BATCH_SHARPNESS.column, JACOBIAN.column)
    ranks = ranked(_by_data(reached(study)), columns)
    of_caption = _of_caption(study)
    together = Prediction(
        f"{study}.fast.together",
        f"{kind}: over batch sizes at the largest learning rate, the Jacobian norm and the gap rise and fall together.",
        f"sharpening section 6, {_FIGURES[study, 'batch_size']}",
        along(where(reached(study), _fast), JACOBIAN.column, ABSOLUTE_GAP.column, _ALIKE["batch_size"]),
        quote=_NOT_VGG,
        reason=_NO_PROBLEM,
    )
    return [
        *([together] if study == "vgg" else []),
        Prediction(
            f"{study}.jacobian.gap",
            f"{kind}: the Jacobian norm is correlated with the generalisation gap{exception}.",
            "sharpening B.2",
            across(_by_data(table), [(JACOBIAN.column, ABSOLUTE_GAP.column)], mean, "mean over data sets of Pearson r"),
            kind="claim",
            quote="with Jacobian norm in particular being well-correlated to generalisation gap",
        ),
        Prediction(
            f"{study}.jacobian.sharpness",
            f"{kind}: smaller sharpness goes with a smaller Jacobian norm.",
            f"sharpening caption of Fig. 3, {_FIGURES[study, 'lr']}",
            across(ranks, [columns], mean, "mean over data sets of Spearman's coefficient"),
            kind="reading" if of_caption else "claim",
            reason=of_caption,
            quote="The downward pressure on sharpness and generalisation gap correlates with smaller Jacobian norms",
        ),
    ]


def _x8_plots(results: Results) -> list[Plot]:
    plots = []
    for study, kind in _KINDS.items():
        networks = reached(study)(results)
        sets = networks[_DATA].map(_data_in) if _DATA in networks else pd.Series("", index=networks.index)
        for name, among in networks.groupby(sets):
            at, on = (f"{study}_{name}", f"{kind} on {name}") if name else (study, kind)
            plots += [
                ends(
                    among,
                    f"{at}_lr",
                    "lr",
                    "batch_size",
                    f"{_FIGURES[study, 'lr']}: {on}, learning rate by batch size",
                    log_x=True,
                ),
                ends(
                    among,
                    f"{at}_batch",
                    "batch_size",
                    "lr",
                    f"{_FIGURES[study, 'batch_size']}: {on}, batch size by learning rate",
                    log_x=True,
                    log_y=("sharpness",) if study == "resnet" else True,  # as the caption of Fig. 4 says
                ),
            ]
        plots.append(pairwise(study, results[study]))
    return plots


def _data_in(cell: str) -> str:
    """Return the name of the data set in a cell that holds its settings.

    >>> _data_in("(DataSettings(name='cifar10', train=None), 10, 0.01)")
    'cifar10'
    """
    return cell.partition("name='")[2].partition("'")[0]


SEARCHED = (
    "The local variation (Eq. 5) is that within a distance of 1 of ResNet-18's samples, found by a search, which gives "
    "a lower bound; the paper does not measure it. Lines of both data sets are weighed together."
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
                "the mean of 5 is below 0.01; 6 seeds, measured on 40 points.",
                NO_DECAY,
                COEFFICIENT,
                SEARCHED,
            ),
            "desk": (
                NARROW,
                "200 images of CIFAR-10, without CIFAR-100; learning rates 0.1, 0.03, 0.01 and batches of 8, 32, 128; "
                "10 seeds; measured on 100 points, in float32.",
                "The loss is looked at every 50 steps, until the mean of 5 is below 0.01. These 250 steps are 10 "
                "epochs of batches of 8, and 125 of 128 (the paper's 1000 steps are 1.3 to 20). So training ends at "
                "losses of 0.0002 to 0.03, with which the sharpness goes (rank correlations of 0.87 and 0.84).",
                UNTOLD_INIT,
                NO_DECAY,
                COEFFICIENT,
                SEARCHED,
            ),
            "paper": (FEW_SEEDS, UNTOLD_INIT, GHOSTS, "200,000 steps at most.", NO_DECAY, COEFFICIENT, SEARCHED),
        },
    ),
)
