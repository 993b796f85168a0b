"""X18: many minima of LeNet5, and relative flatness compared with other measures."""

from __future__ import annotations

from flatlens.papers.experiment import Experiment, Plot
from flatlens.papers.plots import pairwise, scatter
from flatlens.papers.predictions import Results
from flatlens.papers.relative2021.lenets import CODED, LAST, OF_ANOTHER, RIGHT, lenet_studies, minima
from flatlens.papers.relative2021.minima_claims import predictions
from flatlens.papers.remarks import COEFFICIENT, ONE_DRAW, SMOKE_ONLY


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
