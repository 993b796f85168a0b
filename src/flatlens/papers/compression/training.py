"""X1 and X2, sharpness and compression through training; X3, the bound from MLS to sharpness at several lengths of it.

As in the paper's figures, sharpness is sqrt(S) and volume is its logarithm. The volume of the three largest eigenvalues
and the logarithm of the dimension, which the authors' code draws, have names of their own. X3 has the steps of the
bound at the first layer, A <= B <= C <= D of Eq. 48.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.experiments.quantities import SHARPNESS, Quantity, in_words
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import MLP, Architecture, LeNet5, SmallVGG
from flatlens.papers.contrasts import OfCounts, mean_of, of_each_case
from flatlens.papers.evidence import (
    Evidence,
    Number,
    Table,
    Trajectories,
    along,
    between,
    by_line,
    correlated_changes,
    gain,
    histories,
    in_trajectory,
    labelled,
    log_gain,
    numbers_of,
    once_below,
    reached,
    up_to_below,
    weighed,
    where,
)
from flatlens.papers.experiment import ON_PAPERS_DATA, Plot, Results, Scale, Side, deferred, tested
from flatlens.papers.figures import BANDS, banded, followed_curves
from flatlens.statistics import Statistic, pearson, spearman
from flatlens.statistics.correlations import CoefficientName
from flatlens.statistics.statistic import Array, Retained
from flatlens.training import SGD, Training

FIXED_LR, FIXED_BATCH = 0.1, 20
SQUARED = partial(Training, SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error")
"""Training under the half squared error, to its end."""
INTERPOLATES = 0.01
"""Loss below which a network counts as interpolating, where the paper says "after the loss is minimized"."""
LOG_VOLUME = Quantity("log volume", "log_volume")
TOP_THREE = Quantity("log volume, 3 largest eigenvalues (code)", "log_volume(top_k=3)")
"""Volume in the form in which the authors' figures show it."""


def vgg(scale: Scale) -> tuple[DataSettings, Architecture]:
    """Return the paper's small VGG and its data, two classes of images."""
    if scale in ON_PAPERS_DATA:
        return DataSettings("cifar10", test=tested(scale), classes=(0, 1)), SmallVGG(classes=2)
    return DataSettings("patches", train=600 if scale == "laptop" else 30), SmallVGG(classes=2)


def mlp(scale: Scale) -> tuple[DataSettings, Architecture]:
    """Return four dense layers and their data, images as rows."""
    if scale in ON_PAPERS_DATA:
        return DataSettings("fashion_mnist", test=tested(scale), flat=True), MLP(784, (784, 784, 784), 10)
    train, width = (600, 64) if scale == "laptop" else (100, 16)
    return DataSettings("digits", train=train), MLP(64, (width, width, width), 10)


def lenet(scale: Scale) -> tuple[DataSettings, Architecture]:
    """Return LeNet5 and its data."""
    if scale in ON_PAPERS_DATA:
        return DataSettings("cifar10", test=tested(scale)), LeNet5()
    return DataSettings("patches", train=600 if scale == "laptop" else 30), LeNet5(classes=2)


def samples(data: DataSettings) -> int:
    """Return the number of training samples that are measured."""
    return min(100, data.train or 100)


def top_three(model: Architecture) -> tuple[Quantity, ...]:
    """Return the volume of the three largest eigenvalues; nothing for two outputs, where it equals the volume."""
    return (TOP_THREE,) if getattr(model, "classes", None) != 2 else ()


STUDY = "training"
LONG = 50_000
"""Steps after which the sharpness stops decreasing in the paper: a shorter training cannot show it."""
LATE, ONSET, LATER = once_below(INTERPOLATES), between(0, 0.1), between(0.5, 1)
ALL_RIGHT = once_below(0.0025)
"""From where on none of 100 samples can be misclassified: one of them alone would have a half squared error of 0.25."""
AFTER_FIRST_LOOK = between(1e-9, 1)  #: without the start
TO_INTERPOLATION = up_to_below(INTERPOLATES)
SHARP, VOLUME, CODED = SHARPNESS.column, LOG_VOLUME.column, TOP_THREE.column
_IN_TRAINING = (
    Quantity("training loss", "loss"),
    Quantity("NMLS", "nmls"),
    SHARPNESS,
    LOG_VOLUME,
    Quantity("MLS", "mls"),
    Quantity("local dimension", "local_dimension"),
    Quantity("log local dimension (code)", "local_dimension", "log"),
)
"""The quantities of Fig. 1, from left to right; the last one a second time, as the authors' code draws it."""


def _x1(scale: Scale) -> Mapping[str, Study]:
    sizes = {"smoke": (30, 15, 1), "laptop": (2000, 100, 7), "desk": (20_000, 1000, 10), "paper": (100_000, 1000, 8)}
    return _through_training(*vgg(scale), *sizes[scale])


def _x2(scale: Scale) -> Mapping[str, Study]:
    sizes = {"smoke": (40, 20, 1), "laptop": (10_000, 400, 10), "desk": (16_000, 800, 10), "paper": (100_000, 1000, 8)}
    return _through_training(*mlp(scale), *sizes[scale])


def _through_training(data: DataSettings, model: Architecture, steps: int, every: int, seeds: int) -> dict[str, Study]:
    """Return one study for both figures: they share the networks at the fixed learning rate and batch size."""
    looks = 10 if data.train else steps // 4  # all images of a set take as long as many steps
    training = SQUARED(max_steps=steps, check_every=looks)
    shown = tuple(dict.fromkeys(q.column for q in (*_IN_TRAINING, *top_three(model))))
    measures = (*shown, "generalisation_gap", "test_accuracy", "accuracy")
    followed = Followed(shown, every, samples(data))
    base = NetworkSettings(data, model, training, measures, samples=samples(data), followed=followed)
    pairs = [(lr, FIXED_BATCH) for lr in (0.05, 0.1, 0.2)] + [(FIXED_LR, batch) for batch in (8, 32)]
    axes = (Axis("lr+batch_size", tuple(pairs)), Axis("seed", tuple(range(seeds))))
    return {STUDY: Study("through training", base, axes)}


def in_figure(table: Table, setting: str) -> Table:
    """Return the networks of a table that differ in one setting, "lr" or "batch_size", alone."""
    held, value = ("batch_size", FIXED_BATCH) if setting == "lr" else ("lr", FIXED_LR)
    return where(table, f"{held} == {value}")


def trend(setting: str, column: str) -> Evidence:
    """Return the mean over seeds of Kendall's tau-b of the setting and a column at the end of training."""
    return along(in_figure(reached(STUDY), setting), setting, column, ["seed"])


def mean_at_each(
    setting: str, name: str, number: Number, trajectories: Trajectories = histories, side: Side = "below"
) -> Evidence:
    """Return the mean of a number of the networks' trajectories, at each value of the setting."""
    return _at_each(setting, in_trajectory(STUDY, {name: number}, trajectories), name, None, side)


def following(
    setting: str,
    name: str,
    column: str,
    trajectories: Trajectories = histories,
    side: Side = "above",
    *,
    share: bool = False,
    levels: bool = False,
) -> Evidence:
    """Return the mean r of the changes of sharpness and a column at each value of the setting, as in `follows`.

    That of ranks has to agree. `levels`: of their logarithms at the steps in place of the changes between them.
    """
    said = f"{'r^2' if share else 'Pearson r'} of the changes of sharpness and {name} between steps"
    numbers = {said: follows(column, share=share), "of ranks": follows(column, "spearman", share=share)}
    if levels:
        said = f"Pearson r of log sharpness and log {name} over the steps"
        numbers = {said: along_with(column), "of ranks": along_with(column, "spearman")}
    return _at_each(setting, in_trajectory(STUDY, numbers, trajectories), said, "of ranks", side)


def of_mean_curves(
    setting: str, name: str, column: str, trajectories: Trajectories = histories, *, levels: bool = False
) -> Evidence:
    """Return r of the changes of the mean curves of sharpness and a column between steps, at each value of the setting.

    As the authors' code draws them: means over the networks, and no logarithms (volumes are that). That of ranks has to
    agree. `levels`: of their values at the steps in place of the changes between them.
    """
    said = f"Pearson r of the changes of the mean curves of sharpness and {name} between steps"
    if levels:
        said = f"Pearson r of the mean curves of sharpness and {name} over the steps"

    def over_steps(line: Table) -> Evidence:
        def weigh(results: Results) -> Statistic:
            networks, known = line(results), trajectories(results[STUDY])
            curves = np.array([[SHARPNESS.of(known[key]), known[key][column]] for key in networks["key"]])
            curves = curves if levels else np.diff(curves)
            once = np.ones((1, curves.shape[2]))

            def r(coefficient: OfCounts, counts: Array) -> Array:
                sums = np.tensordot(counts, curves, 1)  # shape (B, 2, steps); r is that of means
                return np.array([coefficient(x, y, once)[0] for x, y in sums])

            return weighed(said, partial(r, pearson), Retained(networks, ()), fisher=True, ranks=partial(r, spearman))

        return weigh

    return of_each_case(by_line(in_figure(reached(STUDY), setting), setting), over_steps, said)


def _at_each(setting: str, table: Table, name: str, ranks: str | None, side: Side) -> Evidence:
    """Return the mean of a column at each value of the setting; all have to be on the side."""
    lines = by_line(in_figure(table, setting), setting)
    return of_each_case(lines, lambda case: mean_of(case, name, ranks), name, side=side)


@deferred
def follows(
    trajectory: pd.DataFrame, column: str, coefficient: CoefficientName = "pearson", *, share: bool = False
) -> float:
    """Return the correlation of the changes between steps of a column and of sharpness, as in the figures its root.

    `share`: return r^2, less what chance adds: of unrelated columns its mean is 0.
    """
    of = correlated_changes(SHARPNESS.name, column, coefficient)
    both = trajectory.assign(**{SHARPNESS.name: SHARPNESS.of(trajectory)})
    r = of(both)
    if not share:
        return r
    changes = len(both.reindex(columns=[SHARPNESS.name, column]).dropna()) - 1
    return (r**2 * (changes - 1) - 1) / (changes - 2) if changes > 2 else np.nan


@deferred
def along_with(trajectory: pd.DataFrame, column: str, coefficient: CoefficientName = "pearson") -> float:
    """Return the correlation over the steps of the logarithms of a column (volumes are that) and of sharpness."""
    other = trajectory[column] if column in (VOLUME, CODED) else np.log(trajectory[column])
    return float(np.log(trajectory[SHARPNESS.column]).corr(other, method=coefficient))


def of_long(number: Number) -> Number:
    """Return the number of trajectories of twice LONG steps or more, whose later half is beyond LONG; NaN of others."""
    return lambda trajectory: number(trajectory) if trajectory.index.max() >= 2 * LONG else np.nan


_BEYOND = {"log(last / first) of sharpness": of_long(log_gain(SHARP)), "gain of log volume": of_long(gain(VOLUME))}
batch_32 = where(in_trajectory(STUDY, _BEYOND, LATER), "batch_size == 32")


@deferred
def _by_setting(results: Results, figures: Mapping[str, str]) -> list[Plot]:
    """Return the figures over each setting: one panel per quantity over the steps, one curve per value."""
    result = results[STUDY]
    measured = set(result.histories["measure"])
    shown = [q for q in (*_IN_TRAINING, TOP_THREE) if q.column in measured]
    return [
        followed_curves(
            result, in_figure(reached(STUDY), setting)(results), setting, shown, f"through_training_{setting}",
            f"{figure}: through training, by {in_words(setting)}",
            "batch size 20" if setting == "lr" else "learning rate 0.1",
        )
        for setting, figure in figures.items()
    ]  # fmt: skip


_x1_plots = _by_setting({"lr": "Fig. 1", "batch_size": "Fig. 2"})
_x2_plots = _by_setting({"batch_size": "Fig. H.8", "lr": "Fig. H.9"})


# ---- X3: how tight each step of the bound is

CHAIN = {
    "A": "mls_chain.A_B.lhs[fc1]",
    "B": "mls_chain.B_C.lhs[fc1]",
    "C": "mls_chain.C_D.lhs[fc1]",
    "D": "mls_chain.C_D.rhs[fc1]",
}
VARIATION_SIDES = ("mls_chain.B_C.variation.rhs[fc1]", "mls_chain.B_C.variation.lhs[fc1]")
"""||W|| times root mean square and mean over the samples of ||df/dW||_F / ||x||: they differ where it varies."""


def _x3(scale: Scale) -> Mapping[str, Study]:
    steps = {
        "smoke": (1, 40),
        "laptop": (1, 30, 100, 300, 1000, 3000, 10_000),
        "desk": (1, 100, 1000, 10_000, 30_000),
        "paper": (1, 100, 1000, 10_000, 100_000),
    }[scale]
    data, model = mlp(scale)
    looks = 10_000 if scale in ON_PAPERS_DATA else 10  # all images of a set take as long as many steps
    training = SQUARED(max_steps=1, check_every=looks)
    base = NetworkSettings(data, model, training, ("mls", "loss"), ("mls_chain",), samples=samples(data))
    seeds = {"smoke": 2, "laptop": 10, "desk": 10, "paper": 8}[scale]
    return {"tightness": Study("tightness", base, (Axis("max_steps", steps), Axis("seed", tuple(range(seeds)))))}


def chain_steps(results: Results) -> pd.DataFrame:
    """Return the networks with how much wider and looser the chain's last step is than the other two, and `holds`.

    `wide` compares differences, `twofold` and `tenfold` with two and ten times the others, `loose` logarithms of
    ratios; `holds` is 1 where no step decreases by more than rounding. With `log C/B`, and how much
    ||df/dW||_F / ||x|| varies over the samples, as `log(rms / mean)` and as `log CV`.
    """
    networks = reached("tightness")(results)
    a, b, c, d = (networks[column] for column in CHAIN.values())
    rounded = 1 + 1e-9
    holds = (a <= b * rounded) & (b <= c * rounded) & (c <= d * rounded)
    others = np.maximum(b - a, c - b)
    return networks.assign(
        **variation(networks),
        wide=(d - c) - others,
        twofold=(d - c) - 2 * others,
        tenfold=(d - c) - 10 * others,
        loose=np.log(d / c) - np.maximum(np.log(b / a), np.log(c / b)),
        holds=holds.astype(float),
    )


def variation(networks: pd.DataFrame, first: str = "fc1") -> dict[str, pd.Series]:
    """Return log C/B of the chain at the first layer, and how much ||df/dW||_F / ||x|| varies over the samples."""
    columns = [column.replace("fc1", first) for column in (CHAIN["B"], CHAIN["C"], *VARIATION_SIDES)]
    b, c, rms, mean = (numbers_of(networks, columns)[column] for column in columns)
    varies = (rms / mean).map(np.log)
    return {"log C/B": (c / b).map(np.log), "log(rms / mean)": varies, "log CV": log_cv(varies)}


def over_runs(number: Callable[[pd.DataFrame, CoefficientName], float], name: str) -> Evidence:
    """Return the mean over runs of a number of the logarithms of all columns, in the order of the steps of training.

    A run is the networks of one seed: they differ in the number of steps alone. The number's own of ranks has to agree.
    """

    def runs(results: Results) -> pd.DataFrame:
        networks = reached("tightness")(results)
        logs = networks[[*CHAIN.values(), *VARIATION_SIDES]].astype(float).apply(np.log)
        logs = logs.assign(seed=networks["seed"], steps=networks["max_steps"])
        found = [
            (seed, number(ordered, "pearson"), number(ordered, "spearman"))
            for seed, run in logs.groupby("seed")
            for ordered in [run.sort_values("steps")]
        ]
        return labelled(pd.DataFrame(found, columns=["seed", name, "of ranks"]), ["seed"], "run")

    return mean_of(runs, name, "of ranks")


def with_mls(run: pd.DataFrame, coefficient: CoefficientName, bound: str = "C") -> float:
    """Return the correlation of the changes of A and a bound of it between numbers of steps."""
    return correlated_changes(CHAIN["A"], CHAIN[bound], coefficient)(run)


def more_indicative(run: pd.DataFrame, coefficient: CoefficientName, *, size: bool = False) -> float:
    """Return Fisher's z of the changes of A and C between numbers of steps, less that of A and D.

    Of ranks the difference itself: r = 1 is common there, and its z infinite. `size`: compare |z|.
    """
    c, d = (with_mls(run, coefficient, other) for other in ("C", "D"))
    if size:
        c, d = abs(c), abs(d)
    if coefficient != "pearson":
        return c - d
    return float(np.diff(np.arctanh(np.clip([d, c], -1 + 1e-9, 1 - 1e-9)))[0])


def log_cv(log_ratio: pd.Series) -> pd.Series:
    """Return the log of the coefficient of variation, from log(root mean square / mean): their ratio^2 is 1 + CV^2."""
    found: pd.Series = np.log(np.expm1(2 * log_ratio)) / 2
    return found


def with_variation(
    run: pd.DataFrame, coefficient: CoefficientName, *, cv: bool = False, steps: str = "steps > 0"
) -> float:
    """Return the correlation over the numbers of steps of log C/B and of how much ||df/dW||_F / ||x|| varies.

    That is log(rms / mean) over the samples; with `cv` it is the log of the coefficient of variation.
    """
    run = run.query(steps)
    loose, varies = run[CHAIN["C"]] - run[CHAIN["B"]], run[VARIATION_SIDES[0]] - run[VARIATION_SIDES[1]]
    varies = log_cv(varies) if cv else varies
    return float(loose.corr(varies, method=coefficient)) if len(run) > 2 else float("nan")


def _x3_plots(results: Results) -> list[Plot]:
    networks = reached("tightness")(results)
    a, b, c, d = CHAIN.values()
    # the factors between the ends of the chain, one for each condition of G.1 under which a step is an equality
    factors = {
        "B/A by W and J not aligned": networks["mls_chain.A_B.aligned.rhs[fc1]"] / networks[a],
        "B/A by the rank of J": networks[b] / networks["mls_chain.A_B.rank.lhs[fc1]"],
        "C/B by variation over samples": networks[c] / networks[b],
        "D/C by the other weights": networks[d] / networks[c],
    }
    chain = {name: networks[column] for name, column in CHAIN.items()}
    plots = []
    for name, title, said, panel, lines in (
        ("tightness", "Fig. G.4: the steps of the bound", "A <= B <= C <= D of Eq. 48 at the first layer",
         "mean over the samples", chain),
        ("factors", "Appendix G.1: which condition a step misses", "D/A is the product of these factors", "factor",
         factors),
    ):  # fmt: skip
        wide = networks[["seed"]].assign(panel=panel, x=networks["max_steps"], **lines)
        long = wide.melt(["panel", "x", "seed"], list(lines), "line", "y")
        plots.append(banded(long, name, title, f"{said}. {BANDS}.", "step", log_x=True))
    return plots
