"""X9: gap, sharpness and Jacobian norm under label smoothing, mixup, augmentation and SAM, by their strengths.

A case is a kind of network (with BatchNorm or without, on one data set) under one regulariser.
"""

from __future__ import annotations

import pandas as pd

from flatlens.papers.cases import across, mean
from flatlens.papers.evidence import correlated, these
from flatlens.papers.experiment import Experiment, Plot
from flatlens.papers.plots import BANDS, banded
from flatlens.papers.predictions import Results
from flatlens.papers.remarks import FEW_SEEDS, ONE_DRAW, SMOKE_ONLY
from flatlens.papers.sharpening.networks import GHOSTS
from flatlens.papers.sharpening.regularised_claims import x9_predictions
from flatlens.papers.sharpening.regularisers import REGULARISERS, kind_in_words, regularised_networks, studies
from flatlens.papers.sharpening.section6 import (
    ABSOLUTE,
    DRAWN_QUANTITIES,
    FEW_OF_CIFAR,
    JACOBIAN_COLUMN,
    JACOBIANS,
    SECTION6_UNSAID,
    SHARPNESS_COLUMN,
    SMALL_NETWORKS,
    SOFTMAXED_COLUMN,
    TINY,
)

_CORRELATED = {
    "sharpness": SHARPNESS_COLUMN,
    "Jacobian norm": JACOBIAN_COLUMN,
    "Jacobian norm of softmax": SOFTMAXED_COLUMN,
}


def _x9_plots(results: Results) -> list[Plot]:
    table = regularised_networks(*REGULARISERS)(results)
    return [_correlations(results), *(_of_kind(str(kind), mine) for kind, mine in table.groupby("kind"))]


def _of_kind(kind: str, table: pd.DataFrame) -> Plot:
    """Return one of Fig. 20 to 27: two rows of panels for each regulariser."""
    table = table.assign(x=table["strength"], line=table["lr"])
    parts = [
        mine.assign(panel=f"{shown.name}, {REGULARISERS[str(name)].title}", y=shown.of(mine))
        for name, mine in table.groupby("regulariser", sort=False)
        for shown in DRAWN_QUANTITIES
    ]
    caption = f"Over the strength of each regulariser, alpha, beta, p or rho; a line an initial learning rate. {BANDS}."
    rows = pd.concat(parts, ignore_index=True)
    title = f"{_figures(kind)}: {kind_in_words(kind)}, regularised"
    return banded(rows, f"regularised_{kind}", title, caption, "strength", "learning rate")


_FIGURES = {"vgg11": (20, 24), "vgg11_bn": (21, 25), "resnet18": (22, 26), "resnet18_bn": (23, 27)}
"""Figures of each kind of network on CIFAR-10 and on CIFAR-100."""


def _figures(kind: str) -> str:
    """Return the figures that show a kind of network.

    >>> _figures("resnet18_cifar10_bn"), _figures("vgg11")
    ('Fig. 5, 23', 'Fig. 20, 24')
    """
    on_10, on_100 = _FIGURES[kind.replace("_cifar100", "").replace("_cifar10", "")]
    shown = [on_100] if "cifar100" in kind else [on_10] if "cifar10" in kind else [on_10, on_100]
    return "Fig. " + ", ".join(map(str, [5, *shown] if on_10 == 23 and shown != [on_100] else shown))


def _correlations(results: Results) -> Plot:
    """Return each r of the claims with its interval: a panel for the mean over kinds, and one for each kind."""
    rows = []
    for name, one in REGULARISERS.items():
        table = regularised_networks(name)(results)
        for shown, column in _CORRELATED.items():
            pair = (column, ABSOLUTE)
            whole = across(regularised_networks(name), [pair], mean, "mean over cases of Pearson r")(results)
            rows.append(("mean over all kinds", one.title, shown, whole.value, whole.low, whole.high))
            for kind, mine in table.groupby("kind"):
                found = correlated(these(mine), *pair)(results)
                rows.append((kind_in_words(str(kind)), one.title, shown, found.value, found.low, found.high))
    data = pd.DataFrame(rows, columns=["panel", "x", "group", "y", "low", "high"])
    caption = "Pearson's r with the gap over the networks of one kind and regulariser, with its 95% interval."
    return Plot("correlations", "What correlates with the gap", caption, "bars", data, "regulariser", "r with the gap")


_GRID = (
    "Strengths and initial learning rates are not given: alpha to 0.75, beta and p to 1, rho to 0.2; 0.1, 0.01 and "
    "0.001 as in B.2, weighed together."
)
_LOSSES = (
    "Gap and loss are of all training samples, without mixup or augmentation; the rest is of the samples measured."
)
_FITTED = (
    "These are 480 steps, too few without BatchNorm: there the mean training accuracy is 0.75 to 0.77 (ResNet-18) and "
    "0.96 (VGG-11) without a regulariser, and 0.24 to 0.58 at the greatest strengths, so that a stronger regulariser "
    "also means less training. With BatchNorm it is 0.98 or more, but for augmentation at p = 1 (0.79 and 0.93)."
)
_OFTEN = (
    "That the Hessian is often uncorrelated with the gap is shown beside the other correlations, and not weighed: no "
    "number of networks can show that there is none."
)

EXPERIMENTS = (
    Experiment(
        "X9",
        "Regularisers: sharpness, Jacobian norm and gap over their strengths",
        "sharpening Fig. 5, 20, 21, 22, 23, 24, 25, 26, 27",
        studies,
        x9_predictions(),
        _x9_plots,
        {
            "smoke": (SMOKE_ONLY, TINY, JACOBIANS),
            "laptop": (
                SMALL_NETWORKS,
                "One learning rate, .05 for ResNet-18 and .02 for VGG-11, batches of 25 and 10, 30 and 60 epochs, 6 "
                "seeds, 30 samples measured.",
                JACOBIANS,
                _LOSSES,
                _OFTEN,
            ),
            "desk": (
                FEW_OF_CIFAR,
                "One learning rate, .05 for ResNet-18 and .02 for VGG-11, 60 epochs, 16 seeds; 32 of ResNet-18 "
                "without BatchNorm, 64 under mixup.",
                "10 seeds left one case of 16 of the main claim open (p = 0.0253 a side); with 6 more, a second look, "
                "two cases of ResNet-18 without BatchNorm were open; 16 more of this kind, a third look, left that of "
                "mixup open (p = 0.043 a side); 32 more of it are a fourth and last look. Where there is no effect, "
                "four looks decide in up to 7.1% of cases a side, not 2.5%.",
                "Strengths: alpha to 0.75, beta and p to 1, rho to 0.1.",
                _FITTED,
                ONE_DRAW,
                JACOBIANS,
                _LOSSES,
                _OFTEN,
            ),
            "paper": (_GRID, FEW_SEEDS, JACOBIANS, GHOSTS, _LOSSES, SECTION6_UNSAID, _OFTEN),
        },
    ),
)
