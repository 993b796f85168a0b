"""The claims of X9: what section 6 and B.3 say of regularised networks. A case is a kind under one regulariser."""

from __future__ import annotations

import numpy as np
import pandas as pd

from flatlens.papers.cases import across, alike, first_change, in_each_case, margin, of_each_case
from flatlens.papers.contrasts import mean_of, unchanged
from flatlens.papers.evidence import Evidence, Table, along, where
from flatlens.papers.predictions import Prediction, Results, Side, claim
from flatlens.papers.remarks import WEAK
from flatlens.papers.sharpening.regularisers import (
    REGULARISERS,
    SAME_EXCEPT_STRENGTH,
    Regulariser,
    regularised_networks,
)
from flatlens.papers.sharpening.section6 import ABSOLUTE, BATCH_JACOBIAN, GGN_NORM, JACOBIAN_COLUMN, SHARPNESS_COLUMN

_SIMILAR = 0.2
"""Largest distance of two "very similar" norms, in logarithms: a fifth."""
_ALMOST_ALWAYS = 0.9
_MARGIN = "mean over cases of Pearson r with the gap, Jacobian's less sharpness's"

_IN_ALL_CASES = "In all cases, the model Jacobian is correlated with the generalisation gap"
_CONSISTENTLY = (
    "empirical Jacobian norm consistently correlates better with generalisation than does sharpness for all "
    "regularisation measures we studied"
)
_AT_LEAST_INITIALLY = (
    "while Jacobian norm is regularised at least initially across all techniques, only in SAM is sharpness regularised"
)
_DECORRELATION = (
    "the decorrelation between Jacobian and generalisation for Mixup and Data Aug as x-axis parameter is increased is "
    "to be expected"
)
_INCREASE = (
    "the gradual increase in Jacobian norm for mixup and data augmentation as the *x*-axis parameter is increased"
)
_SUPERIOR = (
    "revealing in all cases the superior correlation of Jacobian norm and generalisation when compared with loss "
    "sharpness"
)
_FORCES = (
    "forcing the Hessian to be sufficiently small likewise appears to force the Jacobian to be smaller (see the SAM "
    "plots)"
)
_OTHERS = (
    "the Hessian is also influenced by other factors and can be large even without the Jacobian being large (see other "
    "plots)"
)
_MUCH_BETTER = (
    "The norm of the input-output Jacobian is much better correlated with the generalisation gap than that of the "
    "Hessian"
)
_HAND_IN_HAND = (
    "whenever loss sharpness *does* correlate with generalisation, this correlation tends to go hand-in-hand with "
    "smaller Jacobian norm"
)
_EACH_KIND = "The text says it of every technique; that it holds in each kind of network is asked for here."
_VERY_SIMILAR = "the norm of the Gauss-Newton matrix is (almost) always very similar to that of Hessian"
_NEGLIGIBLE = "this difference was observed to have negligible effect on the Jacobian norm"


def _alike(table: Table) -> Table:
    """Return the table with a column that is 1 where the two matrices' norms are very similar, else 0."""

    def found(results: Results) -> pd.DataFrame:
        kept = table(results)
        apart = (kept[GGN_NORM].astype(float) / kept[SHARPNESS_COLUMN].astype(float)).map(np.log).abs()
        return kept.assign(**{"norms a fifth apart at most": (apart < _SIMILAR).astype(float).where(apart.notna())})

    return found


def _of_fig5(table: Table) -> Table:
    """Return the networks of Fig. 5: ResNet-18 with BatchNorm; on CIFAR-10 if there are several data sets."""
    return where(table, lambda t: t["kind"].isin(["resnet18_bn", "resnet18_cifar10_bn"]))


def x9_predictions() -> tuple[Prediction, ...]:
    """Return the claims of section 6 and B.3 about regularised networks."""
    predictions = [prediction for name, one in REGULARISERS.items() for prediction in _predictions_of(name, one)]
    every = regularised_networks(*REGULARISERS)
    others = regularised_networks(*(name for name, one in REGULARISERS.items() if not one.flattens))
    superior, norms = [(JACOBIAN_COLUMN, ABSOLUTE), (SHARPNESS_COLUMN, ABSOLUTE)], (SHARPNESS_COLUMN, JACOBIAN_COLUMN)
    return (
        claim(
            "jacobian.in_all_cases",
            "In all cases the correlation of the Jacobian norm with the gap is superior to that of sharpness, with "
            "its sign: that a sharper network has the smaller gap counts as less.",
            "sharpening section 1, 4th contribution",
            in_each_case(every, superior, "Fisher's z with the gap, Jacobian's less sharpness's"),
            _SUPERIOR,
            headline=True,
        ),
        Prediction(
            "jacobian.in_all_cases.by_size",
            "By size alone, whatever the sign, the Jacobian norm has the larger correlation in all cases, too.",
            "sharpening section 1, 4th contribution",
            in_each_case(every, superior, "Fisher's |z| with the gap, Jacobian's less sharpness's", size=True),
            quote=_SUPERIOR,
            reason="A strong correlation tells as much of the gap below 0 as above it.",
        ),
        *predictions,
        claim(
            "fig5.better",
            "ResNet-18 with BatchNorm: the Jacobian norm correlates better with the gap than sharpness does, in the "
            "mean of the four regularisers.",
            "sharpening Fig. 5",
            across(_of_fig5(every), superior, margin, _MARGIN),
            _MUCH_BETTER,
        ),
        claim(
            "sam.forces_the_jacobian",
            "SAM: forcing the Hessian to be small forces the Jacobian to be small: their norms correlate in all cases.",
            "sharpening B.3 (ii)",
            in_each_case(regularised_networks("sam"), [norms], "Pearson r of sharpness and Jacobian"),
            _FORCES,
        ),
        claim(
            "hessian.hand_in_hand",
            "Whenever sharpness correlates with the gap, it goes hand in hand with the Jacobian norm: both "
            "correlations are high in the same cases.",
            "sharpening section 6",
            across(
                every,
                [(SHARPNESS_COLUMN, ABSOLUTE), norms],
                alike,
                "Pearson r over cases of r(sharpness, gap) and r(sharpness, Jacobian)",
            ),
            _HAND_IN_HAND,
        ),
        claim(
            "hessian.other_factors",
            "The Hessian can be large without the Jacobian being large: under some regulariser other than SAM the "
            "sharper networks of some kind have the smaller Jacobian norms.",
            "sharpening B.3 (ii)",
            in_each_case(others, [norms], "Pearson r of sharpness and Jacobian", "some", "below"),
            _OTHERS,
            "below",
        ),
        Prediction(
            "gauss_newton",
            "The norm of the Gauss-Newton matrix is (almost) always very similar to that of the Hessian: a fifth apart "
            f"at most in more than {_ALMOST_ALWAYS:.0%} of the networks.",
            "sharpening B.3",
            mean_of(_alike(every), "norms a fifth apart at most", shares=True),
            "above",
            _ALMOST_ALWAYS,
            quote=_VERY_SIMILAR,
            reason="How similar, and how often, is not said: a fifth, in nine of ten.",
        ),
        Prediction(
            "batchnorm.mode",
            "BatchNorm in train mode in place of eval mode changes the Jacobian norm by less than a fifth.",
            "sharpening B.3",
            unchanged(where(every, lambda t: t["batchnorm"].astype(bool)), JACOBIAN_COLUMN, BATCH_JACOBIAN),
            "below",
            _SIMILAR,
            quote=_NEGLIGIBLE,
            reason="How small is negligible is not said: a fifth, as for norms that are very similar.",
        ),
    )


def _predictions_of(name: str, one: Regulariser) -> list[Prediction]:
    """Return what is claimed of each regulariser."""
    table, title = regularised_networks(name), f"{one.title[0].upper()}{one.title[1:]}"
    pair = (JACOBIAN_COLUMN, ABSOLUTE)

    def sharpness(side: Side) -> Evidence:
        return of_each_case(
            table,
            lambda kind: along(kind, "strength", SHARPNESS_COLUMN, SAME_EXCEPT_STRENGTH),
            "Kendall tau-b of strength and sharpness",
            side=side,
        )

    predictions = [
        claim(
            f"{name}.jacobian_and_gap",
            f"{title}: in all cases the Jacobian norm correlates with the gap.",
            "sharpening B.3 (i)",
            in_each_case(table, [pair], "Pearson r of the Jacobian norm and the gap"),
            _IN_ALL_CASES,
        ),
        claim(
            f"{name}.better_than_sharpness",
            f"{title}: the Jacobian norm correlates better with the gap than sharpness does, in the mean of the kinds.",
            "sharpening section 6",
            across(table, [pair, (SHARPNESS_COLUMN, ABSOLUTE)], margin, _MARGIN),
            _CONSISTENTLY,
        ),
        Prediction(
            f"{name}.jacobian",
            f"{title} regularises the Jacobian at least initially: its norm falls from no regularisation to the "
            "weakest, in each kind of network.",
            "sharpening section 6",
            of_each_case(
                table,
                lambda kind: first_change(kind, "strength", JACOBIAN_COLUMN, SAME_EXCEPT_STRENGTH),
                "log of the Jacobian norm at the weakest over that without",
                side="below",
            ),
            "below",
            quote=_AT_LEAST_INITIALLY,
            reason=_EACH_KIND,
        ),
        Prediction(
            f"{name}.sharpness",
            f"{title} regularises the sharpness, in each kind of network.",
            "sharpening section 6",
            sharpness("below"),
            "below",
            quote=_AT_LEAST_INITIALLY,
            reason=_EACH_KIND,
        )
        if one.flattens
        else Prediction(
            f"{name}.sharpness",
            f"{title} does not regularise the sharpness, as only SAM does: no fall with {one.symbol}, tau above "
            f"{-WEAK:g} in each kind of network.",
            "sharpening section 6",
            sharpness("above"),
            "above",
            -WEAK,
            quote=_AT_LEAST_INITIALLY,
            reason=f"That a number does not fall needs a margin, which the text does not give. {_EACH_KIND}",
        ),
    ]
    if not one.impure:
        return predictions
    beyond = where(_of_fig5(table), lambda t: t["strength"] > 0)
    return [
        *predictions,
        Prediction(
            f"{name}.decorrelates",
            f"{title}, ResNet-18 with BatchNorm: beyond the weakest, the Jacobian norm and the gap do not go together "
            f"as {one.symbol} increases: tau below {WEAK:g}.",
            "sharpening Fig. 5",
            along(beyond, *pair, SAME_EXCEPT_STRENGTH),
            "below",
            WEAK,
            quote=_DECORRELATION,
            reason="How little is decorrelated is not said. A smaller range alone makes every r smaller, so that the r "
            "of all networks is no measure for it.",
        ),
        claim(
            f"{name}.jacobian_comes_back",
            f"{title}, ResNet-18 with BatchNorm: beyond the weakest, the Jacobian norm on the pure samples gradually "
            f"increases with {one.symbol}.",
            "sharpening section 6, Fig. 5",
            along(beyond, "strength", JACOBIAN_COLUMN, SAME_EXCEPT_STRENGTH),
            _INCREASE,
        ),
    ]  # fmt: skip
