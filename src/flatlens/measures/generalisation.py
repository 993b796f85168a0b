"""Loss, accuracy, the gap between training and held-out data, and the representativeness of the sample."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from flatlens.curvature.probes import mean_of_forms, student
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined
from flatlens.grams import Weight
from flatlens.measures.definition import (
    FUNCTION,
    LAYERWISE,
    PERMUTATION,
    UNITS_AND_ORDER,
    Parts,
    Run,
    on_lens,
    require_count,
    require_one_of,
    require_positive,
)
from flatlens.measures.lens import Lens
from flatlens.measures.notes import no_linear_layer, which_layer
from flatlens.measures.rows import with_note
from flatlens.perturbation.features import (
    BANDWIDTHS,
    ROTATION_LAWS,
    RotatedFeatures,
    mismatch,
    noise,
    unmovable,
    with_moved_features,
)
from flatlens.perturbation.labels import seen
from flatlens.problem.sample_losses import Outcomes, forwards
from flatlens.statistics.inference import clopper_pearson

NO_TEST = "no held-out data: give Problem(test=...)"
NO_CLASSES = "the targets are not class labels"
ONE_SAMPLE = "on one held-out sample: an error needs two"
NO_LEAST = "the smallest value of this loss is not known"
CONVENTIONS = ("signed", "absolute", "summed_x5", "accuracy")


def held_out_risk(held_out: Outcomes) -> Estimate:
    """Return the risk on held-out data as an estimate of the expected one.

    The risk is a ratio of sums, of losses and of masses: its error is that of the mean of l_i - L m_i, where m_i is the
    mass over the mean mass. Losses are skewed: most are small, and few are large.
    """
    losses = held_out.losses
    if len(losses) == 1:
        return undefined(f"{float(losses):g} {ONE_SAMPLE}")
    assert held_out.weights is not None
    _, stderr = mean_of_forms(losses - held_out.risk * held_out.weights)
    return Estimate(held_out.risk, float(stderr), "estimate", samples=losses)


def held_out_accuracy(held_out: Outcomes) -> Estimate:
    """Return the accuracy on held-out data as an estimate of the expected one, with the exact binomial error.

    That of Clopper and Pearson, the longer side. Of samples that are right in a part of their tokens it is too large.
    """
    if held_out.correct is None:
        return undefined(NO_CLASSES)
    n, right = _counted(held_out.correct)
    if n == 1:
        return undefined(f"{right:g} {ONE_SAMPLE}")
    share, (low, high) = right / n, clopper_pearson(right, n)
    return Estimate(share, max(share - low, high - share) / 1.96, "estimate", samples=held_out.correct)


def _accuracy(found: Outcomes) -> Estimate:
    if found.correct is None:
        return undefined(NO_CLASSES)
    n, right = _counted(found.correct)
    return Estimate(right / n, samples=found.correct)


def _counted(correct: Tensor) -> tuple[int, float]:
    """Return (the number of samples that count, how many of them are right)."""
    counted = correct[~correct.isnan()]
    return len(counted), float(counted.sum())


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
    losses, note = lens.outcomes("data").losses, "; ".join(lens.problem.data.notes)
    if not excess:
        return Estimate(float(losses.mean()), samples=losses, note=note)
    if (least := _least(lens)) is None:
        return undefined(NO_LEAST)
    return Estimate(float((losses - least).mean()), samples=losses - least, note=note)


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
    """Share of the data classified rightly: the mean over samples.

    Of a sequence it is the share of its tokens, where `loss` is the mean over all tokens. Ignored ones do not count.
    """
    return _accuracy(lens.outcomes("data"))


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
    """Mean loss over the held-out data: the test risk.

    Its error is that of the expected loss, estimated from independent samples. Losses that are rare and large are not
    in it where no held-out sample has one.
    """
    if not lens.problem.test:
        return undefined(NO_TEST)
    found = held_out_risk(lens.outcomes("test"))
    return replace(found, note="; ".join(filter(None, (found.note, *lens.problem.test.notes))))


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
    """Share of the held-out data classified rightly: as `accuracy`, with the binomial error of the expected share."""
    return held_out_accuracy(lens.outcomes("test")) if lens.problem.test else undefined(NO_TEST)


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
        a, b = _accuracy(train), held_out_accuracy(test)
        if undefined_one := next((one for one in (a, b) if one.kind == "undefined"), None):
            return undefined_one
        return Estimate(a.value - b.value, b.stderr, "estimate", unit="share")
    b = held_out_risk(test)
    if b.kind == "undefined":
        return b
    if convention == "signed":
        return Estimate(b.value - train.risk, stderr=b.stderr, kind="estimate")
    if convention == "absolute":
        return Estimate(abs(b.value - train.risk), stderr=b.stderr, kind="estimate")
    held = 5 * len(test.losses)
    return Estimate(held * b.value - len(train.losses) * train.risk, stderr=held * b.stderr, kind="estimate")


@on_lens(
    id="D2",
    family="data",
    symbol=r"\mathcal{E}_{Rep}",
    source="relative2021 Eq. 3, 5, section 6, C.1",
    unit="loss",
    cost="one forward, kernel densities; 2 probes forwards for the split",
    invariant_under=UNITS_AND_ORDER,
    invariances={("bandwidth", "relative"): frozenset({LAYERWISE, PERMUTATION})},
    of_parameters=False,
    on_request=True,
    differentiates=False,
)
def representativeness(
    lens: Lens,
    run: Run,
    *,
    splits: int = 10,
    folds: int = 3,
    bandwidth: str = "scott",
    delta: float = 0.1,
    probes: int = 16,
    over: str = "rotations",
    sigma: float = 1.0,
) -> Parts:
    """Approximate representativeness of the sample: |int (p - p_hat) l| with both densities estimated from splits.

    The features of the last linear layer are split at random, `splits` times; one part in `folds` is held out. p_hat is
    the kernel density of the rest, p that of the part held out, and l the network's loss at the points of both. The
    value is an approximation and not a bound: the distribution itself is not known, and a mean of absolute values is
    above 0 even if both parts have the same law. `.shift` is int |p - p_hat|, between 0 and 2, and `.bound` the largest
    loss times it. The error is the spread over splits. These share their points, so it is a guide and not an interval.

    With held-out data, `.split.representativeness` and `.split.robustness` are the terms of the signed gap in Eq. 5,
    with labels kept: test loss - loss at moved features, and loss at moved weights - training loss. Apart from the
    error of the probes their sum is the gap; the note says by how much it differs. Features move by `delta` ||phi|| r
    in random directions. `over` is the law of r: always 1 ("rotations"), or a law of Proposition 2, "ball" (uniform
    densities lambda_i) or "truncated_normal" of width `sigma`, as in `feature_robustness`. If you know the label
    function, give it to `flatlens.perturbation.moved_risk`.
    """
    require_count(2, splits=splits, folds=folds, probes=probes)
    require_positive(delta=delta, sigma=sigma)
    require_one_of(ROTATION_LAWS, over=over)
    require_one_of(BANDWIDTHS, bandwidth=bandwidth)
    last = lens.layout.last()
    if last is None:
        return {("", None): undefined(no_linear_layer(lens))}
    weight = lens.layout.weights[last]
    if why := unmovable(weight, by_noise=True):
        return {("", None): undefined(why)}
    parts = dict(_by_splits(lens, run, weight, splits, folds, bandwidth))
    if lens.problem.test is not None:
        parts |= _split_gap(lens, run, weight, delta, probes, over, sigma)
    return {key: with_note(one, which_layer(lens, last)) for key, one in parts.items()}


def _by_splits(lens: Lens, run: Run, weight: Weight, splits: int, folds: int, bandwidth: str) -> Parts:
    try:
        points = seen(lens.problem, lens.model, lens.layout, weight)
    except BadInput as error:  # for example, one label per token
        return {("", None): undefined(str(error))}
    every = lens.outcomes("data").losses
    losses = every[points.counted.cpu()] * float(points.counted.double().mean())  # their mean is the risk
    n = len(losses)
    if n < 3 * folds:
        return {("", None): undefined(f"{n} samples cannot be split into {folds} parts of at least 3")}
    phi = points.phi.cpu()
    moving = phi[:, phi.std(0) > 1e-12 * phi.abs().max()]
    if not moving.shape[1]:
        return {("", None): undefined("the features are the same for every sample")}
    weighted, shifts = torch.empty(2, splits, dtype=torch.float64)
    for number in range(splits):
        order = torch.randperm(n, generator=run.generator)
        held, kept = order[: n // folds], order[n // folds :]
        found = mismatch(moving[held], moving[kept], losses[held], losses[kept], bandwidth)
        weighted[number], shifts[number] = abs(found.weighted), found.shift
        if run.progress is not None:
            run.progress("random splits", number + 1, splits)
    note = "an approximation from random splits"
    largest = float(losses.abs().max())

    def spread(values: Tensor, unit: str = "loss", note: str = note) -> Estimate:
        mean, stderr = student(values)
        return Estimate(float(mean), float(stderr), "estimate", note=note, unit=unit, arrays={"splits": values})

    return {
        ("", None): spread(weighted),
        ("shift", None): spread(shifts, "share"),
        ("bound", None): spread(largest * shifts, note=f"{note}; the largest absolute loss seen is {largest:.3g}"),
    }


def _split_gap(lens: Lens, run: Run, weight: Weight, delta: float, probes: int, law: str, sigma: float) -> Parts:
    """Return E_Rep (by moved features) and E_F (by moved weights): by the key identity they add up to the gap."""
    if why := unmovable(weight) or ("" if weight.dense else "the layer acts at several positions of a sample"):
        return {("split.representativeness", None): undefined(why)}
    held_out = lens.outcomes("test")
    features = RotatedFeatures(lens.problem, lens.model, weight)
    at_features, at_weights = torch.empty(2, probes, dtype=torch.float64)
    for number in range(probes):
        move = noise(delta, 1.0, run.generator, law, sigma)
        moved = with_moved_features(lens.problem, lens.model, lens.layout, weight, move)
        at_features[number] = moved.risk
        at_weights[number] = features.change(features.draw(delta, law, sigma, run.generator))
        if run.progress is not None:
            run.progress("moved features", number + 1, probes)
    nearby, error = (float(v) for v in student(at_features))
    robust, robust_error = (float(v) for v in student(at_weights))
    apart = features.risk - nearby + robust
    within = (error**2 + robust_error**2) ** 0.5
    note = f"the sum with E_F differs from the gap by {apart:.2g} +- {1.96 * within:.2g}"
    value, spread = held_out.risk - nearby, held_out_risk(held_out).stderr
    found = Estimate(value, (error**2 + spread**2) ** 0.5, "estimate", note=note)
    if len(held_out.losses) == 1:
        found = undefined(f"one held-out sample gives no error (the value is {value:g})")
    return {
        ("split.representativeness", None): found,
        ("split.robustness", None): Estimate(robust, robust_error, "estimate"),
    }
