"""X9: gap, sharpness and Jacobian norm under label smoothing, mixup, augmentation and SAM, by their strengths.

A case is a kind of network (with BatchNorm or without, on one data set) under one regulariser.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from flatlens.papers.cases import across, alike, by_part, first_step, in_each_case, margin, mean
from flatlens.papers.contrasts import mean_of
from flatlens.papers.evidence import Table, along, correlated, where
from flatlens.papers.experiment import Experiment, Plot
from flatlens.papers.plots import banded
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import SMOKE_ONLY, WEAK
from flatlens.papers.sharpening.networks import GHOSTS
from flatlens.papers.sharpening.regularisers import (
    REGULARISERS,
    SAME_EXCEPT_STRENGTH,
    Regulariser,
    kind_in_words,
    regularised_networks,
    studies,
)
from flatlens.papers.sharpening.section6 import (
    ABSOLUTE,
    DRAWN_QUANTITIES,
    GGN_NORM,
    JACOBIAN,
    JACOBIANS,
    SECTION6_UNSAID,
    SHARPNESS,
    SMALL_NETWORKS,
    SOFTMAXED,
    TINY,
)

MUCH = 0.3
"""Least difference of r that counts as "much better"."""
_SIMILAR = 0.2
"""Largest distance of two "very similar" norms, in logarithms: a fifth."""


ALMOST_ALWAYS = 0.9


def _alike(table: Table) -> Table:
    """Return the table with a column that is 1 where the two matrices' norms are very similar, else 0."""

    def found(results: Results) -> pd.DataFrame:
        kept = table(results)
        apart = (kept[GGN_NORM].astype(float) / kept[SHARPNESS].astype(float)).map(np.log).abs()
        return kept.assign(**{"norms a fifth apart at most": (apart < _SIMILAR).astype(float).where(apart.notna())})

    return found


def _x9_predictions() -> tuple[Prediction, ...]:
    predictions = [prediction for name, one in REGULARISERS.items() for prediction in _predictions_of(name, one)]
    every = regularised_networks(*REGULARISERS)
    # ResNet-18 with BatchNorm; on CIFAR-10 if there are several data sets
    of_fig5 = where(every, lambda t: t["kind"].isin(["resnet18_bn", "resnet18_cifar10_bn"]))
    return (
        *predictions,
        Prediction(
            "sam.forces_the_jacobian",
            "SAM: forcing the Hessian to be small forces the Jacobian to be small: their norms correlate, in the mean "
            "of the cases.",
            "sharpening B.3 (ii)",
            across(
                regularised_networks("sam"),
                [(SHARPNESS, JACOBIAN)],
                mean,
                "mean over cases of Pearson r of sharpness and Jacobian",
            ),
        ),
        Prediction(
            "fig5.much_better",
            f"ResNet-18 with BatchNorm: the Jacobian norm correlates much better with the gap than sharpness does, r "
            f"larger by {MUCH:g} in the mean of the four.",
            "sharpening Fig. 5",
            across(of_fig5, [(JACOBIAN, ABSOLUTE), (SHARPNESS, ABSOLUTE)], margin, _MARGIN),
            "above",
            MUCH,
        ),
        Prediction(
            "hessian.hand_in_hand",
            "Whenever sharpness correlates with the gap, it goes hand in hand with the Jacobian norm: both "
            "correlations are high in the same cases.",
            "sharpening section 6",
            across(
                every,
                [(SHARPNESS, ABSOLUTE), (SHARPNESS, JACOBIAN)],
                alike,
                "Pearson r over cases of r(sharpness, gap) and r(sharpness, Jacobian)",
            ),
        ),
        Prediction(
            "hessian.other_factors",
            "The Hessian can be large without the Jacobian being large: under the regularisers other than SAM their "
            f"norms hardly correlate, r below {WEAK:g} in the mean of the cases.",
            "sharpening B.3 (ii)",
            across(
                regularised_networks(*(name for name, one in REGULARISERS.items() if not one.flattens)),
                [(SHARPNESS, JACOBIAN)],
                mean,
                "mean over cases of Pearson r of sharpness and Jacobian",
            ),
            "below",
            WEAK,
        ),
        Prediction(
            "jacobian.in_all_cases",
            "In all cases the correlation of the Jacobian norm with the gap is superior to that of sharpness: r is "
            "larger even in the case where it is least so.",
            "sharpening section 1, 4th contribution",
            in_each_case(
                every,
                [(JACOBIAN, ABSOLUTE), (SHARPNESS, ABSOLUTE)],
                "Fisher's z with the gap, Jacobian's less sharpness's",
            ),
        ),
        Prediction(
            "gauss_newton",
            "The norm of the Gauss-Newton matrix is (almost) always very similar to that of the Hessian: a fifth apart "
            f"at most in more than {ALMOST_ALWAYS:.0%} of the networks.",
            "sharpening B.3",
            mean_of(_alike(every), "norms a fifth apart at most"),
            "above",
            ALMOST_ALWAYS,
        ),
    )


_MARGIN = "mean over cases of Pearson r with the gap, Jacobian's less sharpness's"


def _predictions_of(name: str, one: Regulariser) -> list[Prediction]:
    table, title = regularised_networks(name), one.title
    in_title = f"{title[0].upper()}{title[1:]}"
    predictions = []
    for jacobian, suffix, said in ((JACOBIAN, "", "the Jacobian"), (SOFTMAXED, ".softmax", "the softmax's Jacobian")):
        pair = (jacobian, ABSOLUTE)
        predictions += [
            Prediction(
                f"{name}.jacobian_and_gap{suffix}",
                f"{in_title}: in all cases {said} correlates with the gap; the least r of the kinds of networks.",
                "sharpening B.3 (i)",
                in_each_case(table, [pair], f"Pearson r of {jacobian} and the gap"),
            ),
            Prediction(
                f"{name}.better_than_sharpness{suffix}",
                f"{in_title}: {said} correlates better with the gap than sharpness does, in the mean of the kinds.",
                "sharpening section 6",
                across(table, [pair, (SHARPNESS, ABSOLUTE)], margin, _MARGIN),
            ),
        ]
    predictions += [
        Prediction(
            f"{name}.jacobian",
            f"{in_title} regularises the Jacobian at least initially: its norm falls from no regularisation to the "
            "weakest.",
            "sharpening section 6",
            first_step(table, "strength", JACOBIAN, SAME_EXCEPT_STRENGTH),
            "below",
        ),
        Prediction(
            f"{name}.sharpness",
            f"{in_title} regularises the sharpness."
            if one.flattens
            else f"{in_title} does not regularise the sharpness, as only SAM does: no fall with {one.symbol}, tau "
            f"above {-WEAK:g}.",
            "sharpening section 6",
            along(table, "strength", SHARPNESS, SAME_EXCEPT_STRENGTH),
            "below" if one.flattens else "above",
            0.0 if one.flattens else -WEAK,
        ),
    ]
    if one.impure:
        predictions += [
            Prediction(
                f"{name}.decorrelates",
                f"{in_title}: the Jacobian norm and the gap decorrelate as {one.symbol} increases: their r is smaller "
                "beyond the weakest than with the unregularised networks, in the mean of the kinds.",
                "sharpening Fig. 5",
                by_part(
                    table, lambda t: t["strength"] > 0, JACOBIAN, ABSOLUTE,
                    "mean over cases of Pearson r of Jacobian and gap: beyond the weakest less that of all",
                ),
                "below",
            ),
            Prediction(
                f"{name}.jacobian_comes_back",
                f"{in_title}: beyond the weakest, the Jacobian norm on the pure samples gradually increases with "
                f"{one.symbol}.",
                "sharpening Fig. 5, section 6",
                along(where(table, lambda t: t["strength"] > 0), "strength", JACOBIAN, SAME_EXCEPT_STRENGTH),
            ),
        ]  # fmt: skip
    return predictions


CORRELATED = {"sharpness": SHARPNESS, "Jacobian norm": JACOBIAN, "Jacobian norm of softmax": SOFTMAXED}


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
    caption = (
        "Over the strength of each regulariser, alpha, beta, p or rho; a line an initial learning rate: the mean over "
        "seeds, with its extremes."
    )
    rows = pd.concat(parts, ignore_index=True)
    return banded(
        rows, f"regularised_{kind}", f"Regularised: {kind_in_words(kind)}", caption, "strength", "learning rate"
    )


def _correlations(results: Results) -> Plot:
    """Return each r of the claims with its interval: a panel for the mean over kinds, and one for each kind."""
    rows = []
    for name, one in REGULARISERS.items():
        table = regularised_networks(name)(results)
        for shown, column in CORRELATED.items():
            pair = (column, ABSOLUTE)
            whole = across(regularised_networks(name), [pair], mean, "mean over cases of Pearson r")(results)
            rows.append(("mean over all kinds", one.title, shown, whole.value, whole.low, whole.high))
            for kind, mine in table.groupby("kind"):
                found = correlated(lambda _, mine=mine: mine, *pair)(results)  # type: ignore[misc]
                rows.append((kind_in_words(str(kind)), one.title, shown, found.value, found.low, found.high))
    data = pd.DataFrame(rows, columns=["panel", "x", "group", "y", "low", "high"])
    caption = "Pearson's r with the gap over the networks of one kind and regulariser, with its 95% interval."
    return Plot("correlations", "What correlates with the gap", caption, "bars", data, "regulariser", "r with the gap")


_GRID = (
    "Strengths and initial learning rates are not given: alpha to 0.75, beta and p to 1, rho to 0.2; 0.1, 0.01 and "
    "0.001 as in B.2."
)
_LOSSES = (
    "Gap and loss are of all training samples, without mixup or augmentation; the rest is of the samples measured."
)
MODE = "That BatchNorm's mode matters little to the Jacobian norm is not weighed: see the bound `batchnorm_limit`."

EXPERIMENTS = (
    Experiment(
        "X9",
        "Regularisers: sharpness, Jacobian norm and gap over their strengths",
        "sharpening Fig. 5, 20, 21, 22, 23, 24, 25, 26, 27",
        studies,
        _x9_predictions(),
        _x9_plots,
        {
            "smoke": (SMOKE_ONLY, TINY, JACOBIANS),
            "laptop": (
                SMALL_NETWORKS,
                "Learning rates .05 and .1 for ResNet-18, .005 and .02 for VGG-11, batches of 25 and 10, 30 and 60 "
                "epochs, 2 seeds, 30 samples measured.",
                JACOBIANS,
                _LOSSES,
                MODE,
            ),
            "paper": (_GRID, JACOBIANS, GHOSTS, _LOSSES, SECTION6_UNSAID, MODE),
        },
    ),
)
