"""X16 and X17: clusters mapped back through a random tanh network, and a ridge head on the network's features.

The head is the last linear layer. There `relative_flatness_ggn` equals Definition 3 and needs no curvature products of
the layers below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from flatlens.bounds.relative_generalisation import rate
from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import MLP
from flatlens.papers.contrasts import mean_of, rising, strength
from flatlens.papers.evidence import correlated, reached, where
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import scatter
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import COEFFICIENT, SMOKE_ONLY, WEAK, trial_axis
from flatlens.papers.units import labelled
from flatlens.statistics import Statistic
from flatlens.training import Ridge, Training

_FEATURES = 8
FLATNESS = "relative_flatness_ggn"
AS_CODED = "relative_flatness_ggn(normalized='variance')"


def _clusters(data: DataSettings, measures: tuple[str, ...]) -> NetworkSettings:
    model = MLP(784, (512, 128, 16, _FEATURES), 2, "tanh", init="xavier_uniform")
    training = Training(Ridge(), loss="half_squared_error", max_steps=1)
    return NetworkSettings(data, model, training, (*measures, "loss", "test_accuracy", "generalisation_gap"))


def _x16(scale: Scale) -> Mapping[str, Study]:
    train, test, repeats = {"smoke": (60, 140, 4), "laptop": (500, 4500, 100), "paper": (500, 4500, 100)}[scale]
    separations = (1.0, 4.0) if scale == "smoke" else (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)
    base = _clusters(DataSettings("inverted_clusters", train=train, test=test, separation=4.0), (FLATNESS, AS_CODED))
    shown = (
        GAP,
        Quantity("relative flatness", FLATNESS),
        Quantity("relative flatness, features by their variance", AS_CODED),
        Quantity("class separation", "separation", role="setting"),
    )
    axes = (Axis("separation", separations), trial_axis(repeats))
    return {"clusters": Study("clusters", base, axes, shown, scale=scale)}


def _x16_predictions() -> tuple[Prediction, ...]:
    source, gap, every = "relative2021 section 6, Fig. 3", "generalisation_gap", reached("clusters")
    far, near = (where(every, lambda t: t["separation"] == t["separation"].max()),
                 where(every, lambda t: t["separation"] == t["separation"].min()))  # fmt: skip
    return (
        Prediction(
            "far",
            "Where labels are locally constant (the largest class separation) relative flatness correlates with the "
            "generalisation gap.",
            source,
            correlated(far, FLATNESS, gap),
        ),
        Prediction(
            "near",
            f"Where they are not (the smallest) it does not: |r| below {WEAK:g}.",
            source,
            strength(near, FLATNESS, gap),
            "below",
            WEAK,
        ),
        Prediction(
            "rises",
            "The correlation increases with the class separation.",
            source,
            rising(every, "separation", FLATNESS, gap),
        ),
        Prediction(
            "rises.as_coded",
            "The same with the features divided by their variance, as the authors' code does.",
            source,
            rising(every, "separation", AS_CODED, gap),
        ),
    )


def _by_separation(
    networks: pd.DataFrame, columns: Mapping[str, str], of: Callable[[pd.DataFrame, str], Statistic], panel: str
) -> pd.DataFrame:
    """Return the curves of Fig. 3 and 4: one line per column, a statistic of each class separation's networks."""
    rows = []
    for line, column in columns.items():
        for separation, among in networks.groupby("separation"):
            found = of(among, column)
            rows.append((panel, separation, line, found.value, found.low, found.high))
    return pd.DataFrame(rows, columns=["panel", "x", "line", "y", "low", "high"])


def _x16_plots(results: Results) -> list[Plot]:
    networks = reached("clusters")(results)
    measured = {"Definition 3": FLATNESS, "features by their variance": AS_CODED}
    return [
        Plot(
            "fig3", "Relative flatness and the gap, by class separation",
            "Pearson's r over the networks of a class separation, with its 95% interval.",
            "curves", _by_separation(networks, measured, _r_with_gap, "Pearson's r with the gap"),
            "class separation", "relative flatness by",
        ),
        scatter(
            networks, "gaps", "Relative flatness and the gap", "One mark a network.",
            {"all class separations": FLATNESS},
            "generalisation_gap", "separation", x="relative flatness", y="generalisation gap",
        ),
    ]  # fmt: skip


def _r_with_gap(among: pd.DataFrame, column: str) -> Statistic:
    return correlated(lambda _: among, column, "generalisation_gap")({})


FOLDS = 3


def _x17(scale: Scale) -> Mapping[str, Study]:
    size, repeats = {"smoke": (90, 2), "laptop": (600, 10), "paper": (600, 30)}[scale]
    separations = (1.0, 4.0) if scale == "smoke" else (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
    test = size // FOLDS
    data = DataSettings("inverted_clusters", train=size - test, test=test, separation=4.0, fold=0)
    base = _clusters(data, (FLATNESS, "representativeness"))
    shown = (
        GAP,
        Quantity("relative flatness", FLATNESS),
        Quantity("representativeness, by kernel densities", "representativeness"),
        Quantity("class separation", "separation", role="setting"),
    )
    axes = (Axis("separation", separations), trial_axis(repeats), Axis("fold", tuple(range(FOLDS))))
    return {"folds": Study("folds", base, axes, shown, scale=scale)}


def approximated(results: Results) -> pd.DataFrame:
    """Return one row per sample, the mean over its folds: gap, density estimate's part, approximated bound.

    The bound is |S|^(-2/(4+m)) kappa_Tr / (2 m) + |int (p - p_hat) l|, as in `relative_generalisation.kde`. "as coded"
    has 0.01 / m in place of the first factor: the authors' delta of 0.1, and no half.
    """
    networks = reached("folds")(results)
    settings = results["folds"].settings["base"]["data"]
    found = networks[["separation", "seed", "generalisation_gap", "test_accuracy"]].copy()
    shift, kappa = networks["representativeness"], networks[FLATNESS]
    found["representativeness"] = shift
    found["bound"] = shift + rate(int(settings["train"]), _FEATURES) * kappa / (2 * _FEATURES)
    found["as coded"] = shift + 0.01 * kappa / _FEATURES
    samples = labelled(found.groupby(["separation", "seed"], as_index=False).mean(), ["seed"])
    for bound, of in (("bound", ""), ("as coded", " as coded")):
        samples[f"slack{of}"] = samples[bound] - samples["generalisation_gap"]
        samples[f"excess{of}"] = samples[bound] - TIGHT * samples["generalisation_gap"]
    return samples


TIGHT = 10
"""Largest ratio of bound and gap at which the bound is called tight."""


def _x17_predictions() -> tuple[Prediction, ...]:
    source = "relative2021 section 6, Fig. 4"
    return (
        Prediction(
            "bounds",
            "The approximated bound is above the generalisation gap, in the mean over samples.",
            source,
            mean_of(approximated, "slack"),
        ),
        Prediction(
            "tight",
            f"It is tight: less than {TIGHT} times the gap, in the mean over samples.",
            source,
            mean_of(approximated, "excess"),
            "below",
        ),
        Prediction(
            "tight.as_coded",
            "The same with delta = 0.1, as in the authors' code.",
            source,
            mean_of(approximated, "excess as coded"),
            "below",
        ),
        Prediction(
            "easier",
            "The bound decreases the easier the learning problem becomes.",
            source,
            correlated(approximated, "separation", "bound", "kendall"),
            "below",
        ),
        Prediction(
            "easier.as_coded",
            "The same with delta = 0.1, as in the authors' code.",
            source,
            correlated(approximated, "separation", "as coded", "kendall"),
            "below",
        ),
        Prediction(
            "accuracy.harder",
            "The lower the class separation, the harder the learning problem: test accuracy increases with it.",
            "relative2021 section 6",
            correlated(approximated, "separation", "test_accuracy", "kendall"),
        ),
        Prediction(
            "representativeness.less",
            "The lower the class separation, the less representative a sample: the error of the density estimate, "
            "weighted by the loss, decreases with it.",
            "relative2021 section 6, C.1",
            correlated(approximated, "separation", "representativeness", "kendall"),
            "below",
        ),
    )


def _x17_plots(results: Results) -> list[Plot]:
    drawn = {"gap": "generalisation_gap", "approximated bound": "bound", "the same, delta = 0.1": "as coded"}
    return [
        Plot(
            "fig4", "The gap and its approximated bound, by class separation",
            "Means over samples, each the mean of its three folds, with 95% intervals.",
            "curves", _by_separation(approximated(results), drawn, _mean, "half squared error"),
            "class separation", "mean of",
        )
    ]  # fmt: skip


def _mean(among: pd.DataFrame, column: str) -> Statistic:
    return mean_of(lambda _: among, column)({})


SEPARATION = (
    "Class separation is the smallest distance between cluster centres, covariances A A' / 6; the paper leaves open "
    "how these are drawn, and which separations it takes. The authors' code puts the centres on corners of a cube."
)
HEAD = (
    "The loss of the ridge head is not named: the half squared error on one-hot labels here, scikit-learn's penalty of "
    "1. The features are scaled by one number so that the tanh can be inverted, and the head is fitted to those."
)
INVERSE = "Inputs are exact solutions within the tanh's reach, where the paper's are least squares."
_BOUND = (
    "delta is the theorem's, |S|^(-1/(4+m)), and kappa is divided by 2 m; the authors' code has delta = 0.1 and m, "
    "drawn beside it. Kernel densities are of ten random splits within the training folds, Scott's bandwidth."
)
WORST = "Not weighed: the worst-case bound on representativeness, for all distributions."

EXPERIMENTS = (
    Experiment(
        "X16",
        "Relative flatness and the gap, the more locally constant labels are",
        "relative2021 Fig. 3",
        _x16,
        _x16_predictions(),
        _x16_plots,
        {
            "smoke": (SMOKE_ONLY, SEPARATION, HEAD),
            "laptop": (SEPARATION, HEAD, INVERSE, COEFFICIENT),
            "paper": (SEPARATION, HEAD, INVERSE, COEFFICIENT),
        },
    ),
    Experiment(
        "X17",
        "The gap and the bound approximated by kernel densities",
        "relative2021 Fig. 4",
        _x17,
        _x17_predictions(),
        _x17_plots,
        {
            "smoke": (SMOKE_ONLY, SEPARATION, HEAD),
            "laptop": ("10 samples of each class separation.", _BOUND, SEPARATION, HEAD, INVERSE, WORST),
            "paper": (
                "30 samples of each class separation: the paper does not say.",
                _BOUND,
                SEPARATION,
                HEAD,
                INVERSE,
                WORST,
            ),
        },
    ),
)
