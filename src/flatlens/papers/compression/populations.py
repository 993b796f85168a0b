"""X4: a hundred networks of each kind, and the correlation of every pair of quantities.

As in the paper's figures, sharpness is sqrt(S), volume is its logarithm, relative flatness is the last layer's, D
(Eq. 48) is the first layer's, MLS is the input's.

LeNets are trained by several protocols, each a study: `lenet`, on ten classes, is ours; `lenet_printed` and
`lenet_coded` are on two labels of CIFAR-10, as G.2 prints and as the authors' code does. The code's loss is
`nn.MSELoss`, the mean over outputs of squared errors: its learning rates are 2 / outputs times as large in our loss,
the half squared error. The studies "..._x5" multiply these rates by five.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.experiments.quantities import GAP, SHARPNESS, Quantity
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.models import MLP, LeNet5
from flatlens.papers.compression.training import (
    INTERPOLATES,
    LOG_VOLUME,
    SQUARED,
    TOP_THREE,
    lenet,
    mlp,
    samples,
    top_three,
    variation,
    vgg,
)
from flatlens.papers.evidence import correlated, studied
from flatlens.papers.experiment import ON_PAPERS_DATA, Plot, Results, Scale, Side, deferred, own_seeds
from flatlens.papers.figures import pairwise
from flatlens.statistics import Statistic, in_cases
from flatlens.statistics.inference import Holds
from flatlens.training import Until

KINDS = {"vgg": "VGGs", "mlp": "MLPs", "lenet": "LeNets"}
"""Kinds of networks by the first word of a study's name."""
FULLY_CONNECTED = ("mlp", "mlp_coded")
"""Studies whose networks have fc1 as their first layer; the others have conv1."""

MLS, NMLS = Quantity("MLS", "mls"), Quantity("NMLS", "nmls")
D, BOUND = Quantity("D", "mls_chain.rhs[fc1]"), Quantity("bound of NMLS", "nmls_bound.rhs")
D_CODED = Quantity("D, Frobenius norm", "mls_chain(norm='frobenius').rhs[fc1]")
BOUND_CODED = Quantity("bound of NMLS, Frobenius norms", "nmls_bound(norm='frobenius').rhs")
RELATIVE = Quantity("relative flatness, last layer", "relative_flatness")
SHOWN = (Quantity("local dimension", "local_dimension"), SHARPNESS, LOG_VOLUME, MLS, NMLS, GAP, D, BOUND, RELATIVE)
"""The quantities of Fig. G.5 to G.7."""
_VOLUMES = (
    (Quantity("volume", "volume_bound.lhs[fc1]"), Quantity("its bound", "volume_bound.rhs[fc1]")),
    (
        Quantity("network volume", "network_volume_bound.lhs"),
        Quantity("bound of network volume", "network_volume_bound.rhs"),
    ),
)
"""Both sides of the bounds of volume, Prop. 3.4 and 3.6, in logarithms."""
_ALSO = (
    Quantity("accuracy gap", "generalisation_gap(convention='accuracy')"),
    Quantity("test loss", "test_loss"),
    Quantity("C", "mls_chain.C_D.lhs[fc1]"),
    *(side for bound in _VOLUMES for side in bound),
)
_PROTOCOLS = {
    "lenet_printed": (2, 1, 100),
    "lenet_printed_x5": (2, 5, 100),
    "lenet_coded_x5": (10, 5, 20),
    "lenet_coded": (10, 1, 20),
    "mlp_coded": (10, 1, 20),
}
"""Outputs, factor of the code's learning rates, and training samples that are measured."""
MINUS_D, ITSELF, HOLDS = "-D", "volume itself", "bounds hold"
PARTIAL_SHARPNESS = "partial sharpness"
"""Root of the mean over samples of ||df/dW||_F^2, W the first layer's weight: a factor of C, as sqrt(S) is one of D."""
OF_LAYERS = "network volume of mean logarithms"
"""Log of the sum over layers of exp(mean log volume), where the network volume, a sum of means, is not stored."""
WITH_TEST_LOSS = [(x.name, "test loss") for x in (SHARPNESS, LOG_VOLUME, MLS)]
LOOSE, TENFOLD = "log(bound of volume / volume)", float(np.log(10))


def _x4(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, each = {
        "smoke": ((0.05, 0.1), (8,), 2),
        "laptop": ((0.05, 0.1, 0.2), (8, 16, 32), 3),
        "desk": ((0.05, 0.1, 0.2), (8, 16, 32, 64), 8),
        "paper": ((0.01, 0.02, 0.05, 0.1, 0.2), (8, 16, 32, 64), 5),
    }[scale]
    grid = [*product(lrs, batches)]
    steps = {"smoke": 400, "laptop": 20_000, "desk": 30_000, "paper": 200_000}[scale]
    below: Mapping[Scale, float] = {"smoke": 0.2, "laptop": INTERPOLATES, "desk": INTERPOLATES}
    studies = {}
    for name, (data, model) in {"vgg": vgg(scale), "mlp": mlp(scale), "lenet": lenet(scale)}.items():
        until = Until(loss_below=below.get(scale))  # on all images a small learning rate never comes to one
        training = SQUARED(until=until, max_steps=steps, check_every=250 if scale == "desk" else 10)
        columns = [Column.parse(q.column) for q in (*SHOWN, *_ALSO, *top_three(model))]
        base = NetworkSettings(
            replace(data, train=1000) if scale == "desk" else data,  # few, so that the gap is large beside its error
            model,
            training,
            measures=tuple(sorted({c.measure for c in columns if not c.side})),
            bounds=("mls_chain", "nmls_bound", "volume_bound", "network_volume_bound"),
            samples=samples(data),
        )
        shown = tuple(q.with_first(_first_layer(name)) for q in SHOWN)
        twice = name == "lenet" and scale == "desk"  # with 96 LeNets both main claims were open
        setups = own_seeds("lr+batch_size", grid * (1 + twice), each)
        studies[name] = Study(name, base, (setups,), shown, scale=scale)
    protocols = {} if scale == "laptop" else {name: _of_protocol(name, scale) for name in _PROTOCOLS}
    return studies | protocols


def _of_protocol(name: str, scale: Scale) -> Study:
    """Return a study by the text's protocol or the code's: two labels, images between 0 and 1 from the first one on."""
    outputs, factor, measured = _PROTOCOLS[name]
    data, model = mlp(scale) if name in FULLY_CONNECTED else lenet(scale)
    if isinstance(model, LeNet5):
        model = replace(model, classes=outputs, init="xavier_normal")
    elif isinstance(model, MLP) and scale in ON_PAPERS_DATA:
        model = replace(model, widths=(500, 500, 500))
    if scale in ON_PAPERS_DATA:
        classes = None if name in FULLY_CONNECTED else (0, 1)
        data = replace(data, classes=classes, order="first", standardise="none")
    until = Until(loss_below={"smoke": 0.2, "desk": INTERPOLATES}.get(scale))
    steps = {"smoke": 200, "desk": 30_000}.get(scale, 750_000)
    training = SQUARED(until=until, max_steps=steps, check_every=100)
    norm = "" if name in FULLY_CONNECTED else "(norm='frobenius')"
    top = (TOP_THREE,) if outputs > 2 else ()
    columns = [Column.parse(q.column) for q in (*SHOWN, *_ALSO, *top)]
    base = NetworkSettings(
        replace(data, train=1000) if scale == "desk" else data,
        model,
        training,
        measures=tuple(sorted({c.measure for c in columns if not c.side})),
        bounds=tuple(dict.fromkeys(f"{one}{form}" for one in ("mls_chain", "nmls_bound") for form in ("", norm))),
        samples=min(measured, data.train or measured),
    )
    # the authors' five settings, those of Fig. 1 and 2, with 20 networks each; in turn, so that a part has all settings
    settings = ((0.05, 20), (0.1, 20), (0.2, 20), (0.1, 8), (0.1, 32))
    grid = ((0.01, 8), (0.02, 8)) if scale == "smoke" else settings * 20
    setups = own_seeds("lr+batch_size", [(lr * factor * 2 / outputs, batch) for lr, batch in grid], 1)
    # columns of the quantities that the authors' code computes otherwise: the volume of the three largest eigenvalues,
    # and D and the bound with Frobenius norms, of a convolution times the root of its positions
    column = {LOG_VOLUME: TOP_THREE.column} if name in ("lenet_coded", "mlp_coded") else {}
    if name == "lenet_coded":
        column |= {D: D_CODED.column, BOUND: BOUND_CODED.column}
    shown = [replace(q, column=column.get(q, q.column)).with_first(_first_layer(name)) for q in SHOWN]
    return Study(name, base, (setups,), tuple(shown), scale=scale)


def _first_layer(study: str) -> str:
    return "fc1" if study in FULLY_CONNECTED else "conv1"


@deferred
def population(results: Results, study: str) -> pd.DataFrame:
    """Return the networks of a kind with all quantities that predictions need, under the names shown.

    Of "lenet_coded.spectral" D and the bound of NMLS have spectral norms, as printed, in place of the code's.
    """
    study, _, norms = study.partition(".")
    values = studied(study)(results)
    networks = results[study].networks.set_index("key").loc[values["key"]].reset_index()
    first = _first_layer(study)
    if norms:
        values = values.assign(**{q.name: q.with_first(first).of(networks) for q in (D, BOUND)})
    also = {q.name: q.with_first(first).of(networks) for q in (*_ALSO, D_CODED, BOUND_CODED, TOP_THREE)}
    volume: pd.Series = also[_VOLUMES[0][0].name].astype(float).map(np.exp)
    partial = also["C"] / D.with_first(first).of(networks) * SHARPNESS.of(networks)
    loose = also[_VOLUMES[0][1].name] - also[_VOLUMES[0][0].name]
    of_layers = networks.filter(regex=r"^log_volume\[").astype(float).map(np.exp).sum(axis=1, min_count=1)
    table = values.assign(
        **also,
        **{MINUS_D: -values[D.name], ITSELF: volume, PARTIAL_SHARPNESS: partial, LOOSE: loose},
        **{OF_LAYERS: of_layers.map(np.log)},
        **variation(networks, first),
    )
    rounded = 1e-9
    violated = pd.concat(
        [table[small.name] > table[large.name] * (1 + rounded) for small, large in ((MLS, D), (NMLS, BOUND))]
        + [table[small.name] > table[large.name] + rounded for small, large in _VOLUMES],
        axis=1,
    )
    return table.assign(**{HOLDS: 1.0 - violated.any(axis=1)})


def single_layer(gap: str) -> list[tuple[str, str]]:
    """Return the pairs of a quantity of one layer with this gap, and with sharpness."""
    return [(x.name, y) for x in (RELATIVE, D) for y in (gap, SHARPNESS.name)]


@deferred
def over_kinds(
    results: Results, studies: Sequence[str], pairs: Sequence[tuple[str, str]], holds: Holds, side: Side, name: str
) -> Statistic:
    """Return Pearson's r of pairs of quantities in each of the studies, one of a kind of networks."""
    parts = {
        f"{KINDS[study.partition('_')[0]]}, {x} and {y}": correlated(population(study), x, y)(results)
        for study in studies
        for x, y in pairs
    }
    return in_cases(parts, holds, name, side)


@deferred
def one_layer_in_both(results: Results, studies: Sequence[str], gap: str) -> Statistic:
    """Return the larger r of a quantity of one layer with this gap and with sharpness, of each kind and quantity."""
    parts = {}
    for study, x in product(studies, (RELATIVE.name, D.name)):
        pairs = [(x, gap), (x, SHARPNESS.name)]
        both = over_kinds([study], pairs, "all", "below", f"larger r of {x} with {gap} and sharpness")(results)
        parts[f"{KINDS[study.partition('_')[0]]}, {x}"] = both
    return in_cases(
        parts, "some", "larger Pearson r of relative flatness or D with the gap and sqrt sharpness", "below"
    )


@deferred
def only_the_bound_of_nmls(results: Results, studies: Sequence[str]) -> Statistic:
    """Return r of NMLS and its bound, above 0 for all kinds, and that of MLS and -D, above 0 for some kind."""
    nmls, mls = [(NMLS.name, BOUND.name)], [(MLS.name, MINUS_D)]
    with_all = over_kinds(studies, nmls, "all", "above", "Pearson r of NMLS and its bound")(results)
    against = over_kinds(studies, mls, "some", "above", "Pearson r of MLS and -D")(results)
    name = (
        "smaller of two: Pearson r of NMLS and its bound, in every kind of network; Pearson r of MLS and -D, in at "
        "least one kind"
    )
    return in_cases({"Prop. 3.10": with_all, "Prop. 3.8": against}, "all", name)


def _x4_plots(results: Results) -> list[Plot]:
    titles = {
        "vgg": "Fig. G.5: VGGs", "mlp": "Fig. G.6: MLPs", "mlp_coded": "Fig. G.6: MLPs, as coded",
        "lenet": "Fig. G.7: LeNets, ten classes", "lenet_printed": "Fig. G.7: LeNets, as printed",
        "lenet_coded": "Fig. G.7: LeNets, as coded",
    }  # fmt: skip
    drawn = [replace(pairwise(name, results[name]), title=title) for name, title in titles.items() if name in results]
    return [plot for plot in drawn if len(plot.data)]
