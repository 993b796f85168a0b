"""X9 and X13: gap, sharpness and Jacobian norm under regularisers, by their strengths.

X9 has label smoothing, mixup, augmentation and SAM. A case is a kind of network (with BatchNorm or without, on one data
set) under one regulariser.

X13 regularises the input-output or the parameter-output Jacobian at a small learning rate, by `InputJacobian` and
`ParameterJacobian` in their published form (`training.objective`). The paper treats it as ||J||_F; a coefficient c of
it is a coefficient c / sqrt(n N) of ||J||_F: c / 36 for 128 samples and 10 outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from flatlens.experiments.overrides import vary
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.papers.claims import experiment
from flatlens.papers.contrasts import across, first_change, in_each_case, mean_correlation, of_each_case, readings
from flatlens.papers.evidence import (
    CASE,
    Evidence,
    Table,
    along,
    correlated,
    labelled,
    these,
    trained_in,
    trained_ones,
    where,
)
from flatlens.papers.experiment import Plot, Results, Scale, Side, deferred
from flatlens.papers.figures import BANDS, banded
from flatlens.papers.sharpening.networks import (
    ABSOLUTE,
    DRAWN_QUANTITIES,
    GGN_NORM,
    JACOBIAN_COLUMN,
    MEASURED_QUANTITIES,
    SHARPNESS_COLUMN,
    SOFTMAXED_COLUMN,
    Trained,
    kinds,
)
from flatlens.training import SAM, Constant, InputJacobian, Mixup, ParameterJacobian, Steps

SHARP, NORM, SOFTMAXED, GAP = SHARPNESS_COLUMN, JACOBIAN_COLUMN, SOFTMAXED_COLUMN, ABSOLUTE

# ---- X9

Strengths: TypeAlias = Mapping[Scale, tuple[float, ...]]


@dataclass(frozen=True)
class Regulariser:
    """A regulariser whose strength is a setting."""

    title: str
    symbol: str  #: symbol of the strength
    setting: str
    strengths: Strengths


_TO_075, _TO_1 = (0.0, 0.1, 0.25, 0.5, 0.75), (0.0, 0.25, 0.5, 1.0)
ALPHA: Strengths = {"smoke": (0.0, 0.25, 0.5), "laptop": (0.0, 0.25, 0.5, 0.75), "desk": _TO_075, "paper": _TO_075}
BETA: Strengths = {"smoke": (0.0, 0.5, 1.0), "laptop": _TO_1, "desk": _TO_1, "paper": (0.0, 0.1, 0.25, 0.5, 1.0)}
_P: Strengths = {"smoke": (0.0, 0.5, 1.0), "laptop": _TO_1, "desk": _TO_1, "paper": (0.0, 0.25, 0.5, 0.75, 1.0)}
RHO: Strengths = {
    "smoke": (0.0, 0.05, 0.1),
    "laptop": (0.0, 0.05, 0.1, 0.2),
    "desk": (0.0, 0.01, 0.02, 0.05, 0.1),
    "paper": (0.0, 0.02, 0.05, 0.1, 0.2),
}
REGULARISERS: Mapping[str, Regulariser] = {
    "label_smoothing": Regulariser("label smoothing", "alpha", "label_smoothing", ALPHA),
    "mixup": Regulariser("mixup", "beta", "mixup.beta", BETA),
    "augmentation": Regulariser("data augmentation", "p", "augmentation.p", _P),
    "sam": Regulariser("SAM", "rho", "ascent.rho", RHO),
}
_SEEDS: Mapping[Scale, int] = {"smoke": 1, "laptop": 6, "desk": 16, "paper": 5}
_MORE_WITHOUT_BATCHNORM = {"mixup": 64}
_MORE_ELSEWHERE = 32
"""Seeds of ResNet-18 without BatchNorm at desk scale. With 16 two cases of the main claim were open, with 32 one."""


def _x9(scale: Scale) -> Mapping[str, Study]:
    studies, seeds = {}, _SEEDS[scale]
    for (kind, trained), (name, one) in product(kinds(scale).items(), REGULARISERS.items()):
        every: Mapping[str, dict[str, Any]] = {
            "label_smoothing": {},
            "mixup": {"mixup": Mixup(0.0)},
            "augmentation": {"augmentation": trained.augmentation},
            "sam": {"ascent": SAM(0.0)},
        }
        more = scale == "desk" and trained.title == "ResNet-18"
        without = _MORE_WITHOUT_BATCHNORM.get(name, _MORE_ELSEWHERE) if more else seeds
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


TRAINED_FROM = 0.9
"""Least mean training accuracy of the networks of a case, over all its strengths, for it to say anything of minima."""


def fitted(results: Results) -> pd.DataFrame:
    """Return the networks of the cases whose mean training accuracy, over all strengths, is at least 0.9."""
    networks = every(results)
    means = networks["accuracy"].astype(float).groupby(networks[CASE]).transform("mean")
    kept: pd.DataFrame = networks[means >= TRAINED_FROM]
    return kept


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


def with_alike_norms(results: Results) -> pd.DataFrame:
    """Return all networks with a column that is 1 where the two matrices' norms are very similar, else 0."""
    kept = every(results)
    apart = (kept[GGN_NORM].astype(float) / kept[SHARP].astype(float)).map(np.log).abs()
    return kept.assign(**{"norms a fifth apart at most": (apart < SIMILAR).astype(float).where(apart.notna())})


def beyond_weakest(name: str) -> Table:
    """Return the networks of Fig. 5 under a regulariser, without those at no strength."""
    return where(regularised_networks(name), f"{FIG_5} and strength > 0")


def sharpness_along(name: str, table: Table, side: Side) -> Evidence:
    """Return Kendall's tau of strength and sharpness in each kind of network; all have to be on the side."""
    return _along_strengths(where(table, f"regulariser == '{name}'"), SHARP, "sharpness", side)


def jacobian_along(name: str, norm: str) -> Evidence:
    """Return Kendall's tau of strength and this Jacobian norm in each kind of network; all have to be below."""
    return _along_strengths(regularised_networks(name), norm, "Jacobian norm", "below")


def _along_strengths(table: Table, column: str, said: str, side: Side) -> Evidence:
    return of_each_case(
        table,
        lambda kind: along(kind, "strength", column, SAME_EXCEPT_STRENGTH),
        f"Kendall tau-b of strength and {said}",
        side=side,
    )


def at_the_weakest(name: str, norm: str) -> Evidence:
    """Return the log ratio of this Jacobian norm at the weakest strength to that at none, in each kind of network."""
    return of_each_case(
        regularised_networks(name),
        lambda kind: first_change(kind, "strength", norm, SAME_EXCEPT_STRENGTH),
        "log of the Jacobian norm at the weakest over that without",
        side="below",
    )


_CORRELATED = {"sharpness": SHARP, "Jacobian norm": NORM, "Jacobian norm of softmax": SOFTMAXED}


def _x9_plots(results: Results) -> list[Plot]:
    table = regularised_networks(*REGULARISERS)(results)
    return [_correlations(results), *(_of_kind(str(kind), mine) for kind, mine in table.groupby("kind"))]


def _of_kind(kind: str, table: pd.DataFrame) -> Plot:
    """Return one of Fig. 20 to 27: two rows of panels for each regulariser."""
    table = table.assign(x=table["strength"], line=table["lr"])
    parts = [
        mine.assign(panel=f"{shown.name}, {REGULARISERS[str(name)].title}", y=shown.of(mine))
        for name, mine in table.groupby("regulariser", sort=False)
        for shown in DRAWN_QUANTITIES
    ]
    caption = f"Over the strength of each regulariser, alpha, beta, p or rho; a line an initial learning rate. {BANDS}."
    rows = pd.concat(parts, ignore_index=True)
    title = f"{_figures(kind)}: {kind_in_words(kind)}, regularised"
    return banded(rows, f"regularised_{kind}", title, caption, "strength", "learning rate")


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


def _correlations(results: Results) -> Plot:
    rows = []
    for name, one in REGULARISERS.items():
        table = regularised_networks(name)(results)
        for shown, column in _CORRELATED.items():
            pair = (column, GAP)
            whole = across(these(table), [pair], mean_correlation, "mean over cases of Pearson r")(results)
            rows.append(("mean over all kinds", one.title, shown, whole.value, whole.low, whole.high))
            for kind, mine in table.groupby("kind"):
                found = correlated(these(mine), *pair)(results)
                rows.append((kind_in_words(str(kind)), one.title, shown, found.value, found.low, found.high))
    data = pd.DataFrame(rows, columns=["panel", "x", "group", "y", "low", "high"])
    caption = "Pearson's r with the gap over the networks of one kind and regulariser, with its 95% interval."
    return Plot("correlations", "What correlates with the gap", caption, "bars", data, "regulariser", "r with the gap")


# ---- X13

_LARGE, _SMALL_RATE = 0.1, 0.001
_COEFFICIENTS: Mapping[str, Mapping[Scale, tuple[float, ...]]] = {
    "input": {
        "smoke": (0.01, 0.1),
        "laptop": (0.01, 0.03, 0.1, 0.3),
        "desk": (0.01, 0.03, 0.1, 0.3),
        "paper": (0.001, 0.01, 0.1, 1.0),
    },
    "parameters": {
        "smoke": (0.01, 0.1),
        "laptop": (0.003, 0.01, 0.03, 0.1),
        "desk": (0.003, 0.01, 0.03, 0.1),
        "paper": (0.001, 0.01, 0.1, 1.0),
    },
}
JACOBIAN_REGULARISERS = {"input": "Input", "parameters": "Param."}
"""Names in the legend of Fig. 33."""
_REFERENCES = {"reference_large": "ref 1e-1", "reference_small": "ref 1e-3"}
_EPOCHS: Mapping[Scale, int] = {"laptop": 60, "desk": 90}
"""More than section 6's at these scales, for so small a learning rate; 90 is the caption's number."""


def _x13(scale: Scale) -> Mapping[str, Study]:
    seeds = Axis("seed", tuple(range({"smoke": 4, "laptop": 6, "desk": 8, "paper": 5}[scale])))
    studies = {}
    for kind, trained in kinds(scale).items():
        network, _, data = kind.partition("_")
        if network != "resnet18":
            continue
        longer = replace(trained, epochs=_EPOCHS.get(scale, trained.epochs))
        for name, base in _bases(longer).items():
            coefficients = (Axis("coefficient", _COEFFICIENTS[name][scale]),) if name in JACOBIAN_REGULARISERS else ()
            studies[f"{data or trained.data.name}.{name}"] = Study(
                f"{trained.title}, {_TITLES[name]}", base, (*coefficients, seeds), MEASURED_QUANTITIES, scale=scale
            )
    return studies


_TITLES = {
    "input": "input-output Jacobian regularised",
    "parameters": "parameter-output Jacobian regularised",
    "reference_large": "learning rate .1",
    "reference_small": "learning rate .001",
}


def _bases(trained: Trained) -> dict[str, NetworkSettings]:
    """Return section 6's settings for each study, with learning rate .001, or .1 that falls after each third."""
    settings, third, both = trained.settings(), trained.epochs // 3, "lr+schedule"
    slow = vary(settings, both, (_SMALL_RATE, Constant()))
    return {
        "input": vary(slow, "penalties", (InputJacobian(0.0, "published"),)),
        "parameters": vary(slow, "penalties", (ParameterJacobian(0.0, "published"),)),
        "reference_large": vary(settings, both, (_LARGE, Steps((third, 2 * third)))),
        "reference_small": slow,
    }


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


def largest_or_none(name: str) -> Table:
    """Return the networks with the largest coefficient, and those with none."""
    both = jacobian_networks(name, "reference_small")
    return where(both, "coefficient == 0 or coefficient == coefficient.max()")


def best_networks(results: Results) -> pd.DataFrame:
    """Return how far the best networks of the two regularisers are apart, in logarithms, for each seed.

    `apart` is the distance of the smallest gaps; `apart less gained` that of the largest test accuracies, less the
    smaller of their two gains over the network without a regulariser.
    """
    table, _ = trained_ones(jacobian_networks(*JACOBIAN_REGULARISERS, "reference_small")(results))
    studies, of_each = [*JACOBIAN_REGULARISERS, "reference_small"], table.groupby([*SAME, "study"])
    best = pd.DataFrame({"gap": of_each[GAP].min(), "accuracy": of_each["test_accuracy"].max()})
    logs = best.where(best > 0).map(np.log)
    gap, accuracy = (logs[name].unstack().reindex(columns=studies) for name in best)
    gained = accuracy[[*JACOBIAN_REGULARISERS]].sub(accuracy["reference_small"], axis=0).min(axis=1, skipna=False)
    found = {
        "apart": (gap["input"] - gap["parameters"]).abs(),
        "apart less gained": (accuracy["input"] - accuracy["parameters"]).abs() - gained,
    }
    return labelled(gap.assign(**found).reset_index(), ["seed"])


def _x13_plots(results: Results) -> list[Plot]:
    """Return Fig. 33: each reference is a level line."""
    table = jacobian_networks(*JACOBIAN_REGULARISERS, *_REFERENCES)(results)
    coefficients = sorted(set(table["coefficient"]) - {0.0})
    titled = table.assign(x=table["coefficient"], line=table["study"].map({**JACOBIAN_REGULARISERS, **_REFERENCES}))
    drawn = [titled[titled["study"] == name] for name in JACOBIAN_REGULARISERS]
    drawn += [titled[titled["study"] == name].assign(x=at) for name in _REFERENCES for at in coefficients]
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


EXPERIMENTS = (
    experiment("sharpening", "X9", _x9, _x9_plots, globals()),
    experiment("sharpening", "X13", _x13, _x13_plots, globals()),
)
