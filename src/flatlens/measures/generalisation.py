"""Loss, accuracy, the gap between training and held-out data, and the representativeness of the sample."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.probes import mean_of_forms
from flatlens.estimate import Estimate, joined_notes, undefined, with_note
from flatlens.grams import LayerGrams
from flatlens.measures.definition import FUNCTION, on_lens, per_sample, require_one_of
from flatlens.measures.lens import Lens
from flatlens.problem.forward import Outcomes, forwards
from flatlens.statistics.inference import clopper_pearson

NO_TEST = "no held-out data: give Problem(test=...)"
ONE_SAMPLE = "on one held-out sample: an error needs two"


def held_out_risk(held_out: Outcomes) -> Estimate:
    """Return the risk on held-out data as an estimate of the expected one."""
    # a ratio of sums, of losses and of masses: its error is that of the mean of l_i - L m_i, m_i the mass over the mean
    # mass; losses are skewed: most are small, and few are large
    losses = held_out.losses
    if len(losses) == 1:
        return undefined(f"{float(losses):g} {ONE_SAMPLE}")
    assert held_out.weights is not None
    _, stderr = mean_of_forms(losses - held_out.risk * held_out.weights)
    return Estimate(held_out.risk, float(stderr), "estimate", samples=losses)


def share_right(found: Outcomes, *, held_out: bool = False) -> Estimate:
    """Accuracy; on held-out data its error is the longer side of Clopper and Pearson's interval."""
    if found.correct is None:
        return undefined("the targets are not class labels")
    counted = found.correct[~found.correct.isnan()]
    n, right = len(counted), float(counted.sum())
    if not held_out:
        return Estimate(right / n, samples=found.correct)
    if n == 1:
        return undefined(f"{right:g} {ONE_SAMPLE}")
    share, (low, high) = right / n, clopper_pearson(right, n)
    return Estimate(share, max(share - low, high - share) / 1.96, "estimate", samples=found.correct)


@per_sample(id="own", family="generalisation", symbol="l_i", source="relative2021 section 2", unit="loss",
            place="outputs", needs=())  # fmt: skip
def _losses(g: LayerGrams) -> Tensor:
    """Loss of each sample: a pass that has them knows `Lens.outcomes`."""
    assert g.losses is not None
    return g.losses


of_outcomes = partial(
    on_lens,
    family="generalisation",
    id="D4",
    invariant_under=FUNCTION,
    works_coupled=True,
    differentiates=False,
    reads=(_losses,),
)
of_data = partial(of_outcomes, works_sharded=True)
of_held_out = partial(of_outcomes, held_out=True)


@of_data(symbol="L", source="relative2021 section 2", unit="loss")
def loss(lens: Lens, *, excess: bool = False) -> Estimate:
    """Empirical risk: mean loss over the data.

    `excess=True` subtracts the smallest value that the loss can have for these targets. For cross-entropy this is the
    mean entropy of the labels: 0 unless they are smoothed or soft. The value is undefined for losses whose smallest
    value is not known.
    """
    losses, problem = lens.outcomes("data").losses, lens.problem
    if excess:
        # less the smallest possible loss of each sample, scaled as `Outcomes.losses` are
        parts: list[Tensor] = []
        with closing(forwards(problem, lens.model)) as found:
            for f, y in found:
                if (part := problem.loss.least(f, y)) is None:
                    return undefined("the smallest value of this loss is not known")
                parts.append(part.detach().cpu())
        losses = losses - torch.cat(parts) * (problem.n / problem.mass)
    return Estimate(float(losses.mean()), samples=losses, note="; ".join(problem.data.notes))


@of_data(symbol="A", source="sharpening B.3", unit="share")
def accuracy(lens: Lens) -> Estimate:
    """Share of the data classified correctly: the mean over samples.

    Of a sequence it is the share of its tokens, where `loss` is the mean over all tokens. Ignored ones do not count.
    """
    return share_right(lens.outcomes("data"))


@of_held_out(symbol="L_{test}", source="relative2021 section 2", unit="loss")
def test_loss(lens: Lens) -> Estimate:
    """Mean loss over the held-out data: the test risk.

    Its error is that of the expected loss, estimated from independent samples. Losses that are rare and large are not
    in it where no held-out sample has one.
    """
    if not lens.problem.test:
        return undefined(NO_TEST)
    found = held_out_risk(lens.outcomes("test"))
    return with_note(found, joined_notes(*lens.problem.test.notes))


@of_held_out(symbol="A_{test}", source="sharpening B.3", unit="share")
def test_accuracy(lens: Lens) -> Estimate:
    """Share of the held-out data classified correctly: as `accuracy`, with the binomial error of the expected share."""
    return share_right(lens.outcomes("test"), held_out=True) if lens.problem.test else undefined(NO_TEST)


@of_held_out(symbol="E_{gen}", source="relative2021 section 2", unit="loss")
def generalisation_gap(lens: Lens, *, convention: str = "signed") -> Estimate:
    """Test loss minus training loss.

    The conventions are "signed" (relative2021); "absolute", |test - train| (sharpening section 6); "summed_x5", 5 times
    the summed test loss minus the summed training loss (reparam2019 Fig. 1, where the training set is 5 times the test
    set); and "accuracy", training accuracy minus test accuracy. The standard error is that of the mean over the
    held-out data; the training loss has none. With `batchnorm="train"`, the training loss is computed with batch
    statistics, and the test loss never is.
    """
    require_one_of(("signed", "absolute", "summed_x5", "accuracy"), convention=convention)
    if lens.problem.test is None:
        return undefined(NO_TEST)
    train, test = lens.outcomes("data"), lens.outcomes("test")
    if convention == "accuracy":
        here, there = share_right(train), share_right(test, held_out=True)
        if "undefined" in (here.kind, there.kind):
            return here if here.kind == "undefined" else there
        return Estimate(here.value - there.value, there.stderr, "estimate", unit="share")
    risk = held_out_risk(test)
    if risk.kind == "undefined":
        return risk
    gap, factor = risk.value - train.risk, 1
    if convention == "summed_x5":
        factor = 5 * len(test.losses)
        gap = factor * risk.value - len(train.losses) * train.risk
    return Estimate(abs(gap) if convention == "absolute" else gap, factor * risk.stderr, "estimate")
