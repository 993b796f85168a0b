"""X1 and X2: sharpness and compression through training.

As in the paper's figures, sharpness is sqrt(S) and volume is its logarithm. The volume of the three largest eigenvalues
and the logarithm of the dimension, which the authors' code draws, have names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import SHARPNESS, Quantity, in_words
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
from flatlens.papers.compression.training_claims import (
    FIG_1,
    FIG_2,
    FIG_H8,
    FIG_H9,
    STUDY,
    Line,
    mlp_predictions,
    vgg_predictions,
)
from flatlens.papers.evidence import reached
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import followed_curves
from flatlens.papers.predictions import Results
from flatlens.papers.remarks import SMOKE_ONLY
from flatlens.training import SGD, Training

_LRS, BATCHES = (0.05, 0.1, 0.2), (8, 20, 32)
_IN_TRAINING = (
    Quantity("training loss", "loss"),
    Quantity("NMLS", "nmls"),
    SHARPNESS,
    LOG_VOLUME,
    Quantity("MLS", "mls"),
    Quantity("local dimension", "local_dimension"),
    LOG_DIMENSION,
)
"""The quantities of Fig. 1, from left to right; the last one a second time, as the authors' code draws it."""


def _x1(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {
        "smoke": (30, 15, 1),
        "laptop": (2000, 100, 7),
        "desk": (20_000, 1000, 10),
        "paper": (100_000, 1000, 8),
    }[scale]
    return _through_training(_followed(*vgg(scale), steps, every), seeds)


def _x2(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {
        "smoke": (40, 20, 1),
        "laptop": (10_000, 400, 10),
        "desk": (16_000, 800, 10),
        "paper": (100_000, 1000, 8),
    }[scale]
    return _through_training(_followed(*mlp(scale), steps, every), seeds)


def _through_training(base: NetworkSettings, seeds: int) -> dict[str, Study]:
    """Return one study for both figures: they share the networks at the fixed learning rate and batch size."""
    pairs = [(lr, FIXED_BATCH) for lr in _LRS] + [(FIXED_LR, batch) for batch in BATCHES if batch != FIXED_BATCH]
    axes = (Axis("lr+batch_size", tuple(pairs)), Axis("seed", tuple(range(seeds))))
    return {STUDY: Study("through training", base, axes)}


def _followed(data: DataSettings, model: Architecture, steps: int, every: int) -> NetworkSettings:
    training = Training(
        SGD(FIXED_LR),
        batch_size=FIXED_BATCH,
        loss="half_squared_error",
        max_steps=steps,
        check_every=10 if data.train else steps // 4,  # all images of a set take as long as many steps
    )
    shown = tuple(dict.fromkeys(q.column for q in in_training(model)))
    measures = (*shown, "generalisation_gap", "test_accuracy", "accuracy")
    followed = Followed(shown, every, samples(data))
    return NetworkSettings(data, model, training, measures, samples=samples(data), followed=followed)


def in_training(model: Architecture) -> tuple[Quantity, ...]:
    """Return the quantities followed in training: unless there are two classes, also three eigenvalues' volume."""
    return (*_IN_TRAINING, *top_three(model))


def _plots(*lines: Line) -> Callable[[Results], list[Plot]]:
    """Return the figures of these lines: one panel per quantity over the steps, one curve per value of the setting."""

    def drawn(results: Results) -> list[Plot]:
        result = results[STUDY]
        measured = set(result.histories["measure"])
        shown = [q for q in (*_IN_TRAINING, TOP_THREE) if q.column in measured]
        return [
            followed_curves(
                result, line.of(reached(STUDY))(results), line.setting, shown, f"through_training_{line.setting}",
                f"{line.figure}: through training, by {in_words(line.setting)}",
                "batch size 20" if line.setting == "lr" else "learning rate 0.1",
            )
            for line in lines
        ]  # fmt: skip

    return drawn


_TWO_OUTPUTS = (
    "Of two outputs the volume of the three largest eigenvalues, as in the authors' figures, is the whole volume."
)
_MINIMISED = (
    f"'After the loss is minimised' is here: from the first loss below {INTERPOLATES:g} on, of the samples measured."
)
_NOT_MINIMISED = (
    f"'After the loss is minimised' would be from the first loss below {INTERPOLATES:g} on: none comes there, the "
    "least is 0.027, so that the rows on it are not tested."
)
_SEEDS = "More than the paper's 5 seeds: networks of one seed share their start, and 5 units decide nothing."
_STEPS = "100,000 steps: the paper does not say how many."
_WIDTHS = "Widths are not given: 784 in every layer."

EXPERIMENTS = (
    Experiment(
        "X1",
        "Sharpness, volume and sensitivity through the training of a VGG",
        "compression Fig. 1, 2",
        _x1,
        vgg_predictions(),
        _plots(FIG_1, FIG_2),
        {
            "smoke": (SMOKE_ONLY, PATCHES),
            "laptop": (PATCHES, SMALL_VGG, _TWO_OUTPUTS, _MINIMISED, _SEEDS),
            "desk": (
                "20,000 steps: the paper's figures go on after 50,000.",
                SMALL_VGG,
                _TWO_OUTPUTS,
                _MINIMISED,
                _SEEDS,
            ),
            "paper": (_STEPS, SMALL_VGG, _TWO_OUTPUTS, _MINIMISED, _SEEDS),
        },
    ),
    Experiment(
        "X2",
        "Sharpness, volume and sensitivity through the training of a 4-layer MLP",
        "compression Fig. H.8, H.9",
        _x2,
        mlp_predictions(),
        _plots(FIG_H8, FIG_H9),
        {
            "smoke": (SMOKE_ONLY, DIGITS),
            "laptop": (DIGITS, _MINIMISED, _SEEDS),
            "desk": ("16,000 steps: the paper does not say how many.", _WIDTHS, _NOT_MINIMISED, _SEEDS),
            "paper": (_STEPS, _WIDTHS, _MINIMISED, _SEEDS),
        },
    ),
)
