"""Petzka, Adilova, Kamp, Sminchisescu, "A Reparameterization-Invariant Flatness Measure for Deep Neural Networks".

X14: LeNet5, the flatness of one layer and the gap, before and after a reparametrisation. The weight layers are counted,
so layer 5 is fc3, which acts on the outputs of the last hidden layer. `lenet_printed` has the paper's learning rates
and batch sizes; `lenet` is an earlier run with four times these rates. X15: a fully connected network, the flatness of
every layer, of neurons and of the whole network, and the gap.

Names of the paper's Table 1: kappa^l is `layer_sharpness.kappa` of layer l, kappa_tau^l is `kappa_trace`, rho_sigma^l
is `neuron_flatness`, rho^l is `neuron_flatness.max`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Literal

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.models import MLP, LeNet5
from flatlens.papers.contrasts import (
    DRAWS,
    draws_of,
    less_over_draws,
    ranks_within,
    readings,
    size_over_draws,
    strength,
    stronger,
    weaker,
    within,
)
from flatlens.papers.evidence import (
    UNIT,
    Evidence,
    Table,
    correlated,
    independent,
    mark_left_out,
    numbers_of,
    reached,
    trained_ones,
    where,
)
from flatlens.papers.experiment import (
    MOVED,
    MOVED_NEURONS,
    ON_PAPERS_DATA,
    SUMMED_GAP,
    Plot,
    Results,
    Scale,
    Side,
    deferred,
    own_seeds,
    tested,
)
from flatlens.papers.figures import pairwise, scatter
from flatlens.statistics import Statistic, in_cases
from flatlens.statistics.inference import Holds
from flatlens.training import SGD, Training, Until

# ---- X14: one layer

_PRINTED = ((4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1))
"""The paper's batch sizes and learning rates; lr / batch is .00025, .00025, .00031 and .0002."""
_INITS = ("xavier_normal", "kaiming_uniform", "uniform", "normal")
_X14_BATCHES: Mapping[Scale, tuple[tuple[int, float], ...]] = {
    "smoke": ((4, 0.002), (8, 0.004)),
    "laptop": ((2, 0.0005), (4, 0.001), (8, 0.002), (16, 0.004)),
    "desk": ((4, 0.004), (8, 0.008), (16, 0.016), (32, 0.032)),
    "paper": _PRINTED,
}


def _x14(scale: Scale) -> Mapping[str, Study]:
    data = {
        "smoke": DataSettings("patches", train=30, test=30),
        "laptop": DataSettings("patches", train=200, test=600),
        "desk": DataSettings("cifar10", train=1000, test=tested(scale)),
        "paper": DataSettings("cifar10"),
    }[scale]
    until = Until(loss_below=0.5 if scale == "smoke" else 0.1, loss_over="epoch")
    epochs = {"smoke": 40, "laptop": 300, "desk": 300, "paper": 500}[scale]
    looks = 1000 if scale == "desk" else 100
    training = Training(SGD(0.001), batch_size=4, until=until, max_epochs=epochs, check_every=looks)
    base = NetworkSettings(
        data,
        LeNet5(classes=10 if scale in ON_PAPERS_DATA else 2),
        training,
        measures=("layer_sharpness", "kappa_trace", "weight_norm", "loss", "generalisation_gap", SUMMED_GAP),
        moved=(MOVED,),
    )
    # each scheme with each pair of batch size and learning rate, as many times as the scale has time for
    seeds = {"smoke": 1, "laptop": 3, "desk": 6, "paper": 9}[scale]
    schemes = _INITS[:2] if scale == "smoke" else _INITS
    setups = own_seeds("init+batch_size+lr", [(init, *pair) for init in schemes for pair in _X14_BATCHES[scale]], seeds)
    # the gaps, and measures of layer 5 before and after layers are rescaled
    shown = (
        GAP,
        Quantity("5 x summed test less summed training loss", SUMMED_GAP, role="result"),
        *(
            Quantity(f"{name}{after}", _of_layer("fc3", column, at))
            for after, at in (("", ""), (", moved", MOVED))
            for name, column in (
                ("kappa, layer 5", "layer_sharpness.kappa"),
                ("kappa_tau, layer 5", "kappa_trace"),
                ("lmax, layer 5", "layer_sharpness"),
            )
        ),
    )
    studies = {"lenet": Study("lenet", base, (setups,), shown, scale=scale)}
    if scale == "laptop":
        return studies
    # The paper's pairs, and N(0, .1) with .1 as the variance and as the standard deviation
    laws, pairs, seeds, epochs = {
        "smoke": (("xavier_normal", "normal_sd"), _X14_BATCHES["smoke"], 1, 40),
        "desk": ((*_INITS, "normal_sd"), _PRINTED, 4, 500),
        "paper": ((*_INITS, "normal_sd"), _PRINTED, 9, 500),
    }[scale]
    settings = [(law, *pair) for pair in pairs for law in laws]
    setups = own_seeds("init+batch_size+lr", settings * seeds, 1)  # in turn: the settings of a part are all there
    printed = replace(base, training=replace(training, max_epochs=epochs))
    return studies | {"lenet_printed": Study("lenet_printed", printed, (setups,), shown, scale=scale)}


def _of_layer(layer: str, row: str, transform: str) -> str:
    return str(Column.of(row, layer).after(transform))


def lenets(results: Results) -> pd.DataFrame:
    """Return the values of Fig. 1 and 2 for each network, as trained and after the move ("moved ...")."""
    return layer_five(results, "lenet")


@deferred
def printed(results: Results, *normals: str, most: float = np.inf) -> pd.DataFrame:
    """Return the same of the networks trained as printed, from three schemes and these laws of N(0, .1).

    "normal" takes .1 as the variance, "normal_sd" as the standard deviation. `most`: of their own final loss.
    """
    networks = layer_five(results, "lenet_printed")
    kept = networks["init"].isin((*_INITS[:3], *normals)) & (networks["loss"] < most)
    return networks[kept].reset_index(drop=True)


def last_hidden(results: Results) -> pd.DataFrame:
    """Return the values of fc2, the last hidden layer's own weights, of all networks trained as printed."""
    return layer_five(results, "lenet_printed", "fc2")


def layer_five(results: Results, study: str, layer: str = "fc3") -> pd.DataFrame:
    """Return the values of layer 5 of the networks of a study that reached the loss, with their schemes.

    Our move divides layer 5 by a factor; "multiplied ..." is after one that multiplies it by this factor, as coded.
    """
    networks = reached(study)(results)
    columns = {
        "key": networks["key"],
        UNIT: networks[UNIT],
        "gap": networks.get("generalisation_gap"),
        "loss": networks["loss"].astype(float),
        "init": networks["init+batch_size+lr+seed"].str.extract(r"(\w+)", expand=False),  # "('normal', 4, ..."
    }
    for prefix, at in (("", ""), ("moved ", MOVED)):
        kappa_trace, norm = (networks.get(_of_layer(layer, name, at)) for name in ("kappa_trace", "weight_norm"))
        columns |= {
            f"{prefix}kappa": networks.get(_of_layer(layer, "layer_sharpness.kappa", at)),
            f"{prefix}kappa_tau": kappa_trace,
            f"{prefix}lmax": networks.get(_of_layer(layer, "layer_sharpness", at)),
            f"{prefix}trace": None if kappa_trace is None or norm is None else kappa_trace / norm**2,
        }
    table = pd.DataFrame(columns, index=networks.index)
    by = numbers_of(table, ["lmax", "moved lmax", "trace", "moved trace"])
    multiplied = {f"multiplied {name}": by[name] ** 2 / by[f"moved {name}"] for name in ("lmax", "trace")}
    return table.assign(**multiplied)


_VALUES = ("kappa", "kappa_tau", "lmax", "trace")
_MULTIPLIED = ("multiplied lmax", "multiplied trace")
_STANDARDISED = ["gap", *_VALUES, *(f"moved {name}" for name in _VALUES), *_MULTIPLIED]
lenets_within = within(lenets, "init", _STANDARDISED)


def printed_within(*normals: str, most: float = np.inf) -> Table:
    """Return `printed` with its numbers standardised within each scheme."""
    return within(printed(*normals, most=most), "init", _STANDARDISED)


last_hidden_within = within(last_hidden, "init", _STANDARDISED)
last_hidden_of_variance = where(last_hidden, "init != 'normal_sd'")
last_hidden_of_variance_within = within(last_hidden_of_variance, "init", _STANDARDISED)


@deferred
def ranks_of(results: Results, table: Table, by: str | None = None) -> pd.DataFrame:
    """Return a table of layer 5 with the ranks of its numbers, among those of the same `by`, or among all."""
    return ranks_within(table(results), _STANDARDISED, by)


def ranked_inside(*normals: str) -> Table:
    """Return `printed` with the ranks of its numbers inside each scheme, standardised there."""
    return within(ranks_of(printed(*normals), "init"), "init", _STANDARDISED)


_LAWS = {"normal": "N(0, variance .1)", "normal_sd": "N(0, deviation .1)"}


@deferred
def layer_redrawn(results: Results, table: Table, move: str, measure: str) -> pd.DataFrame:
    """Return a table of layer 5 with a number after a move, its factor drawn again: "moved trace, draw 7"."""
    networks = table(results)
    squares = np.random.default_rng(0).uniform(5, 25, (len(networks), DRAWS)) ** 2
    own = numbers_of(networks, [measure]).to_numpy()
    after = own * squares if move == "moved" else own / squares
    return networks.join(pd.DataFrame(after, networks.index, draws_of(f"{move} {measure}")))


def over_draws(weighed: Callable[[Table], Evidence], move: str, measure: str, name: str) -> Evidence:
    """Return a claim of the paper's networks in the four readings of `as_read`, each network a unit."""
    columns = [*_STANDARDISED, *draws_of(f"{move} {measure}")]
    again = {words: layer_redrawn(printed(law), move, measure) for law, words in _LAWS.items()}
    pooled = {f"pooled, {words}": weighed(table) for words, table in again.items()}
    apart = {f"within a scheme, {words}": weighed(within(table, "init", columns)) for words, table in again.items()}
    return readings(pooled | apart, f"mean over draws of {name}")


def as_read(
    weighed: Callable[[Table], Evidence],
    name: str,
    *,
    unit: str | None = "init",
    ranks: bool | Literal["inside"] = False,
    most: float = np.inf,
) -> Evidence:
    """Return a claim of the paper's networks in four readings: pooled or within schemes, .1 variance or deviation.

    `unit`: of the pooled ones; None for a network. `ranks`: of ranks over all networks, within schemes of the
    standardised numbers; "inside": of ranks inside each scheme, which leaves the two readings within schemes.
    `most`: of the networks' final loss.
    """
    if ranks == "inside":
        apart = {f"within a scheme, {words}": weighed(ranked_inside(law)) for law, words in _LAWS.items()}
        return readings(apart, f"of ranks inside each scheme: {name}")

    def one(table: Table) -> Evidence:
        return weighed(ranks_of(table) if ranks else table)

    pooled = {
        f"pooled, {words}": one(printed(law, most=most) if unit is None else independent(printed(law, most=most), unit))
        for law, words in _LAWS.items()
    }
    apart = {f"within a scheme, {words}": one(printed_within(law, most=most)) for law, words in _LAWS.items()}
    return readings(pooled | apart, f"of ranks: {name}" if ranks else name)


def strongly(measure: str, *, unit: str | None = "init", most: float = np.inf) -> Evidence:
    """Return r of a measure and the gap among the paper's networks, in four readings."""
    name = f"Pearson r of {measure} and gap"
    return as_read(lambda table: correlated(table, measure, "gap"), name, unit=unit, most=most)


def weakly(
    measure: str,
    move: str = "moved",
    *,
    unit: str | None = "init",
    ranks: bool | Literal["inside"] = False,
    redrawn: bool = False,
) -> Evidence:
    """Return |r| of a moved measure and the gap among the paper's networks, in four readings.

    `redrawn`: in the mean over draws of the factors, here and in `fails` and `falls`.
    """
    name = f"{move} {measure}"
    if redrawn:
        said = f"|r| of {name} and gap"
        return over_draws(lambda table: size_over_draws(table, name, "gap"), move, measure, said)
    return as_read(lambda table: strength(table, name, "gap"), f"|r| of {name} and gap", unit=unit, ranks=ranks)


def fails(
    measure: str,
    proposed: str,
    move: str = "moved",
    *,
    size: bool = False,
    unit: str | None = "init",
    ranks: bool | Literal["inside"] = False,
    redrawn: bool = False,
    most: float = np.inf,
) -> Evidence:
    """Return how much less a moved measure correlates with the gap than the proposed one, in four readings.

    `size`: compare |z|. `most`: of the networks' final loss.
    """
    moved, own = [f"{move} {measure}"], [f"moved {proposed}"]
    if redrawn:
        name = f"Fisher's z of {own[0]} and gap, less that of {moved[0]}; and r of the former"
        return over_draws(lambda table: less_over_draws(table, own[0], moved[0], "gap"), move, measure, name)
    if size:
        name = f"Fisher's |z| of moved {proposed} and gap, less that of {move} {measure}"
        return as_read(lambda table: weaker(table, moved, own, "gap"), name, unit=unit, ranks=ranks)
    name = f"Fisher's z of moved {proposed} and gap, less that of {move} {measure}"
    return as_read(lambda table: stronger(table, own, moved, "gap"), name, unit=unit, ranks=ranks, most=most)


def falls(
    measure: str, move: str = "moved", *, ranks: bool | Literal["inside"] = False, redrawn: bool = False
) -> Evidence:
    """Return how far a move makes a positive correlation of a measure with the gap weaker, in four readings."""
    moved, own = [f"{move} {measure}"], [measure]
    name = f"Fisher's |z| of {measure} and gap, less that of {move} {measure}; and r of the former"
    if redrawn:
        return over_draws(lambda t: less_over_draws(t, measure, moved[0], "gap", size=True), move, measure, name)
    return as_read(lambda table: weaker(table, moved, own, "gap", positive=True), name, unit=None, ranks=ranks)


def _x14_plots(results: Results) -> list[Plot]:
    networks = printed("normal", "normal_sd")(results) if "lenet_printed" in results else lenets(results)
    trained = {"kappa^5": "kappa", "kappa_tau^5": "kappa_tau"}
    moved = {"kappa^5": "kappa", "largest eigenvalue": "lmax", "kappa_tau^5": "kappa_tau", "trace": "trace"}
    return [
        scatter(
            networks, "fig1", "Fig. 1: flatness of layer 5 and the gap", "One mark a network.", trained, "gap", "init",
            x="flatness of layer 5", y="generalisation gap",
        ),
        scatter(
            networks, "fig2", "Fig. 2: the same after a layer-wise reparametrisation",
            "Each layer times a random factor in [5, 25], the next divided by it; one mark a network.",
            {name: f"moved {column}" for name, column in moved.items()}, "gap", "init",
            x="of layer 5, moved", y="generalisation gap",
        ),
        *(pairwise(name, result) for name, result in results.items()),
    ]  # fmt: skip


# ---- X15: every layer

FC_LAYERS = ("fc1", "fc2", "fc3", "fc4", "fc5")
HIDDEN, BEHIND = FC_LAYERS[:4], FC_LAYERS[1:]
"""The four hidden layers by their own weights, and by those that act on their outputs, as in the authors' code."""
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
OF_TABLE_1 = {
    symbol: tuple(str(Column.of(column, layer)) for layer in FC_LAYERS)
    for symbol, column in (
        ("kappa^l", "layer_sharpness.kappa"),
        *((symbol, column) for column, (symbol, _) in LAYER_MEASURES.items()),
    )
} | {
    "kappa^max": ("layer_sharpness.kappa_max",),
    "kappa^Sigma": ("layer_sharpness.kappa",),
    **{symbol: (column,) for symbol, column in NETWORK_WISE.items()},
}
"""Columns of each measure of Table 1: one of the whole network, or one of each layer."""


def _x15(scale: Scale) -> Mapping[str, Study]:
    data, inputs = {
        "smoke": (DataSettings("digits", train=100), 64),
        "laptop": (DataSettings("digits", train=600), 64),
        "desk": (DataSettings("mnist", flat=True), 784),
        "paper": (DataSettings("mnist", flat=True), 784),
    }[scale]
    papers = ((1000, 0.02), (2000, 0.04), (4000, 0.08), (8000, 0.16))  # learning rates in a constant ratio
    pairs: tuple[tuple[int, float], ...] = {
        "smoke": ((25, 0.1), (50, 0.2)),
        "laptop": ((25, 0.05), (50, 0.1), (100, 0.2), (200, 0.4)),
    }.get(scale, papers)
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


def well_trained(results: Results) -> pd.DataFrame:
    """Return the networks; those whose training loss is above 0.07 are marked as left out, as in App. C."""
    networks = reached("mlp")(results)
    return mark_left_out(networks, networks["loss"] > 0.07, "training loss above 0.07")


def _symbols(layers: Sequence[str]) -> dict[str, list[str]]:
    return {
        column: [symbol.removesuffix("l") + layer.removeprefix("fc") for layer in layers]
        for column, (symbol, _) in LAYER_MEASURES.items()
    }


def _together(symbols: Mapping[str, Sequence[str]]) -> list[str]:
    return [symbol for of_measure in symbols.values() for symbol in of_measure]


SYMBOLS, OUTGOING = _symbols(HIDDEN), _symbols(BEHIND)
ALL_SYMBOLS, ALL_OUTGOING = _together(SYMBOLS), _together(OUTGOING)
"""Symbols of the hidden layers, by measure and together: "kappa_tau^2"; by their own weights, and by those behind."""


def _under_symbols(networks: pd.DataFrame) -> pd.DataFrame:
    names = {column: symbol for symbol, column in NETWORK_WISE.items()}
    for column, symbols in _symbols(FC_LAYERS).items():
        names |= {str(Column.of(column, layer)): symbol for layer, symbol in zip(FC_LAYERS, symbols, strict=True)}
    test_loss = networks["loss"] + networks["generalisation_gap"]
    return networks.assign(test_loss=test_loss).rename(columns=names)


def mlps(results: Results) -> pd.DataFrame:
    """Return `well_trained` with measures under the paper's symbols: "rho^2" of a layer, "rho^max" of all."""
    return _under_symbols(well_trained(results))


def mlps_by_errors(results: Results) -> pd.DataFrame:
    """Return the same, but those are left out whose training error, as the share of wrong labels, is above 0.07."""
    networks = reached("mlp")(results)
    wrong = 1 - networks["accuracy"].astype(float)
    return _under_symbols(mark_left_out(networks, wrong > 0.07, "training error rate above 0.07"))


_NUMBERS = [*_together(_symbols(FC_LAYERS)), *NETWORK_WISE, "generalisation_gap"]
mlps_within = within(mlps, "batch_size", _NUMBERS)


def mlps_ranks(results: Results) -> pd.DataFrame:
    """Return the networks of `mlps` with ranks of all measures and of the gap."""
    return ranks_within(mlps(results), _NUMBERS)


SLIGHTLY = float(np.arctanh(0.8) - np.arctanh(0.7))
"""Largest difference of Fisher's z that counts as slight: that of r = 0.7 and 0.8."""


@deferred
def apart(results: Results, table: Table, columns: Sequence[str], y: str, holds: Holds, side: Side) -> Statistic:
    """Return |Fisher's z| with y of each of the columns less that of each other: of "all" pairs, or of "some" pair."""
    pairs = {f"{mine} less {other}": weaker(table, [other], [mine], y) for mine, other in permutations(columns, 2)}
    name = f"Fisher's |z| with {y}: each of {', '.join(columns)} less each other"
    return in_cases({pair: one(results) for pair, one in pairs.items()}, holds, name, side)


def mlp_changes(results: Results) -> pd.DataFrame:
    """Return the networks with how far each measure of Table 1 moves: "rho^max, layerwise".

    This is |log(after / before)|; of a measure of single layers, that of the layer in which it moves furthest.
    """
    networks = reached("mlp")(results)
    columns = {}
    for transform in (MOVED, MOVED_NEURONS):
        for symbol, of in OF_TABLE_1.items():
            after = {column: networks[str(Column.parse(column).after(transform))] for column in of}
            ratios = [moved / networks[column] for column, moved in after.items()]
            columns[f"{symbol}, {transform}"] = np.abs(np.log(ratios)).max(0)
    return networks.assign(**columns)


def _x15_plots(results: Results) -> list[Plot]:
    networks, _ = trained_ones(well_trained(results))
    plots = [
        scatter(
            networks, f"{figure.replace('. ', '').lower()}", f"{figure}: {symbol} of each hidden layer and the gap",
            "One mark a network.", {f"layer {layer[2:]}": str(Column.of(column, layer)) for layer in HIDDEN},
            "generalisation_gap", "batch_size", x=symbol, y="generalisation gap",
        )
        for column, (symbol, figure) in LAYER_MEASURES.items()
    ]  # fmt: skip
    changes, rows = mlp_changes(results), []
    for name, columns in OF_TABLE_1.items():
        of = "layer" if len(columns) > 1 else "network"
        rows.append((of, name, "invariant, says the paper", "all linear" if "rho" in name else "layer-wise"))
        for said, transform in (("layer-wise", MOVED), ("neuron-wise", MOVED_NEURONS)):
            rows.append((of, name, f"changed by {said}", f"{changes[f'{name}, {transform}'].mean():.2g}"))
    return [
        *plots,
        scatter(
            networks, "fig6", "Fig. 6: flatness of the whole network and the gap", "One mark a network.", NETWORK_WISE,
            "generalisation_gap", "batch_size", x="flatness", y="generalisation gap",
        ),
        Plot(
            "table1", "Table 1: which reparametrisations leave the measures unchanged",
            "The change is the mean over networks of |log(after / before)|, in the layer where it is largest. Factors "
            "are random, in [5, 25]. Of rho^l(j), of single neurons, its maximum and sum over a layer are shown.",
            "table", pd.DataFrame(rows, columns=["panel", "row", "column", "text"]),
        ),
        pairwise("mlp", results["mlp"]),
    ]  # fmt: skip
