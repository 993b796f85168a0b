"""Loss, accuracy and the gap between training and held-out data."""

from __future__ import annotations

import math
from contextlib import closing

import torch
from torch import Tensor

from flatlens.estimate import Estimate, undefined
from flatlens.measures.card import FUNCTION, on_lens
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_one_of
from flatlens.problem.outcomes import forwards

NO_TEST = "no held-out data: give Problem(test=...)"
NO_CLASSES = "the targets are not class labels"
NO_LEAST = "the smallest value of this loss is not known"
CONVENTIONS = ("signed", "absolute", "summed_x5", "accuracy")


def stderr_of(samples: Tensor) -> float:
    """Return the standard error of the mean of independent samples; NaN for one sample."""
    return float(samples.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan


def _mean(samples: Tensor | None, sampled: bool) -> Estimate:
    """Return the mean over the data; for held-out data, as an estimate of its expectation, from two samples on."""
    if samples is None:
        return undefined(NO_CLASSES)
    counted = samples[~torch.isnan(samples)]
    if not sampled:
        return Estimate(float(counted.mean()), samples=samples)
    if len(counted) == 1:
        return undefined(f"{float(counted):g} on one held-out sample: an error needs two")
    return Estimate(float(counted.mean()), stderr=stderr_of(counted), kind="estimate", samples=samples)


@on_lens(
    family="generalisation",
    id="D4",
    symbol="L",
    source="relative2021 section 2",
    unit="loss",
    invariant_under=FUNCTION,
    works_coupled=True,
    works_sharded=True,
    differentiates=False,
)
def loss(lens: Lens, *, excess: bool = False) -> Estimate:
    """Empirical risk: mean loss over the data.

    `excess=True` subtracts the smallest value that the loss can have for these targets. For cross-entropy this is the
    mean entropy of the labels: 0 unless they are smoothed or soft. The value is undefined for losses whose smallest
    value is not known.
    """
    losses = lens.outcomes("data").losses
    if not excess:
        return _mean(losses, sampled=False)
    least = _least(lens)
    return undefined(NO_LEAST) if least is None else _mean(losses - least, sampled=False)


def _least(lens: Lens) -> Tensor | None:
    """Return the smallest possible loss of each sample, (n,), scaled as `Outcomes.losses` are."""
    problem = lens.problem
    parts: list[Tensor] = []
    with closing(forwards(problem, lens.model)) as found:
        for f, y in found:
            part = problem.loss.least(f, y)
            if part is None:
                return None
            parts.append(part.detach().cpu())
    return torch.cat(parts) * (problem.n / problem.mass)


@on_lens(
    family="generalisation",
    id="D4",
    symbol="A",
    source="sharpening B.3",
    unit="share",
    invariant_under=FUNCTION,
    works_coupled=True,
    works_sharded=True,
    differentiates=False,
)
def accuracy(lens: Lens) -> Estimate:
    """Share of the data classified rightly."""
    return _mean(lens.outcomes("data").correct, sampled=False)


@on_lens(
    family="generalisation",
    id="D4",
    symbol="L_{test}",
    source="relative2021 section 2",
    unit="loss",
    invariant_under=FUNCTION,
    held_out=True,
    works_coupled=True,
    differentiates=False,
)
def test_loss(lens: Lens) -> Estimate:
    """Mean loss over the held-out data: the test risk."""
    return _mean(lens.outcomes("test").losses, sampled=True) if lens.problem.test else undefined(NO_TEST)


@on_lens(
    family="generalisation",
    id="D4",
    symbol="A_{test}",
    source="sharpening B.3",
    unit="share",
    invariant_under=FUNCTION,
    held_out=True,
    works_coupled=True,
    differentiates=False,
)
def test_accuracy(lens: Lens) -> Estimate:
    """Share of the held-out data classified rightly."""
    return _mean(lens.outcomes("test").correct, sampled=True) if lens.problem.test else undefined(NO_TEST)


@on_lens(
    family="generalisation",
    id="D4",
    symbol="E_{gen}",
    source="relative2021 section 2",
    unit="loss",
    invariant_under=FUNCTION,
    held_out=True,
    works_coupled=True,
    differentiates=False,
)
def generalisation_gap(lens: Lens, *, convention: str = "signed") -> Estimate:
    """Test loss minus training loss.

    The conventions are "signed" (relative2021); "absolute", |test - train| (sharpening section 6); "summed_x5", 5 times
    the summed test loss minus the summed training loss (reparam2019 Fig. 1, where the training set is 5 times the test
    set); and "accuracy", training accuracy minus test accuracy. The standard error is that of the mean over the
    held-out data; the training loss has none. With `batchnorm="train"`, the training loss is computed with batch
    statistics, and the test loss never is.
    """
    require_one_of(CONVENTIONS, convention=convention)
    if lens.problem.test is None:
        return undefined(NO_TEST)
    train, test = lens.outcomes("data"), lens.outcomes("test")
    if convention == "accuracy":
        if train.correct is None or test.correct is None:
            return undefined(NO_CLASSES)
        a, b = _mean(train.correct, sampled=False), _mean(test.correct, sampled=True)
        return b if b.kind == "undefined" else Estimate(a.value - b.value, b.stderr, "estimate", unit="share")
    a, b = _mean(train.losses, sampled=False), _mean(test.losses, sampled=True)
    if b.kind == "undefined":
        return b
    if convention == "signed":
        return Estimate(b.value - a.value, stderr=b.stderr, kind="estimate")
    if convention == "absolute":
        return Estimate(abs(b.value - a.value), stderr=b.stderr, kind="estimate")
    held = 5 * len(test.losses)
    return Estimate(held * b.value - len(train.losses) * a.value, stderr=held * b.stderr, kind="estimate")
