"""X14 and X15: "A Reparameterization-Invariant Flatness Measure for Deep Neural Networks".

The authors are Petzka, Adilova, Kamp and Sminchisescu.

Names of the paper's Table 1: kappa^l is `layer_sharpness.kappa` of layer l, kappa_tau^l is `kappa_trace`, rho_sigma^l
is `neuron_flatness`, rho^l is `neuron_flatness.max`. The weight layers of LeNet5 are counted, so layer 5 is fc3, which
acts on the outputs of the last hidden layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from flatlens.column import Column
from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import MLP, LeNet5
from flatlens.papers.contrasts import steadier, strength, stronger, unchanged, weakest
from flatlens.papers.evidence import Table, correlated, reached
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import pairwise, scatter
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import COEFFICIENT, MOVED, SMOKE_ONLY, STRONG, SUMMED_GAP, WEAK
from flatlens.papers.units import UNIT
from flatlens.training import SGD, Training, Until

# X14: LeNet5, one layer's flatness, before and after a reparametrisation

INITS = ("xavier_normal", "kaiming_uniform", "uniform", "normal")
BATCHES_LRS: Mapping[Scale, tuple[tuple[int, float], ...]] = {
    "smoke": ((4, 0.002), (8, 0.004)),
    "laptop": ((2, 0.0005), (4, 0.001), (8, 0.002), (16, 0.004)),
    "paper": ((4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)),
}
FIFTH = "fc3"


def _x14(scale: Scale) -> Mapping[str, Study]:
    data = {
        "smoke": DataSettings("patches", train=30, test=30),
        "laptop": DataSettings("patches", train=200, test=600),
        "paper": DataSettings("cifar10"),
    }[scale]
    until = Until(loss_below=0.5 if scale == "smoke" else 0.1, loss_over="epoch")
    epochs = {"smoke": 40, "laptop": 300, "paper": 500}[scale]
    base = NetworkSettings(
        data,
        LeNet5(classes=10 if scale == "paper" else 2),
        Training(SGD(0.001), batch_size=4, until=until, max_epochs=epochs, check_every=100),
        measures=("layer_sharpness", "kappa_trace", "weight_norm", "loss", "generalisation_gap", SUMMED_GAP),
        moved=(MOVED,),
    )
    seeds = {"smoke": 1, "laptop": 3, "paper": 9}[scale]
    inits = INITS[:2] if scale == "smoke" else INITS
    axes = (Axis("init", inits), Axis("batch_size+lr", BATCHES_LRS[scale]), Axis("seed", tuple(range(seeds))))
    shown = (
        GAP,
        Quantity("5 x summed test less summed training loss", SUMMED_GAP, role="result"),
        *(
            Quantity(f"{name}{after}", _of_fifth(column, at))
            for after, at in (("", ""), (", moved", MOVED))
            for name, column in (
                ("kappa, layer 5", "layer_sharpness.kappa"),
                ("kappa_tau, layer 5", "kappa_trace"),
                ("lmax, layer 5", "layer_sharpness"),
            )
        ),
    )
    return {"lenet": Study("lenet", base, axes, shown, scale=scale)}


def _of_fifth(row: str, transform: str) -> str:
    """Return the column of the fifth layer, of the network as it is ("") or after a transform."""
    return str(replace(Column.of(row, FIFTH), transform=transform))


def fifth_layer(study: str) -> Table:
    """Return the values of Fig. 1 and 2 for each network, as trained and after the move ("moved ...")."""

    def found(results: Results) -> pd.DataFrame:
        networks = reached(study)(results)
        columns = {
            "key": networks["key"],
            UNIT: networks[UNIT],
            "gap": networks.get("generalisation_gap"),
            "init": networks.get("init"),
        }
        for prefix, at in (("", ""), ("moved ", MOVED)):
            kappa_trace, norm = (networks.get(_of_fifth(name, at)) for name in ("kappa_trace", "weight_norm"))
            columns |= {
                f"{prefix}kappa": networks.get(_of_fifth("layer_sharpness.kappa", at)),
                f"{prefix}kappa_tau": kappa_trace,
                f"{prefix}lmax": networks.get(_of_fifth("layer_sharpness", at)),
                f"{prefix}trace": None if kappa_trace is None or norm is None else kappa_trace / norm**2,
            }
        return pd.DataFrame(columns, index=networks.index)

    return found


def _x14_predictions() -> tuple[Prediction, ...]:
    table = fifth_layer("lenet")
    predictions = []
    for name, symbol in (("kappa", "kappa^5"), ("kappa_tau", "kappa_tau^5")):
        predictions += [
            Prediction(
                f"{name}.gap",
                f"{symbol} correlates positively with the generalisation error.",
                "reparam2019 section 3, Fig. 1",
                correlated(table, name, "gap"),
            ),
            Prediction(
                f"{name}.invariant",
                f"{symbol} is not affected by a layer-wise reparametrisation.",
                "reparam2019 Thm 2, Fig. 2",
                unchanged(table, name, f"moved {name}"),
                "below",
                1e-3 if name == "kappa" else 1e-6,  # the eigenvalue is found to a residual of a thousandth
            ),
        ]
    predictions.append(
        Prediction(
            "kappa_tau.stronger",
            "The correlation is stronger for kappa_tau^5 than for kappa^5.",
            "reparam2019 section 3, Fig. 1",
            stronger(table, ["kappa_tau"], ["kappa"], "gap"),
        )
    )
    predictions.append(
        Prediction(
            "kappa_tau.strong",
            f"kappa_tau^5 correlates strongly with it, r at least {STRONG:g} (the paper's is 0.91).",
            "reparam2019 section 3, Fig. 1",
            correlated(table, "kappa_tau", "gap"),
            "above",
            STRONG,
        )
    )
    for name, symbol in (("lmax", "the largest eigenvalue"), ("trace", "the trace")):
        predictions.append(
            Prediction(
                f"{name}.weak",
                f"After the reparametrisation {symbol} of layer 5's Hessian correlates very weakly with the "
                f"generalisation error, |r| below {WEAK:g}.",
                "reparam2019 section 3, Fig. 2",
                strength(table, f"moved {name}", "gap"),
                "below",
                WEAK,
            )
        )
    return tuple(predictions)


def _x14_plots(results: Results) -> list[Plot]:
    networks = fifth_layer("lenet")(results)
    first = {"kappa^5": "kappa", "kappa_tau^5": "kappa_tau"}
    second = {
        "kappa^5": "moved kappa",
        "largest eigenvalue": "moved lmax",
        "kappa_tau^5": "moved kappa_tau",
        "trace": "moved trace",
    }
    return [
        scatter(
            networks, "fig1", "Flatness of layer 5 and the gap", "One mark a network.", first, "gap", "init",
            x="flatness of layer 5", y="generalisation gap",
        ),
        scatter(
            networks, "fig2", "The same after a layer-wise reparametrisation",
            "Each layer times a random factor in [5, 25], the next divided by it; one mark a network.",
            second, "gap", "init", x="of layer 5, moved", y="generalisation gap",
        ),
        pairwise("lenet", results["lenet"]),
    ]  # fmt: skip


# X15: a fully connected network, the flatness of every layer

HIDDEN = ("fc1", "fc2", "fc3", "fc4")
LAYER_MEASURES = {
    "kappa_trace": ("kappa_tau^l", "Fig. 3"),
    "neuron_flatness": ("rho_sigma^l", "Fig. 4"),
    "neuron_flatness.max": ("rho^l", "Fig. 5"),
}
NETWORK_WISE = {
    "kappa_tau^max": "kappa_trace.max",
    "kappa_tau^Sigma": "kappa_trace",
    "rho^max": "neuron_flatness.max",
    "rho^Sigma": "neuron_flatness",
}
"""Column of each measure of the whole network."""
TRAINED = 0.07
"""Largest training loss: networks above it are left out."""


def _x15(scale: Scale) -> Mapping[str, Study]:
    data, inputs = {
        "smoke": (DataSettings("digits", train=100), 64),
        "laptop": (DataSettings("digits", train=600), 64),
        "paper": (DataSettings("mnist", flat=True), 784),
    }[scale]
    pairs: tuple[tuple[int, float], ...] = {
        "smoke": ((25, 0.1), (50, 0.2)),
        "laptop": ((25, 0.05), (50, 0.1), (100, 0.2), (200, 0.4)),
        "paper": ((1000, 0.02), (2000, 0.04), (4000, 0.08), (8000, 0.16)),
    }[scale]
    epochs, seeds = {"smoke": (40, 2), "laptop": (30, 12), "paper": (1000, 10)}[scale]
    base = NetworkSettings(
        data,
        MLP(inputs, (50, 50, 50, 30), 10, init="xavier_normal"),
        Training(SGD(0.1), batch_size=25, max_epochs=epochs, check_every=100),
        measures=("kappa_trace", "neuron_flatness", "loss", "accuracy", "generalisation_gap", SUMMED_GAP),
    )
    axes = (Axis("batch_size+lr", pairs), Axis("seed", tuple(range(seeds))))
    shown = (
        GAP,
        Quantity("training loss", "loss"),
        *(Quantity(name, column) for name, column in NETWORK_WISE.items()),
        Quantity("batch size (log)", "batch_size", "log", role="setting"),
    )
    return {"mlp": Study("mlp", base, axes, shown, scale=scale)}


def well_trained(study: str) -> Table:
    """Return the networks whose training loss is at most 0.07."""

    def found(results: Results) -> pd.DataFrame:
        networks = reached(study)(results)
        return networks[networks["loss"] <= TRAINED] if "loss" in networks else networks

    return found


def _x15_predictions() -> tuple[Prediction, ...]:
    table, gap = well_trained("mlp"), "generalisation_gap"
    predictions = [
        Prediction(
            f"{column}.{layer}",
            f"{symbol} of hidden layer {layer[2:]} correlates positively with the generalisation error.",
            f"reparam2019 App. C, {figure}",
            correlated(table, str(Column.of(column, layer)), gap),
        )
        for column, (symbol, figure) in LAYER_MEASURES.items()
        for layer in HIDDEN
    ]
    predictions.append(
        Prediction(
            "kappa_trace.strong",
            f"kappa_tau^l correlates strongly with it in each hidden layer, r at least {STRONG:g}.",
            "reparam2019 App. C, Fig. 3",
            weakest(table, _in_layers("kappa_trace"), gap),
            "above",
            STRONG,
        )
    )
    predictions += [
        Prediction(
            f"{column}.varies_more",
            f"Over the hidden layers r of {symbol} with it differs more than that of kappa_tau^l.",
            f"reparam2019 App. C, Fig. 3, {figure.removeprefix('Fig. ')}",
            steadier(table, _in_layers("kappa_trace"), _in_layers(column), gap),
        )
        for column, (symbol, figure) in LAYER_MEASURES.items()
        if column != "kappa_trace"
    ]
    predictions += [
        Prediction(
            f"{name}.stronger",
            f"{name}, of the whole network, correlates more strongly with it than any hidden layer's of the three.",
            "reparam2019 App. C, Fig. 6",
            stronger(table, [column], [name for kind in LAYER_MEASURES for name in _in_layers(kind)], gap),
        )
        for name, column in NETWORK_WISE.items()
    ]
    return tuple(predictions)


def _in_layers(column: str) -> list[str]:
    return [str(Column.of(column, layer)) for layer in HIDDEN]


def _x15_plots(results: Results) -> list[Plot]:
    networks = well_trained("mlp")(results)
    plots = [
        scatter(
            networks, f"{figure.replace('. ', '').lower()}", f"{symbol} of each hidden layer and the gap",
            "One mark a network.", {f"layer {layer[2:]}": str(Column.of(column, layer)) for layer in HIDDEN},
            "generalisation_gap", "batch_size", x=symbol, y="generalisation gap",
        )
        for column, (symbol, figure) in LAYER_MEASURES.items()
    ]  # fmt: skip
    return [
        *plots,
        scatter(
            networks, "fig6", "Flatness of the whole network and the gap", "One mark a network.", NETWORK_WISE,
            "generalisation_gap", "batch_size", x="flatness", y="generalisation gap",
        ),
        pairwise("mlp", results["mlp"]),
    ]  # fmt: skip


GAPS = (
    "Claims and figures are of the mean test loss less the mean training loss. The paper's summed one is it times the "
    "number of training samples, where those are five times the test samples; it is measured beside it, by name."
)
_FACTORS = (
    "Each layer is multiplied by a factor of its own and the next divided by it; the authors' later code moves the "
    "last two alone."
)
FIFTH_LAYER = (
    "The paper's layer 5 is the last hidden one. The five weight layers are counted here: the fifth is fc3, the output "
    "layer, which acts on the last hidden layer's outputs."
)
CONVERGED = (
    '"Until convergence" is taken as in relative2021, a mean loss of an epoch below 0.1: the paper says no more, and '
    "the authors' later code stops on the last layer's gradient."
)
RATIO = (
    "Learning rates .02, .04, .08, .16 for batches of 1000 to 8000: the paper prints .02 to 1.6, and that the ratio is "
    "constant, which .16 makes it."
)
_UNSAID = "1000 epochs and 10 seeds a batch size: the paper gives neither. Its training error is taken to be the loss."

EXPERIMENTS = (
    Experiment(
        "X14",
        "Flatness of one layer and the gap, before and after a reparametrisation",
        "reparam2019 Fig. 1, 2",
        _x14,
        _x14_predictions(),
        _x14_plots,
        {
            "smoke": (SMOKE_ONLY, GAPS, COEFFICIENT, FIFTH_LAYER),
            "laptop": (
                "Patches of two photographs in place of CIFAR-10, 200 to train on.",
                "Batches of 2 to 16 and learning rates to match, in the paper's ratio, for so few samples; 3 seeds.",
                GAPS,
                COEFFICIENT,
                CONVERGED,
                _FACTORS,
                FIFTH_LAYER,
            ),
            "paper": (CONVERGED, "500 epochs at most.", COEFFICIENT, _FACTORS, GAPS, FIFTH_LAYER),
        },
    ),
    Experiment(
        "X15",
        "Flatness of layers, of neurons and of whole networks, and the gap",
        "reparam2019 Fig. 3, 4, 5, 6",
        _x15,
        _x15_predictions(),
        _x15_plots,
        {
            "smoke": (SMOKE_ONLY, COEFFICIENT),
            "laptop": (
                "scikit-learn's digits in place of MNIST, 600 to train on.",
                "Batches of 25 to 200, as many steps an epoch as those of 1000 to 8000 make of MNIST within a factor "
                "of 3; 30 epochs, 12 seeds.",
                COEFFICIENT,
            ),
            "paper": (RATIO, _UNSAID, COEFFICIENT),
        },
    ),
)
