"""X13: regularisation of the input-output or the parameter-output Jacobian at a small learning rate, by coefficient.

The regularisers are `InputJacobian` and `ParameterJacobian` in their published form, ||u^T J||_2: J is the Jacobian of
the whole minibatch, u one vector, uniform on the unit sphere of n N numbers (n samples, N outputs). The paper treats it
as ||J||_F. Its root mean square is ||J||_F / sqrt(n N); where samples are independent this is
sqrt(mean_i ||J_i||_F^2 / N) for every batch size. So a coefficient c of it is a coefficient c / sqrt(n N) of ||J||_F:
c / 36 for 128 samples and 10 outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from flatlens.experiments.overrides import vary
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.papers.contrasts import first_change, in_each_case, mean_of
from flatlens.papers.evidence import CASE, Table, along, labelled, trained_in, trained_ones, where
from flatlens.papers.experiment import (
    FEW_SEEDS,
    ONE_DRAW,
    SMOKE_ONLY,
    Experiment,
    Plot,
    Prediction,
    Results,
    Scale,
    Side,
    claim,
)
from flatlens.papers.figures import BANDS, banded
from flatlens.papers.sharpening.networks import (
    ABSOLUTE,
    DRAWN_QUANTITIES,
    GHOSTS,
    JACOBIAN_COLUMN,
    MEASURED_QUANTITIES,
    SECTION6_UNSAID,
    Trained,
    kinds,
)
from flatlens.training import Constant, InputJacobian, ParameterJacobian, Steps

_LARGE, _SMALL_RATE = 0.1, 0.001
_COEFFICIENTS: Mapping[str, Mapping[Scale, tuple[float, ...]]] = {
    "input": {
        "smoke": (0.01, 0.1),
        "laptop": (0.01, 0.03, 0.1, 0.3),
        "desk": (0.01, 0.03, 0.1, 0.3),
        "paper": (0.001, 0.01, 0.1, 1.0),
    },
    "parameters": {
        "smoke": (0.01, 0.1),
        "laptop": (0.003, 0.01, 0.03, 0.1),
        "desk": (0.003, 0.01, 0.03, 0.1),
        "paper": (0.001, 0.01, 0.1, 1.0),
    },
}
JACOBIAN_REGULARISERS = {"input": "Input", "parameters": "Param."}
"""Names in the legend of Fig. 33."""
_REFERENCES = {"reference_large": "ref 1e-1", "reference_small": "ref 1e-3"}
_SIMILAR = 0.4
"""Largest distance of the gaps, in logarithms, for "similar improvements": a factor of 1.5."""

_EPOCHS: Mapping[Scale, int] = {"laptop": 60, "desk": 90}
"""More than section 6's at these scales, for so small a learning rate; 90 is the caption's number."""


def _x13(scale: Scale) -> Mapping[str, Study]:
    seeds = Axis("seed", tuple(range({"smoke": 4, "laptop": 6, "desk": 8, "paper": 5}[scale])))
    studies = {}
    for kind, trained in kinds(scale).items():
        network, _, data = kind.partition("_")
        if network != "resnet18":
            continue
        longer = replace(trained, epochs=_EPOCHS.get(scale, trained.epochs))
        for name, base in _bases(longer).items():
            coefficients = (Axis("coefficient", _COEFFICIENTS[name][scale]),) if name in JACOBIAN_REGULARISERS else ()
            studies[f"{data or trained.data.name}.{name}"] = Study(
                f"{trained.title}, {_TITLES[name]}", base, (*coefficients, seeds), MEASURED_QUANTITIES, scale=scale
            )
    return studies


_TITLES = {
    "input": "input-output Jacobian regularised",
    "parameters": "parameter-output Jacobian regularised",
    "reference_large": "learning rate .1",
    "reference_small": "learning rate .001",
}


def _bases(trained: Trained) -> dict[str, NetworkSettings]:
    """Return section 6's settings for each study, with learning rate .001, or .1 that falls after each third."""
    settings, third, both = trained.settings(), trained.epochs // 3, "lr+schedule"
    slow = vary(settings, both, (_SMALL_RATE, Constant()))
    return {
        "input": vary(slow, "penalties", (InputJacobian(0.0, "published"),)),
        "parameters": vary(slow, "penalties", (ParameterJacobian(0.0, "published"),)),
        "reference_large": vary(settings, both, (_LARGE, Steps((third, 2 * third)))),
        "reference_small": slow,
    }


def jacobian_networks(*names: str) -> Table:
    """Return the networks of these studies that reached the end; the case is the data set, references have 0."""

    def found(results: Results) -> pd.DataFrame:
        parts = []
        for study in results:
            data, _, name = study.partition(".")
            if name in names:
                table = trained_in(study)(results).assign(study=name, **{CASE: data})
                parts.append(table if name in JACOBIAN_REGULARISERS else table.assign(coefficient=0.0))
        return pd.concat(parts, ignore_index=True)

    return found


_SAME = (CASE, "seed")


def _ends(name: str) -> Table:
    """Return the networks with the largest coefficient, and those with none."""
    both = jacobian_networks(name, "reference_small")
    return where(both, lambda t: t["coefficient"].isin([0.0, t["coefficient"].max()]))


def _best(results: Results) -> pd.DataFrame:
    """Return how far the best networks of the two regularisers are apart, in logarithms, for each seed.

    `apart` is the distance of the smallest gaps; `apart less gained` that of the largest test accuracies, less the
    smaller of their two gains over the network without a regulariser.
    """
    table, _ = trained_ones(jacobian_networks(*JACOBIAN_REGULARISERS, "reference_small")(results))
    studies, of_each = [*JACOBIAN_REGULARISERS, "reference_small"], table.groupby([*_SAME, "study"])
    best = pd.DataFrame({"gap": of_each[ABSOLUTE].min(), "accuracy": of_each["test_accuracy"].max()})
    logs = best.where(best > 0).map(np.log)
    gap, accuracy = (logs[name].unstack().reindex(columns=studies) for name in best)
    gained = accuracy[[*JACOBIAN_REGULARISERS]].sub(accuracy["reference_small"], axis=0).min(axis=1, skipna=False)
    found = {
        "apart": (gap["input"] - gap["parameters"]).abs(),
        "apart less gained": (accuracy["input"] - accuracy["parameters"]).abs() - gained,
    }
    return labelled(gap.assign(**found).reset_index(), ["seed"])


def _x13_predictions() -> tuple[Prediction, ...]:
    predictions = [prediction for name in JACOBIAN_REGULARISERS for prediction in _predictions_of(name)]
    references = jacobian_networks(*_REFERENCES)
    return (
        *predictions,
        Prediction(
            "similar",
            "The improvements by the input-output Jacobian are similar to those by the parameter-output Jacobian: the "
            "smallest gaps over the coefficients are within a factor of 1.5, in the mean over seeds.",
            "sharpening App. D",
            mean_of(_best, "apart"),
            "below",
            _SIMILAR,
            quote=_IMPROVE,
            reason="How similar is not said: a factor of 1.5 between the best of each. A network that has not fitted "
            "its data has a small gap, too.",
        ),
        Prediction(
            "similar.accuracy",
            "The improvements by both regularisers are similar: the largest test accuracies over the coefficients are "
            "nearer to each other than either is to that without a regulariser, and above it, in the mean over seeds.",
            "sharpening App. D",
            mean_of(_best, "apart less gained"),
            "below",
            quote=_IMPROVE,
            reason="How similar is not said, nor what performance is: Fig. 33 shows the gap, which the row above has.",
        ),
        *(
            Prediction(
                f"references.{name}",
                f"Trained at a learning rate of .1 that decays, the {said} is smaller than at .001 throughout.",
                "sharpening section 5, App. D",
                first_change(references, "lr", column, _SAME),
                "below",
                kind="reading" if reason else "claim",
                quote=quote,
                reason=reason,
            )
            for name, said, column, quote, reason in (
                ("gap", "generalisation gap", ABSOLUTE, _LARGE_RATE, ""),
                ("jacobian", "Jacobian norm", JACOBIAN_COLUMN, _DOWNWARD, _NO_FINAL_NORM),
            )
        ),
    )


_TREND = "Note the consistent downwards trend of both Jacobian norm and generalisation gap in all cases"
_IMPROVE = (
    "we should see similar improvements in network performance when training with a small learning rate using an "
    "*input-output* Jacobian regulariser"
)
_CORRELATED = "one should see that these improvements are correlated to input-output Jacobian norm in all cases"
_LARGE_RATE = (
    "it is to this that we attribute the better generalisation of models trained with large learning rate, even if "
    "that learning rate is decayed towards the end of training"
)
_NO_FINAL_NORM = "The text compares no norms at the end, and the two end at other training losses."
_DOWNWARD = "Nonetheless, this downward pressure on Jacobian is important"


def _predictions_of(name: str) -> list[Prediction]:
    """Return what is claimed of each regulariser."""
    table = jacobian_networks(name)
    regularising = {
        "input": "Regularising the input-output Jacobian",
        "parameters": "Regularising the parameter-output Jacobian",
    }[name]

    def at_largest(slug: str, says: str, column: str, side: Side) -> Prediction:
        return Prediction(
            f"{name}.{slug}",
            f"{regularising}: at the largest coefficient {says}",
            "sharpening App. D",
            first_change(_ends(name), "coefficient", column, _SAME),
            side,
            quote=_IMPROVE,
            reason="The text names no coefficient; it is about the input-output Jacobian, and the other regulariser "
            "is held to the same.",
        )

    return [
        claim(
            f"{name}.jacobian",
            f"{regularising}: the norm of the input-output Jacobian falls with the coefficient.",
            "sharpening Fig. 33",
            along(table, "coefficient", JACOBIAN_COLUMN, _SAME),
            _TREND,
            "below",
        ),
        claim(
            f"{name}.gap",
            f"{regularising}: the generalisation gap falls with the coefficient.",
            "sharpening Fig. 33",
            along(table, "coefficient", ABSOLUTE, _SAME),
            _TREND,
            "below",
        ),
        at_largest(
            "generalises",
            "the gap is smaller than without, at the same small learning rate.",
            ABSOLUTE,
            "below",
        ),
        at_largest("performs", "the test accuracy is larger than without.", "test_accuracy", "above"),
        claim(
            f"{name}.correlated",
            f"{regularising}: the improvements are correlated to the input-output Jacobian norm in all cases: r of it "
            "and the gap, with the unregularised networks.",
            "sharpening App. D",
            in_each_case(
                jacobian_networks(name, "reference_small"),
                [(JACOBIAN_COLUMN, ABSOLUTE)],
                "Pearson r of the Jacobian norm and the gap",
            ),
            _CORRELATED,
        ),
    ]


def _x13_plots(results: Results) -> list[Plot]:
    """Return Fig. 33: each reference is a level line."""
    table = jacobian_networks(*JACOBIAN_REGULARISERS, *_REFERENCES)(results)
    coefficients = sorted(set(table["coefficient"]) - {0.0})
    drawn = [
        table[table["study"] == name].assign(x=lambda t: t["coefficient"], line=title)
        for name, title in JACOBIAN_REGULARISERS.items()
    ] + [
        table[table["study"] == name].assign(x=coefficient, line=title)
        for name, title in _REFERENCES.items()
        for coefficient in coefficients
    ]
    whole = pd.concat(drawn, ignore_index=True)
    rows = pd.concat(
        [
            whole.assign(panel=whole[CASE].map(f"{shown.name}, {{}}".format), y=shown.of(whole))
            for shown in DRAWN_QUANTITIES
        ],
        ignore_index=True,
    )
    caption = (
        f"Over the coefficient of the published form. {BANDS}. References, without a regulariser, are level: they "
        "have no coefficient."
    )
    return [banded(rows, "fig33", "Fig. 33: Jacobians regularised", caption, "coefficient", "regulariser", log_x=True)]


_SCALING = (
    "The regularised number is ||u^T J||_2 of a whole minibatch with one u on the unit sphere, as written: ||J||_F "
    "over sqrt(n N) in the root mean square, which the text leaves out, and not squared."
)
_MODEL = "The networks are Fig. 5's, ResNet-18 with BatchNorm, and the coefficients are ours: the text gives neither."
_OF_OUTPUTS = "The Jacobian norm is that of the outputs, not of their softmax: unsaid."
_RATE = "Batches, momentum and weight decay are those of section 6; .001 throughout but for the one reference from .1."

EXPERIMENTS = (
    Experiment(
        "X13",
        "Regularised Jacobians at a small learning rate: Jacobian norm and gap",
        "sharpening Fig. 33",
        _x13,
        _x13_predictions(),
        _x13_plots,
        {
            "smoke": (SMOKE_ONLY, _SCALING),
            "laptop": (
                "150 of scikit-learn's digits in place of CIFAR-10 and CIFAR-100, an eighth of the width, 60 epochs of "
                "6 steps, 30 samples measured.",
                _MODEL,
                _SCALING,
            ),
            "desk": (
                "200 images of CIFAR-10, without CIFAR-100; ResNet-18 with a sixteenth of its channels; batches of "
                "25, 100 samples measured, in float32; 8 seeds.",
                "90 epochs as in the caption, but of 8 steps. The stronger the regulariser, the larger is the training "
                "loss at the end: gaps are not of equal loss.",
                ONE_DRAW,
                _OF_OUTPUTS,
                _MODEL,
                _RATE,
                _SCALING,
            ),
            "paper": (_MODEL, _RATE, _OF_OUTPUTS, FEW_SEEDS, _SCALING, GHOSTS, SECTION6_UNSAID),
        },
    ),
)
