"""X9 and X13: gap, sharpness and Jacobian norm under regularisers, by their strengths.

X9 has label smoothing, mixup, augmentation and SAM. A case is a kind of network (with BatchNorm or without, on one data
set) under one regulariser.

Sharpness and the Gauss-Newton norm (B.3) have BatchNorm in train mode, its moments those of the 1000 samples measured.
The Jacobian norm is the largest over the samples, in eval mode. Every loss includes label smoothing and leaves out
weight decay. Samples changed by mixup or augmentation are never measured.

X13 regularises the input-output or the parameter-output Jacobian at a small learning rate, by `InputJacobian` and
`ParameterJacobian` in their published form (`training.objective`). The paper treats it as ||J||_F; a coefficient c of
it is a coefficient c / sqrt(n N) of ||J||_F: c / 36 for 128 samples and 10 outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.experiments.overrides import vary
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import Axis, Dtype, NetworkSettings, Study
from flatlens.models import VGG11, Architecture, ResNet18
from flatlens.papers.contrasts import (
    OfCounts,
    across,
    first_change,
    in_each_case,
    margin_by_size,
    mean_correlation,
    mean_of,
    of_each_case,
    readings,
    strength,
    with_own,
)
from flatlens.papers.evidence import (
    ACCURACY_GAP,
    CASE,
    UNIT,
    Evidence,
    Table,
    along,
    complete,
    correlated,
    labelled,
    these,
    trained_in,
    trained_ones,
    weighed,
    where,
)
from flatlens.papers.experiment import WEAK, Plot, Results, Scale, Side, deferred
from flatlens.papers.figures import BANDS, banded
from flatlens.papers.sharpening.networks import ABSOLUTE_GAP, JACOBIAN, NARROW_RESNET, NARROW_VGG
from flatlens.papers.sharpening.networks import SOFTMAXED as SOFTMAXED_JACOBIAN
from flatlens.statistics import Statistic, in_cases, kendall, pearson, spearman
from flatlens.statistics.inference import Holds, fishers_z
from flatlens.statistics.statistic import Array
from flatlens.training import (
    SAM,
    SGD,
    Augmentation,
    Constant,
    InputJacobian,
    Mixup,
    ParameterJacobian,
    Steps,
    Training,
)

SHARP, GGN_NORM = (f"{name}(rtol=0.01, batch_statistics=1000)" for name in ("sharpness", "ggn_norm"))
NORM, SOFTMAXED, GAP = JACOBIAN.column, SOFTMAXED_JACOBIAN.column, ABSOLUTE_GAP.column
DRAWN_QUANTITIES = (
    ABSOLUTE_GAP,
    Quantity("sharpness", SHARP),
    Quantity("Jacobian norm", NORM),
    Quantity("Gauss-Newton norm", GGN_NORM),
    Quantity("training loss", "loss", role="result"),
    Quantity("test accuracy", "test_accuracy", role="result"),
)
"""The quantities of Fig. 20 to 27."""
MEASURED_QUANTITIES = (
    *DRAWN_QUANTITIES,
    Quantity("Jacobian norm of softmax", SOFTMAXED),
    Quantity("Jacobian norm in train mode", "batch_jacobian_norm(rtol=0.01, batch_statistics=1000)"),
)
"""These, the Jacobian of softmax(f), and that of the batch with BatchNorm in train mode."""


@dataclass(frozen=True)
class Trained:
    """A kind of network with its training at one scale."""

    title: str
    data: DataSettings
    model: Architecture
    batch_size: int
    epochs: int
    samples: int  #: number of samples measured
    lrs: tuple[float, ...]  #: initial learning rates
    augmentation: Augmentation
    dtype: Dtype = "float64"  #: dtype in which they are measured

    def settings(self) -> NetworkSettings:
        """Return the settings without a regulariser other than weight decay.

        The learning rate falls to a tenth at 5/9 and 8/9 of the epochs, as after 50 and 80 of 90.
        """
        training = Training(
            SGD(self.lrs[0], momentum=0.9, weight_decay=5e-4),
            batch_size=self.batch_size,
            schedule=Steps((5 * self.epochs // 9, 8 * self.epochs // 9)),
            max_epochs=self.epochs,
            check_every=100,
        )
        measures = (*(one.column for one in MEASURED_QUANTITIES), "accuracy")
        return NetworkSettings(self.data, self.model, training, measures, samples=self.samples, dtype=self.dtype)


def kinds(scale: Scale) -> Mapping[str, Trained]:
    """Return the kinds of networks by the names of their studies; each is trained with and without BatchNorm."""
    # the paper's networks on both of its data sets, with all its learning rates
    if scale == "paper":
        crops, lrs = Augmentation(), (0.1, 0.01, 0.001)
        return {
            f"{name}_{data}": Trained(f"{title}, {said}", DataSettings(data), model, 128, 90, 1000, lrs, crops)
            for data, classes, said in (("cifar10", 10, "CIFAR-10"), ("cifar100", 100, "CIFAR-100"))
            for name, title, model in (
                ("resnet18", "ResNet-18", ResNet18(classes)),
                ("vgg11", "VGG-11", VGG11(classes, init="vgg")),
            )
        }
    # narrow networks on few of its images, for which one learning rate has to do
    if scale == "desk":
        few = DataSettings("cifar10", train=200, test=1000)
        return {
            "resnet18": Trained("ResNet-18", few, NARROW_RESNET, 25, 60, 100, (0.05,), Augmentation(), "float32"),
            "vgg11": Trained("VGG-11", few, NARROW_VGG, 25, 60, 100, (0.02,), Augmentation(), "float32"),
        }
    # stand-ins that a laptop trains in minutes, and smaller ones only to see that it runs
    train, test, images, share = (20, 20, 20, 32) if scale == "smoke" else (150, 300, 40, 8)
    digits, patches = DataSettings("digits", train=train, flat=False), DataSettings("patches", train=images, test=test)
    resnet, shifted = ResNet18(channels=1, width=1 / share), Augmentation(pad=1, flip=False)
    if scale == "smoke":
        vgg = VGG11(2, width=1 / 64, init="vgg")
        return {
            "resnet18": Trained("ResNet-18", digits, resnet, 10, 6, 10, (0.02,), shifted),
            "vgg11": Trained("VGG-11", patches, vgg, 10, 6, 10, (0.02,), Augmentation()),
        }
    vgg = VGG11(classes=2, width=1 / 8, init="vgg")
    return {
        "resnet18": Trained("ResNet-18", digits, resnet, 25, 30, 30, (0.05,), shifted),
        "vgg11": Trained("VGG-11", patches, vgg, 10, 60, 30, (0.02,), Augmentation()),
    }


# ---- X9

Strengths: TypeAlias = Mapping[Scale, tuple[float, ...]]


@dataclass(frozen=True)
class Regulariser:
    """A regulariser whose strength is a setting."""

    title: str
    setting: str
    strengths: Strengths


_TO_075, _TO_1 = (0.0, 0.1, 0.25, 0.5, 0.75), (0.0, 0.25, 0.5, 1.0)
_ALPHA: Strengths = {"smoke": (0.0, 0.25, 0.5), "laptop": (0.0, 0.25, 0.5, 0.75), "desk": _TO_075, "paper": _TO_075}
_BETA: Strengths = {"smoke": (0.0, 0.5, 1.0), "laptop": _TO_1, "desk": _TO_1, "paper": (0.0, 0.1, 0.25, 0.5, 1.0)}
_P: Strengths = {"smoke": (0.0, 0.5, 1.0), "laptop": _TO_1, "desk": _TO_1, "paper": (0.0, 0.25, 0.5, 0.75, 1.0)}
_RHO: Strengths = {
    "smoke": (0.0, 0.05, 0.1),
    "laptop": (0.0, 0.05, 0.1, 0.2),
    "desk": (0.0, 0.01, 0.02, 0.05, 0.1),
    "paper": (0.0, 0.02, 0.05, 0.1, 0.2),
}
REGULARISERS: Mapping[str, Regulariser] = {
    "label_smoothing": Regulariser("label smoothing", "label_smoothing", _ALPHA),
    "mixup": Regulariser("mixup", "mixup.beta", _BETA),
    "augmentation": Regulariser("data augmentation", "augmentation.p", _P),
    "sam": Regulariser("SAM", "ascent.rho", _RHO),
}


def _x9(scale: Scale) -> Mapping[str, Study]:
    studies, seeds = {}, {"smoke": 1, "laptop": 6, "desk": 16, "paper": 5}[scale]
    for (kind, trained), (name, one) in product(kinds(scale).items(), REGULARISERS.items()):
        every: Mapping[str, dict[str, Any]] = {
            "label_smoothing": {},
            "mixup": {"mixup": Mixup(0.0)},
            "augmentation": {"augmentation": trained.augmentation},
            "sam": {"ascent": SAM(0.0)},
        }
        # of ResNet-18 without BatchNorm: with 16 seeds two cases of the main claim were open, with 32 one
        more = scale == "desk" and trained.title == "ResNet-18"
        without = (64 if name == "mixup" else 32) if more else seeds
        starts = (*product([True], range(seeds)), *product([False], range(without)))
        axes = (Axis("lr", trained.lrs), Axis(one.setting, one.strengths[scale]), Axis("batchnorm+seed", starts))
        base = trained.settings()
        base = replace(base, training=replace(base.training, **every[name]))
        title = f"{trained.title}, {one.title}"
        studies[f"{kind}.{name}"] = Study(title, base, axes, MEASURED_QUANTITIES, scale=scale)
    return studies


SAME_EXCEPT_STRENGTH = ("kind", "lr", "seed")
"""Settings shared by networks of one regulariser that differ only in its strength."""


@deferred
def regularised_networks(results: Results, *names: str) -> pd.DataFrame:
    """Return the networks of these regularisers that reached the end, with kind, regulariser, strength, case.

    Those that never trained are marked, and left out of every statistic.
    """
    parts = []
    for study in results:
        network, _, name = study.partition(".")
        if name in names:
            table = trained_in(study)(results)
            kind = network + np.where(table["batchnorm"], "_bn", "")
            strength = table[REGULARISERS[name].setting]
            parts.append(table.assign(kind=kind, regulariser=name, strength=strength, **{CASE: f"{name} " + kind}))
    return pd.concat(parts, ignore_index=True)


def kind_in_words(kind: str) -> str:
    """Return a kind of network in words.

    >>> kind_in_words("resnet18_cifar10_bn"), kind_in_words("vgg11")
    ('ResNet-18 on CIFAR-10 with BatchNorm', 'VGG-11 without BatchNorm')
    """
    network, *data = kind.removesuffix("_bn").split("_")
    where = "".join(f" on {name.upper().replace('R1', 'R-1')}" for name in data)
    known = {"resnet18": "ResNet-18", "vgg11": "VGG-11"}
    return f"{known[network]}{where} with{'' if kind.endswith('_bn') else 'out'} BatchNorm"


def in_trained_cases(networks: pd.DataFrame) -> pd.Series:
    """Return whether the mean training accuracy in each network's case, over all strengths, is at least 0.9."""
    return networks["accuracy"].astype(float).groupby(networks[CASE]).transform("mean") >= 0.9


def fitted(results: Results) -> pd.DataFrame:
    """Return the networks of cases whose networks are trained: others are no minima."""
    return where(every, in_trained_cases)(results)


_DIFFERENCE = "Fisher's z with the gap, Jacobian's less sharpness's"
superior = readings(
    {
        said: in_each_case(fitted, [(norm, GAP), (SHARP, GAP)], f"{said}: {_DIFFERENCE}", size=size)
        for said, norm, size in (
            ("with its sign", NORM, False),
            ("by its size", NORM, True),
            ("softmax, with its sign", SOFTMAXED, False),
            ("softmax, by its size", SOFTMAXED, True),
        )
    },
    _DIFFERENCE,
)
SIMILAR = 0.2
"""Largest distance of two "very similar" norms, in logarithms: a fifth."""
every = regularised_networks(*REGULARISERS)
FIG_5 = "kind in ['resnet18_bn', 'resnet18_cifar10_bn']"
"""The networks of Fig. 5: ResNet-18 with BatchNorm; on CIFAR-10 if there are several data sets."""
every_alone, fitted_alone = (where(table, "strength > 0") for table in (every, fitted))
FIT_SAM, FIT_OTHERS = "regulariser == 'sam'", "regulariser != 'sam'"


def with_alike_norms(results: Results) -> pd.DataFrame:
    """Return all networks with columns that are 1 where the two matrices' norms are very similar, else 0."""
    kept = every(results)
    apart = (kept[GGN_NORM].astype(float) / kept[SHARP].astype(float)).map(np.log).abs()
    limits = {"norms a fifth apart at most": SIMILAR, "norms a tenth apart at most": SIMILAR / 2}
    return kept.assign(**{name: (apart < most).astype(float).where(apart.notna()) for name, most in limits.items()})


def where_sharpness_correlates(networks: pd.DataFrame) -> pd.Series:
    """Return whether sharpness and gap correlate positively, r not below 0.3, in each network's case."""
    cases = trained_ones(networks)[0].groupby(CASE)
    r = {case: mine[SHARP].astype(float).corr(mine[GAP].astype(float)) for case, mine in cases}
    return networks[CASE].map(r) >= WEAK


def mediated(z: Array, to_norm: Array, to_gap: Array) -> Array:
    """Return the mean over cases of |z| of sharpness and gap less that of their partial correlation given the norm.

    Its arguments are Fisher's z of sharpness and gap, of sharpness and norm, and of norm and gap, for `across`.
    """
    r, of_sharpness, of_gap = (np.tanh(one) for one in (z, to_norm, to_gap))
    given = (r - of_sharpness * of_gap) / np.sqrt((1 - of_sharpness**2) * (1 - of_gap**2))
    return margin_by_size(z, fishers_z(given))


def size_in_each_case(table: Table, x: str, y: str, name: str, holds: Holds = "all", side: Side = "above") -> Evidence:
    """Return |Pearson's r| of two columns in each case."""
    return of_each_case(table, lambda case: strength(case, x, y), name, holds, side)


def along_in_each(table: Table, x: str, y: str, name: str, holds: Holds = "all", side: Side = "above") -> Evidence:
    """Return Kendall's tau of two columns along lines of networks that differ in strength alone, in each case."""
    return of_each_case(table, lambda case: along(case, x, y, SAME_EXCEPT_STRENGTH), name, holds, side)


@deferred
def lines(results: Results, table: Table, norm: str) -> pd.DataFrame:
    """Return one row per line of networks that differ in strength alone.

    `better` is Kendall's tau of the Jacobian norm and the gap less that of sharpness and the gap; `better by size` the
    same of |tau|.
    """
    rows = []
    for key, line in trained_ones(table(results))[0].groupby([CASE, UNIT, *SAME_EXCEPT_STRENGTH], sort=False):
        own, sharp, gap = line[[norm, SHARP, GAP]].astype(float).dropna().to_numpy().T
        if len(gap) > 1:
            tau, other = (float(kendall(x, gap, np.ones((1, len(gap))))[0]) for x in (own, sharp))
            rows.append((*key, tau - other, abs(tau) - abs(other)))
    return pd.DataFrame(rows, columns=[CASE, UNIT, *SAME_EXCEPT_STRENGTH, "better", "better by size"])


def better_along_lines(table: Table, norm: str, column: str, name: str, *, own: bool = False) -> Evidence:
    """Return the mean of this column of `lines` in each case. `own`: the norm's tau has to be above 0, too."""
    found = of_each_case(lines(table, norm), lambda case: mean_of(case, column), name)
    return with_own(along_in_each(table, norm, GAP, name), found, name) if own else found


def better_by_means(table: Table, norm: str, name: str, *, size: bool = False) -> Evidence:
    """Return r of this norm and the gap less that of sharpness and the gap, of means over seeds along the strength.

    It has to be above 0 in each case. `size`: compare |r|.
    """

    def of_case(case: Table) -> Evidence:
        def weigh(results: Results) -> Statistic:
            kept = complete(case(results), ["lr", "strength", norm, SHARP, GAP])
            of, point = kept.table, kept.table.groupby(["lr", "strength"]).ngroup().to_numpy()
            members = point == np.unique(point)[:, None]

            def less(r: OfCounts, counts: Array) -> Array:
                drawn = counts[:, None] * members
                own, sharp, gap = (drawn @ of[column].to_numpy() / drawn.sum(2) for column in (norm, SHARP, GAP))
                once, each = np.ones((1, len(members))), ((own, gap), (sharp, gap))
                mine, theirs = (np.array([r(x, y, once)[0] for x, y in zip(*pair, strict=True)]) for pair in each)
                return np.asarray(np.abs(mine) - np.abs(theirs) if size else mine - theirs)

            return weighed(name, partial(less, pearson), kept, ranks=partial(less, spearman))

        return weigh

    return of_each_case(table, of_case, name)


def beyond_weakest(name: str) -> Table:
    """Return the networks of Fig. 5 under a regulariser, without those at no strength."""
    return where(regularised_networks(name), f"{FIG_5} and strength > 0")


def sharpness_along(name: str, table: Table, side: Side) -> Evidence:
    """Return Kendall's tau of strength and sharpness in each kind of network; all have to be on the side."""
    return _along_strengths(where(table, f"regulariser == '{name}'"), SHARP, "sharpness", side)


def jacobian_along(table: Table, norm: str) -> Evidence:
    """Return Kendall's tau of strength and this Jacobian norm in each kind of network; all have to be below."""
    return _along_strengths(table, norm, "Jacobian norm", "below")


def _along_strengths(table: Table, column: str, said: str, side: Side) -> Evidence:
    return along_in_each(table, "strength", column, f"Kendall tau-b of strength and {said}", side=side)


def at_the_weakest(table: Table, column: str, said: str = "Jacobian norm", side: Side = "below") -> Evidence:
    """Return the log ratio of a number at the weakest strength to that at none, in each kind of network."""
    return of_each_case(
        table,
        lambda kind: first_change(kind, "strength", column, SAME_EXCEPT_STRENGTH),
        f"log of the {said} at the weakest over that without",
        side=side,
    )


def at_the_strongest(table: Table, column: str, said: str = "Jacobian norm", side: Side = "below") -> Evidence:
    """Return the log ratio of a number at the greatest strength to that at none, in each kind of network."""

    def two(kind: Table) -> Table:
        return where(kind, "strength == 0 or strength == strength.max()")

    return of_each_case(
        table,
        lambda kind: first_change(two(kind), "strength", column, SAME_EXCEPT_STRENGTH),
        f"log of the {said} at the strongest over that without",
        side=side,
    )


def _x9_plots(results: Results) -> list[Plot]:
    # which of three norms correlates with the gap: over all kinds of networks, and in each
    correlations = []
    for name, one in REGULARISERS.items():
        table = regularised_networks(name)(results)
        for shown, column in {"sharpness": SHARP, "Jacobian norm": NORM, "Jacobian norm of softmax": SOFTMAXED}.items():
            pair = (column, GAP)
            whole = across(these(table), [pair], mean_correlation, "mean over cases of Pearson r")(results)
            found = {"mean over all kinds": whole}
            found |= {
                kind_in_words(str(kind)): correlated(these(mine), *pair)(results)
                for kind, mine in table.groupby("kind")
            }
            correlations += [(panel, one.title, shown, r.value, r.low, r.high) for panel, r in found.items()]
    data = pd.DataFrame(correlations, columns=["panel", "x", "group", "y", "low", "high"])
    said = "Pearson's r with the gap over the networks of one kind and regulariser, with its 95% interval."
    plots = [Plot("correlations", "What correlates with the gap", said, "bars", data, "regulariser", "r with the gap")]
    # Fig. 20 to 27, one a kind: two rows of panels for each regulariser
    caption = f"Over the strength of each regulariser, alpha, beta, p or rho; a line an initial learning rate. {BANDS}."
    for kind, table in every(results).groupby("kind"):
        rows = pd.concat(
            [
                mine.assign(
                    x=mine["strength"],
                    line=mine["lr"],
                    panel=f"{shown.name}, {REGULARISERS[str(name)].title}",
                    y=shown.of(mine),
                )
                for name, mine in table.groupby("regulariser", sort=False)
                for shown in DRAWN_QUANTITIES
            ],
            ignore_index=True,
        )
        title = f"{_figures(str(kind))}: {kind_in_words(str(kind))}, regularised"
        plots.append(banded(rows, f"regularised_{kind}", title, caption, "strength", "learning rate"))
    return plots


_FIGURES = {"vgg11": (20, 24), "vgg11_bn": (21, 25), "resnet18": (22, 26), "resnet18_bn": (23, 27)}
"""Figures of each kind of network on CIFAR-10 and on CIFAR-100."""


def _figures(kind: str) -> str:
    """Return the figures that show a kind of network.

    >>> _figures("resnet18_cifar10_bn"), _figures("vgg11")
    ('Fig. 5, 23', 'Fig. 20, 24')
    """
    on_10, on_100 = _FIGURES[kind.replace("_cifar100", "").replace("_cifar10", "")]
    shown = [on_100] if "cifar100" in kind else [on_10] if "cifar10" in kind else [on_10, on_100]
    return "Fig. " + ", ".join(map(str, [5, *shown] if on_10 == 23 and shown != [on_100] else shown))


# ---- X13

JACOBIAN_REGULARISERS = {"input": "Input", "parameters": "Param."}
"""Names in the legend of Fig. 33."""
REFERENCES = {"reference_large": "ref 1e-1", "reference_small": "ref 1e-3"}


def _x13(scale: Scale) -> Mapping[str, Study]:
    of_input, of_parameters, seeds = {
        "smoke": ((0.01, 0.1), (0.01, 0.1), 4),
        "laptop": ((0.01, 0.03, 0.1, 0.3), (0.003, 0.01, 0.03, 0.1), 6),
        "desk": ((0.01, 0.03, 0.1, 0.3), (0.003, 0.01, 0.03, 0.1), 8),
        "paper": ((0.001, 0.01, 0.1, 1.0), (0.001, 0.01, 0.1, 1.0), 5),
    }[scale]
    seed, both = Axis("seed", tuple(range(seeds))), "lr+schedule"
    studies = {}
    for kind, trained in kinds(scale).items():
        network, _, data = kind.partition("_")
        if network != "resnet18":
            continue
        # section 6's settings, with learning rate .001, or .1 that falls after each third; at two scales more epochs
        # than there, for so small a learning rate: 90 is the caption's number
        epochs = {"laptop": 60, "desk": 90}.get(scale, trained.epochs)
        settings, third = replace(trained, epochs=epochs).settings(), epochs // 3
        slow = vary(settings, both, (0.001, Constant()))
        of_inputs = vary(slow, "penalties", (InputJacobian(0.0, "published"),))
        of_weights = vary(slow, "penalties", (ParameterJacobian(0.0, "published"),))
        for name, said, base, coefficients in (
            ("input", "input-output Jacobian regularised", of_inputs, of_input),
            ("parameters", "parameter-output Jacobian regularised", of_weights, of_parameters),
            ("reference_large", "learning rate .1", vary(settings, both, (0.1, Steps((third, 2 * third)))), ()),
            ("reference_small", "learning rate .001", slow, ()),
        ):
            axes = (Axis("coefficient", coefficients), seed) if coefficients else (seed,)
            studies[f"{data or trained.data.name}.{name}"] = Study(
                f"{trained.title}, {said}", base, axes, MEASURED_QUANTITIES, scale=scale
            )
    return studies


@deferred
def jacobian_networks(results: Results, *names: str) -> pd.DataFrame:
    """Return the networks of these studies that reached the end; the case is the data set, references have 0."""
    parts = []
    for study in results:
        data, _, name = study.partition(".")
        if name in names:
            table = trained_in(study)(results).assign(study=name, **{CASE: data})
            parts.append(table if name in JACOBIAN_REGULARISERS else table.assign(coefficient=0.0))
    return pd.concat(parts, ignore_index=True)


SAME = (CASE, "seed")


def trained_coefficients(networks: pd.DataFrame) -> pd.Series:
    """Return whether the networks of each one's study and coefficient have a mean training accuracy of at least 0.9."""
    accuracy = networks["accuracy"].astype(float)
    return accuracy.groupby([networks["study"], networks["coefficient"]]).transform("mean") >= 0.9


def largest_or_none(name: str, *, trained: bool = False) -> Table:
    """Return the networks with the largest coefficient, perhaps of those with which networks train, and with none."""
    both = jacobian_networks(name, "reference_small")
    both = where(both, trained_coefficients) if trained else both
    return where(both, "coefficient == 0 or coefficient == coefficient.max()")


def falls_each_step(table: Table, column: str) -> Evidence:
    """Return the log ratio of a column at each coefficient to that at the one before; all have to be below 0."""

    def steps(results: Results) -> Statistic:
        networks = table(results)
        parts = {}
        for low, high in pairwise(sorted(networks["coefficient"].unique())):
            two = where(these(networks), f"{low} <= coefficient <= {high}")
            parts[f"{low:g} to {high:g}"] = first_change(two, "coefficient", column, SAME)(results)
        return in_cases(parts, "all", f"log of {column} at each coefficient over that at the one before", "below")

    return steps


@deferred
def with_change(results: Results, table: Table) -> pd.DataFrame:
    """Return the networks with `change of the gap`: their gap less that of the same seed without a regulariser."""
    without = jacobian_networks("reference_small")(results)[[*SAME, GAP]].rename(columns={GAP: "without"})
    networks = table(results).merge(without, on=list(SAME))
    return networks.assign(**{"change of the gap": networks[GAP].astype(float) - networks["without"].astype(float)})


@deferred
def best_among(results: Results, table: Table) -> pd.DataFrame:
    """Return how far the best networks of the two regularisers are apart, in logarithms, for each seed.

    `apart` is the distance of the smallest gaps, `accuracy gaps apart` that of the smallest accuracy gaps; `reductions
    apart` that of how far the smallest gaps are below the gap without a regulariser; `apart less gained` that of the
    largest test accuracies, less the smaller of their two gains over the network without a regulariser.
    """
    networks, _ = trained_ones(table(results))
    studies, of_each = [*JACOBIAN_REGULARISERS, "reference_small"], networks.groupby([*SAME, "study"])
    best = pd.DataFrame({"gap": of_each[GAP].min(), "accuracy": of_each["test_accuracy"].max()})
    best = best.assign(**{ACCURACY_GAP: of_each[ACCURACY_GAP].min()})
    logs = best.where(best > 0).map(np.log)
    gap, accuracy, of_accuracy = (logs[name].unstack().reindex(columns=studies) for name in best)
    gained = accuracy[[*JACOBIAN_REGULARISERS]].sub(accuracy["reference_small"], axis=0).min(axis=1, skipna=False)
    smallest = best["gap"].unstack().reindex(columns=studies)
    reduced = smallest[[*JACOBIAN_REGULARISERS]].rsub(smallest["reference_small"], axis=0)
    reductions = reduced.where(reduced > 0).map(np.log)
    found = {
        "apart": (gap["input"] - gap["parameters"]).abs(),
        "accuracy gaps apart": (of_accuracy["input"] - of_accuracy["parameters"]).abs(),
        "reductions apart": (reductions["input"] - reductions["parameters"]).abs(),
        "apart less gained": (accuracy["input"] - accuracy["parameters"]).abs() - gained,
    }
    return labelled(gap.assign(**found).reset_index(), ["seed"])


@deferred
def at_same_coefficients(results: Results, table: Table) -> pd.DataFrame:
    """Return how far the two regularisers' gaps are `apart`, in logarithms, for each seed and coefficient of both."""
    networks, _ = trained_ones(table(results))
    gaps = networks.pivot(index=[*SAME, "coefficient"], columns="study", values=GAP).astype(float)
    gaps = gaps.reindex(columns=[*JACOBIAN_REGULARISERS]).dropna()
    logs = gaps.map(np.log)
    return labelled(gaps.assign(apart=(logs["input"] - logs["parameters"]).abs()).reset_index(), ["seed"])


both_regularisers = jacobian_networks(*JACOBIAN_REGULARISERS, "reference_small")
regularised_alone = jacobian_networks(*JACOBIAN_REGULARISERS)
all_of_figure = jacobian_networks(*JACOBIAN_REGULARISERS, *REFERENCES)
best_networks = best_among(both_regularisers)


def _x13_plots(results: Results) -> list[Plot]:
    """Return Fig. 33: each reference is a level line."""
    table = jacobian_networks(*JACOBIAN_REGULARISERS, *REFERENCES)(results)
    coefficients = sorted(set(table["coefficient"]) - {0.0})
    titled = table.assign(x=table["coefficient"], line=table["study"].map({**JACOBIAN_REGULARISERS, **REFERENCES}))
    drawn = [titled[titled["study"] == name] for name in JACOBIAN_REGULARISERS]
    drawn += [titled[titled["study"] == name].assign(x=at) for name in REFERENCES for at in coefficients]
    whole = pd.concat(drawn, ignore_index=True)
    panels = [
        whole.assign(panel=whole[CASE].map(f"{shown.name}, {{}}".format), y=shown.of(whole))
        for shown in DRAWN_QUANTITIES
    ]
    rows = pd.concat(panels, ignore_index=True)
    caption = (
        f"Over the coefficient of the published form. {BANDS}. References, without a regulariser, are level: they "
        "have no coefficient."
    )
    return [banded(rows, "fig33", "Fig. 33: Jacobians regularised", caption, "coefficient", "regulariser", log_x=True)]
