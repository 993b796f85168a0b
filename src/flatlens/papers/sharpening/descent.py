"""X6, X10 and X11: sharpness and Jacobian norm through training, by label smoothing and by the scale of the inputs.

X6 has progressive sharpening under label smoothing, by full-batch gradient descent. With it Theorem 5.1's lower bound
on the Jacobian norm in the course of training, which needs a sample that covers the support of a known law: cubes,
whose support is convex (a network of its own for each number of steps, from the same start, is the same training). And
the end of section 5, for which the paper cites Cohen et al. (2021) and shows no experiment: wide networks sharpen less,
and linear models not at all while their Jacobian grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.data.synthetic import RECIPES
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.result import StudyResult
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.experiments.tables import kinds_of
from flatlens.models import MLP, Activation, Architecture
from flatlens.papers.contrasts import mean_of, of_each_case
from flatlens.papers.evidence import (
    CASE,
    Evidence,
    Number,
    Table,
    along,
    correlated_changes,
    first,
    gain,
    growth_beyond,
    histories,
    in_trajectory,
    last,
    late,
    log_gain,
    log_rise,
    peak,
    reached,
    rise,
    rise_to_peak,
    trained_in,
    trained_ones,
    until_partner,
    up_to_edge,
    where,
)
from flatlens.papers.experiment import Plot, Results, Scale, Side, deferred, seed_axis, tested
from flatlens.papers.figures import BANDS, banded, followed_curves, trajectory_curves
from flatlens.papers.sharpening.networks import (
    BATCH_SHARPNESS,
    JACOBIAN,
    NARROW_RESNET,
    NARROW_VGG,
    RESNET,
    SOFTMAXED,
    VGG,
    measured_in,
)
from flatlens.statistics.correlations import COEFFICIENTS, CoefficientName
from flatlens.training import SGD, Adam, Training


def rows(scale: Scale) -> tuple[DataSettings, MLP]:
    """Return patches of photographs as rows of numbers, and a fully connected ReLU network on them."""
    train, width = (20, 8) if scale == "smoke" else (300, 64)
    return DataSettings("patches", train=train, test=200, flat=True), MLP(3072, (width, width, width), 2)


SMOOTHING = "label_smoothing"


def smoothings(scale: Scale) -> Axis:
    """Return the axis of B.1's strengths."""
    return Axis(SMOOTHING, (0.0, 0.5) if scale == "smoke" else (0.0, 0.5, 0.75))


def of_smoothing(table: Table, smoothed: bool, *, fastest: bool = False) -> Table:
    """Return the networks with label smoothing, or those without; with `fastest`, only at the largest learning rate."""

    def chosen(networks: pd.DataFrame) -> pd.Series:
        rows = (networks[SMOOTHING] > 0) == smoothed
        return rows & (networks["lr"] == trained_ones(networks)[0]["lr"].max()) if fastest else rows

    return where(table, chosen)


# ---- X6

LAWS_OF_INPUTS = ("interval", "square")
BOUND, NORM = (str(Column.parse("jacobian_growth").of_side(side)) for side in ("lhs", "rhs"))
"""Columns of the lower bound and of the Jacobian norm."""


def bound_studies(scale: Scale) -> dict[str, Study]:
    """Return one study per law of the inputs: networks by the number of steps of their training."""
    samples, seeds = {"smoke": (60, 4), "desk": (300, 12)}.get(scale, (300, 8))
    most = (1, 10, 30, 100, 300, 1000, 3000)
    steps = {"smoke": (1, 100), "paper": most}.get(scale, most[:-1])
    training = Training(Adam(0.003), batch_size=64, loss="mse", max_steps=1, check_every=1000)
    studies = {}
    for law in LAWS_OF_INPUTS:
        data = DataSettings(f"waves_{law}", train=samples, test=100)
        base = NetworkSettings(
            data,
            MLP(1 + LAWS_OF_INPUTS.index(law), (32,), 1, "tanh"),
            training,
            ("jacobian_norm", "sharpness", "loss", "generalisation_gap"),
            bounds=("jacobian_growth",),
        )
        shown = (GAP, Quantity("training loss", "loss"), Quantity("Jacobian norm", NORM), Quantity("bound", BOUND))
        axes = (Axis("max_steps", steps), seed_axis(seeds))
        studies[f"bound_{law}"] = Study(f"Theorem 5.1 on {RECIPES[law]}", base, axes, shown, scale=scale)
    return studies


@deferred
def on_law(results: Results, law: str) -> pd.DataFrame:
    """Return the networks on a law, with `law` and `holds`: 1 if the bound is at most the Jacobian norm, else 0."""
    networks = reached(f"bound_{law}")(results)
    return networks.assign(law=law, holds=(networks[BOUND] <= networks[NORM]).astype(float))


def of_laws(results: Results) -> pd.DataFrame:
    """Return the networks on both laws."""
    return pd.concat([on_law(law)(results) for law in LAWS_OF_INPUTS], ignore_index=True)


def bound_plot(results: Results) -> Plot:
    """Return the bound and the Jacobian norm over the steps of training."""
    table = of_laws(results)
    long = table.melt(["law", "max_steps"], [BOUND, NORM], "line", "y")
    long["line"] = long["line"].map({BOUND: "lower bound", NORM: "Jacobian norm"})
    long["panel"] = long["law"].map(RECIPES)
    caption = f"{BANDS}. Below 0 the bound says nothing. The paper has no such figure."
    rows = long.rename(columns={"max_steps": "x"})
    return banded(rows, "bound", "Theorem 5.1 through training", caption, "steps", log_x=True)


_SHOWN = (Quantity("training loss", "loss"), BATCH_SHARPNESS, SOFTMAXED)
WIDTH = "width"


def width_studies(scale: Scale) -> dict[str, Study]:
    """Return networks of three hidden layers by their width, and linear models at a learning rate that suits them."""
    data, model = rows("smoke" if scale == "smoke" else "laptop")
    widths, steps, every, seeds = {
        "smoke": ((4, 8), 20, 20, 4),
        "laptop": ((16, 48, 144), 400, 80, 8),
        "desk": ((16, 48, 144), 400, 40, 12),
        "paper": ((16, 64, 256, 1024), 400, 20, 8),
    }[scale]
    followed = tuple(q.column for q in _SHOWN)
    training = Training(SGD(0.02), max_steps=steps)
    base = NetworkSettings(
        data, model, training, (*followed, "accuracy", "generalisation_gap"), followed=Followed(followed, every)
    )
    seed = Axis("seed", tuple(range(seeds)))
    wide = Axis("model.widths", tuple((width,) * 3 for width in widths))
    linear = replace(base, model=replace(model, widths=()), training=replace(training, optimiser=SGD(0.001)))
    shown = (GAP, *_SHOWN)
    return {
        "width": Study("full-batch gradient descent, by width", base, (wide, seed), shown, scale=scale),
        "linear": Study("full-batch gradient descent, linear models", linear, (seed,), shown, scale=scale),
    }


@deferred
def with_width(results: Results, table: Table) -> pd.DataFrame:
    """Return the networks with a column `width`: the size of the first hidden layer."""
    networks = table(results)
    sizes = networks["model.widths"].astype(str).str.extract(r"(\d+)", expand=False)
    return networks.assign(**{WIDTH: sizes.astype(int)})


def width_plots(results: Results) -> list[Plot]:
    """Return the curves of networks by their width, and of linear models."""
    plots = []
    for study, title, said in (
        ("width", "Section 5: networks by their width", "Learning rate 0.02."),
        ("linear", "Section 5: linear models", "Learning rate 0.001."),
    ):
        caption = f"Full-batch gradient descent. {BANDS}. {said} The paper has no such figure."
        networks = reached(study)(results)
        lines = with_width(reached(study))(results) if study == "width" else networks.assign(**{WIDTH: "linear"})
        known = histories(results[study])
        plots.append(trajectory_curves(lines, known, WIDTH, _SHOWN, f"by_{study}", title, caption))
    return plots


_EXCESS = Quantity("loss less label entropy", "loss(excess=True)")

_ALIKE = ("model", "lr", "seed")
FITTED = until_partner(SMOOTHING, "accuracy", 0.99, _ALIKE)


def _x6(scale: Scale) -> Mapping[str, Study]:
    data, model = rows(scale)
    models: tuple[Architecture, ...] = (model,)
    # smaller learning rates take more steps to the same time, lr times steps, and look as often in this time
    paces: tuple[tuple[float, int, int], ...] = {
        "smoke": ((0.08, 60, 5),),
        "laptop": ((0.08, 150, 5), (0.04, 300, 10), (0.02, 600, 20)),
        "desk": ((0.08, 120, 10),),
        "paper": ((0.08, 1000, 5), (0.04, 2000, 10), (0.02, 4000, 20)),
    }[scale]
    seeds, samples, ghosts = {
        "smoke": (4, None, None),
        "laptop": (8, None, None),
        "desk": (10, 200, None),
        "paper": (5, 2500, 5000),
    }[scale]
    if scale == "desk":
        data = DataSettings("cifar10", train=500, test=1000, standardise="component")
        models = (NARROW_VGG, replace(NARROW_VGG, batchnorm=False), NARROW_RESNET)
    if scale == "paper":
        data, models = DataSettings("cifar10", standardise="component"), (VGG, RESNET)
    # followed through training: with the accuracy, which tells where a network has fitted
    shown = (_EXCESS, BATCH_SHARPNESS, SOFTMAXED)
    followed = (*(q.column for q in shown), "accuracy")
    training = Training(SGD(0.08), ghost_batch=ghosts, max_steps=1)
    base = NetworkSettings(
        data,
        models[0],
        training,
        (*followed, "generalisation_gap"),
        samples=samples,
        followed=Followed(followed, 5, samples),
    )
    axes = (
        Axis("model", models),
        Axis("lr+max_steps+every", paces),
        smoothings(scale),
        Axis("seed", tuple(range(seeds))),
    )
    descent = Study("full-batch gradient descent", base, axes, (GAP, *shown), scale=scale)
    studies = {"descent": descent}
    if scale == "desk":  # VGG-11 at the two smaller learning rates, on fewer images: two and four times the steps
        base = replace(base, data=DataSettings("cifar10", train=200, test=1000, standardise="component"))
        axes = (
            Axis("model", (NARROW_VGG,)),
            Axis("lr+max_steps+every", ((0.04, 240, 20), (0.02, 480, 40))),
            Axis(SMOOTHING, (0.0, 0.75)),
            Axis("seed", tuple(range(6))),
        )
        name = f"{descent.name}, smaller learning rates"
        studies["slower"] = replace(descent, name=name, base=base, axes=axes)
    return {**studies, **width_studies(scale), **bound_studies(scale)}


@deferred
def by_figure(results: Results, table: Table) -> pd.DataFrame:
    """Return the networks with the figure as their case: a network at a learning rate; without figures of no curve."""
    networks = table(results)
    lrs = networks["lr"].astype(str)
    kinds = kinds_of(networks).astype(str)
    cases = networks.assign(**{CASE: lrs.where(kinds == "", kinds + ", " + lrs)})
    shown, _ = trained_ones(cases)
    return cases[cases[CASE].isin(set(shown[CASE]))]


def in_each_line(table: Table, column: str, ranks: str | None = None, side: Side = "above") -> Evidence:
    """Return the mean of a column, as in `mean_of`, in each line of a figure: at each degree of smoothing."""

    def lines(results: Results) -> pd.DataFrame:
        networks = by_figure(table)(results)
        return networks.assign(**{CASE: networks[CASE] + ", smoothing " + networks[SMOOTHING].astype(str)})

    name = f"{column}, in each line of a figure"
    return of_each_case(lines, lambda line: mean_of(line, column, ranks), name, side=side)


def in_all_figures(table: Table, rise: str, along_what: str = SMOOTHING, side: Side = "below") -> Evidence:
    """Return Kendall's tau of the smoothing, or of another column, and a rise for each figure."""
    name = f"Kendall tau-b of {along_what} and {rise} in each figure"
    return of_each_case(by_figure(table), lambda case: along(case, along_what, rise, _ALIKE), name, side=side)


def moved_alike(x: str, y: str, direction: int) -> Number:
    """Return the share of steps in which y moves up (direction 1) or down (-1), of those in which x does; or NaN."""

    def share(trajectory: pd.DataFrame) -> float:
        of_x, of_y = direction * np.diff(trajectory[[x, y]].dropna().to_numpy(dtype=float), axis=0).T
        return float((of_y[of_x > 0] > 0).mean()) if (of_x > 0).any() else np.nan

    return share


def correlated_values(x: str, y: str, coefficient: CoefficientName = "pearson") -> Number:
    """Return the correlation of the values of two columns over the measured steps; NaN for fewer than four."""

    def correlation(trajectory: pd.DataFrame) -> float:
        values = trajectory[[x, y]].dropna().to_numpy(dtype=float)
        once = np.ones((1, len(values)))
        return float(COEFFICIENTS[coefficient](values[:, 0], values[:, 1], once)[0]) if len(values) > 3 else np.nan

    return correlation


_SHARP, _SOFTMAXED = _CHANGES = BATCH_SHARPNESS.column, SOFTMAXED.column
_DESCENTS = ("descent", "slower")
_RISES = {"rise of sharpness": rise(_SHARP), "rise of the Jacobian norm": rise(_SOFTMAXED)}
_PEAKS = {
    "rise to the peak of sharpness": rise_to_peak(_SHARP),
    "rise to the peak of the Jacobian norm": rise_to_peak(_SOFTMAXED),
}
_RATIOS = {"log rise of sharpness": log_rise(_SHARP), "log rise of the Jacobian norm": log_rise(_SOFTMAXED)}
_ENDS = {"rise to the end of sharpness": gain(_SHARP), "rise to the end of the Jacobian norm": gain(_SOFTMAXED)}
_TOGETHER = {
    "r of the changes of sharpness and Jacobian norm": correlated_changes(*_CHANGES),
    "of ranks": correlated_changes(*_CHANGES, "spearman"),
}
_OF_VALUES = {
    "r of the values of sharpness and Jacobian norm": correlated_values(*_CHANGES),
    "of ranks of the values": correlated_values(*_CHANGES, "spearman"),
    "share of the Jacobian norm's rises in which sharpness rises": moved_alike(_SOFTMAXED, _SHARP, 1),
    "share of the sharpness's falls in which the Jacobian norm falls": moved_alike(_SHARP, _SOFTMAXED, -1),
}
_NUMBERS = {
    **_PEAKS,
    **_RATIOS,
    **_ENDS,
    **_TOGETHER,
    **_OF_VALUES,
    **{f"{name} up to 2/lr": up_to_edge(number, _SHARP, "edge") for name, number in _OF_VALUES.items()},
    "sharpness / (2/lr), largest": peak(_SHARP, "edge"),
    "sharpness / (2/lr), later half": late(_SHARP, "edge"),
    **_RISES,
    "r of the two changes up to 2/lr": up_to_edge(correlated_changes(*_CHANGES), _SHARP, "edge"),
    "of ranks up to 2/lr": up_to_edge(correlated_changes(*_CHANGES, "spearman"), _SHARP, "edge"),
    "growth of the Jacobian norm beyond 2/lr": growth_beyond(_SOFTMAXED, _SHARP, "edge"),
    "growth of sharpness beyond 2/lr": growth_beyond(_SHARP, _SHARP, "edge"),
    "growth of the loss beyond 2/lr": growth_beyond(_EXCESS.column, _SHARP, "edge"),
}


def descents(results: Results) -> pd.DataFrame:
    """Return the networks of gradient descent at every learning rate, with the numbers of their trajectories."""
    return _descents(tuple((name, results[name]) for name in _DESCENTS if name in results))


@lru_cache(4)  # most rows of X6 read this table
def _descents(studies: tuple[tuple[str, StudyResult], ...]) -> pd.DataFrame:
    why = "the network without label smoothing never reached 99% accuracy"
    return _joined(dict(studies), lambda study: in_trajectory(study, _NUMBERS, FITTED, without=why))


def _joined(results: Results, table_of: Callable[[str], Table]) -> pd.DataFrame:
    """Return the table of both studies; that of the smaller learning rates names no model, as all are VGG-11s."""
    parts = [table_of(name)(results) for name in _DESCENTS if name in results]
    named = [part if "model" in part else part.assign(model=str(NARROW_VGG)) for part in parts]
    return pd.concat(named, ignore_index=True)


def of_lowered_loss(results: Results) -> pd.DataFrame:
    """Return all networks of gradient descent that lower their loss: up to 99% accuracy, or to the end without it."""
    change = "change of the loss"
    numbers = {**_RISES, change: lambda one: last(_EXCESS.column)(one) - first(_EXCESS.column)(one)}
    networks = _joined(
        results, lambda study: in_trajectory(study, numbers, lambda result: {**histories(result), **FITTED(result)})
    )
    return networks[networks[change] < 0].reset_index(drop=True)


fastest = of_smoothing(descents, False, fastest=True)
by_width = with_width(in_trajectory("width", {**_RISES, **_PEAKS, **_RATIOS}))
linear = in_trajectory("linear", _RISES)


def descent_plots(results: Results) -> list[Plot]:
    """Return the curves of Fig. 1 and 6 to 11: one figure a network and learning rate."""
    trajectories = {key: one for name in _DESCENTS if name in results for key, one in FITTED(results[name]).items()}
    networks, _ = trained_ones(descents(results))
    kinds = kinds_of(networks)
    by_lr = {0.08: ("Fig. 1, 6", "Fig. 9"), 0.04: ("Fig. 7", "Fig. 10"), 0.02: ("Fig. 8", "Fig. 11")}
    plots = []
    for _, same in networks.groupby([kinds, "lr"], sort=False):
        kind, lr = str(kinds[same.index[0]]), float(same["lr"].iloc[0])
        of_vgg, of_resnet = by_lr[lr]
        figures = {"VGG11": of_vgg, "ResNet18": of_resnet}.get(kind.partition(" ")[0], f"{of_vgg} and {of_resnet}")
        plots.append(
            trajectory_curves(
                same,
                trajectories,
                SMOOTHING,
                (_EXCESS, BATCH_SHARPNESS, SOFTMAXED),
                f"{kind.lower().replace(' ', '_')}_lr_{lr:g}".strip("_").replace(".", "_"),
                f"{figures}: {f'{kind}, ' if kind else ''}learning rate {lr:g}",
                f"Until the network without label smoothing has 99% accuracy. {BANDS}; dashed is 2/lr.",
                {BATCH_SHARPNESS.name: ("2/lr", "edge")},
                log_y=(SOFTMAXED.name,),  # the caption of Fig. 1 names this axis alone
            )
        )
    return plots


def _x6_plots(results: Results) -> list[Plot]:
    return [*descent_plots(results), *width_plots(results), bound_plot(results)]


# ---- X10: the link from Jacobian to sharpness through the loss, in the first epoch of SGD and in the whole training

_OUTPUTS = Quantity("output norm", "output_norm")
_FACTORS = "layer_factors(blocks=False)"
_CURVATURE = Quantity("norm of C", f"{_FACTORS}.loss_curvature")
"""||C||, the square root of the loss's second derivative in Eq. 4."""


def _x10(scale: Scale) -> Mapping[str, Study]:
    data, network = {
        "desk": (DataSettings("cifar10", train=2000, test=tested(scale), standardise="channel"), NARROW_VGG),
        "paper": (DataSettings("cifar10", standardise="channel"), VGG),
    }.get(scale, rows(scale))
    if scale == "laptop":
        data = replace(data, train=600)
    lr, batch, often, seldom, epochs, seeds, samples = {
        "smoke": (0.02, 5, 2, 4, 3, 4, None),
        "laptop": (0.02, 5, 5, 120, 30, 8, 300),
        "desk": (0.1, 64, 2, 64, 60, 10, 500),
        "paper": (0.1, 128, 5, 391, 90, 5, 2500),
    }[scale]
    training = Training(SGD(lr), batch_size=batch, max_epochs=1, check_every=100)
    shown = (BATCH_SHARPNESS, SOFTMAXED, _OUTPUTS)
    followed = tuple(q.column for q in shown)
    axes = (smoothings(scale), Axis("seed", tuple(range(seeds))))
    base = NetworkSettings(
        data,
        network,
        training,
        (*followed, "loss", "accuracy", "generalisation_gap"),
        samples=samples,
        followed=Followed(followed, often, samples),
        dtype=measured_in(scale),
    )
    first = Study("the first epoch", base, axes, (GAP, *shown), scale=scale)
    whole = first.setting("max_epochs", epochs).setting("every", seldom)
    with_curvature = replace(whole.base, followed=Followed((*followed, _FACTORS), seldom, samples))
    return {"first_epoch": first, "training": replace(whole, base=with_curvature)}


def _share(column: str, end: Callable[[str], Number] = last) -> Number:
    """Return the last value as a share of the largest: 1 if the column ends there, near 0 if it has collapsed."""
    return lambda trajectory: end(column)(trajectory) / peak(column)(trajectory)


def of_later_half(number: Number) -> Number:
    """Return a number of the later half of the trajectory."""
    return lambda trajectory: number(trajectory.iloc[len(trajectory) // 2 :])


def of_every_second(number: Number) -> Number:
    """Return a number of every second measured step, from the first on."""
    return lambda trajectory: number(trajectory.iloc[::2])


def last_quarter(column: str) -> Number:
    """Return a column's mean over the last quarter of the trajectory."""
    return of_later_half(late(column))


def log_of_halves(column: str) -> Number:
    """Return log(mean over the later half of the trajectory / mean over the earlier half)."""
    return lambda one: float(np.log(late(column)(one) / one[column].iloc[: len(one) // 2].mean()))


_SHARES = {
    f"share of the largest {name}{over}": _share(column, end)
    for name, column in (("sharpness", _SHARP), ("Jacobian norm", _SOFTMAXED), ("norm of C", _CURVATURE.column))
    for over, end in (("", last), (", mean of the last quarter", last_quarter))
}
_BOTH: tuple[tuple[str, CoefficientName], ...] = (("r", "pearson"), ("ranks", "spearman"))
_FALLS = {
    f"{said} of the {read} of output norm and {what}": number
    for what, column in (("norm of C", _CURVATURE.column), ("Jacobian norm", _SOFTMAXED))
    for said, r in _BOTH
    for read, number in (
        ("changes", correlated_changes(_OUTPUTS.column, column, r)),
        ("changes over two looks", correlated_changes(_OUTPUTS.column, column, r, apart=2)),
        ("values", correlated_values(_OUTPUTS.column, column, r)),
    )
}
training = in_trajectory(
    "training",
    {
        **_SHARES,
        "log(last / third quarter) of sharpness": of_later_half(log_of_halves(_SHARP)),
        "log(last / third quarter) of the output norm": of_later_half(log_of_halves(_OUTPUTS.column)),
        "last output norm, mean of the last quarter": last_quarter(_OUTPUTS.column),
        "log(last / middle) of sharpness": of_later_half(log_gain(_SHARP)),
        "rise of the output norm": rise(_OUTPUTS.column),
        "last output norm": last(_OUTPUTS.column),
        "log(last / middle) of the output norm": of_later_half(log_gain(_OUTPUTS.column)),
        **_FALLS,
        **{f"{name}, later half": of_later_half(number) for name, number in _FALLS.items()},
    },
    networks=trained_in,
)
unsmoothed, smoothed = of_smoothing(training, False), of_smoothing(training, True)
fitted, fitted_unsmoothed = (where(table, "accuracy >= 0.99") for table in (training, unsmoothed))
_LONGER = {
    name: number
    for looks, apart in (("two looks", 2), ("three looks", 3))
    for name, number in (
        (f"r of the changes of sharpness and Jacobian norm over {looks}", correlated_changes(*_CHANGES, apart=apart)),
        (f"of ranks over {looks}", correlated_changes(*_CHANGES, "spearman", apart=apart)),
    )
}
_SECOND = {f"{name}, every second look": of_every_second(number) for name, number in _TOGETHER.items()}
first_epoch = in_trajectory(
    "first_epoch", {**_RISES, **_PEAKS, **_RATIOS, **_ENDS, **_TOGETHER, **_LONGER, **_SECOND, **_OF_VALUES}
)


def _x10_plots(results: Results) -> list[Plot]:
    plots = []
    for study, name, title, more in (
        ("first_epoch", "fig28", "Fig. 28: the first epoch, by label smoothing", ()),
        ("training", "fig29", "Fig. 29: the whole training, by label smoothing; and the norm of C", (_CURVATURE,)),
    ):
        shown, networks, known = (BATCH_SHARPNESS, SOFTMAXED, _OUTPUTS, *more), reached(study)(results), results[study]
        plots.append(trajectory_curves(networks, histories(known), SMOOTHING, shown, name, title, f"SGD. {BANDS}."))
    return plots


# ---- X11: the effect of scaling the inputs on Jacobian norm, sharpness and features; Jacobian norms with and without
# softmax, as in the paper's other figures of the Jacobian norm

_FEATURES = ("feature_norm[fc2]", "feature_norm[fc3]")
_OF_SCALES = (
    Quantity("training loss", "loss"),
    JACOBIAN,
    SOFTMAXED,
    Quantity("sharpness", "sharpness"),
    Quantity("norm of the first layer's features", _FEATURES[0]),
    Quantity("norm of the second layer's features", _FEATURES[1]),
)
_ACTIVATIONS: tuple[Activation, ...] = ("relu", "tanh")
_INCREASING = (JACOBIAN.column, SOFTMAXED.column, "sharpness")
NUMBERS = {
    **{f"rise of {column}": rise(column) for column in _INCREASING},
    **{f"rise to the peak of {column}": rise_to_peak(column) for column in _INCREASING},
    **{f"log rise of {column}": log_rise(column) for column in _INCREASING},
    **{f"rise to the end of {column}": gain(column) for column in _INCREASING},
    **{f"last {column}": last(column) for column in _FEATURES},
    **{f"later mean of {column}": late(column) for column in _FEATURES},
    **{f"largest {column}": peak(column) for column in (*_INCREASING, *_FEATURES)},
}
"""Numbers of each network, from its measures followed in training."""


def _x11(scale: Scale) -> Mapping[str, Study]:
    first_5000 = DataSettings(
        "cifar10", train=5000, order="first", standardise="component", statistics="all", scale=1.0, flat=True
    )
    often_at_first = (*range(0, 60, 5), *range(60, 301, 20))  # on digits sharpness is largest in the first steps
    sizes: Mapping[Scale, tuple[DataSettings, MLP, int, int | tuple[int, ...], int]] = {
        "smoke": (DataSettings("digits", train=60, scale=1.0), MLP(64, (20, 20), 10), 40, 20, 2),
        "laptop": (DataSettings("digits", train=600, scale=1.0), MLP(64, (200, 200), 10), 300, often_at_first, 8),
        "desk": (replace(first_5000, test=tested(scale)), MLP(3072, (200, 200), 10), 300, 20, 10),
        "paper": (first_5000, MLP(3072, (200, 200), 10), 300, 10, 5),
    }
    data, model, steps, every, seeds = sizes[scale]
    samples = 1000 if scale == "desk" else None
    measures = ("loss", *_INCREASING, "feature_norm")
    axes = (Axis("scale", (0.5, 1.0, 1.5)), Axis("seed", tuple(range(seeds))))
    training = Training(SGD(0.2), loss="cross_entropy", max_steps=steps, check_every=10)
    studies: dict[str, Study] = {}
    followed = Followed(measures, every, samples)
    for name in _ACTIVATIONS:
        network, measured = replace(model, activation=name), (*measures, "generalisation_gap")
        base = NetworkSettings(data, network, training, measured, samples=samples, followed=followed)
        studies[name] = Study(name, base, axes, (GAP, *_OF_SCALES), scale=scale)
    return studies


def over_scales(study: str, number: str, chosen: str = "scale > 0") -> Evidence:
    """Return the mean over seeds of Kendall's tau-b of the scale of the inputs and a number, over the chosen scales."""
    return along(where(in_trajectory(study, NUMBERS), chosen), "scale", number, ["seed"])


def over_scales_unscaled(study: str, number: str) -> Evidence:
    """Return the same for a number of the Jacobian with respect to the unscaled inputs: times the scale."""
    return along(_times_the_scale(study, number), "scale", number, ["seed"])


@deferred
def _times_the_scale(results: Results, study: str, number: str) -> pd.DataFrame:
    networks = in_trajectory(study, NUMBERS)(results)
    return networks.assign(**{number: networks[number] * networks["scale"]})


def _x11_plots(results: Results) -> list[Plot]:
    held = "gradient descent at a learning rate of 0.2"
    return [
        followed_curves(
            results[study], reached(study)(results), "scale", _OF_SCALES, f"fig{number}",
            f"Fig. {number}: input scaling, {said} networks through training", held,
        )
        for study, number, said in (("relu", 30, "ReLU"), ("tanh", 31, "tanh"))
    ]  # fmt: skip
