"""Feature robustness, labels near the samples, representativeness: what happens where a layer's features move."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.probes import skewed, student
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.grams import Weight
from flatlens.measures.definition import (
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
from flatlens.measures.generalisation import held_out_risk
from flatlens.measures.lens import Lens
from flatlens.measures.moved_weights import NO_LOSS, lost_in_rounding, of_draws, of_searches
from flatlens.measures.notes import no_linear_layer, which_layer
from flatlens.perturbation.features import (
    BANDWIDTHS,
    ROTATION_LAWS,
    Move,
    RotatedFeatures,
    SeenFeatures,
    mismatch,
    noise,
    relabelled,
    seen,
    unmovable,
    with_moved_features,
)
from flatlens.perturbation.weights import Elsewhere

APART = 1.9  #: value of int |p - p_hat|, at most 2, above which few kernels overlap
NO_OVERLAP = "; kernels hardly overlap: a mean difference of the parts' mean losses, whatever the features are"
FEW_LABELS = 20  #: labels of all that show how much another label can change the loss
FEATURES_MOVED = "moved features"

of_moved_features = partial(
    on_lens,
    family="perturbation",
    unit="loss",
    invariant_under={LAYERWISE, PERMUTATION},
    of_parameters=False,
    on_request=True,
    differentiates=False,
)
of_near_data = partial(of_moved_features, family="data")


@of_moved_features(
    id="P4",
    symbol=r"\mathcal{E}_F^\phi(f, S, \mathcal{A})",
    source="relative2021 Eq. 4, Def. 1, Prop. 2; reparam2019 D.1",
    cost="two forward passes per probe and level; for over='worst' restarts x steps gradients",
)
def feature_robustness(
    lens: Lens,
    run: Run,
    *,
    delta: float = 0.1,
    over: str = "rotations",
    sigma: float = 1.0,
    probes: int = 16,
    restarts: int = 3,
    steps: int = 50,
    layers: bool = False,
    levels: int = 1,
) -> Estimate | Parts:
    """Feature robustness: the change of the risk under phi -> (I + A) phi at a layer, labels kept, A random.

    `over` names the distribution of A. "rotations": A = delta O with O Haar-distributed; by Theorem 5 the change is
    delta^2 / (2m) `relative_flatness` to leading order. "ball": A = r O such that A phi is uniform in the ball of
    radius delta ||phi||. "truncated_normal": the density of Prop. 2, of width `sigma` before it is cut off at 1.
    "noise": a random direction for each sample (reparam2019 D.1); if the layer is used once per sample, the mean is
    that over rotations, with a smaller error. "worst": the largest change over all ||A|| <= delta; a lower bound, found
    by `restarts` searches, less the risk's rounding error. Each of the `probes` is an antithetic pair, A and -A. The
    network-level value is the last linear layer's; `layers=True` adds the others.

    Definition 1 is about all alpha A with 0 <= alpha <= delta. With `levels` above 1, `.sup` is the largest absolute
    value of the mean change at that many equal steps of alpha up to delta, with the same A. Apart from the error of the
    mean, this is a lower bound of the supremum. If the risk is convex along every A, the supremum is at delta.
    """
    require_positive(delta=delta, sigma=sigma)
    require_count(2, probes=probes)
    require_count(1, restarts=restarts, steps=steps, levels=levels)
    require_one_of((*ROTATION_LAWS, "noise", "worst"), over=over)
    weights, last = lens.plan.weights, lens.plan.last()
    if last is None:
        return undefined(no_linear_layer(lens))
    shares = [(k + 1) / levels for k in range(levels)]

    # by the law of A: each sample's own noise, the worst A, or pairs A and -A
    def of(weight: Weight) -> dict[str, Estimate]:
        if why := unmovable(weight, by_noise=over == "noise"):
            return {"": undefined(why)}
        problem, model = lens.problem, lens.model
        if over == "noise":
            here = lens.outcomes("data").losses
            changes, samples = torch.empty(levels, probes, dtype=torch.float64), torch.zeros_like(here)
            for number in run.counted(FEATURES_MOVED, probes):
                seed = int(torch.randint(2**62, (), generator=run.generator))
                for k, share in enumerate(shares):
                    both = torch.zeros_like(here)
                    for sign in (1.0, -1.0):
                        move = noise(share * delta, sign, torch.Generator().manual_seed(seed))
                        both += (with_moved_features(problem, model, lens.plan, weight, move).losses - here) / 2
                    changes[k, number] = both.mean()
                samples = samples + both / probes
            parts = _at_levels(changes, Elsewhere(problem, model=model).rounding() if problem.parameters else 0.0)
            whole = "" if weight.dense else "noise on the layer's whole input"
            return parts | {"": replace(with_note(parts[""], whole), samples=samples)}
        features = RotatedFeatures(problem, model, weight)
        if over != "worst":
            changes = torch.empty(len(shares), probes, dtype=torch.float64)
            for number in run.counted(FEATURES_MOVED, probes):
                WA = features.draw(delta, over, sigma, run.generator)
                for k, share in enumerate(shares):
                    changes[k, number] = (features.change(share * WA) + features.change(-share * WA)) / 2
            return _at_levels(changes, features.elsewhere.rounding())
        if why := lost_in_rounding("delta", delta, 1.0, lens.problem.dtype):
            return {"": undefined(why)}
        value, reached = features.worst(delta, restarts, steps, run.generator)
        if not value >= 0:
            return {"": undefined(NO_LOSS)}
        return {"": of_searches(value, reached, features.elsewhere.rounding(), "delta")}

    # the network-level value is that of the last layer
    found = {name: of(weight) for name, weight in weights.items() if layers or name == last}
    parts = {(part, None): with_note(one, which_layer(lens, last)) for part, one in found[last].items()}
    return parts | {(part, name): one for name in found if layers for part, one in found[name].items()}


def _at_levels(changes: Tensor, rounding: float) -> dict[str, Estimate]:
    """Return the estimate at delta, and beside several levels of alpha, (levels, probes), the largest absolute one."""
    found = {"": of_draws(changes[-1], rounding)}
    if len(changes) > 1:
        sizes = changes.mean(1).abs()
        best = of_draws(changes[int(sizes.argmax())], rounding)
        at = f"the largest is at {int(sizes.argmax()) + 1} of {len(changes)} levels"
        found["sup"] = with_note(replace(best, value=float(sizes.max()), note=at), best.note)
    return found


@of_near_data(
    id="D3",
    symbol=r"\overline{|\ell(f', y[\phi']) - \ell(f', y)|}",
    source="relative2021 Def. 9",
    cost="one forward pass per probe, nearest neighbours",
)
def locally_constant_labels(lens: Lens, run: Run, *, delta: float = 0.1, probes: int = 16) -> Estimate | Parts:
    """Change of the loss through labels alone, near the samples: mean_i |l(f', y[phi']) - l(f', y_i)|.

    phi' = phi_i + delta ||phi_i|| xi at the last linear layer, where xi is uniform on the sphere; f' are the outputs
    there. The label y[phi'] is a guess: that of the nearest sample, in the data and the held-out data. Definition 9
    requires that the change is O(delta^3) in all directions: `.worst` takes each sample's largest change, a lower bound
    of that. `.changed` is the share of points whose label differs. Where no point's label differs, the note says how
    large that share can be. If you know the label function, give it to `flatlens.perturbation.label_change`.
    """
    require_positive(delta=delta)
    require_count(2, probes=probes)
    weight = _last_layer(lens)
    if isinstance(weight, str):
        return undefined(weight)
    try:
        known = seen(lens.problem, lens.model, lens.plan, weight, held_out=True)
    except BadInput as error:
        return undefined(str(error))
    changes, changed = [], []
    for _ in run.counted(FEATURES_MOVED, probes):
        move = noise(delta, 1.0, run.generator)
        found = relabelled(lens.problem, lens.model, lens.plan, weight, known.nearest, move)
        changes.append((found.told - found.kept).abs())
        changed.append(found.changed.nanmean())
    values, shares = torch.stack(changes), torch.stack(changed)
    worst = values.max(0).values
    parts = {
        "": of_draws(values.mean(1)),
        "worst": Estimate(float(worst.mean()), kind="lower bound", samples=worst),
        "changed": Estimate(float(shares.mean()), float(skewed(shares)[1]), "estimate", unit="share"),
    }
    if not bool(shares.any()):
        parts |= _none_differs(lens, weight, known, noise(delta, 1.0, run.generator), probes)
    return {(part, None): with_note(one, which_layer(lens, weight.layer)) for part, one in parts.items()}


def _last_layer(lens: Lens) -> Weight | str:
    """Return the last linear layer's weight, or why its features cannot be moved."""
    if (last := lens.plan.last()) is None:
        return no_linear_layer(lens)
    return unmovable(lens.plan.weights[last], by_noise=True) or lens.plan.weights[last]


def _none_differs(lens: Lens, weight: Weight, known: SeenFeatures, move: Move, probes: int) -> dict[str, Estimate]:
    """Change of loss and share of labels where none of k points differs: 0, or a share of 3 / k at most (95%)."""
    told: Tensor = torch.unique(known.y, dim=0)
    if len(told) == 1:
        vacuous = Estimate(0.0, note="vacuous: all samples have one label, so none can differ")
        return {"": vacuous, "changed": replace(vacuous, unit="share")}
    points = probes * int(known.counted[: lens.problem.n].sum())
    share = 3 / points
    note = f"no label differs at {points} points: the share is at most {share:.2g} (95%)"
    few = told[torch.linspace(0, len(told) - 1, min(len(told), FEW_LABELS)).long()]
    largest = 0.0
    for label in few:

        def told_alike(phi: Tensor, label: Tensor = label) -> Tensor:
            return label.expand(len(phi), *label.shape)

        moved = relabelled(lens.problem, lens.model, lens.plan, weight, told_alike, move)
        largest = max(largest, float((moved.told - moved.kept).abs().max()))
    return {
        "": Estimate(0.0, share * largest / 1.96, "estimate", note),
        "changed": Estimate(0.0, share / 1.96, "estimate", note, unit="share"),
    }


@of_near_data(
    id="D2",
    symbol=r"\mathcal{E}_{Rep}",
    source="relative2021 Eq. 3, 5, section 6, C.1",
    cost="one forward pass, kernel densities; 2 x probes forward passes for the split",
    invariant_under=UNITS_AND_ORDER,
    invariances={("bandwidth", "relative"): frozenset({LAYERWISE, PERMUTATION})},
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
) -> Estimate | Parts:
    """Approximate representativeness of the sample: |int (p - p_hat) l| with both densities estimated from splits.

    The features of the last linear layer are split at random, `splits` times; one part in `folds` is held out. p_hat is
    the kernel density of the rest, p that of the part held out, and l the network's loss at the points of both. The
    value is an approximation and not a bound: the distribution itself is not known, and a mean of absolute values is
    above 0 even if both parts have the same law. Both densities are read at the sample's own points, and each is
    divided by its sum there, so that a constant loss has the value 0; losses away from these points are not in it. With
    many features kernels hardly overlap, and the value is near the difference of the parts' mean losses. `.shift` is
    int |p - p_hat|, between 0 and 2, and `.bound` the largest loss times it. The error is the spread over splits. These
    share their points, so it is a guide and not an interval.

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
    weight = _last_layer(lens)
    if isinstance(weight, str):
        return undefined(weight)
    parts = _by_splits(lens, run, weight, splits, folds, bandwidth)
    if lens.problem.test is not None:
        parts |= _split_gap(lens, run, weight, delta, probes, over, sigma)
    return {(part, None): with_note(one, which_layer(lens, weight.layer)) for part, one in parts.items()}


def _by_splits(lens: Lens, run: Run, weight: Weight, splits: int, folds: int, bandwidth: str) -> dict[str, Estimate]:
    try:
        points = seen(lens.problem, lens.model, lens.plan, weight)
    except BadInput as error:  # for example, one label per token
        return {"": undefined(str(error))}
    every = lens.outcomes("data").losses
    losses = every[points.counted.cpu()] * float(points.counted.double().mean())  # their mean is the risk
    n = len(losses)
    if n < 3 * folds:
        return {"": undefined(f"{n} samples cannot be split into {folds} parts of at least 3")}
    phi = points.phi.cpu()
    moving = phi[:, phi.std(0) > 1e-12 * phi.abs().max()]
    if not moving.shape[1]:
        return {"": undefined("the features are the same for every sample")}
    weighted, shifts, plain = torch.empty(3, splits, dtype=torch.float64)
    for number in run.counted("random splits", splits):
        order = torch.randperm(n, generator=run.generator)
        held, kept = order[: n // folds], order[n // folds :]
        shifts[number], signed = mismatch(moving[held], moving[kept], losses[held], losses[kept], bandwidth)
        weighted[number], plain[number] = abs(signed), (losses[held].mean() - losses[kept].mean()).abs()
    note = "an approximation from random splits"
    apart = float(shifts.mean()) > APART and torch.allclose(weighted, plain, rtol=0.01, atol=0)
    largest = float(losses.abs().max())

    def spread(values: Tensor, unit: str = "loss", note: str = note) -> Estimate:
        mean, stderr = student(values)
        return Estimate(float(mean), float(stderr), "estimate", note=note, unit=unit, arrays={"splits": values})

    return {
        "": spread(weighted, note=note + NO_OVERLAP * apart),
        "shift": spread(shifts, "share"),
        "bound": spread(largest * shifts, note=f"{note}; the largest absolute loss seen is {largest:.3g}"),
    }


def _split_gap(
    lens: Lens, run: Run, weight: Weight, delta: float, probes: int, law: str, sigma: float
) -> dict[str, Estimate]:
    """Return E_Rep (by moved features) and E_F (by moved weights): by the key identity they add up to the gap."""
    if why := unmovable(weight) or ("" if weight.dense else "the layer acts at several positions of a sample"):
        return {"split.representativeness": undefined(why)}
    held_out = lens.outcomes("test")
    features = RotatedFeatures(lens.problem, lens.model, weight)
    at_features, at_weights = torch.empty(2, probes, dtype=torch.float64)
    for number in run.counted(FEATURES_MOVED, probes):
        move = noise(delta, 1.0, run.generator, law, sigma)
        moved = with_moved_features(lens.problem, lens.model, lens.plan, weight, move)
        at_features[number] = moved.risk
        at_weights[number] = features.change(features.draw(delta, law, sigma, run.generator))
    nearby, error = (float(v) for v in student(at_features))
    robust, robust_error = (float(v) for v in student(at_weights))
    apart = features.risk - nearby + robust
    within = (error**2 + robust_error**2) ** 0.5
    note = f"the sum with E_F differs from the gap by {apart:.2g} +- {1.96 * within:.2g}"
    value, spread = held_out.risk - nearby, held_out_risk(held_out).stderr
    found = Estimate(value, (error**2 + spread**2) ** 0.5, "estimate", note=note)
    if len(held_out.losses) == 1:
        found = undefined(f"one held-out sample gives no error (the value is {value:g})")
    return {"split.representativeness": found, "split.robustness": Estimate(robust, robust_error, "estimate")}
