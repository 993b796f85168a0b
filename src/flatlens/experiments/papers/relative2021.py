"""Petzka, Kamp, Adilova, Sminchisescu and Boley, "Relative Flatness and Generalization": X16 to X18.

Relative flatness is Definition 3's of the last linear layer. In X16 and X17 that layer reads a tanh network's features,
and `relative_flatness_ggn` is the same number there without the curvature products of the layers below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.bounds.relative_generalisation import rate
from flatlens.data.named import DataSettings
from flatlens.experiments.claims import Claim, Results
from flatlens.experiments.contrasts import mean_of, rising, stronger, unchanged
from flatlens.experiments.evidence import Table, correlated, reached
from flatlens.experiments.experiment import Experiment, Plot, Scale
from flatlens.experiments.papers.remarks import COEFFICIENT, MOVED, QUICK, SUMMED, WEAK
from flatlens.experiments.plots import pairwise, scatter
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import MLP, LeNet5
from flatlens.statistics import average, correlate
from flatlens.training import SGD, Adam, Ridge, RMSProp, Training, Until

# X16 and X17: clusters, pulled back through a random network

FEATURES = 8
SEEDS = "data.seed+model.seed+training.seed"
"""The random network is in the data and in the model: one seed for both, and for the sample."""
FLATNESS = "relative_flatness_ggn"
AS_CODED = "relative_flatness_ggn(normalize='variance')"


def _clusters(data: DataSettings, measures: tuple[str, ...]) -> NetworkSettings:
    model = MLP(784, (512, 128, 16, FEATURES), 2, "tanh", init="xavier_uniform")
    training = Training(Ridge(), loss="half_squared_error", max_steps=1)
    return NetworkSettings(data, model, training, (*measures, "loss", "test_accuracy", "generalisation_gap"))


def _samples(count: int) -> Axis:
    return Axis(SEEDS, tuple((seed, seed, seed) for seed in range(count)))


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
    axes = (Axis("separation", separations), _samples(repeats))
    return {"clusters": Study("clusters", base, axes, shown, scale=scale)}


def at_end(study: str, last: bool) -> Table:
    """The networks of the largest class separation, or of the smallest."""

    def found(results: Results) -> pd.DataFrame:
        networks = reached(study)(results)
        values = networks["separation"]
        chosen: pd.DataFrame = networks[values == (values.max() if last else values.min())]
        return chosen

    return found


def _x16_claims() -> tuple[Claim, ...]:
    source, gap = "relative2021 section 6, Fig. 3", "generalisation_gap"
    return (
        Claim(
            "far",
            "Where labels are locally constant (the largest class separation) relative flatness correlates with the "
            "generalisation gap.",
            source,
            correlated(at_end("clusters", last=True), FLATNESS, gap),
        ),
        Claim(
            "near",
            f"Where they are not (the smallest) it does not: r below {WEAK:g}.",
            source,
            correlated(at_end("clusters", last=False), FLATNESS, gap),
            "below",
            WEAK,
        ),
        Claim(
            "rises",
            "The correlation increases with the class separation.",
            source,
            rising(reached("clusters"), "separation", FLATNESS, gap),
        ),
        Claim(
            "rises.as_coded",
            "The same with the features divided by their variance, as the authors' code does.",
            source,
            rising(reached("clusters"), "separation", AS_CODED, gap),
        ),
    )


def _x16_plots(results: Results) -> list[Plot]:
    networks = reached("clusters")(results)
    rows = []
    for line, column in (("Definition 3", FLATNESS), ("features by their variance", AS_CODED)):
        for separation, among in networks.groupby("separation"):
            r = correlate(among[column], among["generalisation_gap"], "pearson", names=(line, "gap"), permuted=0)
            rows.append(("Pearson's r with the gap", separation, line, r.value, r.low, r.high))
    return [
        Plot(
            "fig3", "Relative flatness and the gap, by class separation",
            "Pearson's r over the networks of a class separation, with its 95% bootstrap interval.",
            "curves", pd.DataFrame(rows, columns=["panel", "x", "line", "y", "low", "high"]),
            "class separation", "relative flatness by",
        ),
        scatter(
            networks, "gaps", "Relative flatness and the gap", "One mark a network.",
            {"all class separations": FLATNESS},
            "generalisation_gap", "separation", x="relative flatness", y="generalisation gap",
        ),
    ]  # fmt: skip


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
    axes = (Axis("separation", separations), _samples(repeats), Axis("fold", tuple(range(FOLDS))))
    return {"folds": Study("folds", base, axes, shown, scale=scale)}


def approximated(results: Results) -> pd.DataFrame:
    """One row a sample, the mean over its folds: the gap, and the approximated bound.

    |S|^(-2/(4+m)) kappa_Tr / (2 m) + |int (p - p_hat) l|, as `relative_generalisation.kde` has it; "as coded" with
    0.01 / m in the place of the first factor, the authors' delta of 0.1 and no half.
    """
    networks = reached("folds")(results)
    settings = results["folds"].settings["base"]["data"]
    found = networks[["separation", "seed", "generalisation_gap", "test_accuracy"]].copy()
    shift, kappa = networks["representativeness"], networks[FLATNESS]
    found["bound"] = shift + rate(int(settings["train"]), FEATURES) * kappa / (2 * FEATURES)
    found["as coded"] = shift + 0.01 * kappa / FEATURES
    samples = found.groupby(["separation", "seed"], as_index=False).mean()
    for bound, of in (("bound", ""), ("as coded", " as coded")):
        samples[f"slack{of}"] = samples[bound] - samples["generalisation_gap"]
        samples[f"excess{of}"] = samples[bound] - TIGHT * samples["generalisation_gap"]
    return samples


TIGHT = 10
"""How many times the gap a bound may be and still be called tight."""


def _x17_claims() -> tuple[Claim, ...]:
    source = "relative2021 section 6, Fig. 4"
    return (
        Claim(
            "bounds",
            "The approximated bound is above the generalisation gap, in the mean over samples.",
            source,
            mean_of(approximated, "slack"),
        ),
        Claim(
            "tight",
            f"It is tight: less than {TIGHT} times the gap, in the mean over samples.",
            source,
            mean_of(approximated, "excess"),
            "below",
        ),
        Claim(
            "tight.as_coded",
            "The same with delta = 0.1, as in the authors' code.",
            source,
            mean_of(approximated, "excess as coded"),
            "below",
        ),
        Claim(
            "easier",
            "The bound decreases the easier the learning problem becomes.",
            source,
            correlated(approximated, "separation", "bound", "kendall"),
            "below",
        ),
        Claim(
            "easier.as_coded",
            "The same with delta = 0.1, as in the authors' code.",
            source,
            correlated(approximated, "separation", "as coded", "kendall"),
            "below",
        ),
        Claim(
            "gap.easier",
            "So does the gap.",
            source,
            correlated(approximated, "separation", "generalisation_gap", "kendall"),
            "below",
        ),
    )


def _x17_plots(results: Results) -> list[Plot]:
    samples = approximated(results)
    rows = []
    for line, column in (
        ("gap", "generalisation_gap"),
        ("approximated bound", "bound"),
        ("the same, delta = 0.1", "as coded"),
    ):
        for separation, among in samples.groupby("separation"):
            found = average(among[column], name=column)
            rows.append(("half squared error", separation, line, float(among[column].mean()), found.low, found.high))
    return [
        Plot(
            "fig4", "The gap and its approximated bound, by class separation",
            "Means over samples, each the mean of its three folds, with 95% bootstrap intervals.",
            "curves", pd.DataFrame(rows, columns=["panel", "x", "line", "y", "low", "high"]),
            "class separation", "mean of",
        )
    ]  # fmt: skip


# X18: LeNet5, relative flatness among other measures

LAST, ANOTHER = "fc3", "fc2"
PAC_BAYES = "pac_bayes_flatness(draws=4)"
NORMALISED = "relative_flatness(normalize='std')"
RIGHT: Mapping[str, str] = {
    "relative flatness": "relative_flatness",
    "Hessian trace": "hessian_trace",
    "Fisher-Rao norm": "fisher_rao",
    "PAC-Bayes": PAC_BAYES,
    "weight norm": "weight_norm",
}
"""The five of Fig. 5 as flatlens defines them: trace and norm of the whole network."""
CODED = ("relative flatness (code)", "last layer's trace (code)", "Fisher-Rao norm", "1/sigma (code)",
         "last layer's squared norm (code)")  # fmt: skip
"""The five as the authors' code computes them, up to constant factors."""


def _x18(scale: Scale) -> Mapping[str, Study]:
    data = {
        "smoke": DataSettings("patches", train=30, test=30),
        "laptop": DataSettings("patches", train=120, test=600),
        "paper": DataSettings("cifar10"),
    }[scale]
    optimisers = {
        "smoke": (SGD(0.02), Adam(1e-3)),
        "laptop": (SGD(0.02), SGD(0.05), Adam(5e-4), Adam(2e-3), RMSProp(1e-4), RMSProp(5e-4)),
        "paper": tuple(kind(lr) for kind in (SGD, Adam, RMSProp) for lr in (1e-4, 0.02, 0.05)),
    }[scale]
    batches, seeds, epochs = {
        "smoke": ((5, 10), 1, 60),
        "laptop": ((8, 16, 32, 64), 2, 200),
        "paper": ((64, 128, 256, 512, 1024), 10, 300),
    }[scale]
    until = Until(loss_below=0.3 if scale == "smoke" else 0.1, loss_over="epoch")
    base = NetworkSettings(
        data,
        LeNet5(classes=10 if scale == "paper" else 2),
        Training(SGD(0.02), batch_size=64, until=until, max_epochs=epochs, check_every=100),
        measures=(*RIGHT.values(), NORMALISED, "kappa_trace", "loss", "generalisation_gap", SUMMED),
        moved=(MOVED,),
    )
    shown = (
        GAP,
        *(Quantity(name, column) for name, column in RIGHT.items()),
        Quantity("relative flatness, fc2", f"relative_flatness[{ANOTHER}]"),
        Quantity("relative flatness, normalised", NORMALISED),
        Quantity("1/sigma", PAC_BAYES, "sqrt"),
    )
    axes = (Axis("training.optimiser", optimisers), Axis("batch_size", batches), Axis("seed", tuple(range(seeds))))
    return {"lenet": Study("lenet", base, axes, shown, scale=scale)}


def minima(results: Results) -> pd.DataFrame:
    """What Fig. 5 to 8 show of each network, under the names in RIGHT and CODED, and after the move ("moved ...")."""
    networks = reached("lenet")(results)
    nothing = pd.Series(np.nan, index=networks.index)

    def column(name: str, at: str, layer: str = "") -> pd.Series:
        found = networks.get(f"{name}{at}[{layer}]" if layer else f"{name}{at}")
        return nothing if found is None else found.astype(float)

    columns = {"gap": column("generalisation_gap", ""), "batch size": networks["batch_size"]}
    if "training.optimiser" in networks:
        columns["optimiser"] = networks["training.optimiser"].str.partition("(")[0]
    for prefix, at in (("", ""), ("moved ", f"@{MOVED}")):
        norm = column("weight_norm", at, LAST)
        columns |= {f"{prefix}{name}": column(measured, at) for name, measured in RIGHT.items()}
        columns |= {
            f"{prefix}relative flatness, fc2": column("relative_flatness", at, ANOTHER),
            f"{prefix}{CODED[0]}": column(NORMALISED, at),
            f"{prefix}{CODED[1]}": column("kappa_trace", at, LAST) / norm**2,
            f"{prefix}{CODED[3]}": column(PAC_BAYES, at) ** 0.5,
            f"{prefix}{CODED[4]}": norm**2,
        }
    return pd.DataFrame(columns)


def _x18_claims() -> tuple[Claim, ...]:
    flat, trace, fisher_rao, pac_bayes, norm = RIGHT
    claims = [
        Claim(
            "flatness",
            "Relative flatness correlates positively with the generalisation gap.",
            "relative2021 section 6, Fig. 5",
            correlated(minima, flat, "gap"),
        )
    ]
    for mine, others, named in ((flat, (trace, fisher_rao, pac_bayes, norm), ""), (CODED[0], CODED[1:], ".as_coded")):
        claims += [
            Claim(
                f"stronger_than.{_slug(other)}{named}",
                f"Relative flatness correlates more strongly with it than: {other.removesuffix(' (code)')}"
                f"{', both as the authors compute them in their code' if named else ''}.",
                "relative2021 section 6, Fig. 5",
                stronger(minima, [mine], [other], "gap"),
            )
            for other in others
        ]
    claims.append(
        Claim(
            "fisher_rao.weakest",
            "The Fisher-Rao norm shows the weakest correlation.",
            "relative2021 section 6",
            stronger(minima, [flat, trace, pac_bayes, norm], [fisher_rao], "gap"),
        )
    )
    claims += [
        Claim(
            f"{_slug(name)}.invariant",
            f"{name[0].upper()}{name[1:]}: invariant to layer-wise reparametrisation.",
            "relative2021 Fig. 7, C.2",
            unchanged(minima, name, f"moved {name}"),
            "below",
            1e-6,
        )
        for name in (flat, fisher_rao)
    ]
    claims += [
        Claim(
            f"{_slug(name)}.declines",
            f"{name[0].upper()}{name[1:]}: the correlation with the gap declines after it.",
            "relative2021 Fig. 7, C.2",
            stronger(minima, [name], [f"moved {name}"], "gap"),
        )
        for name in (trace, pac_bayes, norm)
    ]
    another = f"{flat}, fc2"
    claims += [
        Claim(
            "another_layer",
            "Relative flatness of another fully connected layer correlates positively with the gap.",
            "relative2021 Fig. 8, C.2",
            correlated(minima, another, "gap"),
        ),
        Claim(
            "another_layer.less",
            "It does so less than that of the penultimate layer's features.",
            "relative2021 Fig. 8, C.2",
            stronger(minima, [flat], [another], "gap"),
        ),
    ]
    return tuple(claims)


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name.replace(" (code)", "").replace("'s", "")).lower()


def _x18_plots(results: Results) -> list[Plot]:
    networks, one = minima(results), "One mark a network."
    shown = (
        ("fig5", "Measures and the gap", {name: name for name in RIGHT}, one),
        ("fig5_as_coded", "The same as the authors' code computes them", {name: name for name in CODED}, one),
        ("fig7", "The same after a layer-wise reparametrisation", {name: f"moved {name}" for name in RIGHT},
         "Each layer times a random factor in [5, 25], the next divided by it; one mark a network."),
        ("fig8", "Relative flatness of two layers", {"fc3": "relative flatness", "fc2": "relative flatness, fc2"}, one),
    )  # fmt: skip
    return [
        *(
            scatter(
                networks, name, title, said, panels, "gap", "optimiser", x="measure", y="generalisation gap"
            )
            for name, title, panels, said in shown
        ),
        pairwise("lenet", results["lenet"]),
    ]  # fmt: skip


SEPARATION = (
    "Class separation is the smallest distance between cluster centres, covariances A A' / 6; the paper leaves open "
    "how these are drawn, and which separations it takes. The authors' code puts the centres on corners of a cube."
)
HEAD = (
    "The loss of the ridge head is not named: the half squared error on one-hot labels here, scikit-learn's penalty of "
    "1. The features are scaled by one number so that the tanh can be inverted, and the head is fitted to those."
)
INVERSE = "Inputs are exact solutions within the tanh's reach, where the paper's are least squares."
BOUND = (
    "delta is the theorem's, |S|^(-1/(4+m)), and kappa is divided by 2 m; the authors' code has delta = 0.1 and m, "
    "drawn beside it. Kernel densities are of ten random splits within the training folds, Scott's bandwidth."
)
CODE = (
    "In the authors' code trace and weight norm are the last layer's, the norm is squared, features are divided by "
    "their standard deviation first, sigma^2 stands for sigma, and the Fisher-Rao norm has a factor 6 for 5: the "
    "figure and the claims named as coded take these, but for constant factors, which no correlation sees."
)
FACTORS = (
    "Each layer is multiplied by a factor of its own and the next divided by it; the authors' code moves the last two "
    "layers alone."
)
SPLIT_GAP = (
    "The gap is the mean test loss less the mean training loss; the code sums both, the test's five times, which is "
    "measured beside it, by name, and proportional where the test samples are a fifth."
)
UNSAID = (
    "The law of the initial weights and a limit of epochs are not given: PyTorch's own, and 300. What has not "
    "converged by then is left out, as in the paper."
)

EXPERIMENTS = (
    Experiment(
        "X16",
        "Relative flatness and the gap, the more locally constant labels are",
        "relative2021 Fig. 3",
        _x16,
        _x16_claims(),
        _x16_plots,
        {
            "smoke": (QUICK, SEPARATION, HEAD),
            "laptop": (SEPARATION, HEAD, INVERSE, COEFFICIENT),
            "paper": (SEPARATION, HEAD, INVERSE, COEFFICIENT),
        },
    ),
    Experiment(
        "X17",
        "The gap and the bound approximated by kernel densities",
        "relative2021 Fig. 4",
        _x17,
        _x17_claims(),
        _x17_plots,
        {
            "smoke": (QUICK, SEPARATION, HEAD),
            "laptop": ("10 samples of each class separation.", BOUND, SEPARATION, HEAD, INVERSE),
            "paper": ("30 samples of each class separation: the paper does not say.", BOUND, SEPARATION, HEAD, INVERSE),
        },
    ),
    Experiment(
        "X18",
        "Relative flatness among other measures, at many minima of LeNet5",
        "relative2021 Fig. 5, 6, 7, 8",
        _x18,
        _x18_claims(),
        _x18_plots,
        {
            "smoke": (QUICK, SPLIT_GAP),
            "laptop": (
                "Patches of two photographs in place of CIFAR-10, 120 to train on; smaller batches, and learning rates "
                "at which each optimiser converges; 2 seeds.",
                SPLIT_GAP, CODE, FACTORS, COEFFICIENT,
            ),
            "paper": (UNSAID, SPLIT_GAP, CODE, FACTORS, COEFFICIENT),
        },
    ),
)  # fmt: skip
