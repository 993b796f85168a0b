"""X18: many minima of LeNet5, and relative flatness (Definition 3, last layer) compared with other measures."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import LeNet5
from flatlens.papers.contrasts import stronger, unchanged
from flatlens.papers.evidence import correlated, reached
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import pairwise, scatter
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import COEFFICIENT, MOVED, SMOKE_ONLY, STRONG, SUMMED_GAP
from flatlens.papers.units import UNIT
from flatlens.training import SGD, Adam, RMSProp, Training, Until

LAST, ANOTHER = "fc3", "fc2"
PAC_BAYES = "pac_bayes_flatness(probes=4)"
NORMALISED = "relative_flatness(normalized='std')"
RIGHT: Mapping[str, str] = {
    "relative flatness": "relative_flatness",
    "Hessian trace": "hessian_trace",
    "Fisher-Rao norm": "fisher_rao",
    "PAC-Bayes": PAC_BAYES,
    "weight norm": "weight_norm",
}
"""The five measures of Fig. 5 as flatlens defines them: trace and norm are of the whole network."""
CODED = ("relative flatness (code)", "last layer's trace (code)", "Fisher-Rao norm", "1/sigma (code)",
         "last layer's squared norm (code)")  # fmt: skip
"""The five measures as the authors' code computes them, up to constant factors."""


_TENTH = 0.1
"""Least change, in the logarithm, of a measure that is not invariant; PAC-Bayes also changes by its random draws."""


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
        measures=(*RIGHT.values(), NORMALISED, "kappa_trace", "loss", "generalisation_gap", SUMMED_GAP),
        moved=(MOVED,),
    )
    shown = (
        GAP,
        *(Quantity(name, column) for name, column in RIGHT.items()),
        Quantity("relative flatness, fc2", str(Column("relative_flatness", layer=ANOTHER))),
        Quantity("relative flatness, normalised", NORMALISED),
        Quantity("1/sigma", PAC_BAYES, "sqrt"),
    )
    axes = (Axis("training.optimiser", optimisers), Axis("batch_size", batches), Axis("seed", tuple(range(seeds))))
    return {"lenet": Study("lenet", base, axes, shown, scale=scale)}


def minima(results: Results) -> pd.DataFrame:
    """Return the values of Fig. 5 to 8 for each network, named as in RIGHT and CODED, and moved ("moved ...")."""
    networks = reached("lenet")(results)
    nothing = pd.Series(np.nan, index=networks.index)

    def column(name: str, at: str, layer: str | None = None) -> pd.Series:
        found = networks.get(str(Column(name, transform=at, layer=layer)))
        return nothing if found is None else found.astype(float)

    columns = {
        "key": networks["key"],
        UNIT: networks[UNIT],
        "gap": column("generalisation_gap", ""),
        "batch size": networks["batch_size"],
    }
    if "training.optimiser" in networks:
        columns["optimiser"] = networks["training.optimiser"].str.partition("(")[0]
    for prefix, at in (("", ""), ("moved ", MOVED)):
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


def _x18_predictions() -> tuple[Prediction, ...]:
    flat, trace, fisher_rao, pac_bayes, norm = RIGHT
    predictions = [
        Prediction(
            "flatness",
            "Relative flatness correlates positively with the generalisation gap.",
            "relative2021 section 6, Fig. 5",
            correlated(minima, flat, "gap"),
        ),
        Prediction(
            "flatness.strong",
            f"It does so strongly, r at least {STRONG:g}.",
            "relative2021 section 6, C.2",
            correlated(minima, flat, "gap"),
            "above",
            STRONG,
        ),
    ]
    for mine, others, named in ((flat, (trace, fisher_rao, pac_bayes, norm), ""), (CODED[0], CODED[1:], ".as_coded")):
        predictions += [
            Prediction(
                f"stronger_than.{_slug(other)}{named}",
                f"Relative flatness correlates more strongly with it than: {other.removesuffix(' (code)')}"
                f"{', both as the authors compute them in their code' if named else ''}.",
                "relative2021 section 6, Fig. 5",
                stronger(minima, [mine], [other], "gap"),
            )
            for other in others
        ]
    predictions.append(
        Prediction(
            "fisher_rao.weakest",
            "The Fisher-Rao norm shows the weakest correlation.",
            "relative2021 section 6",
            stronger(minima, [flat, trace, pac_bayes, norm], [fisher_rao], "gap"),
        )
    )
    predictions += [
        Prediction(
            f"{_slug(name)}.invariant",
            f"{name[0].upper()}{name[1:]}: invariant to layer-wise reparametrisation.",
            "relative2021 Fig. 7, C.2",
            unchanged(minima, name, f"moved {name}"),
            "below",
            1e-6,
        )
        for name in (flat, fisher_rao)
    ]
    predictions += [
        Prediction(
            f"{_slug(name)}.not_invariant",
            f"{name[0].upper()}{name[1:]}: not invariant to it, changed by more than a tenth.",
            "relative2021 section 6",
            unchanged(minima, name, f"moved {name}"),
            "above",
            _TENTH,
        )
        for name in (trace, pac_bayes, norm)
    ]
    predictions += [
        Prediction(
            f"{_slug(name)}.declines",
            f"{name[0].upper()}{name[1:]}: the correlation with the gap declines after it.",
            "relative2021 Fig. 7, C.2",
            stronger(minima, [name], [f"moved {name}"], "gap"),
        )
        for name in (trace, pac_bayes, norm)
    ]
    another = f"{flat}, fc2"
    predictions += [
        Prediction(
            "another_layer",
            "Relative flatness of another fully connected layer correlates positively with the gap.",
            "relative2021 Fig. 8, C.2",
            correlated(minima, another, "gap"),
        ),
        Prediction(
            "another_layer.strong",
            f"It keeps the high correlation, r at least {STRONG:g}.",
            "relative2021 Fig. 8, C.2",
            correlated(minima, another, "gap"),
            "above",
            STRONG,
        ),
        Prediction(
            "another_layer.less",
            "It does so less than that of the penultimate layer's features.",
            "relative2021 Fig. 8, C.2",
            stronger(minima, [flat], [another], "gap"),
        ),
    ]
    return tuple(predictions)


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


CODE = (
    "In the authors' code trace and weight norm are the last layer's, the norm is squared, features are divided by "
    "their standard deviation first, sigma^2 stands for sigma, and the Fisher-Rao norm has a factor 6 for 5: the "
    "figure and the claims named as coded take these, but for constant factors, which no correlation sees."
)
_FACTORS = (
    "Each layer is multiplied by a factor of its own and the next divided by it; the authors' code moves the last two "
    "layers alone."
)
NEURONS = "Not weighed: neuron-wise reparametrisations, of which C.2 says the same."
SPLIT_GAP = (
    "The gap is the mean test loss less the mean training loss; the code sums both, the test's five times, which is "
    "measured beside it, by name, and proportional where the test samples are a fifth."
)
_UNSAID = (
    "The law of the initial weights and a limit of epochs are not given: PyTorch's own, and 300. What has not "
    "converged by then is left out, as in the paper."
)

EXPERIMENTS = (
    Experiment(
        "X18",
        "Relative flatness among other measures, at many minima of LeNet5",
        "relative2021 Fig. 5, 6, 7, 8",
        _x18,
        _x18_predictions(),
        _x18_plots,
        {
            "smoke": (SMOKE_ONLY, SPLIT_GAP),
            "laptop": (
                "Patches of two photographs in place of CIFAR-10, 120 to train on; smaller batches, and learning rates "
                "at which each optimiser converges; 2 seeds.",
                SPLIT_GAP, CODE, _FACTORS, COEFFICIENT, NEURONS,
            ),
            "paper": (_UNSAID, SPLIT_GAP, CODE, _FACTORS, COEFFICIENT, NEURONS),
        },
    ),
)  # fmt: skip
