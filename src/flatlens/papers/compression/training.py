"""X1 and X2: sharpness and compression through training.

As in the paper's figures, sharpness is sqrt(S) and volume is its logarithm. The volume of the three largest eigenvalues
and the logarithm of the dimension, which the authors' code draws, have names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import SHARPNESS, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import Architecture
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
    mlp,
    samples,
    top_three,
    vgg,
)
from flatlens.papers.contrasts import mean_of
from flatlens.papers.courses import agreement, between, gain, in_course, log_gain, once_below, slowing
from flatlens.papers.evidence import changes, together, trend, where
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import followed_curves
from flatlens.papers.predictions import Prediction, Results, Side
from flatlens.papers.remarks import SMOKE_ONLY, WEAK
from flatlens.training import SGD, Training

LRS, BATCHES = (0.05, 0.1, 0.2), (8, 20, 32)
IN_TRAINING = (
    Quantity("training loss", "loss"),
    Quantity("NMLS", "nmls"),
    SHARPNESS,
    LOG_VOLUME,
    Quantity("MLS", "mls"),
    Quantity("local dimension", "local_dimension"),
    LOG_DIMENSION,
)
"""The quantities of Fig. 1, from left to right; the last one a second time, as the authors' code draws it."""


# X1 and X2: training at three learning rates and three batch sizes


def _through_training(base: NetworkSettings, seeds: int) -> dict[str, Study]:
    trial = Axis("seed", tuple(range(seeds)))
    both = Study("", base, ()).setting("lr", FIXED_LR).setting("batch_size", FIXED_BATCH).base
    return {
        "learning_rates": Study("learning rates", both, (Axis("lr", LRS), trial)),
        "batch_sizes": Study("batch sizes", both, (Axis("batch_size", BATCHES), trial)),
    }


def _x1(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (30, 15, 1), "laptop": (2000, 100, 5), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*vgg(scale), steps, every), seeds)


def _x2(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (40, 20, 1), "laptop": (10_000, 400, 5), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*mlp(scale), steps, every), seeds)


def _followed(data: DataSettings, model: Architecture, steps: int, every: int) -> NetworkSettings:
    training = Training(SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=steps)
    shown = tuple(dict.fromkeys(q.column for q in in_training(model)))
    measures = (*shown, "generalisation_gap", "test_accuracy", "accuracy")
    followed = Followed(shown, every, samples(data))
    return NetworkSettings(data, model, training, measures, samples=samples(data), followed=followed)


def in_training(model: Architecture) -> tuple[Quantity, ...]:
    """Return the quantities followed in training; with more than three classes also the volume of three eigenvalues."""
    return (*IN_TRAINING, *top_three(model))


_STUDIES = ("learning_rates", "batch_sizes")
_ONSET_SHARE = 0.1
"""Share of the steps, from the first one, that counts as the onset of training."""
STEADY = float(np.log(0.9))
"""A quantity that falls by less than a tenth (in the logarithm) over the later half counts as no longer decreasing."""
ONSET, LATER = between(0, _ONSET_SHARE), between(0.5, 1)
DIMENSION_AND_SHARPNESS = "|Pearson r| of the changes of sharpness and local dimension between steps"


def _in_training_predictions(figures: str, *, top: bool) -> tuple[Prediction, ...]:
    """Return the predictions about both networks: which setting ends lower."""
    predictions = []
    sides: tuple[tuple[str, str, str, Side], ...] = (
        ("learning_rates", "lr", "Higher learning rates", "below"),
        ("batch_sizes", "batch_size", "Larger batches", "above"),
    )
    for study, setting, larger, side in sides:
        less, compression = ("lower", "stronger") if side == "below" else ("higher", "weaker")
        ends = [("sharpness", SHARPNESS.column, f"{less} sharpness")]
        ends += [(name, column, f"{compression} compression of {told}") for name, column, told in _volumes(top=top)]
        ends += [(name, name, f"{compression} compression: {less} {name.upper()}") for name in ("mls", "nmls")]
        predictions += [
            Prediction(
                f"{study}.{name}",
                f"{larger} lead to {told}.",
                f"compression {figures}",
                trend(study, setting, column),
                side,
            )
            for name, column, told in ends
        ]
    return tuple(predictions)


def _volumes(*, top: bool) -> list[tuple[str, str, str]]:
    """Return the name in claims, the column and the words of each volume."""
    coded = (
        "volume_of_top_3",
        TOP_THREE.column,
        "volume (the three largest eigenvalues', as in the authors' code)",
    )
    return [("volume", LOG_VOLUME.column, "volume"), *([coded] if top else [])]


def _x1_predictions() -> tuple[Prediction, ...]:
    sharp, late = SHARPNESS.column, INTERPOLATES
    predictions = [*_in_training_predictions("Fig. 1, 2", top=False)]
    for study in _STUDIES:
        over = f"Over three {study.replace('_', ' ')}:"
        gains = in_course(study, {"gain of log_volume": gain(LOG_VOLUME.column)}, once_below(late))
        unsigned = in_course(study, {DIMENSION_AND_SHARPNESS: _dimension_with_sharpness}, once_below(late))
        onset = in_course(study, {"log(later / first) of local_dimension": log_gain("local_dimension")}, ONSET)
        predictions += [
            Prediction(
                f"{study}.mls_follows_sharpness",
                f"{over} MLS follows sharpness.",
                "compression Fig. 1, 2, section 4.1",
                together(study, sharp, "mls", below=late),
            ),
            Prediction(
                f"{study}.volume_follows_sharpness",
                f"{over} once the loss is minimised, sharpness and volume decrease together.",
                "compression Fig. 1, 2",
                together(study, sharp, LOG_VOLUME.column, below=late),
            ),
            Prediction(
                f"{study}.sharpness_decreases",
                f"{over} once the loss is minimised, sharpness decreases.",
                "compression section 4.1",
                changes(study, sharp, below=late),
                "below",
            ),
            Prediction(
                f"{study}.volume_decreases",
                f"{over} once the loss is minimised, volume decreases.",
                "compression section 4.1",
                mean_of(gains, "gain of log_volume"),
                "below",
            ),
            Prediction(
                f"{study}.mls_decreases",
                f"{over} once the loss is minimised, MLS decreases.",
                "compression section 4.1",
                changes(study, "mls", below=late),
                "below",
            ),
            Prediction(
                f"{study}.dimension",
                f"{over} local dimension decreases as the loss decreases to near 0.",
                "compression section 4.2",
                changes(study, "local_dimension"),
                "below",
            ),
            Prediction(
                f"{study}.dimension_at_onset",
                f"{over} local dimension decreases rapidly with the onset of training, in the first "
                f"{_ONSET_SHARE:.0%} of it.",
                "compression section 3.2",
                mean_of(onset, "log(later / first) of local_dimension"),
                "below",
            ),
            Prediction(
                f"{study}.dimension_unexplained",
                f"{over} once the loss is minimised, sharpness does not explain local dimension: the size of Pearson's "
                f"r of their changes between steps is below {WEAK:g}.",
                "compression section 4.2",
                mean_of(unsigned, DIMENSION_AND_SHARPNESS),
                "below",
                WEAK,
            ),
        ]
    numbers = {"log(last / first) of sharpness": log_gain(sharp), "gain of log_volume": gain(LOG_VOLUME.column)}
    largest = where(in_course("batch_sizes", numbers, LATER), lambda t: t["batch_size"] == max(BATCHES))
    predictions += [
        Prediction(
            "batch_32.sharpness_stops",
            "With batches of 32 sharpness stops decreasing: over the later half of training it falls by less than a "
            "tenth.",
            "compression section 4.1",
            mean_of(largest, "log(last / first) of sharpness"),
            "above",
            STEADY,
        ),
        Prediction(
            "batch_32.volume_continues",
            "Volume continues to decrease there.",
            "compression section 4.1",
            mean_of(largest, "gain of log_volume"),
            "below",
        ),
    ]
    return tuple(predictions)


def _dimension_with_sharpness(course: pd.DataFrame) -> float:
    return abs(agreement(SHARPNESS.column, "local_dimension")(course))


def _x2_predictions() -> tuple[Prediction, ...]:
    sharp = SHARPNESS.column
    predictions = [*_in_training_predictions("Fig. H.8, H.9", top=True)]
    for study in _STUDIES:
        over = f"Over three {study.replace('_', ' ')}:"
        predictions += [
            Prediction(
                f"{study}.{name}_follows_sharpness",
                f"{over} {name.upper()} follows sharpness during the training.",
                "compression Fig. H.8, H.9, section 4.1" if name == "mls" else "compression Fig. H.8, H.9",
                together(study, sharp, name),
            )
            for name in ("mls", "nmls")
        ]
        ended = in_course(study, {"log(last / first) of sharpness": log_gain(sharp)}, LATER)
        predictions.append(
            Prediction(
                f"{study}.sharpness_plateaus",
                f"{over} sharpness does not noticeably decrease towards the end: over the later half of training it "
                "falls by less than a tenth.",
                "compression section 4.1, Fig. H.8, H.9",
                mean_of(ended, "log(last / first) of sharpness"),
                "above",
                STEADY,
            )
        )
        for name, column, told in _volumes(top=True):
            gains = in_course(study, {f"gain of {column}": gain(column)}, LATER)
            slower = in_course(
                study, {f"later less earlier mean gain of {column}": slowing(column)}, once_below(INTERPOLATES)
            )
            predictions += [
                Prediction(
                    f"{study}.{name}_continues",
                    f"{over} {told} continues to decrease over the later half of training.",
                    "compression section 4.1, Fig. H.8, H.9",
                    mean_of(gains, f"gain of {column}"),
                    "below",
                ),
                Prediction(
                    f"{study}.{name}_slows",
                    f"{over} {told} does so more slowly: once the loss is minimised, it falls less over the later half "
                    "of the steps than over the earlier.",
                    "compression section 4.1, Fig. H.8, H.9",
                    mean_of(slower, f"later less earlier mean gain of {column}"),
                ),
            ]
    return tuple(predictions)


def _in_training_plots(results: Results) -> list[Plot]:
    plots = []
    for study, setting, held in (
        ("learning_rates", "lr", f"batch size {FIXED_BATCH}"),
        ("batch_sizes", "batch_size", f"learning rate {FIXED_LR:g}"),
    ):
        result = results[study]
        measured = set(result.histories["measure"])
        shown = [q for q in (*IN_TRAINING, TOP_THREE) if q.column in measured]
        plots.append(followed_curves(result, setting, shown, held))
    return plots


TWO_OUTPUTS = (
    "Of two outputs the volume of the three largest eigenvalues, as in the authors' figures, is the whole volume."
)

EXPERIMENTS = (
    Experiment(
        "X1",
        "Sharpness, volume and sensitivity through the training of a VGG",
        "compression Fig. 1, 2",
        _x1,
        _x1_predictions(),
        _in_training_plots,
        {
            "smoke": (SMOKE_ONLY, PATCHES),
            "laptop": (PATCHES, SMALL_VGG, TWO_OUTPUTS),
            "paper": (SMALL_VGG, TWO_OUTPUTS),
        },
    ),
    Experiment(
        "X2",
        "Sharpness, volume and sensitivity through the training of a 4-layer MLP",
        "compression Fig. H.8, H.9",
        _x2,
        _x2_predictions(),
        _in_training_plots,
        {"smoke": (SMOKE_ONLY, DIGITS), "laptop": (DIGITS,), "paper": ("Widths are not given: 784 in every layer.",)},
    ),
)
