"""X4: a hundred networks of each kind, and the correlation of every pair of quantities.

As in the paper's figures, sharpness is sqrt(S), volume is its logarithm, relative flatness is the last layer's, D
(Eq. 48) is the first layer's, MLS is the input's. The volume of the three largest eigenvalues and the logarithm of the
dimension, which the authors' code draws, have names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flatlens.column import Column
from flatlens.experiments.quantities import GAP, SHARPNESS, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.papers.compression.networks import (
    DIGITS,
    FIXED_BATCH,
    FIXED_LR,
    INTERPOLATES,
    LOG_DIMENSION,
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
from flatlens.papers.contrasts import stronger, stronger_in_size
from flatlens.papers.evidence import correlated, reached, related, studied
from flatlens.papers.experiment import Experiment, Scale
from flatlens.papers.plots import pairwise
from flatlens.papers.predictions import Prediction
from flatlens.papers.remarks import SMOKE_ONLY, STRONG
from flatlens.training import SGD, Training, Until

_SHOWN = (
    GAP,
    SHARPNESS,
    LOG_VOLUME,
    Quantity("local dimension", "local_dimension"),
    Quantity("MLS", "mls"),
    Quantity("NMLS", "nmls"),
    Quantity("D", "mls_chain.rhs[fc1]"),
    Quantity("bound of NMLS", "nmls_bound.rhs"),
    Quantity("relative flatness, last layer", "relative_flatness"),
    LOG_DIMENSION,
)
"""The nine quantities of Fig. G.5 to G.7, and the dimension as the authors' code draws it."""

_KINDS = {"vgg": "VGGs", "mlp": "MLPs", "lenet": "LeNets"}

_GRIDS: Mapping[Scale, tuple[tuple[float, ...], tuple[int, ...], int]] = {
    "smoke": ((0.05, 0.1), (8,), 2),
    "laptop": ((0.05, 0.1, 0.2), (8, 16, 32), 3),
    "paper": ((0.01, 0.02, 0.05, 0.1, 0.2), (8, 16, 32, 64), 5),
}


def _x4(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, seeds = _GRIDS[scale]
    axes = (Axis("lr", lrs), Axis("batch_size", batches), Axis("seed", tuple(range(seeds))))
    steps = {"smoke": 400, "laptop": 20_000, "paper": 200_000}[scale]
    loss = {"smoke": 0.2, "laptop": INTERPOLATES, "paper": INTERPOLATES}[scale]
    studies = {}
    for name, (data, model), first in (
        ("vgg", vgg(scale), "conv1"),
        ("mlp", mlp(scale), "fc1"),
        ("lenet", lenet(scale), "conv1"),
    ):
        training = Training(
            SGD(FIXED_LR),
            batch_size=FIXED_BATCH,
            loss="half_squared_error",
            until=Until(loss_below=loss),
            max_steps=steps,
        )
        shown = (*_SHOWN, *top_three(model))
        columns = [Column.parse(q.column) for q in shown]
        base = NetworkSettings(
            data, model, training,
            measures=tuple(sorted({column.measure for column in columns if not column.side})),
            bounds=("mls_chain", "nmls_bound"),
            samples=samples(data),
        )  # fmt: skip
        shown = tuple(q.with_first(first) for q in shown)
        studies[name] = Study(name, base, axes, shown, scale=scale)
    return studies


WEAKLY = 0.5
"""Largest r that counts as "weak (even negative)"."""


def _x4_predictions() -> tuple[Prediction, ...]:
    predictions = []
    for study in ("vgg", "mlp", "lenet"):
        pairs: tuple[tuple[str, str, int], ...] = (
            ("bound of NMLS", GAP.name, 1),
            ("MLS", GAP.name, 1),
            ("NMLS", GAP.name, 1),
            (LOG_VOLUME.name, SHARPNESS.name, 2),
            (LOG_VOLUME.name, "MLS", 2),
            (SHARPNESS.name, GAP.name, 3),
            ("bound of NMLS", "NMLS", 4),
        )
        told: tuple[tuple[str, str, str], ...] = (
            ("MLS", SHARPNESS.name, "section 1 (2), 5"),
            ("MLS", "NMLS", "section 4.3"),
            (LOG_VOLUME.name, GAP.name, "section 5"),
        )
        if study == "mlp":  # the only one with ten outputs at every scale
            pairs += ((TOP_THREE.name, SHARPNESS.name, 2), (TOP_THREE.name, "MLS", 2))
        for x, y, source in (*((x, y, f"G.2 ({number})") for x, y, number in pairs), *told):
            says = f"{_KINDS[study]}: {x} correlates positively with {y}."
            predictions.append(Prediction(_slug(study, x, y), says, f"compression {source}", related(study, x, y)))
        predictions += _compared(study)
        weak = related(study, "relative flatness, last layer", GAP.name)
        predictions.append(
            Prediction(
                f"{study}.relative_flatness",
                f"{_KINDS[study]}: relative flatness of the last layer correlates weakly with the gap, r below 1/2.",
                "compression G.2 (6)",
                weak,
                "below",
                WEAKLY,
            )
        )
    predictions += [
        Prediction(
            "mlp.D_against_mls",
            "MLPs: D, the bound of MLS by the sharpness of all layers, correlates negatively with MLS.",
            "compression Fig. G.4, G.2 (5)",
            related("mlp", "D", "MLS"),
            "below",
        ),
        Prediction(
            "mlp.C_with_mls",
            "MLPs: C, the bound of MLS by the gradient of the first layer's weights alone, correlates positively with "
            "MLS.",
            "compression Fig. G.4",
            correlated(reached("mlp"), "mls_chain.C_D.lhs[fc1]", "mls"),
        ),
    ]
    predictions += [
        Prediction(
            _slug("mlp", x, y),
            f"MLPs: {told} correlates weakly with {y}, r below 1/2.",
            "compression section 4.3, Fig. G.6",
            related("mlp", x, y),
            "below",
            WEAKLY,
        )
        for x, y, told in (
            ("relative flatness, last layer", SHARPNESS.name, "relative flatness of the last layer"),
            ("D", GAP.name, "D"),
            ("D", SHARPNESS.name, "D"),
        )
    ]
    return tuple(predictions)


def _compared(study: str) -> list[Prediction]:
    """Return the predictions about which correlations are strong, and which are stronger than others."""
    shown, kind = studied(study), _KINDS[study]
    strong = [
        Prediction(
            _slug(study, x, "strong"),
            f"{kind}: {x} correlates strongly with {SHARPNESS.name}, r at least {STRONG:g}.",
            source,
            related(study, x, SHARPNESS.name),
            "above",
            STRONG,
        )
        for x, source in ((LOG_VOLUME.name, "compression section 1 (2)"), ("MLS", "compression section 1 (2), 5"))
    ]
    better = [
        Prediction(
            _slug(study, "MLS", "better_than_volume", y),
            f"{kind}: MLS correlates more strongly with {y} than {LOG_VOLUME.name} does.",
            "compression section 3.2, G.2",
            stronger(shown, ["MLS"], [LOG_VOLUME.name], y),
        )
        for y in (SHARPNESS.name, GAP.name)
    ]
    weaker = [
        Prediction(
            _slug(study, x, "weaker_with_gap"),
            f"{kind}: {x} correlates more weakly with {GAP.name} than with {SHARPNESS.name}, by the size of r.",
            "compression section 5",
            stronger_in_size(shown, [SHARPNESS.name], [GAP.name], x),
        )
        for x in (LOG_VOLUME.name, "MLS")
    ]
    dimension = Prediction(
        _slug(study, "local dimension", "weaker"),
        f"{kind}: local dimension correlates more weakly with {SHARPNESS.name} than MLS and {LOG_VOLUME.name} do, "
        "by the size of r.",
        "compression section 4.2, Fig. G.5, G.6, G.7",
        stronger_in_size(shown, ["MLS", LOG_VOLUME.name], ["local dimension"], SHARPNESS.name),
    )
    return [*strong, *better, *weaker, dimension]


def _slug(*words: str) -> str:
    return ".".join(re.sub(r"[^\w ]", "", word).replace(" ", "_") for word in words)


_GRID = "A grid of learning rates, batch sizes and seeds; the paper does not say how its 100 networks were chosen."
TEST_LOSS = "What is said of test loss is weighed of the generalisation gap: training loss is near 0."
STAYING = "Not weighed: that weights change little in training, which is concluded from the gap's correlation."

EXPERIMENTS = (
    Experiment(
        "X4",
        "A hundred networks each: how sharpness, compression, bounds and the gap go together",
        "compression Fig. G.5, G.6, G.7",
        _x4,
        _x4_predictions(),
        lambda results: [pairwise(name, result) for name, result in results.items()],
        {
            "smoke": (SMOKE_ONLY, PATCHES, DIGITS),
            "laptop": (PATCHES, DIGITS, "27 networks of each kind, not 100.", _GRID, TEST_LOSS, STAYING),
            "paper": (SMALL_VGG, _GRID, "Measured on 100 training samples.", TEST_LOSS, STAYING),
        },
    ),
)
