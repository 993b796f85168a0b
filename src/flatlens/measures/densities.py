"""Representativeness of the sample, estimated from the sample itself, and its part in the gap."""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.curvature.probes import student
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined
from flatlens.grams import Weight
from flatlens.measures.card import LAYERWISE, PERMUTATION, UNITS_AND_ORDER, Parts, Run, on_lens
from flatlens.measures.generalisation import held_out_risk
from flatlens.measures.left_out import no_linear_layer, which_layer
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_count, require_one_of, require_positive
from flatlens.measures.rows import with_note
from flatlens.perturbation.density import BANDWIDTHS, mismatch
from flatlens.perturbation.features import RotatedFeatures, noise, unmovable, with_moved_features
from flatlens.perturbation.labels import seen
from flatlens.perturbation.rotations import ROTATION_LAWS


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
