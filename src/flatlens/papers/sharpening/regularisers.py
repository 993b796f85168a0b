"""The four regularisers of section 6 as studies over their strengths, and the table of all their networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from flatlens.experiments.settings import Axis, Study
from flatlens.papers.evidence import Table, trained_in
from flatlens.papers.experiment import Scale
from flatlens.papers.predictions import Results
from flatlens.papers.sharpening.section6 import MEASURED_QUANTITIES, Trained, kinds
from flatlens.papers.units import CASE
from flatlens.training import SAM, Mixup

Strengths: TypeAlias = Mapping[Scale, tuple[float, ...]]


@dataclass(frozen=True)
class Regulariser:
    """A regulariser whose strength is a setting."""

    title: str
    symbol: str  #: symbol of the strength
    setting: str
    strengths: Strengths
    flattens: bool = False  #: whether the paper finds that it lowers the sharpness
    impure: bool = False  #: whether it trains on samples that are not measured


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
    "mixup": Regulariser("mixup", "beta", "mixup.beta", BETA, impure=True),
    "augmentation": Regulariser("data augmentation", "p", "augmentation.p", _P, impure=True),
    "sam": Regulariser("SAM", "rho", "ascent.rho", RHO, flattens=True),
}
_SEEDS: Mapping[Scale, int] = {"smoke": 1, "laptop": 6, "desk": 16, "paper": 5}
_MORE_WITHOUT_BATCHNORM = {"mixup": 64}
_MORE_ELSEWHERE = 32
"""Seeds of ResNet-18 without BatchNorm at desk scale. With 16 two cases of the main claim were open, with 32 one."""


def studies(scale: Scale) -> Mapping[str, Study]:
    """Return one study for each kind of network and regulariser."""
    return {
        f"{kind}.{name}": _study(trained, name, scale)
        for kind, trained in kinds(scale).items()
        for name in REGULARISERS
    }


def _study(trained: Trained, name: str, scale: Scale) -> Study:
    """Return the study of one kind of network and regulariser: by BatchNorm, learning rate and strength."""
    every: Mapping[str, dict[str, Any]] = {
        "label_smoothing": {},
        "mixup": {"mixup": Mixup(0.0)},
        "augmentation": {"augmentation": trained.augmentation},
        "sam": {"ascent": SAM(0.0)},
    }
    base, one = trained.settings(), REGULARISERS[name]
    seeds = _SEEDS[scale]
    more = scale == "desk" and trained.title == "ResNet-18"
    without = _MORE_WITHOUT_BATCHNORM.get(name, _MORE_ELSEWHERE) if more else seeds
    starts = (*product([True], range(seeds)), *product([False], range(without)))
    axes = (Axis("lr", trained.lrs), Axis(one.setting, one.strengths[scale]), Axis("batchnorm+seed", starts))
    base = replace(base, training=replace(base.training, **every[name]))
    return Study(f"{trained.title}, {one.title}", base, axes, MEASURED_QUANTITIES, scale=scale)


SAME_EXCEPT_STRENGTH = ("kind", "lr", "seed")
"""Settings shared by networks of one regulariser that differ only in its strength."""


def regularised_networks(*names: str) -> Table:
    """Return the networks of these regularisers that reached the end, with kind, regulariser, strength, case.

    Those that never trained are marked, and left out of every statistic.
    """

    def found(results: Results) -> pd.DataFrame:
        parts = []
        for study in results:
            network, _, name = study.partition(".")
            if name in names:
                table = trained_in(study)(results)
                kind = network + np.where(table["batchnorm"], "_bn", "")
                strength = table[REGULARISERS[name].setting]
                parts.append(table.assign(kind=kind, regulariser=name, strength=strength, **{CASE: f"{name} " + kind}))
        return pd.concat(parts, ignore_index=True)

    return found


def kind_in_words(kind: str) -> str:
    """Return a kind of network in words.

    >>> kind_in_words("resnet18_cifar10_bn"), kind_in_words("vgg11")
    ('ResNet-18 on CIFAR-10 with BatchNorm', 'VGG-11 without BatchNorm')
    """
    network, *data = kind.removesuffix("_bn").split("_")
    where = "".join(f" on {name.upper().replace('R1', 'R-1')}" for name in data)
    known = {"resnet18": "ResNet-18", "vgg11": "VGG-11"}
    return f"{known[network]}{where} with{'' if kind.endswith('_bn') else 'out'} BatchNorm"
