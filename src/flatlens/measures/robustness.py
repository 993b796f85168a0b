"""The risk at moved features of a layer, and whether labels stay constant near them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatlens.curvature.probes import skewed
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined
from flatlens.grams import Weight
from flatlens.measures.card import LAYERWISE, PERMUTATION, Parts, Run, on_lens
from flatlens.measures.left_out import no_linear_layer, which_layer
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_count, require_one_of, require_positive
from flatlens.measures.perturbation import NO_LOSS, lost_in_rounding, of_draws, of_searches
from flatlens.measures.rows import with_note
from flatlens.perturbation.features import Move, RotatedFeatures, noise, unmovable, with_moved_features
from flatlens.perturbation.labels import SeenFeatures, relabelled, seen
from flatlens.perturbation.rotations import ROTATION_LAWS
from flatlens.perturbation.weights import Elsewhere

FEW_LABELS = 20  #: labels of all that show how much another label can change the loss


@on_lens(
    id="P4",
    family="perturbation",
    symbol=r"\mathcal{E}_F^\phi(f, S, \mathcal{A})",
    source="relative2021 Eq. 4, Def. 1, Prop. 2; reparam2019 D.1",
    unit="loss",
    cost="two forward passes per probe and level; for over='worst' restarts x steps gradients",
    invariant_under={LAYERWISE, PERMUTATION},
    of_parameters=False,
    on_request=True,
    differentiates=False,
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
) -> Parts:
    """Feature robustness: the change of the risk under phi -> (I + A) phi at a layer, labels kept, A random.

    `over` names the law of A. "rotations": A = delta O with O of Haar's law; by Theorem 5 the change is delta^2 / (2m)
    `relative_flatness` to leading order. "ball": A = r O such that A phi is uniform in the ball of radius delta
    ||phi||. "truncated_normal": the density of Prop. 2, of width `sigma` before it is cut off at 1. "noise": a random
    direction for each sample (reparam2019 D.1); if the layer is used once per sample, the mean is that over rotations,
    with a smaller error. "worst": the largest change over all ||A|| <= delta; a lower bound, found by `restarts`
    searches, less the risk's rounding error. Each of the `probes` is a pair A and -A. The network's number is that of
    the last linear layer; `layers=True` adds the others.

    Definition 1 is about all alpha A with 0 <= alpha <= delta. With `levels` above 1, `.sup` is the largest absolute
    value of the mean change at that many equal steps of alpha up to delta, with the same A. Apart from the error of the
    mean, this is a lower bound of the supremum. If the risk is convex along every A, the supremum is at delta.
    """
    require_positive(delta=delta, sigma=sigma)
    require_count(2, probes=probes)
    require_count(1, restarts=restarts, steps=steps, levels=levels)
    require_one_of((*ROTATION_LAWS, "noise", "worst"), over=over)
    shares = [(k + 1) / levels for k in range(levels)]

    def of(weight: Weight) -> dict[str, Estimate]:
        if why := unmovable(weight, by_noise=over == "noise"):
            return {"": undefined(why)}
        if over == "noise":
            return _by_noise(lens, run, weight, delta, probes, shares)
        features = RotatedFeatures(lens.problem, lens.model, weight)
        if over == "worst":
            if why := lost_in_rounding("delta", delta, 1.0, lens.problem.dtype):
                return {"": undefined(why)}
            value, reached = features.worst(delta, restarts, steps, run.generator)
            if not value >= 0:
                return {"": undefined(NO_LOSS)}
            return {"": of_searches(value, reached, features.rounding(), "delta")}
        return _by_rotations(features, run, delta, over, sigma, probes, shares)

    weights, last = lens.layout.weights, lens.layout.last()
    if last is None:
        return {("", None): undefined(no_linear_layer(lens))}
    found = {name: of(weight) for name, weight in weights.items() if layers or name == last}
    places: list[tuple[str | None, str]] = [(None, last), *((name, name) for name in found if layers)]
    return {
        (part, at): with_note(estimate, which_layer(lens, last) if at is None else "")
        for at, name in places
        for part, estimate in found[name].items()
    }


def _by_rotations(
    features: RotatedFeatures, run: Run, delta: float, law: str, sigma: float, probes: int, shares: list[float]
) -> dict[str, Estimate]:
    """Return the estimates from several pairs A and -A."""
    changes = torch.empty(len(shares), probes, dtype=torch.float64)
    for number in range(probes):
        WA = features.draw(delta, law, sigma, run.generator)
        for k, share in enumerate(shares):
            changes[k, number] = (features.change(share * WA) + features.change(-share * WA)) / 2
        if run.progress is not None:
            run.progress("moved features", number + 1, probes)
    return _at_levels(changes, features.rounding())


def _at_levels(changes: Tensor, rounding: float) -> dict[str, Estimate]:
    """Return the estimate at delta, and beside several levels of alpha, (levels, probes), the largest absolute one."""
    found = {"": of_draws(changes[-1], rounding)}
    if len(changes) > 1:
        sizes = changes.mean(1).abs()
        best = of_draws(changes[int(sizes.argmax())], rounding)
        note = f"the largest is at {int(sizes.argmax()) + 1} of {len(changes)} levels"
        found["sup"] = replace(best, value=float(sizes.max()), note="; ".join(n for n in (note, best.note) if n))
    return found


def _by_noise(
    lens: Lens, run: Run, weight: Weight, delta: float, probes: int, shares: list[float]
) -> dict[str, Estimate]:
    """Return the estimates that move every sample in its own random direction, and in the opposite one."""
    problem, model, layout = lens.problem, lens.model, lens.layout
    here = lens.outcomes("data").losses
    changes, samples = torch.empty(len(shares), probes, dtype=torch.float64), torch.zeros_like(here)
    for number in range(probes):
        seed = int(torch.randint(2**62, (), generator=run.generator))
        for k, share in enumerate(shares):
            both = torch.zeros_like(here)
            for sign in (1.0, -1.0):
                move = noise(share * delta, sign, torch.Generator().manual_seed(seed))
                both += (with_moved_features(problem, model, layout, weight, move).losses - here) / 2
            changes[k, number] = both.mean()
        samples = samples + both / probes
        if run.progress is not None:
            run.progress("moved features", number + 1, probes)
    rounding = Elsewhere(problem, model=model).rounding() if problem.parameters else 0.0
    found = _at_levels(changes, rounding)
    whole = "" if weight.dense else "noise on the layer's whole input"
    return found | {"": replace(with_note(found[""], whole), samples=samples)}


@on_lens(
    id="D3",
    family="data",
    symbol=r"\overline{|\ell(f', y[\phi']) - \ell(f', y)|}",
    source="relative2021 Def. 9",
    unit="loss",
    cost="one forward pass per probe, nearest neighbours",
    invariant_under={LAYERWISE, PERMUTATION},
    of_parameters=False,
    on_request=True,
    differentiates=False,
)
def locally_constant_labels(lens: Lens, run: Run, *, delta: float = 0.1, probes: int = 16) -> Parts:
    """Change of the loss through labels alone, near the samples: mean_i |l(f', y[phi']) - l(f', y_i)|.

    phi' = phi_i + delta ||phi_i|| xi at the last linear layer, where xi is uniform on the sphere; f' are the outputs
    there. The label y[phi'] is a guess: that of the nearest sample, in the data and the held-out data. Definition 9
    requires that the change is O(delta^3) in all directions: `.worst` takes each sample's largest change, a lower bound
    of that. `.changed` is the share of points whose label differs. Where no point's label differs, the note says how
    large that share can be. If you know the label function, give it to `flatlens.perturbation.label_change`.
    """
    require_positive(delta=delta)
    require_count(2, probes=probes)
    last = lens.layout.last()
    if last is None:
        return {("", None): undefined(no_linear_layer(lens))}
    weight = lens.layout.weights[last]
    if why := unmovable(weight, by_noise=True):
        return {("", None): undefined(why)}
    try:
        known = seen(lens.problem, lens.model, lens.layout, weight, held_out=True)
    except BadInput as error:
        return {("", None): undefined(str(error))}
    changes, changed = [], []
    for number in range(probes):
        move = noise(delta, 1.0, run.generator)
        found = relabelled(lens.problem, lens.model, lens.layout, weight, known.nearest, move)
        changes.append((found.told - found.kept).abs())
        changed.append(found.changed.nanmean())
        if run.progress is not None:
            run.progress("moved features", number + 1, probes)
    values, shares = torch.stack(changes), torch.stack(changed)
    worst = values.max(0).values
    parts = {
        "": of_draws(values.mean(1)),
        "worst": Estimate(float(worst.mean()), kind="lower bound", samples=worst),
        "changed": Estimate(float(shares.mean()), float(skewed(shares)[1]), "estimate", unit="share"),
    }
    if not bool(shares.any()):
        parts |= _none_differs(lens, weight, known, noise(delta, 1.0, run.generator), probes)
    return {(part, None): with_note(one, which_layer(lens, last)) for part, one in parts.items()}


def _none_differs(lens: Lens, weight: Weight, known: SeenFeatures, move: Move, probes: int) -> dict[str, Estimate]:
    """Return the change of the loss and the share of labels that differ, where none did: 0 with a one-sided error.

    What is not met at k points has a share of at most 3 / k (95%).
    """
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

        moved = relabelled(lens.problem, lens.model, lens.layout, weight, told_alike, move)
        largest = max(largest, float((moved.told - moved.kept).abs().max()))
    return {
        "": Estimate(0.0, share * largest / 1.96, "estimate", note),
        "changed": Estimate(0.0, share / 1.96, "estimate", note, unit="share"),
    }
