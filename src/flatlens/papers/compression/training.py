"""X1 and X2: sharpness and compression through training.

As in the paper's figures, sharpness is sqrt(S) and volume is its logarithm. The volume of the three largest eigenvalues
and the logarithm of the dimension, which the authors' code draws, have names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from flatlens.data.sources import DataSettings
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
from flatlens.papers.contrasts import mean_of, of_each_case
from flatlens.papers.evidence import CASE, Evidence, Table, along, histories, reached, where
from flatlens.papers.experiment import (
    SMOKE_ONLY,
    WEAK,
    Experiment,
    Plot,
    Prediction,
    PredictionKind,
    Results,
    Scale,
    Side,
)
from flatlens.papers.figures import followed_curves
from flatlens.papers.trajectories import (
    Courses,
    Number,
    between,
    correlated_changes,
    gain,
    in_course,
    log_gain,
    once_below,
    slowing,
)
from flatlens.statistics.correlations import CoefficientName
from flatlens.training import SGD, Training

STUDY = "training"
ONSET_SHARE = 0.1
LONG = 50_000
"""Steps after which the sharpness stops decreasing in the paper: a shorter training cannot show it."""
STEADY = float(np.log(0.9))
"""A quantity that falls by less than a tenth (in the logarithm) over the later half counts as no longer decreasing."""
LATE, ONSET, LATER = once_below(INTERPOLATES), between(0, ONSET_SHARE), between(0.5, 1)

NO_NUMBER = "The text gives no number; a tenth is ours."
NETWORKS_OWN = (
    "The caption says 'compression', for which the paper has volume and MLS; NMLS stands in the same figure, and is "
    "bounded by sharpness in the same way."
)
VOLUME_IN_CODE = "The text defines volume by all eigenvalues; the authors' code draws that of the three largest."


@dataclass(frozen=True)
class Line:
    """A figure: the networks that differ in one setting."""

    name: str
    setting: str
    figure: str
    larger: str
    side: Side  #: side of sharpness and compression where the setting is larger
    quote: str
    reason: str = ""  #: why its rows about the end of training are readings

    @property
    def over(self) -> str:
        """The words with which predictions about this figure begin."""
        return f"Over three {self.name.replace('_', ' ')}"

    def of(self, table: Table) -> Table:
        """Return the networks of a table that belong to the figure."""
        held, value = ("batch_size", FIXED_BATCH) if self.setting == "lr" else ("lr", FIXED_LR)
        return where(table, lambda networks: networks[held] == value)

    def mean(self, name: str, number: Number, courses: Courses = histories, side: Side = "below") -> Evidence:
        """Return the mean of a number of the networks' courses, at each value of the setting."""
        return self._at_each(in_course(STUDY, {name: number}, courses), name, None, side)

    def following(
        self, name: str, column: str, courses: Courses = histories, side: Side = "above", *, share: bool = False
    ) -> Evidence:
        """Return the mean r of the changes of sharpness and a column at each value of the setting, as in `follows`.

        That of ranks has to agree.
        """
        said, ranks = (
            f"{'r^2' if share else 'Pearson r'} of the changes of sharpness and {name} between steps",
            "of ranks",
        )
        numbers = {said: follows(column, share=share), ranks: follows(column, "spearman", share=share)}
        return self._at_each(in_course(STUDY, numbers, courses), said, ranks, side)

    def _at_each(self, table: Table, name: str, ranks: str | None, side: Side) -> Evidence:
        """Return the mean of a column at each value of the setting; all have to be on the side."""

        def by_value(results: Results) -> pd.DataFrame:
            networks = self.of(table)(results)
            return networks.assign(**{CASE: f"{self.setting} " + networks[self.setting].astype(str)})

        return of_each_case(by_value, lambda case: mean_of(case, name, ranks), name, side=side)

    def trend(self, column: str) -> Evidence:
        """Return the mean over seeds of Kendall's tau-b of the setting and a column at the end of training."""
        return along(self.of(reached(STUDY)), self.setting, column, ["seed"])


_HIGHER_RATES = "higher learning rates lead to lower sharpness and hence stronger compression"
FIG_1 = Line("learning_rates", "lr", "Fig. 1", "Higher learning rates", "below", _HIGHER_RATES)
FIG_2 = Line(
    "batch_sizes", "batch_size", "Fig. 2", "Larger batches", "above",
    "lower batch sizes lead to lower sharpness and hence stronger compression",
)  # fmt: skip
_AT_THE_END = (
    "The caption says it of networks whose loss is minimised; here it is the end of training, at whatever loss that is."
)
FIG_H9 = Line(
    "learning_rates", "lr", "Fig. H.9", "Higher learning rates", "below",
    "After the loss is minimized, higher learning rates lead to lower sharpness and hence stronger compression.",
    _AT_THE_END,
)  # fmt: skip
FIG_H8 = Line(
    "batch_sizes", "batch_size", "Fig. H.8", "Larger batches", "above",
    "After minimizing the loss, lower batch sizes lead to lower sharpness and stronger compression.", _AT_THE_END,
)  # fmt: skip
SHARP, VOLUME = SHARPNESS.column, LOG_VOLUME.column
_CODED = TOP_THREE.column


def follows(column: str, coefficient: CoefficientName = "pearson", *, share: bool = False) -> Number:
    """Return the correlation of the changes between steps of a column and of sharpness, as in the figures its root.

    `share`: return r^2, less what chance adds: of unrelated columns its mean is 0.
    """
    of = correlated_changes(SHARPNESS.name, column, coefficient)

    def found(course: pd.DataFrame) -> float:
        both = course.assign(**{SHARPNESS.name: SHARPNESS.of(course)})
        r = of(both)
        if not share:
            return r
        changes = len(both.reindex(columns=[SHARPNESS.name, column]).dropna()) - 1
        return (r**2 * (changes - 1) - 1) / (changes - 2) if changes > 2 else np.nan

    return found


def of_long(number: Number) -> Number:
    """Return the number of courses of twice LONG steps or more, whose later half is beyond LONG; NaN of others."""
    return lambda course: number(course) if course.index.max() >= 2 * LONG else np.nan


def _ends(line: Line, *, top: bool) -> list[Prediction]:
    """Return the predictions about which value of the setting ends sharper and less compressed."""
    less, compression = ("lower", "stronger") if line.side == "below" else ("higher", "weaker")
    rows: list[tuple[str, str, str, PredictionKind, str]] = [
        ("sharpness", SHARP, f"{less} sharpness", "claim", ""),
        ("volume", VOLUME, f"{compression} compression of volume", "claim", ""),
        ("mls", "mls", f"{compression} compression: {less} MLS", "claim", ""),
        ("nmls", "nmls", f"{compression} compression: {less} NMLS", "reading", NETWORKS_OWN),
    ]
    if top:
        told = f"{compression} compression of the volume of the three largest eigenvalues"
        rows.append(("volume_of_top_3", _CODED, told, "reading", VOLUME_IN_CODE))
    return [
        Prediction(
            f"{line.name}.{name}", f"{line.larger} lead to {told}.", f"compression {line.figure}", line.trend(column),
            line.side, kind="reading" if line.reason else kind, quote=line.quote,
            reason=f"{line.reason} {reason}".strip(),
        )
        for name, column, told, kind, reason in rows
    ]  # fmt: skip


def vgg_predictions() -> tuple[Prediction, ...]:
    """Return the predictions of X1."""
    return (*(row for line in (FIG_1, FIG_2) for row in (*_ends(line, top=False), *_vgg(line))), *_batch_32())


_FOLLOWS = "The sentence says that both decrease; that they do so in the same steps is asked for here."


def _vgg(line: Line) -> list[Prediction]:
    over, late = f"{line.over}, once the loss is minimised", LATE
    trends = (
        "All these results were consistent across multiple learning rates"
        if line is FIG_1
        else "The same broadly consistent trends emerged, linking a decrease in the sharpness to a compression in the "
        "representation volume"
    )
    when = "when the network reaches the interpolation regime, and the sharpness decreases, so does the volume"
    lowers: list[tuple[str, str, Number, str]] = [
        ("sharpness", "sharpness decreases", log_gain(SHARP), when if line is FIG_1 else trends),
        ("volume", "volume decreases", gain(VOLUME), when if line is FIG_1 else trends),
        ("mls", "MLS decreases", log_gain("mls"), "Similarly, the MLS decreases." if line is FIG_1 else trends),
    ]
    rows = [
        Prediction(
            f"{line.name}.{name}_follows_sharpness", f"{over}, {told}.", f"compression {source}",
            line.following(name, column, late),
            kind="claim" if headline else "reading", quote=quote, headline=headline,
            reason="" if headline else _FOLLOWS,
        )
        for name, column, told, source, quote, headline in (
            (
                "volume", VOLUME, "sharpness and volume decrease together", f"abstract, {line.figure}",
                "in the final phase of learning in deep neural networks, the compression of the manifold of neural "
                "representations correlates with the flatness of the loss" if line is FIG_1
                else "sharpness and volumes decrease together", line is FIG_1,
            ),
            (
                "mls", "mls", "MLS follows sharpness", "section 4.1",
                "Similarly, the MLS decreases." if line is FIG_1 else trends, False,
            ),
        )
    ]  # fmt: skip
    rows += [
        Prediction(
            f"{line.name}.{name}_decreases", f"{over}, {told}.", "compression section 4.1",
            line.mean(f"log(last / first) of {name}" if name != "volume" else "gain of log volume", number, late),
            "below", kind="claim", quote=quote,
        )
        for name, told, number, quote in lowers
    ]  # fmt: skip
    return [
        *rows,
        Prediction(
            f"{line.name}.dimension", f"{line.over}: local dimension decreases as the loss decreases to near 0.",
            "compression section 4.2",
            line.mean("log(last / first) of local_dimension", log_gain("local_dimension")), "below", kind="claim",
            quote="the local dimensionality of the representation decreases as the loss decreases to near 0",
        ),
        Prediction(
            f"{line.name}.dimension_at_onset",
            f"{line.over}: local dimension decreases in the first {ONSET_SHARE:.0%} of training.",
            "compression section 3.2",
            line.mean("log(later / first) of local_dimension", log_gain("local_dimension"), ONSET), "below",
            quote="the local dimensionality decreases rapidly with training onset",
            reason="What share of the training is its onset is not said, and how fast is 'rapidly'; the first tenth is "
            "ours.",
        ),
        Prediction(
            f"{line.name}.dimension_unexplained",
            f"{over}, sharpness tells little of local dimension: r^2 of their changes, less what chance adds, is below "
            f"{WEAK**2:.2g}.",
            "compression section 4.2",
            line.following("local dimension", "local_dimension", late, "below", share=True),
            "below", WEAK**2,
            quote="the local dimensionality exhibits unpredictable behavior that cannot be explained by the sharpness",
            reason=f"No number says how little is 'cannot be explained'; {WEAK:g} is ours. MLS and volume follow "
            "sharpness more closely: X4 compares them.",
        ),
    ]  # fmt: skip


def _batch_32() -> list[Prediction]:
    numbers = {"log(last / first) of sharpness": log_gain(SHARP), "gain of log volume": gain(VOLUME)}
    beyond = {name: of_long(number) for name, number in numbers.items()}
    largest = where(in_course(STUDY, beyond, LATER), lambda networks: networks["batch_size"] == 32)
    quote = (
        "while sharpness stops decreasing after about $50 \\cdot 10^3$ iterations for a batch size of 32, the volume "
        "continues to decrease as learning proceeds"
    )
    return [
        Prediction(
            "batch_32.sharpness_stops",
            f"With batches of 32 sharpness stops decreasing after {LONG:,} steps: over the later half of training it "
            "falls by less than a tenth.",
            "compression section 4.1", mean_of(largest, "log(last / first) of sharpness"), "above", STEADY,
            quote=quote, reason=NO_NUMBER,
        ),
        Prediction(
            "batch_32.volume_continues",
            f"With batches of 32 volume continues to decrease after {LONG:,} steps, over the later half of training.",
            "compression section 4.1", mean_of(largest, "gain of log volume"), "below", kind="claim", quote=quote,
        ),
    ]  # fmt: skip


_CONTINUES = "The volume continues to decrease after the sharpness plateaus, albeit at a much slower rate"
_SLOWER = (
    "The text compares with the time before sharpness plateaus, and says 'much': here it is halves of the steps after "
    "the loss is minimised, and no number."
)


def mlp_predictions() -> tuple[Prediction, ...]:
    """Return the predictions of X2."""
    return tuple(row for line in (FIG_H9, FIG_H8) for row in (*_ends(line, top=True), *_mlp(line)))


def _mlp(line: Line) -> list[Prediction]:
    closely = "MLS/NMLS closely follows the trend of sharpness during the training"
    rows = [
        Prediction(
            f"{line.name}.{name}_follows_sharpness", f"{line.over}: {name.upper()} follows sharpness during training.",
            f"compression {line.figure}",
            line.following(name, name),
            kind="claim", quote=closely,
        )
        for name in ("mls", "nmls")
    ]  # fmt: skip
    rows.append(
        Prediction(
            f"{line.name}.sharpness_plateaus",
            f"{line.over}: over the later half of training sharpness falls by less than a tenth.",
            "compression section 4.1", line.mean("log(last / first) of sharpness", log_gain(SHARP), LATER, "above"),
            "above", STEADY, quote="the sharpness does not noticeably decrease towards the end of the training",
            reason=NO_NUMBER,
        )
    )  # fmt: skip
    quote = _CONTINUES
    volumes: tuple[tuple[str, str, str, PredictionKind, str], ...] = (
        ("volume", VOLUME, "volume", "claim", ""),
        ("volume_of_top_3", _CODED, "the volume of the three largest eigenvalues", "reading", VOLUME_IN_CODE),
    )
    for name, column, told, kind, reason in volumes:
        rows += [
            Prediction(
                f"{line.name}.{name}_continues",
                f"{line.over}: {told} continues to decrease over the later half of training.",
                "compression section 4.1", line.mean(f"gain of {column}", gain(column), LATER), "below",
                kind=kind, quote=quote, reason=reason,
            ),
            Prediction(
                f"{line.name}.{name}_slows",
                f"{line.over}: {told} does so more slowly: once the loss is minimised, it falls less over the later "
                "half of the steps than over the earlier.",
                "compression section 4.1",
                line.mean(f"later less earlier mean gain of {column}", slowing(column), LATE, "above"),
                quote=quote, reason=f"{_SLOWER} {reason}".strip(),
            ),
        ]  # fmt: skip
    return rows


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
