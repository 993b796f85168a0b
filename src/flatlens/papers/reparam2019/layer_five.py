"""X14: LeNet5, the flatness of one layer and the gap, before and after a reparametrisation.

The weight layers of LeNet5 are counted, so layer 5 is fc3, which acts on the outputs of the last hidden layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.models import LeNet5
from flatlens.papers.contrasts import strength, stronger, unchanged
from flatlens.papers.evidence import UNIT, Table, correlated, independent, reached
from flatlens.papers.experiment import (
    COEFFICIENT,
    LEAST_CHANGE,
    LEAST_CHANGE_SEARCHED,
    MOVED,
    ON_PAPERS_DATA,
    ONE_DRAW,
    SMOKE_ONLY,
    STRONG,
    SUMMED_GAP,
    VERY_WEAK,
    WEAK_BY_EVANS,
    Experiment,
    Plot,
    Prediction,
    Results,
    Scale,
    own_seeds,
    tested,
)
from flatlens.papers.figures import pairwise, scatter
from flatlens.training import SGD, Training, Until

_INITS = ("xavier_normal", "kaiming_uniform", "uniform", "normal")
_BATCHES_LRS: Mapping[Scale, tuple[tuple[int, float], ...]] = {
    "smoke": ((4, 0.002), (8, 0.004)),
    "laptop": ((2, 0.0005), (4, 0.001), (8, 0.002), (16, 0.004)),
    "desk": ((4, 0.004), (8, 0.008), (16, 0.016), (32, 0.032)),
    "paper": ((4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)),
}
_FIFTH = "fc3"


def _studies(scale: Scale) -> Mapping[str, Study]:
    data = {
        "smoke": DataSettings("patches", train=30, test=30),
        "laptop": DataSettings("patches", train=200, test=600),
        "desk": DataSettings("cifar10", train=1000, test=tested(scale)),
        "paper": DataSettings("cifar10"),
    }[scale]
    until = Until(loss_below=0.5 if scale == "smoke" else 0.1, loss_over="epoch")
    epochs = {"smoke": 40, "laptop": 300, "desk": 300, "paper": 500}[scale]
    looks = 1000 if scale == "desk" else 100
    base = NetworkSettings(
        data,
        LeNet5(classes=10 if scale in ON_PAPERS_DATA else 2),
        Training(SGD(0.001), batch_size=4, until=until, max_epochs=epochs, check_every=looks),
        measures=("layer_sharpness", "kappa_trace", "weight_norm", "loss", "generalisation_gap", SUMMED_GAP),
        moved=(MOVED,),
    )
    seeds = {"smoke": 1, "laptop": 3, "desk": 6, "paper": 9}[scale]
    schemes = _INITS[:2] if scale == "smoke" else _INITS
    setups = own_seeds("init+batch_size+lr", [(init, *pair) for init in schemes for pair in _BATCHES_LRS[scale]], seeds)
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
    return {"lenet": Study("lenet", base, (setups,), shown, scale=scale)}


def _of_fifth(row: str, transform: str) -> str:
    """Return the column of the fifth layer, of the network as it is ("") or after a transform."""
    return str(Column.of(row, _FIFTH).after(transform))


def fifth_layer(study: str) -> Table:
    """Return the values of Fig. 1 and 2 for each network, as trained and after the move ("moved ...")."""

    def found(results: Results) -> pd.DataFrame:
        networks = reached(study)(results)
        columns = {
            "key": networks["key"],
            UNIT: networks[UNIT],
            "gap": networks.get("generalisation_gap"),
            "init": networks["init+batch_size+lr+seed"].str.extract(r"(\w+)", expand=False),  # "('normal', 4, ..."
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


def within(table: Table, group: str, columns: Sequence[str]) -> Table:
    """Return the table with each of the columns standardised over the networks of equal `group`.

    Means alone would leave the group with the largest spread to decide: one of the four schemes has 99% of the squares.
    """

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        numbers = networks[list(columns)].astype(float)
        groups = numbers.groupby(networks[group])
        spread = groups.transform("std", ddof=0).replace(0.0, np.nan)
        return networks.assign(**((numbers - groups.transform("mean")) / spread))

    return found


_VALUES = ("kappa", "kappa_tau", "lmax", "trace")
_SIGNIFICANT = "The correlation is significant for both measures, and it is stronger (with $\\rho = 0.91$) for κ_{τ}^5"
_NOT_AFFECTED = "While the proposed flatness measures are not affected"
_VERY_WEAKLY = (
    "the ones purely based on the Hessian have very weak correlation with the generalization error after the "
    "modifications"
)
_FAIL = "The correlation stays the same for the proposed measure, while Hessian-based measures fail to clearly indicate"
FIG_1, FIG_2 = "reparam2019 section 3, Fig. 1", "reparam2019 section 3, Fig. 2"
_ONE_INIT = "Among networks of one initialisation scheme (numbers standardised within each)"
_WHY_ONE_INIT = (
    "The paper pools four schemes, which are four units, too few for an interval; and one scheme apart from the rest "
    "makes a correlation over all. Within a scheme each network is a unit."
)


def _predictions() -> tuple[Prediction, ...]:
    networks = fifth_layer("lenet")
    pooled = independent(networks, "init")
    table = within(networks, "init", ["gap", *_VALUES, *(f"moved {name}" for name in _VALUES)])
    symbols = {"kappa": "kappa^5", "kappa_tau": "kappa_tau^5"}
    rows = [
        *(
            Prediction(
                f"{name}.gap",
                f"{_ONE_INIT}, {symbol} correlates positively with the generalisation error.",
                FIG_1, correlated(table, name, "gap"),
                quote=_SIGNIFICANT, reason=_WHY_ONE_INIT,
            )
            for name, symbol in symbols.items()
        ),
        *(
            Prediction(
                f"{name}.gap.pooled",
                f"{symbol} correlates positively with it over all networks; the schemes are the units.",
                FIG_1, correlated(pooled, name, "gap"),
                kind="claim", quote=_SIGNIFICANT,
            )
            for name, symbol in symbols.items()
        ),
        Prediction(
            "kappa_tau.stronger",
            f"{_ONE_INIT}, the correlation is stronger for kappa_tau^5 than for kappa^5.",
            FIG_1, stronger(table, ["kappa_tau"], ["kappa"], "gap"),
            quote=_SIGNIFICANT, reason=_WHY_ONE_INIT,
        ),
        Prediction(
            "kappa_tau.strong",
            f"{_ONE_INIT}, kappa_tau^5 correlates strongly with it, r at least {STRONG:g} (over all networks of the "
            "paper it is 0.91).",
            "reparam2019 section 1", correlated(table, "kappa_tau", "gap"), "above", STRONG,
            quote="We empirically show that it also correlates strongly with good generalization performance",
            reason=f"{_WHY_ONE_INIT} App. C calls 0.7 and more strong; section 1 and 3 name no least value.",
            headline=True,
        ),
        *(
            Prediction(
                f"{name}.invariant",
                f"{symbol} is not affected by a layer-wise reparametrisation.",
                "reparam2019 section 3, Thm 2, Fig. 2", unchanged(networks, name, f"moved {name}"), "below",
                LEAST_CHANGE_SEARCHED if name == "kappa" else LEAST_CHANGE,
                kind="theorem", quote=_NOT_AFFECTED,
            )
            for name, symbol in symbols.items()
        ),
        *(
            Prediction(
                f"{name}.fails",
                f"{_ONE_INIT}, after the reparametrisation {said} of layer 5's Hessian correlates less with it than "
                f"{symbols[proposed]}.",
                FIG_2, stronger(table, [f"moved {proposed}"], [f"moved {name}"], "gap"),
                quote=_FAIL, reason=_WHY_ONE_INIT,
            )
            for name, said, proposed in _HESSIAN
        ),
        *(
            Prediction(
                f"{name}.weak",
                f"{_ONE_INIT}, {said} then correlates very weakly with it, |r| below {VERY_WEAK:g}.",
                FIG_2, strength(table, f"moved {name}", "gap"), "below", VERY_WEAK,
                quote=_VERY_WEAKLY, reason=f"{_WHY_ONE_INIT} {WEAK_BY_EVANS}",
            )
            for name, said, _ in _HESSIAN
        ),
    ]  # fmt: skip
    return tuple(rows)


_HESSIAN = (("lmax", "the largest eigenvalue", "kappa"), ("trace", "the trace", "kappa_tau"))
"""The measures of the Hessian alone in Fig. 2, in words, and the proposed one beside each."""


def _plots(results: Results) -> list[Plot]:
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
            networks, "fig1", "Fig. 1: flatness of layer 5 and the gap", "One mark a network.", first, "gap", "init",
            x="flatness of layer 5", y="generalisation gap",
        ),
        scatter(
            networks, "fig2", "Fig. 2: the same after a layer-wise reparametrisation",
            "Each layer times a random factor in [5, 25], the next divided by it; one mark a network.",
            second, "gap", "init", x="of layer 5, moved", y="generalisation gap",
        ),
        pairwise("lenet", results["lenet"]),
    ]  # fmt: skip


_GAPS = (
    "Claims and figures are of the mean test loss less the mean training loss. The paper's summed one is it times the "
    "number of training samples, where those are five times the test samples; it is measured beside it, by name."
)
_SCHEMES = (
    "Claims are weighed among networks of one initialisation scheme, whose mean is taken off and whose deviation is "
    "divided out: over all networks r is mostly the difference "
    "between four schemes, which are four units."
)
_FACTORS = (
    "Each layer is multiplied by a factor of its own and the next divided by it; the authors' later code moves the "
    "last two alone."
)
_FIFTH_LAYER = (
    "The paper's layer 5 is the last hidden one. The five weight layers are counted here: the fifth is fc3, the output "
    "layer, which acts on the last hidden layer's outputs."
)
_CONVERGED = (
    '"Until convergence" is taken as in relative2021, a mean loss of an epoch below 0.1: the paper says no more, and '
    "the authors' later code stops on the last layer's gradient."
)
_ON_FEWER = (_SCHEMES, _GAPS, COEFFICIENT, _CONVERGED, _FACTORS, _FIFTH_LAYER)

EXPERIMENTS = (
    Experiment(
        "X14",
        "Flatness of one layer and the gap, before and after a reparametrisation",
        "reparam2019 Fig. 1, 2",
        _studies,
        _predictions(),
        _plots,
        {
            "smoke": (SMOKE_ONLY, _GAPS, COEFFICIENT, _FIFTH_LAYER),
            "laptop": (
                "Patches of two photographs in place of CIFAR-10, 200 to train on.",
                "Batches of 2 to 16 and learning rates to match, in the paper's ratio, for so few samples; 3 networks "
                "of each setup.",
                *_ON_FEWER,
            ),
            "desk": (
                "1000 images of CIFAR-10 to train on, batches of 4 to 32 with the paper's ratio, four times as large; "
                "6 networks of each setup; 300 epochs at most; 2000 test images. None of the 24 networks from N(0, "
                "0.1) came to the loss, 13 of them diverged: every row is of the other three schemes.",
                ONE_DRAW,
                *_ON_FEWER,
            ),
            "paper": (
                _SCHEMES,
                _CONVERGED,
                "500 epochs at most.",
                COEFFICIENT,
                _FACTORS,
                _GAPS,
                _FIFTH_LAYER,
            ),
        },
    ),
)
