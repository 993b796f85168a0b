"""X15: a fully connected network, the flatness of every layer, of neurons and of the whole network, and the gap."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.models import MLP
from flatlens.papers.contrasts import mean_of, steadier, stronger
from flatlens.papers.evidence import Table, correlated, mark_left_out, reached, trained_ones
from flatlens.papers.experiment import (
    COEFFICIENT,
    LEAST_CHANGE,
    LEAST_CHANGE_SEARCHED,
    MOVED,
    MOVED_NEURONS,
    SMOKE_ONLY,
    STRONG,
    SUMMED_GAP,
    Experiment,
    Plot,
    Prediction,
    Results,
    Scale,
    own_seeds,
)
from flatlens.papers.figures import pairwise, scatter
from flatlens.training import SGD, Training

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
"""Column of each measure of the whole network in Fig. 6."""
_OF_LAYERS = {
    "kappa^l": "layer_sharpness.kappa",
    **{symbol: column for column, (symbol, _) in LAYER_MEASURES.items()},
}
OF_TABLE_1 = {
    **{
        symbol: tuple(str(Column.of(column, layer)) for layer in (*HIDDEN, "fc5"))
        for symbol, column in _OF_LAYERS.items()
    },
    "kappa^max": ("layer_sharpness.kappa_max",),
    "kappa^Sigma": ("layer_sharpness.kappa",),
    **{symbol: (column,) for symbol, column in NETWORK_WISE.items()},
}
"""Columns of each measure of Table 1: one of the whole network, or one of each layer."""
_BATCHES_LRS = ((1000, 0.02), (2000, 0.04), (4000, 0.08), (8000, 0.16))
"""The paper's batch sizes, and learning rates in a constant ratio to them."""
_TRAINED = 0.07
"""Largest training loss: networks above it are left out, as in App. C."""


def _studies(scale: Scale) -> Mapping[str, Study]:
    data, inputs = {
        "smoke": (DataSettings("digits", train=100), 64),
        "laptop": (DataSettings("digits", train=600), 64),
        "desk": (DataSettings("mnist", flat=True), 784),
        "paper": (DataSettings("mnist", flat=True), 784),
    }[scale]
    pairs: tuple[tuple[int, float], ...] = {
        "smoke": ((25, 0.1), (50, 0.2)),
        "laptop": ((25, 0.05), (50, 0.1), (100, 0.2), (200, 0.4)),
        "desk": _BATCHES_LRS,
        "paper": _BATCHES_LRS,
    }[scale]
    epochs, seeds = {"smoke": (40, 2), "laptop": (30, 24), "desk": (160, 20), "paper": (1000, 10)}[scale]
    looks = 1000 if scale == "desk" else 100
    base = NetworkSettings(
        data,
        MLP(inputs, (50, 50, 50, 30), 10, init="xavier_normal"),
        Training(SGD(0.1), batch_size=25, max_epochs=epochs, check_every=looks),
        measures=(
            "kappa_trace", "neuron_flatness", "layer_sharpness", "loss", "accuracy", "generalisation_gap", SUMMED_GAP,
        ),
        moved=(MOVED, MOVED_NEURONS),
        samples=5000 if scale == "desk" else None,
    )  # fmt: skip
    shown = (
        GAP,
        Quantity("training loss", "loss"),
        *(Quantity(name, column) for name, column in NETWORK_WISE.items()),
        Quantity("batch size (log)", "batch_size", "log", role="setting"),
    )
    return {"mlp": Study("mlp", base, (own_seeds("batch_size+lr", pairs, seeds),), shown, scale=scale)}


def well_trained(study: str) -> Table:
    """Return the networks; those whose training loss is above 0.07 are marked as left out."""

    def found(results: Results) -> pd.DataFrame:
        networks = reached(study)(results)
        return mark_left_out(networks, networks["loss"] > _TRAINED, f"training loss above {_TRAINED:g}")

    return found


def in_symbols(table: Table) -> Table:
    """Return the table with the measures' columns under the paper's symbols: "rho^2" of a layer, "rho^max" of all."""
    names = {column: symbol for symbol, column in NETWORK_WISE.items()}
    for column, (symbol, _) in LAYER_MEASURES.items():
        names |= {str(Column.of(column, layer)): of_layer(symbol, layer) for layer in HIDDEN}
    return lambda results: table(results).rename(columns=names)


def of_layer(symbol: str, layer: str) -> str:
    """Return a symbol with a layer's number.

    >>> of_layer("kappa_tau^l", "fc2")
    'kappa_tau^2'
    """
    return symbol.removesuffix("l") + layer.removeprefix("fc")


def changes(study: str) -> Table:
    """Return the networks with how far each measure of Table 1 moves: "rho^max, layerwise".

    This is |log(after / before)|; of a measure of single layers, that of the layer in which it moves furthest.
    """

    def found(results: Results) -> pd.DataFrame:
        networks = reached(study)(results)
        columns = {}
        for transform in (MOVED, MOVED_NEURONS):
            for symbol, of in OF_TABLE_1.items():
                ratios = [networks[moved(column, transform)] / networks[column] for column in of]
                columns[f"{symbol}, {transform}"] = np.abs(np.log(ratios)).max(0)
        return networks.assign(**columns)

    return found


def moved(column: str, transform: str) -> str:
    """Return the name of a column after a transform.

    >>> moved("kappa_trace", "layerwise")
    'kappa_trace@layerwise'
    """
    return str(Column.parse(column).after(transform))


_OBSERVED = "The observed correlation is strong (with $\\rho \\geq 0.7$) and varies slightly for different layers"
_AGAIN_SIGNIFICANT = "The observed correlation is again significant"
_DIFFERS = "compared to the previous measure we can see that it might differ considerably depending on the layer"
_LARGER = (
    "each of the network-wise measures has a larger correlation with generalization loss than the original "
    "neuron-wise and layer-wise measures"
)
_UNDER_LAYERS = "Since each of the individual expressions are invariant under linear reparameterizations of full layers"
_UNDER_ALL = "Since each of the individual expressions is invariant under all linear reparameterizations"
_NOT_UNDER_ALL = "are in general not independent of the latter reparameterizations"
_OF_LAYERS_ALONE = (
    "The text says it of a layer's kappa^l and kappa_tau^l; for their maximum and sum Table 1 names layer-wise moves "
    "alone."
)


def _predictions() -> tuple[Prediction, ...]:
    table, gap = in_symbols(well_trained("mlp")), "generalisation_gap"
    layers = {column: [of_layer(symbol, layer) for layer in HIDDEN] for column, (symbol, _) in LAYER_MEASURES.items()}
    each = [
        (column, symbol, f"reparam2019 App. C, {figure}", layer)
        for column, (symbol, figure) in LAYER_MEASURES.items()
        for layer in HIDDEN
    ]
    return (
        *(
            Prediction(
                f"{column}.{layer}",
                f"{symbol} of hidden layer {layer[2:]} correlates positively with the generalisation error.",
                figure, correlated(table, of_layer(symbol, layer), gap),
                kind="claim", quote=_OBSERVED if column == "kappa_trace" else _AGAIN_SIGNIFICANT,
            )
            for column, symbol, figure, layer in each
        ),
        *(
            Prediction(
                f"{column}.{layer}.strong",
                f"{symbol} of hidden layer {layer[2:]} correlates strongly with it, r at least {STRONG:g}.",
                figure, correlated(table, of_layer(symbol, layer), gap), "above", STRONG,
                kind="claim", quote=_OBSERVED,
            )
            for column, symbol, figure, layer in each if column == "kappa_trace"
        ),
        *(
            Prediction(
                f"{column}.varies_more",
                f"Over the hidden layers r of {symbol} with it differs more than that of kappa_tau^l.",
                f"reparam2019 App. C, Fig. 3, {figure.removeprefix('Fig. ')}",
                steadier(table, layers["kappa_trace"], layers[column], gap),
                quote=_DIFFERS,
                reason="That it 'might' differ holds if it differs in some networks; this row asks for it in ours.",
            )
            for column, (symbol, figure) in LAYER_MEASURES.items() if column != "kappa_trace"
        ),
        *(
            Prediction(
                f"{name}.stronger",
                f"{name}, of the whole network, correlates more strongly with it than any hidden layer's of the three.",
                "reparam2019 App. C, Fig. 6",
                stronger(table, [name], [one for several in layers.values() for one in several], gap),
                kind="claim", quote=_LARGER,
            )
            for name in NETWORK_WISE
        ),
        *_invariances(),
    )  # fmt: skip


def _invariances() -> list[Prediction]:
    """Return the rows of Table 1: what layer-wise and neuron-wise reparametrisations leave unchanged."""
    table, rows = changes("mlp"), []
    for name, columns in OF_TABLE_1.items():
        searched = columns[0].startswith("layer_sharpness")
        rounding = LEAST_CHANGE_SEARCHED if searched else LEAST_CHANGE
        rows.append(
            Prediction(
                f"{name}.layerwise", f"{name} is not affected by layer-wise reparametrisations.",
                "reparam2019 App. B, Table 1", mean_of(table, f"{name}, {MOVED}"), "below", rounding,
                kind="theorem", quote=_UNDER_ALL if name.startswith("rho") else _UNDER_LAYERS,
            )
        )  # fmt: skip
        neurons = mean_of(table, f"{name}, {MOVED_NEURONS}")
        if name.startswith("rho"):
            rows.append(
                Prediction(
                    f"{name}.neuronwise", f"{name} is not affected by neuron-wise ones.",
                    "reparam2019 App. B, Thm 3, Table 1", neurons, "below", rounding, kind="theorem", quote=_UNDER_ALL,
                )
            )  # fmt: skip
        else:
            rows.append(
                Prediction(
                    f"{name}.neuronwise", f"{name} is changed by neuron-wise ones, by more than rounding.",
                    "reparam2019 App. B", neurons, "above", rounding,
                    kind="claim" if name.endswith("^l") else "reading", quote=_NOT_UNDER_ALL,
                    reason="" if name.endswith("^l") else _OF_LAYERS_ALONE,
                )
            )  # fmt: skip
    return rows


def _plots(results: Results) -> list[Plot]:
    networks, _ = trained_ones(well_trained("mlp")(results))
    plots = [
        scatter(
            networks, f"{figure.replace('. ', '').lower()}", f"{figure}: {symbol} of each hidden layer and the gap",
            "One mark a network.", {f"layer {layer[2:]}": str(Column.of(column, layer)) for layer in HIDDEN},
            "generalisation_gap", "batch_size", x=symbol, y="generalisation gap",
        )
        for column, (symbol, figure) in LAYER_MEASURES.items()
    ]  # fmt: skip
    return [
        *plots,
        scatter(
            networks, "fig6", "Fig. 6: flatness of the whole network and the gap", "One mark a network.", NETWORK_WISE,
            "generalisation_gap", "batch_size", x="flatness", y="generalisation gap",
        ),
        _table_1(results),
        pairwise("mlp", results["mlp"]),
    ]  # fmt: skip


def _table_1(results: Results) -> Plot:
    networks, rows = changes("mlp")(results), []
    for name, columns in OF_TABLE_1.items():
        of = "layer" if len(columns) > 1 else "network"
        rows.append((of, name, "invariant, says the paper", "all linear" if "rho" in name else "layer-wise"))
        for said, transform in (("layer-wise", MOVED), ("neuron-wise", MOVED_NEURONS)):
            change = networks[f"{name}, {transform}"].mean()
            rows.append((of, name, f"changed by {said}", f"{change:.2g}"))
    return Plot(
        "table1", "Table 1: which reparametrisations leave the measures unchanged",
        "The change is the mean over networks of |log(after / before)|, in the layer where it is largest. Factors are "
        "random, in [5, 25]. Of rho^l(j), of single neurons, its maximum and sum over a layer are shown.",
        "table", pd.DataFrame(rows, columns=["panel", "row", "column", "text"]),
    )  # fmt: skip


_RATIO = (
    "Learning rates .02, .04, .08, .16 for batches of 1000 to 8000: the paper prints .02 to 1.6, and that the ratio is "
    "constant, which .16 makes it."
)
_TRAINING_ERROR = (
    f"Networks whose training loss is above {_TRAINED:g} are left out: the paper says training error, which is taken "
    "to be the loss, as its generalisation error is a difference of losses."
)
_UNSAID = "1000 epochs and 10 networks of each batch size: the paper gives neither."

EXPERIMENTS = (
    Experiment(
        "X15",
        "Flatness of layers, of neurons and of whole networks, and the gap",
        "reparam2019 Fig. 3, 4, 5, 6, Table 1",
        _studies,
        _predictions(),
        _plots,
        {
            "smoke": (SMOKE_ONLY, COEFFICIENT),
            "laptop": (
                "scikit-learn's digits in place of MNIST, 600 to train on.",
                "Batches of 25 to 200, as many steps an epoch as those of 1000 to 8000 make of MNIST within a factor "
                "of 3; 30 epochs, 24 networks of each batch size.",
                _TRAINING_ERROR,
                COEFFICIENT,
            ),
            "desk": (
                "160 epochs and 20 networks of each batch size: the paper gives neither. Losses and gaps are of all "
                "images, the rest of 5000.",
                "20, 19, 20 and 10 networks of batches of 1000, 2000, 4000 and 8000 have a training loss of at most "
                f"{_TRAINED:g}. Among these 69 the training loss has r = -0.81 with the gap: rows on the gap compare "
                "how far training came, too.",
                _RATIO,
                _TRAINING_ERROR,
                COEFFICIENT,
            ),
            "paper": (_RATIO, _UNSAID, _TRAINING_ERROR, COEFFICIENT),
        },
    ),
)
