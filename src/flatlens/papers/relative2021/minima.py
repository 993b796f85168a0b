"""X18: many minima of LeNet5, and relative flatness (Definition 3, last layer) compared with other measures."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.models import LeNet5
from flatlens.papers.contrasts import stronger, unchanged, weaker
from flatlens.papers.evidence import UNIT, correlated, reached
from flatlens.papers.experiment import (
    COEFFICIENT,
    LEAST_CHANGE,
    MOVED,
    MOVED_NEURONS,
    ON_PAPERS_DATA,
    ONE_DRAW,
    SMOKE_ONLY,
    STRONG,
    SUMMED_GAP,
    Experiment,
    Plot,
    Prediction,
    PredictionKind,
    Results,
    Scale,
    own_seeds,
    tested,
)
from flatlens.papers.figures import pairwise, scatter
from flatlens.training import SGD, Adam, RMSProp, Training, Until

LAST, ANOTHER = "fc3", "fc2"
PAC_BAYES = "pac_bayes_flatness(probes=4)"
NORMALISED = "relative_flatness(normalized='std')"
THEOREM_4 = "relative flatness, normalised"
OF_ANOTHER = f"relative flatness, {ANOTHER}"
RIGHT: Mapping[str, str] = {
    "relative flatness": "relative_flatness",
    "Hessian trace": "hessian_trace",
    "Fisher-Rao norm": "fisher_rao",
    "PAC-Bayes": PAC_BAYES,
    "weight norm": "weight_norm",
}
"""The five measures of Fig. 5 as flatlens defines them: trace and norm are of the whole network."""
CODED = ("relative flatness (code)", "last layer's trace (code)", "Fisher-Rao norm", "PAC-Bayes (code)",
         "last layer's squared norm (code)")  # fmt: skip
"""The five measures as the authors' code computes them, up to constant factors and terms."""
REPARAMETRISED: Mapping[str, str] = {"": "", "moved ": MOVED, "neurons moved ": MOVED_NEURONS}
"""Prefix of the columns after each reparametrisation."""


def lenet_studies(scale: Scale) -> Mapping[str, Study]:
    """Return the study of LeNets, each from a start of its own."""
    data = {
        "smoke": DataSettings("patches", train=30, test=30),
        "laptop": DataSettings("patches", train=120, test=600),
        "desk": DataSettings("cifar10", train=2000, test=tested(scale)),
        "paper": DataSettings("cifar10"),
    }[scale]
    optimisers = {
        "smoke": (SGD(0.02), Adam(1e-3)),
        "laptop": (SGD(0.02), SGD(0.05), Adam(5e-4), Adam(2e-3), RMSProp(1e-4), RMSProp(5e-4)),
        "desk": (SGD(0.02), SGD(0.05), Adam(5e-4), Adam(2e-3), RMSProp(2e-4), RMSProp(5e-4)),
        "paper": tuple(kind(lr) for kind in (SGD, Adam, RMSProp) for lr in (1e-4, 0.02, 0.05)),
    }[scale]
    batches, seeds, epochs = {
        "smoke": ((5, 10), 1, 60),
        "laptop": ((8, 16, 32, 64), 2, 200),
        "desk": ((16, 32, 64, 128), 5, 300),
        "paper": ((64, 128, 256, 512, 1024), 10, 300),
    }[scale]
    until = Until(loss_below=0.3 if scale == "smoke" else 0.1, loss_over="epoch")
    looks = 2000 if scale == "desk" else 100
    base = NetworkSettings(
        data,
        LeNet5(classes=10 if scale in ON_PAPERS_DATA else 2),
        Training(SGD(0.02), batch_size=64, until=until, max_epochs=epochs, check_every=looks),
        measures=(*RIGHT.values(), NORMALISED, "kappa_trace", "loss", "generalisation_gap", SUMMED_GAP),
        moved=(MOVED, MOVED_NEURONS),
        samples=500 if scale == "desk" else None,  # convolutions in float64 take six times as long as in float32
    )
    shown = (
        GAP,
        *(Quantity(name, column) for name, column in RIGHT.items()),
        Quantity(OF_ANOTHER, str(Column("relative_flatness", layer=ANOTHER))),
        Quantity(THEOREM_4, NORMALISED),
        Quantity("1/sigma", PAC_BAYES, "sqrt"),
    )
    setups = [(optimiser, batch) for optimiser in optimisers for batch in batches]
    axis = own_seeds("training.optimiser+batch_size", setups, seeds)
    return {"lenet": Study("lenet", base, (axis,), shown, scale=scale)}


def minima(results: Results) -> pd.DataFrame:
    """Return the values of Fig. 5 to 8 for each network, named as in RIGHT and CODED, and after moves ("moved ...")."""
    networks = reached("lenet")(results)
    nothing = pd.Series(np.nan, index=networks.index)

    def column(name: str, at: str, layer: str | None = None) -> pd.Series:
        found = networks.get(str(Column(name, transform=at, layer=layer)))
        return nothing if found is None else found.astype(float)

    setups = networks["training.optimiser+batch_size+seed"]  # "(SGD(lr=0.02, ...), 8, 0)"
    columns = {
        "key": networks["key"],
        UNIT: networks[UNIT],
        "gap": column("generalisation_gap", ""),
        "batch size": networks["batch_size"],
        "optimiser": setups.str.extract(r"(\w+)\(", expand=False),
    }
    for prefix, at in REPARAMETRISED.items():
        norm, sharpness = column("weight_norm", at, LAST), column(PAC_BAYES, at)
        columns |= {f"{prefix}{name}": column(measured, at) for name, measured in RIGHT.items()}
        columns |= {
            f"{prefix}{OF_ANOTHER}": column("relative_flatness", at, ANOTHER),
            f"{prefix}{THEOREM_4}": column(NORMALISED, at),
            f"{prefix}{CODED[0]}": column(NORMALISED, at),
            f"{prefix}{CODED[1]}": column("kappa_trace", at, LAST) / norm**2,
            f"{prefix}{CODED[3]}": column("weight_norm", at) ** 2 * sharpness**0.5 / 4 + np.log(sharpness) / 4,
            f"{prefix}{CODED[4]}": norm**2,
        }
    return pd.DataFrame(columns)


FLAT, TRACE, FISHER_RAO, PAC, NORM = RIGHT
SECTION_6, C_2 = "relative2021 section 6, Fig. 5", "relative2021 C.2"

STRONGLY = "the novel relative flatness measure correlates strongly with generalization"
HIGHER = "relative flatness has higher correlation than all the competing measures"
WEAKEST = "only the Fisher-Rao norm is reparameterization invariant but shows the weakest correlation"
INVARIANT = (
    "both our proposed relative flatness and the Fisher-Rao norm are invariant to these reparameterization"  # sic
)
CHANGED = "these reparameterizations change traditional measures of flatness"
DECLINES = "For all other measures, the correlation with generalization declines substantially"
NEURONS = "Relative flatness and the Fisher-Rao norm are also invariant under neuron-wise reparameterizations"
NEURONS_BREAK = "which could be used to further break the correlation for the other measures"
PREPROCESSED = (
    "Using a simple preprocessing step (a neuron-wise reparameterization with the variance over the sample), our "
    "proposed measure becomes independent of all neuron-wise reparameterizations"
)
ANOTHER_LAYER = "It keeps the high correlation value, but due to less optimal feature space we observe smaller number"

_CODE = "The authors' code computes the measures of Fig. 5 otherwise than the text defines them."
_TWO_SENTENCES = (
    "C.2 names no exception; section 4 does: 'except for neuron-wise reparameterizations of the feature layer'. Every "
    "layer is moved here."
)
_NO_NUMBER = "The text names no least value; App. C of reparam2019, by the same authors, calls 0.7 strong."


def predictions() -> tuple[Prediction, ...]:
    """Return the predictions of X18."""
    return (*_correlations(), *_invariances(), *_declines(), *_another_layer())


def _correlations() -> list[Prediction]:
    rows = [
        Prediction(
            "flatness", "Relative flatness correlates positively with the generalisation gap.",
            SECTION_6, correlated(minima, FLAT, "gap"),
            kind="claim", quote=STRONGLY,
        ),
        Prediction(
            "flatness.ranks", "So do their ranks: Spearman's correlation.",
            SECTION_6, correlated(minima, FLAT, "gap", "spearman"),
            quote=STRONGLY, reason="The text does not say which correlation; one network can make or hide Pearson's.",
        ),
        Prediction(
            "flatness.strong",
            f"Relative flatness correlates strongly with the generalisation gap, r at least {STRONG:g}.",
            SECTION_6, correlated(minima, FLAT, "gap"), "above", STRONG,
            quote=STRONGLY, reason=_NO_NUMBER, headline=True,
        ),
        Prediction(
            "stronger", "Relative flatness correlates more strongly with it than each of the four other measures.",
            SECTION_6, stronger(minima, [FLAT], [TRACE, FISHER_RAO, PAC, NORM], "gap"),
            kind="claim", quote=HIGHER, headline=True,
        ),
        Prediction(
            "fisher_rao.weakest", "The Fisher-Rao norm shows the weakest correlation.",
            "relative2021 section 6", weaker(minima, [FISHER_RAO], [FLAT, TRACE, PAC, NORM], "gap"),
            kind="claim", quote=WEAKEST,
        ),
    ]  # fmt: skip
    for mine, others, coded in ((FLAT, (TRACE, FISHER_RAO, PAC, NORM), ""), (CODED[0], CODED[1:], ".as_coded")):
        rows += [
            Prediction(
                f"stronger_than.{_slug(other)}{coded}",
                f"Relative flatness correlates more strongly with it than: {other.removesuffix(' (code)')}"
                f"{', both as the authors compute them in their code' if coded else ''}.",
                SECTION_6, stronger(minima, [mine], [other], "gap"),
                kind="reading" if coded else "claim", quote=HIGHER, reason=_CODE if coded else "",
            )
            for other in others
        ]  # fmt: skip
    return rows


def _invariances() -> list[Prediction]:
    """Return what each reparametrisation leaves unchanged."""
    rows = [
        Prediction(
            f"{_slug(name)}.invariant", f"{_title(name)}: layer-wise reparametrisation does not change it.",
            f"{C_2}, Fig. 7", unchanged(minima, name, f"moved {name}"), "below", LEAST_CHANGE,
            kind="theorem", quote=INVARIANT,
        )
        for name in (FLAT, FISHER_RAO)
    ]  # fmt: skip
    rows += [
        Prediction(
            f"{_slug(name)}.not_invariant",
            f"{_title(name)}: layer-wise reparametrisation changes it, by more than rounding.",
            "relative2021 section 1", unchanged(minima, name, f"moved {name}"), "above", LEAST_CHANGE,
            kind="claim" if name == TRACE else "reading", quote=CHANGED,
            reason="" if name == TRACE else "The text says it of measures of flatness; Fig. 7 shows it of this one.",
        )
        for name in (TRACE, PAC, NORM)
    ]  # fmt: skip
    rows += [
        Prediction(
            f"{_slug(FLAT)}.neuronwise",
            f"{_title(FLAT)}: invariant to neuron-wise reparametrisation, the feature layer's included.",
            C_2, unchanged(minima, FLAT, f"neurons moved {FLAT}"), "below", LEAST_CHANGE,
            quote=NEURONS, reason=_TWO_SENTENCES,
        ),
        Prediction(
            f"{_slug(FISHER_RAO)}.neuronwise",
            f"{_title(FISHER_RAO)}: invariant to neuron-wise reparametrisation, of every layer.",
            C_2, unchanged(minima, FISHER_RAO, f"neurons moved {FISHER_RAO}"), "below", LEAST_CHANGE,
            kind="theorem", quote=NEURONS,
        ),
    ]  # fmt: skip
    rows.append(
        Prediction(
            "normalised.neuronwise",
            "Relative flatness of features divided by their standard deviation: invariant to neuron-wise "
            "reparametrisation.",
            "relative2021 section 4, Thm 4", unchanged(minima, THEOREM_4, f"neurons moved {THEOREM_4}"), "below",
            LEAST_CHANGE, quote=PREPROCESSED,
            reason="The text divides by the variance, for which it does not hold (docs/slips_relative.md).",
        )
    )  # fmt: skip
    return rows


def _declines() -> list[Prediction]:
    """Return what happens to the other measures' correlations."""
    moves: tuple[tuple[str, str, str, str, PredictionKind, str, str], ...] = (
        ("declines", "moved", "Layer-wise reparametrisation", f"{C_2}, Fig. 7", "claim", DECLINES, ""),
        ("declines.neuronwise", "neurons moved", "Neuron-wise reparametrisation", C_2, "reading", NEURONS_BREAK,
         "The text says that such moves 'could be used' so; these are ours, drawn at random."),
    )  # fmt: skip
    return [
        Prediction(
            f"{_slug(name)}.{row}", f"{after} weakens the positive correlation of {_with_article(name)} with the gap.",
            place, weaker(minima, [f"{prefix} {name}"], [name], "gap", positive=True),
            kind=kind, quote=quote, reason=reason,
        )
        for row, prefix, after, place, kind, quote, reason in moves
        for name in (TRACE, PAC, NORM)
    ]  # fmt: skip


def _another_layer() -> list[Prediction]:
    place = f"{C_2}, Fig. 8"
    return [
        Prediction(
            "another_layer",
            "Relative flatness of another fully connected layer correlates positively with the gap.",
            place, correlated(minima, OF_ANOTHER, "gap"),
            kind="claim", quote=ANOTHER_LAYER,
        ),
        Prediction(
            "another_layer.strong", f"It keeps the high correlation, r at least {STRONG:g}.",
            place, correlated(minima, OF_ANOTHER, "gap"), "above", STRONG,
            quote=ANOTHER_LAYER, reason=_NO_NUMBER,
        ),
        Prediction(
            "another_layer.less",
            "Its correlation is smaller than that of the penultimate layer's features, which is above 0.",
            place, weaker(minima, [OF_ANOTHER], [FLAT], "gap", positive=True),
            kind="claim", quote=ANOTHER_LAYER,
        ),
    ]  # fmt: skip


def _with_article(name: str) -> str:
    return f"the {name} measure" if name == PAC else f"the {name}"


def _title(name: str) -> str:
    return name[0].upper() + name[1:]


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name.replace(" (code)", "").replace("'s", "")).lower()


def _plots(results: Results) -> list[Plot]:
    networks, one = minima(results), "One mark a network."
    shown = (
        ("fig5", "Fig. 5 and 6: measures and the gap", {name: name for name in RIGHT}, one),
        ("fig5_as_coded", "Fig. 5 as the authors' code computes it", {name: name for name in CODED}, one),
        ("fig7", "Fig. 7: the same after a layer-wise reparametrisation", {name: f"moved {name}" for name in RIGHT},
         "Each layer times a random factor in [5, 25], the next divided by it; one mark a network."),
        ("neurons", "C.2: the same after a neuron-wise reparametrisation",
         {name: f"neurons moved {name}" for name in RIGHT},
         "Each neuron or channel times a random factor in [5, 25], its readers divided by it; one mark a network."),
        ("fig8", "Fig. 8: relative flatness of two layers", {LAST: "relative flatness", "fc2": OF_ANOTHER}, one),
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
    "their standard deviation first, the Fisher-Rao norm has a factor 6 for 5, and the PAC-Bayes measure drawn is "
    "||w||^2 / (4 s^2) + log(n / s) + 10 for noise of the standard deviation s^2. The figure and the claims that are "
    "as coded take these (w with its biases), but for constant factors and terms, which no correlation sees."
)
_FACTORS = (
    "Each layer is multiplied by a factor of its own and the next divided by it; the authors' code moves the last two "
    "layers alone. Neuron-wise, each neuron and channel has a factor of its own; C.2 gives no figure of it."
)
SPLIT_GAP = (
    "The gap is the mean test loss less the mean training loss; the code sums both, the test's five times, which is "
    "measured beside it, by name, and proportional where the test samples are a fifth."
)
_UNSAID = (
    "The text gives neither the law of the initial weights nor a limit of epochs: PyTorch's own, and 300; the code "
    "draws weights by Glorot's normal law. What has not converged by then is left out, as in the paper."
)

EXPERIMENTS = (
    Experiment(
        "X18",
        "Relative flatness among other measures, at many minima of LeNet5",
        "relative2021 Fig. 5, 6, 7, 8",
        lenet_studies,
        predictions(),
        _plots,
        {
            "smoke": (SMOKE_ONLY, SPLIT_GAP),
            "laptop": (
                "Patches of two photographs in place of CIFAR-10, 120 to train on; smaller batches, and learning rates "
                "at which each optimiser converges; 2 networks of each setup.",
                SPLIT_GAP, CODE, _FACTORS, COEFFICIENT,
            ),
            "desk": (
                "2000 images of CIFAR-10 to train on, batches of 16 to 128, learning rates at which each optimiser "
                "converges; 5 networks of each setup, 120 in all; losses and gaps on all of these and on 2000 test "
                "images, the rest on 500.",
                ONE_DRAW, _UNSAID, SPLIT_GAP, CODE, _FACTORS, COEFFICIENT,
            ),
            "paper": (_UNSAID, SPLIT_GAP, CODE, _FACTORS, COEFFICIENT),
        },
    ),
)  # fmt: skip
