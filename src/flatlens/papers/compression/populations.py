"""X4: a hundred networks of each kind, and the correlation of every pair of quantities.

As in the paper's figures, sharpness is sqrt(S), volume is its logarithm, relative flatness is the last layer's, D
(Eq. 48) is the first layer's, MLS is the input's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pandas as pd

from flatlens.column import Column
from flatlens.experiments.quantities import GAP, SHARPNESS, Quantity
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.papers.compression.networks import (
    DIGITS,
    FIXED_BATCH,
    FIXED_LR,
    INTERPOLATES,
    LOG_VOLUME,
    PATCHES,
    SMALL_VGG,
    TOP_THREE,
    lenet,
    mlp,
    samples,
    top_three,
    vgg,
)
from flatlens.papers.compression.training import VOLUME_IN_CODE
from flatlens.papers.contrasts import mean_of, stronger, weaker
from flatlens.papers.evidence import Evidence, Table, correlated, studied
from flatlens.papers.experiment import (
    ONE_DRAW,
    SMOKE_ONLY,
    STRONG,
    WEAK,
    Experiment,
    Plot,
    Prediction,
    PredictionKind,
    Results,
    Scale,
    Side,
    own_seeds,
)
from flatlens.papers.figures import pairwise
from flatlens.statistics import Statistic, in_cases
from flatlens.statistics.inference import Holds
from flatlens.training import SGD, Training, Until

KINDS = {"vgg": "VGGs", "mlp": "MLPs", "lenet": "LeNets"}
FIRST_LAYERS = {"vgg": "conv1", "mlp": "fc1", "lenet": "conv1"}
"""Name of each network's first layer."""

DIMENSION, MLS, NMLS = Quantity("local dimension", "local_dimension"), Quantity("MLS", "mls"), Quantity("NMLS", "nmls")
D, BOUND = Quantity("D", "mls_chain.rhs[fc1]"), Quantity("bound of NMLS", "nmls_bound.rhs")
RELATIVE = Quantity("relative flatness, last layer", "relative_flatness")
SHOWN = (DIMENSION, SHARPNESS, LOG_VOLUME, MLS, NMLS, GAP, D, BOUND, RELATIVE)
"""The quantities of Fig. G.5 to G.7."""

ACCURACY_GAP = Quantity("accuracy gap", "generalisation_gap(convention='accuracy')")
TEST_LOSS = Quantity("test loss", "test_loss")
C = Quantity("C", "mls_chain.C_D.lhs[fc1]")
VOLUMES = {
    "Prop. 3.4": (Quantity("volume", "volume_bound.lhs[fc1]"), Quantity("its bound", "volume_bound.rhs[fc1]")),
    "Prop. 3.6": (
        Quantity("network volume", "network_volume_bound.lhs"),
        Quantity("bound of network volume", "network_volume_bound.rhs"),
    ),
}
"""Both sides of the bounds of volume, in logarithms."""
ALSO = (ACCURACY_GAP, TEST_LOSS, C, *(q for pair in VOLUMES.values() for q in pair))
MINUS_D, HOLDS = "-D", "bounds hold"
_ROUNDED = 1e-9


def population(study: str) -> Table:
    """Return the networks of a kind with all quantities that predictions need, under the names shown."""

    def found(results: Results) -> pd.DataFrame:
        values = studied(study)(results)
        networks = results[study].networks.set_index("key").loc[values["key"]].reset_index()
        also = {q.name: q.with_first(FIRST_LAYERS[study]).of(networks) for q in (*ALSO, TOP_THREE)}
        table = values.assign(**also, **{MINUS_D: -values[D.name]})
        sides = ((MLS, D), (NMLS, BOUND))
        violated = pd.concat(
            [table[small.name] > table[large.name] * (1 + _ROUNDED) for small, large in sides]
            + [table[small.name] > table[large.name] + _ROUNDED for small, large in VOLUMES.values()],
            axis=1,
        )
        return table.assign(**{HOLDS: 1.0 - violated.any(axis=1)})

    return found


def over_kinds(pairs: Sequence[tuple[str, str]], holds: Holds, side: Side, name: str) -> Evidence:
    """Return Pearson's r of pairs of quantities for all kinds of networks: each, or one, has to be on the side."""

    def found(results: Results) -> Statistic:
        parts = {f"{KINDS[k]}, {x} and {y}": correlated(population(k), x, y)(results) for k in KINDS for x, y in pairs}
        return in_cases(parts, holds, name, side)

    return found


def _only_the_bound_of_nmls(results: Results) -> Statistic:
    """Return r of NMLS and its bound, above 0 for all kinds, and that of MLS and -D, above 0 for some kind."""
    with_all = over_kinds([(NMLS.name, BOUND.name)], "all", "above", "Pearson r of NMLS and its bound")(results)
    against = over_kinds([(MLS.name, MINUS_D)], "some", "above", "Pearson r of MLS and -D")(results)
    name = "least of: Pearson r of NMLS and its bound, for all kinds; of MLS and -D, for some"
    return in_cases({"Prop. 3.10": with_all, "Prop. 3.8": against}, "all", name)


@dataclass(frozen=True)
class _Pair:
    """A positive correlation that the paper states for all kinds of networks."""

    x: Quantity
    y: Quantity
    source: str
    quote: str
    kind: PredictionKind = "claim"
    reason: str = ""


_CONSISTENT = "consistently correlates positively with the generalization gap"
_WELL = "log volume correlates well with sharpness and MLS"
_WEAKLY = "sharpness, volume compression, and MLS are correlated, if more weakly, with test loss"
_ACCURACY = "The text does not say whether its gap is of loss or of accuracy: this one is of accuracy."
_STRONGLY = "volume compression and MLS are indeed strongly correlated with sharpness"
_CONSISTENTLY = (
    "predicts a consistently positive correlation between representation compression and loss sharpness in multiple "
    "experimental settings"
)
_NO_STRENGTH = f"The paper does not say what is strong; {STRONG:g} is ours."
_NO_WEAKNESS = f"No number says what is weak; {WEAK:g} is ours."
_PAIRS = (
    *(_Pair(x, GAP, "G.2 (1)", _CONSISTENT) for x in (BOUND, MLS, NMLS)),
    _Pair(SHARPNESS, GAP, "G.2 (3)", "Sharpness is positively correlated with the generalization gap"),
    *(_Pair(x, ACCURACY_GAP, "G.2 (1)", _CONSISTENT, "reading", _ACCURACY) for x in (BOUND, MLS, NMLS)),
    _Pair(
        SHARPNESS, ACCURACY_GAP, "G.2 (3)", "Sharpness is positively correlated with the generalization gap",
        "reading", _ACCURACY,
    ),
    *(_Pair(x, TEST_LOSS, "section 5", _WEAKLY) for x in (SHARPNESS, LOG_VOLUME, MLS)),
    *(_Pair(LOG_VOLUME, y, "G.2 (2)", _WELL) for y in (SHARPNESS, MLS)),
    _Pair(MLS, SHARPNESS, "section 1 (2)", _STRONGLY),
    _Pair(
        MLS, NMLS, "section 4.3",
        "MLS and the bound over NMLS, introduced in Equation (11) and Equation (12), correlate positively with NMLS in "
        "all of our experiments",
    ),
    _Pair(
        BOUND, NMLS, "G.2 (4)", "The bound derived in Equation (12) correlates positively with NMLS in all experiments."
    ),
)  # fmt: skip
_CODED = tuple(_Pair(TOP_THREE, y, "G.2 (2)", _WELL, "reading", VOLUME_IN_CODE) for y in (SHARPNESS, MLS))
"""For the only networks with ten outputs at every scale, MLPs."""


def population_predictions() -> tuple[Prediction, ...]:
    """Return the predictions of X4."""
    rows = [*_of_all_kinds()]
    for study in KINDS:
        rows += [_positive(study, pair) for pair in (*_PAIRS, *(_CODED if study == "mlp" else ()))]
        rows += [*_compared(study), *_against_d(study)]
    return tuple(rows)


def _positive(study: str, pair: _Pair) -> Prediction:
    x, y = pair.x.name, pair.y.name
    return Prediction(
        _slug(study, x, y), f"{KINDS[study]}: {x} correlates positively with {y}.", f"compression {pair.source}",
        correlated(population(study), x, y), kind=pair.kind, quote=pair.quote, reason=pair.reason,
    )  # fmt: skip


def _of_all_kinds() -> list[Prediction]:
    """Return the predictions about all kinds of networks together."""
    single = [(x.name, y.name) for x, y in ((RELATIVE, GAP), (RELATIVE, SHARPNESS), (D, GAP), (D, SHARPNESS))]
    with_sharpness = [(LOG_VOLUME.name, SHARPNESS.name), (MLS.name, SHARPNESS.name)]
    together = over_kinds(with_sharpness, "all", "above", "Pearson r of log volume or MLS and sqrt sharpness")
    only = "only the bound (Proposition 3.10) incorporating all linear weights of the network consistently predicts a "
    rows = [
        Prediction(
            "volume_and_mls_with_sharpness",
            "In VGGs, MLPs and LeNets, log volume and MLS correlate positively with sharpness.",
            "compression section 1 (2)",
            together,
            kind="claim", quote=_CONSISTENTLY, headline=True,
        ),
        Prediction(
            "volume_and_mls_with_sharpness.strong",
            "In VGGs, MLPs and LeNets, log volume and MLS correlate strongly with sharpness, by r of at "
            f"least {STRONG:g}.",
            "compression section 1 (2)",
            together,
            "above", STRONG, quote=_STRONGLY, reason=_NO_STRENGTH, headline=True,
        ),
        Prediction(
            "only_the_bound_of_nmls",
            "NMLS correlates positively with its bound in VGGs, MLPs and LeNets; MLS does not with its bound D: in one "
            "of them negatively.",
            "compression section 1 (3)", _only_the_bound_of_nmls, headline=True,
            quote=only + "positive correlation between both sides of the inequality",
            reason="'Only' needs that the other bounds do not: a correlation below 0 is asked for, and of D alone, as "
            "no figure shows the bounds of volume.",
        ),
        Prediction(
            "D_against_mls_in_some", "D, the bound of MLS, correlates negatively with MLS in VGGs, MLPs or LeNets.",
            "compression G.2 (5)",
            over_kinds([(MLS.name, D.name)], "some", "below", "Pearson r of MLS and D"), "below", kind="claim",
            quote="can sometimes negatively correlate with the bound derived in Equation (11)",
        ),
        Prediction(
            "single_layer_in_some",
            "Relative flatness of the last layer, or D, correlates weakly or negatively with the gap or sharpness in "
            f"VGGs, MLPs or LeNets: r below {WEAK:g}.",
            "compression section 4.3",
            over_kinds(single, "some", "below", "Pearson r of relative flatness or D and the gap or sqrt sharpness"),
            "below", WEAK,
            quote="can exhibit a weak or even negative correlation with the generalization gap and sharpness in some "
            "cases",
            reason=_NO_WEAKNESS,
        ),
        Prediction(
            "bounds_hold",
            "MLPs: MLS, NMLS, volume and network volume are at most their bounds by sharpness in every network.",
            "compression section 1 (1)", mean_of(population("mlp"), HOLDS, shares=True), "above", 1 - _ROUNDED,
            kind="theorem",
            quote="identifies two representation space quantities that quantify compression and are bounded by "
            "sharpness",
        ),
    ]  # fmt: skip
    return rows + [
        Prediction(
            _slug("bound of", left.name, "in some"),
            f"The bound of {where} correlates negatively with the {left.name} in VGGs, MLPs or LeNets.",
            "compression section 1 (3)",
            over_kinds([(left.name, right.name)], "some", "below", f"Pearson r of the sides of {where}"), "below",
            quote=only + "positive correlation between both sides of the inequality",
            reason="'Only' excludes the bounds of volume, too, but no figure of the paper shows them.",
        )
        for where, (left, right) in VOLUMES.items()
    ]  # fmt: skip


def _against_d(study: str) -> list[Prediction]:
    """Return the predictions about MLS and its bound, and in MLPs about C."""
    table, mlp = population(study), study == "mlp"
    rows = [
        Prediction(
            _slug(study, "D", "against mls"),
            f"{KINDS[study]}: D, the bound of MLS by the sharpness of all layers, correlates negatively with MLS.",
            "compression Fig. G.4" if mlp else "compression G.2 (5)", correlated(table, D.name, MLS.name), "below",
            kind="claim" if mlp else "reading",
            quote="bound D, perhaps surprisingly, is negatively correlated with MLS"
            if mlp
            else "can sometimes negatively correlate with the bound derived in Equation (11)",
            reason="" if mlp else "The text says 'sometimes' and names MLPs; the sign for other networks is not said.",
        )
    ]  # fmt: skip
    if mlp:
        says = "MLPs: C, the bound of MLS by the gradient of the first layer's weights, correlates positively with MLS."
        rows.append(
            Prediction(
                "mlp.C_with_mls", says, "compression Fig. G.4", correlated(table, C.name, MLS.name), kind="claim",
                quote="bound C is positively correlated with MLS",
            )
        )  # fmt: skip
    return rows


def _compared(study: str) -> list[Prediction]:
    """Return the predictions about which correlations are strong, and which are stronger than others."""
    table, kind = population(study), KINDS[study]
    volume, mls, sharp = LOG_VOLUME.name, MLS.name, SHARPNESS.name
    strong = [
        Prediction(
            _slug(study, x, "strong"), f"{kind}: {x} correlates with {sharp} by r of at least {STRONG:g}.",
            "compression section 1 (2)", correlated(table, x, sharp), "above", STRONG, quote=_STRONGLY,
            reason=_NO_STRENGTH,
        )
        for x in (volume, mls)
    ]  # fmt: skip
    strong.append(
        Prediction(
            _slug(study, volume, "strong with", mls),
            f"{kind}: {volume} correlates well with {mls}, by r of at least {STRONG:g}.",
            "compression G.2 (2)", correlated(table, volume, mls), "above", STRONG, quote=_WELL, reason=_NO_STRENGTH,
        )
    )  # fmt: skip
    better = [
        Prediction(
            _slug(study, "MLS", "better than volume", y),
            f"{kind}: MLS correlates more strongly with {y} than {volume} does.",
            "compression section 3.2", stronger(table, [mls], [volume], y), kind="claim",
            quote="MLS has a higher correlation with sharpness and test loss than local volumetric ratio",
        )
        for y in (sharp, TEST_LOSS.name)
    ]  # fmt: skip
    less = [
        Prediction(
            _slug(study, x, "weaker with test loss"),
            f"{kind}: {x} correlates more weakly with test loss than with {sharp}, by the size of r.",
            "compression section 5", weaker(table, [TEST_LOSS.name], [sharp], x), kind="claim",
            quote=_WEAKLY,
        )
        for x in (volume, mls)
    ]  # fmt: skip
    return [
        *strong, *better, *less,
        Prediction(
            _slug(study, "local dimension", "weaker"),
            f"{kind}: local dimension correlates more weakly with {sharp} than MLS and {volume} do, by the size of r.",
            "compression section 4.2", weaker(table, [DIMENSION.name], [mls, volume], sharp), kind="claim",
            quote="a weaker correlation of sharpness and local dimensionality compared to other metrics such as MLS "
            "and volume",
        ),
        Prediction(
            _slug(study, "relative flatness", "weaker"),
            f"{kind}: relative flatness of the last layer correlates weakly or negatively with the gap: r below "
            f"{WEAK:g}.",
            "compression G.2 (6)", correlated(table, RELATIVE.name, GAP.name), "below", WEAK,
            quote="shows weak (even negative) correlation with the generalization gap", reason=_NO_WEAKNESS,
        ),
    ]  # fmt: skip


def _slug(*words: str) -> str:
    return ".".join(re.sub(r"[^\w ]", "", word).replace(" ", "_") for word in words)


_GRIDS: Mapping[Scale, tuple[tuple[float, ...], tuple[int, ...], int]] = {
    "smoke": ((0.05, 0.1), (8,), 2),
    "laptop": ((0.05, 0.1, 0.2), (8, 16, 32), 3),
    "desk": ((0.05, 0.1, 0.2), (8, 16, 32, 64), 8),
    "paper": ((0.01, 0.02, 0.05, 0.1, 0.2), (8, 16, 32, 64), 5),
}
_FEW_SAMPLES = 1000
"""Training samples at desk scale: few, so that the gap is large beside its error."""
_GRID_TWICE = {"desk": ("lenet",)}
"""The networks that are trained twice over the grid: with 96 LeNets both main claims were open."""


def _x4(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, each = _GRIDS[scale]
    grid = [*product(lrs, batches)]
    steps = {"smoke": 400, "laptop": 20_000, "desk": 30_000, "paper": 200_000}[scale]
    below: Mapping[Scale, float] = {"smoke": 0.2, "laptop": INTERPOLATES, "desk": INTERPOLATES}
    studies = {}
    for name, (data, model) in {"vgg": vgg(scale), "mlp": mlp(scale), "lenet": lenet(scale)}.items():
        if scale == "desk":
            data = replace(data, train=_FEW_SAMPLES)
        training = Training(
            SGD(FIXED_LR),
            batch_size=FIXED_BATCH,
            loss="half_squared_error",
            until=Until(loss_below=below.get(scale)),  # on all images a small learning rate never comes to one
            max_steps=steps,
            check_every=250 if scale == "desk" else 10,
        )
        columns = [Column.parse(q.column) for q in (*SHOWN, *ALSO, *top_three(model))]
        base = NetworkSettings(
            data, model, training,
            measures=tuple(sorted({c.measure for c in columns if not c.side})),
            bounds=("mls_chain", "nmls_bound", "volume_bound", "network_volume_bound"),
            samples=samples(data),
        )  # fmt: skip
        shown = tuple(q.with_first(FIRST_LAYERS[name]) for q in SHOWN)
        setups = own_seeds("lr+batch_size", grid * (2 if name in _GRID_TWICE.get(scale, ()) else 1), each)
        studies[name] = Study(name, base, (setups,), shown, scale=scale)
    return studies


_FIGURES = {"vgg": "Fig. G.5: VGGs", "mlp": "Fig. G.6: MLPs", "lenet": "Fig. G.7: LeNets"}


def _plots(results: Results) -> list[Plot]:
    return [replace(pairwise(name, result), title=_FIGURES[name]) for name, result in results.items()]


_GRID = "A grid of learning rates and batch sizes; the paper does not say how its 100 networks were chosen."
_SEEDS = "Every network has a start of its own, and counts as independent."
_ENDS = (
    f"Every network is trained until its half squared error is below {INTERPOLATES:g}, looked at every 10 steps (250 "
    "at desk scale), or left out if it does not come there: the paper says 'at the end of the training'."
)
_FIXED = "200,000 steps each: the paper does not say how many."
_STAYING = "Not weighed: that weights change little in training, which is concluded from the gap's correlation."

EXPERIMENTS = (
    Experiment(
        "X4",
        "A hundred networks each: how sharpness, compression, bounds and the gap go together",
        "compression Fig. G.5, G.6, G.7",
        _x4,
        population_predictions(),
        _plots,
        {
            "smoke": (SMOKE_ONLY, PATCHES, DIGITS),
            "laptop": (PATCHES, DIGITS, "27 networks of each kind, not 100.", _GRID, _SEEDS, _ENDS, _STAYING),
            "desk": (
                f"{_FEW_SAMPLES} training samples, for a large gap; 96 VGGs and MLPs, not 100.",
                "192 LeNets: the first 96 left both main claims open, so that the second 96 are a second look: "
                "where there is no effect, two looks decide in up to 4.2% of cases a side, not 2.5%.",
                SMALL_VGG, _GRID, _SEEDS, _ENDS, ONE_DRAW, "Measured on 100 training samples.", _STAYING,
            ),
            "paper": (SMALL_VGG, _GRID, _SEEDS, _FIXED, "Measured on 100 training samples.", _STAYING),
        },
    ),
)  # fmt: skip
