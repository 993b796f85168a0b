"""How often an answer claims what is not so: simulated reports and studies, through the code that makes the answer.

The networks of a seed share a part of their variance, and the measures of a network correlate, as those of real ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch

from benchmarks.populations import effects
from flatlens.comparing import Comparison, GroupComparison
from flatlens.estimate import Estimate, Report
from flatlens.experiments import Study
from flatlens.experiments.narrative import answer_of_study
from flatlens.experiments.quantities import GAP
from flatlens.experiments.tables import gap_correlations
from flatlens.measures import MEASURES
from flatlens.statistics.statistic import Array

Rng = np.random.Generator
SUMMARY = (
    "adaptive_sharpness_ggn",
    "mls",
    "jacobian_norm",
    "log_volume",
    "local_dimension",
    "sharpness",
    "weight_norm",
)
LEVEL, POWER = 0.065, 0.8
"""The largest share of answers that may claim a difference where there is none, and the least where there is one."""
_CLAIM = re.compile(
    r"\bis (flatter|sharper|less|more) |depends on the measure|worse than|held-out loss of .* \(Holm-corrected"
    r"|has the lowest held-out loss|overfitted|correlates most strongly"
)


def claims(answer: list[str]) -> bool:
    """Whether an answer claims a difference, or a correlation.

    >>> claims(["SAM is flatter than SGD."]), claims(["SAM and SGD do not differ significantly in flatness: 1."])
    (True, False)
    """
    return _CLAIM.search(" ".join(answer)) is not None


@dataclass(frozen=True)
class Question:
    """A question, the networks that are simulated for it, and the claim that is right where there is a difference."""

    question: str
    design: str
    answer: Callable[[Rng, float], list[str]]  #: (random numbers, effect); effect 0: no difference
    right: str  #: begins the right answer
    difference: str  #: the difference at effect 1


def groups(seeds: int, paired: bool, rng: Rng, effect: float) -> list[str]:
    """The answer on two groups of networks; the second has a smaller adaptive sharpness, by 2 standard deviations."""
    shape = (2, seeds, len(SUMMARY) + 2)
    of_seed = rng.normal(size=(1, *shape[1:])) if paired else rng.normal(size=shape)
    x = 0.7**0.5 * of_seed + 0.3**0.5 * rng.normal(size=shape)
    x = 0.5**0.5 * x[..., :1] + 0.5**0.5 * x  # measures of one network correlate
    x /= np.sqrt(1 + 0.5**0.5)
    x[1, :, 0] -= 2 * effect
    names = {group: [f"{group} {seed}" for seed in range(seeds)] for group in ("SGD", "SAM")}
    reports = {
        name: _report(dict(zip(SUMMARY, row, strict=False)), 0.05 * np.exp(0.2 * row[-1]), np.exp(0.1 * row[-2]))
        for of, rows in zip(names.values(), x, strict=True)
        for name, row in zip(of, rows, strict=True)
    }
    return GroupComparison(_compared(reports), names, paired).answer


def _report(logs: dict[str, float], train: float | Array, test: float | Array) -> Report:
    rows = {
        name: Estimate(float(log) if MEASURES[name].card.unit == "log" else float(np.exp(0.3 * log)))
        for name, log in logs.items()
    }
    for name, losses in (("loss", train), ("test_loss", test)):
        samples = torch.from_numpy(np.atleast_1d(np.asarray(losses, dtype=np.float64)))
        rows[name] = Estimate(float(samples.mean()), samples=samples)
    rows["accuracy"] = Estimate(1.0)
    return Report({(name, None): one for name, one in rows.items()}, {"n": 100, "dtype": "float32"})


def _compared(reports: dict[str, Report]) -> Comparison:
    return Comparison(reports, {name: MEASURES[name] for name in SUMMARY})


def held_out(networks: int, overfitting: bool, rng: Rng, effect: float) -> list[str]:
    """The answer on networks, each with 300 held-out samples; the first has losses that are half as large.

    With `overfitting` the last one has a tenth of the others' training loss.
    """
    hardness = rng.exponential(size=(1, 300)) ** 2  # few samples have large losses
    losses = hardness * rng.lognormal(0.0, 0.7, size=(networks, 300))
    losses[0] *= 1 - 0.5 * effect
    train = rng.exponential(size=(1, 100)) * rng.lognormal(0.0, 0.3, size=(networks, 100)) / 10
    train[-1] /= 10 if overfitting else 1
    logs = rng.normal(size=(networks, len(SUMMARY)))
    reports = {f"n{i}": _report(dict(zip(SUMMARY, logs[i], strict=True)), train[i], losses[i]) for i in range(networks)}
    return _compared(reports).answer


_STUDY = Study.digits("smoke").over("seed", *range(12))
_MEASURES = [one.name for one in _STUDY.quantities if one.role == "measure"][:12]
_FOLLOWS = 3  #: the number of the measure that follows the gap


def study(seeds: int, each: int, rng: Rng, effect: float) -> list[str]:
    """The answer of a study of 12 measures, of which one follows the gap; 70% of the variance is between seeds."""

    def drawn() -> Array:
        return effects(rng, seeds, 0.7, each)

    gap = drawn()
    values = pd.DataFrame({GAP.name: gap} | {name: drawn() for name in _MEASURES})
    values[_MEASURES[_FOLLOWS]] += 3 * effect * gap
    quantities = [one for one in _STUDY.quantities if one.name in values]
    units = pd.Series(np.repeat(np.arange(seeds), each))
    table = gap_correlations(values, pd.DataFrame(index=values.index), quantities, units)
    inside = pd.DataFrame(columns=["x", "y", "group", "groups", "pearson", "pearson_low", "pearson_high"])
    return answer_of_study(_STUDY, inside, table, [], left_out=0, unfinished=0)


SMALLER, LOWER = "adaptive sharpness 2 standard deviations smaller", "one network with half the loss"
FOLLOWS = "one measure follows the gap, r = .95"
QUESTIONS = (
    Question("two groups, paired", "6 seeds, 70% of the variance between seeds", partial(groups, 6, True),
             "SAM is flatter than SGD", SMALLER),
    Question("two groups, not paired", "10 seeds each", partial(groups, 10, False), "SAM is flatter than SGD", SMALLER),
    Question("held-out loss", "2 networks, 300 skewed losses", partial(held_out, 2, False), "n0 has the lowest", LOWER),
    Question("held-out loss", "4 networks, 300 skewed losses", partial(held_out, 4, False), "n0 has the lowest", LOWER),
    Question("held-out loss", "4 networks, one with a tenth of the training loss", partial(held_out, 4, True),
             "n0 has the lowest", LOWER),
    Question("correlation with the gap, of 12 measures", "12 seeds, one network each", partial(study, 12, 1),
             f"Across 12 networks, {_MEASURES[_FOLLOWS]} correlates most strongly", FOLLOWS),
    Question("correlation with the gap, of 12 measures", "12 seeds, 3 networks each, 70% of the variance between seeds",
             partial(study, 12, 3), f"Across 36 networks, {_MEASURES[_FOLLOWS]} correlates most strongly", FOLLOWS),
)  # fmt: skip


def wrong(one: Question, repeats: int, seed: int = 0) -> int:
    """In how many repeats the answer claims a difference where there is none."""
    rng = np.random.default_rng([seed, QUESTIONS.index(one)])
    return sum(claims(one.answer(rng, 0.0)) for _ in range(repeats))


def right(one: Question, repeats: int, seed: int = 1) -> int:
    """In how many repeats the answer is right where there is a difference."""
    rng = np.random.default_rng([seed, QUESTIONS.index(one)])
    return sum(one.answer(rng, 1.0)[0].startswith(one.right) for _ in range(repeats))
