"""The risk at moved weights: its mean change, its largest change, and the distance that a given change allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.krylov import overflow
from flatlens.curvature.probes import mean_of_forms
from flatlens.errors import BadInput, Give
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.measures.definition import (
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
from flatlens.perturbation.nudges import NUDGES, nudges, rounds
from flatlens.perturbation.searches import Peak, climb, first_crossing
from flatlens.perturbation.weights import Elsewhere
from flatlens.problem import Batch
from flatlens.progress import count_of

LOOKS = 15  #: approximate number of noise levels that a search tries
NO_LOSS = "the loss at moved weights is NaN or inf: use a smaller radius"


def _units(elsewhere: Elsewhere, adaptive: bool) -> Tensor:
    return elsewhere.here.abs() if adaptive else torch.ones_like(elsewhere.here)


of_moved_weights = partial(
    on_lens,
    family="perturbation",
    unit="loss",
    invariant_under={PERMUTATION},
    invariances={("adaptive", True): UNITS_AND_ORDER},  # in units of the weights, a rescaling has no effect
    works_coupled=True,
    on_request=True,
    differentiates=False,
)


@of_moved_weights(
    id="P1",
    symbol=r"S^\rho_{avg}",
    source="compression Eq. 38, 46",
    cost="two forward passes per probe",
    invariant_under=UNITS_AND_ORDER,
    invariances={("adaptive", False): frozenset({PERMUTATION})},
)
def average_sharpness(
    lens: Lens, run: Run, *, rho: float = 0.1, adaptive: bool = True, scale: str = "curvature", probes: int = 32
) -> Estimate:
    """Average-case sharpness: (2 / rho^2) E[L(theta + d) - L(theta)], d normal with standard deviation rho |theta_j|.

    `adaptive=False` takes the standard deviation rho for every parameter. As rho -> 0 the value tends to
    `adaptive_sharpness`, or to `hessian_trace` with `adaptive=False`; at rho = 0.1 a ReLU network can still be far from
    this limit, and with a ReLU whose input is exactly 0 there is none. Each of the `probes` is an antithetic pair (+d,
    -d), so that the slope of the risk cancels. The standard error is over these pairs; `arrays["pairs"]` has their
    values. `scale="published46"` is Eq. 46, which has no factor 2 / rho^2 (and rho = 0.1).
    """
    require_positive(rho=rho)
    require_count(2, probes=probes)
    require_one_of(("curvature", "published46"), scale=scale)
    elsewhere = Elsewhere(lens.problem, model=lens.model)
    here = elsewhere.outcomes(elsewhere.here).losses
    factor = 2 / rho**2 if scale == "curvature" else 1.0
    step = rho * _units(elsewhere, adaptive)
    changes, samples = torch.empty(probes, dtype=torch.float64), torch.zeros_like(here)
    for probe in run.counted("moved weights", probes):
        d = step * torch.randn(len(step), generator=run.generator, dtype=step.dtype).to(step.device)
        both = (elsewhere.outcomes(elsewhere.here + d).losses + elsewhere.outcomes(elsewhere.here - d).losses) / 2
        changes[probe] = factor * (both - here).mean()
        samples += factor * (both - here) / probes
    if not bool(torch.isfinite(changes).all()):
        return undefined(NO_LOSS)
    return replace(of_draws(changes, factor * elsewhere.rounding()), samples=samples, arrays={"pairs": changes})


def of_draws(changes: Tensor, rounding: float = 0.0) -> Estimate:
    """Return the draws' mean, with an error at least as large as their common rounding error."""
    mean, stderr = (float(v) for v in mean_of_forms(changes))
    drowned = rounding > max(stderr, 0.01 * abs(mean))
    note = f"rounding error about {rounding:.1g}: use a larger distance, or dtype=torch.float64" if drowned else ""
    return Estimate(mean, math.hypot(stderr, rounding), "estimate", note, arrays={"draws": changes})


@of_moved_weights(
    id="P2",
    symbol=r"\max_{\|d\| \leq \rho} L(\theta + d) - L(\theta)",
    source="sharpening section 6 (SAM, Foret et al. 2021; ASAM, Kwon et al. 2021)",
    cost="restarts x steps gradients",
    networks=24,
)
def worst_sharpness(
    lens: Lens,
    run: Run,
    *,
    rho: float = 0.05,
    adaptive: bool = False,
    m: int | None = None,
    restarts: int = 3,
    steps: int = 20,
) -> Estimate:
    """Worst-case sharpness: the largest rise of the risk over all ||d||_2 <= rho, found by projected gradient ascent.

    The value is a lower bound: the best of `restarts` searches of `steps` gradients each, less the risk's own rounding
    error, there and here. Where operations inside compute in a half type, the rise is taken again, at moves of weights
    and inputs by less than one rounding. Where the weights' rounding is over 1% of rho, there is no value. One search
    starts along the gradient (its first step is SAM's own approximation), the others in random directions.
    `arrays["restarts"]` shows how far they agree. `adaptive=True` takes the ball ||d / |theta| ||_2 <= rho (that of
    ASAM, for every parameter); a parameter at 0 stays at 0. `m=k` is m-sharpness: each group of k samples, in the
    data's order, has a d of its own, and the rises are averaged.
    """
    require_positive(rho=rho)
    require_count(1, restarts=restarts, steps=steps, **({} if m is None else {"m": m}))
    if m is not None and lens.problem.coupled:
        what = "with ", Give("batchnorm", "train"), " samples are grouped by ghost_batch"
        raise BadInput(what, argument="m", value=m, remedy="leave m out", call="worst_sharpness")
    # the ball, and whether a move of its size exceeds the weights' rounding
    enlarged = lens.enlarged if rounds(lens.problem, lens.model) else lens.problem
    elsewhere = Elsewhere(lens.problem if isinstance(enlarged, str) else enlarged, model=lens.model)
    groups = [None] if m is None or m >= lens.problem.n else lens.problem.data.in_batches_of(m)
    unit = _units(elsewhere, adaptive)
    length = float((elsewhere.here / unit).nan_to_num(posinf=0.0, neginf=0.0).norm())
    if why := lost_in_rounding("rho", rho, length, unit.dtype):
        return undefined(why)
    # each group climbs on its own; the rises are averaged by their masses
    size, total, reached = min(m or lens.problem.n, lens.problem.n), 0.0, []
    highest, there = -math.inf, elsewhere.here
    for group in groups:
        peak, mass = _worst_of(elsewhere, group, rho, unit, restarts, steps, run)
        total += peak.value * mass
        reached.append(peak.restarts.clamp(min=0) * mass)
        if peak.value > highest:
            highest, there = peak.value, elsewhere.here + unit * peak.where
        if run.progress is not None:
            run.progress("groups of samples", len(reached), -(-lens.problem.n // size))
    if not math.isfinite(total):
        return undefined(NO_LOSS)
    mass, rises = lens.problem.mass, torch.stack(reached).sum(0)
    note = f"m = {size}, {count_of(len(reached), 'group')} of samples"
    if rounds(lens.problem, lens.model) and len(reached) == 1:
        # the search has chosen the largest rounding, too: the rise is taken again, at nudges of weights and inputs
        again = torch.zeros(NUDGES, dtype=torch.float64)
        for seed in range(NUDGES):
            with nudges(lens.problem, lens.model, seed) as problem:
                near = Elsewhere(problem, model=lens.model)
                end = near.outcomes(near.here + (there - elsewhere.here)).risk
                again[seed] = end - near.outcomes(near.here).risk
        return of_searches(float(again.mean()), rises / mass, 1.96 * float(again.std()), "rho", note)
    rounding = elsewhere.rounding() + elsewhere.rounding(there)  # of both ends of a rise
    return of_searches(total / mass, rises / mass, rounding, "rho", note)


def of_searches(value: float, reached: Tensor, rounding: float, distance: str, note: str = "") -> Estimate:
    """Rise that the best search `reached`, less rounding: a lower bound; option `distance` makes rises larger."""
    kept = max(value - rounding, 0.0)
    lost = ""
    if kept == 0 < value:
        lost = (
            f"the rise, {value:.1g}, is rounding error, which is about {rounding:.1g}: use a {distance} at least "
            f"{2 * rounding / value:.1g} times as large, or dtype=torch.float64"
        )
    return with_note(Estimate(kept, kind="lower bound", note=note, arrays={"restarts": reached}), lost)


def lost_in_rounding(distance: str, value: float, size: float, dtype: torch.dtype) -> str:
    """Words where rounding changes a move (option `distance`, of size `value`) of weights of `size` by over 1%."""
    rounding = torch.finfo(dtype).eps / math.sqrt(12) * size
    if rounding <= 0.01 * value:
        return ""
    return (
        f"{distance} = {value:g} is lost in the weights' rounding, which is {rounding:.2g} long: use a {distance} of "
        f"at least {100 * rounding:.2g}, or dtype=torch.float64"
    )


def _worst_of(
    elsewhere: Elsewhere, group: Batch | None, rho: float, unit: Tensor, restarts: int, steps: int, run: Run
) -> tuple[Peak, float]:
    """Return (the largest rise of the group's mean loss, its mass)."""
    mass = elsewhere.mass(group)
    if mass == 0:  # every sample is ignored
        return Peak(0.0, torch.zeros_like(unit), torch.zeros(restarts, dtype=torch.float64)), 0.0
    here, slope = elsewhere.slope(elsewhere.here, elsewhere.chunks(group), mass)
    if not bool(slope.isfinite().all()):
        raise overflow(slope.dtype, "the gradient")

    def rise(e: Tensor) -> tuple[float, Tensor]:
        risk, g = elsewhere.slope(elsewhere.here + unit * e, elsewhere.chunks(group), mass)
        return risk - here, unit * g

    def starts() -> Iterator[Tensor]:
        for number in range(restarts):
            drawn = torch.randn(len(unit), generator=run.generator, dtype=unit.dtype).to(unit.device)
            along = unit * slope if number == 0 and bool((unit * slope).any()) else drawn
            yield rho * along / along.norm()

    return climb(rise, starts(), rho, steps), mass


@of_moved_weights(
    id="P3",
    symbol=r"1/\sigma^2",
    source="relative2021 Fig. 5 (Jiang et al. 2020)",
    unit="1 / parameter^2",
    cost="about 20 x probes x 2 forward passes",
)
def pac_bayes_flatness(
    lens: Lens, run: Run, *, level: float = 0.1, of: str = "accuracy", adaptive: bool = False, probes: int = 16
) -> Estimate | Parts:
    """PAC-Bayes flatness: 1 / sigma^2, sigma the largest noise that costs no more than `level` of accuracy on average.

    The noise is normal with standard deviation sigma, or sigma |theta_j| with `adaptive=True`, where a weight at 0
    stays at 0. (A widely copied implementation passes sigma^2 as the standard deviation.) `of="loss"` replaces the
    accuracy by a rise of the risk by `level`. The search doubles the noise until the mean over the probes first passes
    the level, and then bisects, with the same probes throughout; each of the `probes` is used with its opposite. The
    error is a jackknife over probes. `.sigma` is sigma itself. `arrays` has the curve: `sigmas` and `changes`.
    """
    require_positive(level=level)
    require_count(2, probes=probes)
    require_one_of(("accuracy", "loss"), of=of)
    elsewhere = Elsewhere(lens.problem, model=lens.model)
    unit = _units(elsewhere, adaptive)
    here = _score(elsewhere, elsewhere.here, of)
    if here is None:
        return undefined("the targets are not class labels: use of='loss'")
    # the same noise at every level
    looks: list[float] = []
    seeds = torch.randint(2**62, (probes,), generator=run.generator).tolist()

    def change(sigma: float) -> Tensor:
        found = []
        for seed in seeds:
            noise = torch.randn(len(unit), generator=torch.Generator().manual_seed(seed), dtype=unit.dtype)
            step = sigma * unit * noise.to(unit.device)
            scores = (_score(elsewhere, elsewhere.here + step, of), _score(elsewhere, elsewhere.here - step, of))
            found.append(sum(score for score in scores if score is not None) / 2 - here)
        looks.append(sigma)
        if run.progress is not None:
            run.progress("levels of noise", min(len(looks), LOOKS), LOOKS)
        return torch.tensor(found, dtype=torch.float64)

    # the first level at which the mean change passes what is allowed
    size = 1.0 if adaptive else float(elsewhere.here.square().mean().sqrt()) or 1.0
    crossing = first_crossing(change, level, 0.05 * size)
    if crossing is None:
        return undefined(f"no noise changes the {of} by {level:g} on average while the losses are finite")
    sigma, relative = math.exp(crossing.log_sigma), crossing.stderr
    arrays = {"sigmas": crossing.sigmas, "changes": crossing.changes}
    unit_of_sigma = "share of the parameter" if adaptive else "parameter"
    return {
        ("", None): Estimate(sigma**-2, 2 * relative * sigma**-2, "estimate", arrays=arrays, unit="1" * adaptive),
        ("sigma", None): Estimate(sigma, relative * sigma, "estimate", unit=unit_of_sigma),
    }


def _score(elsewhere: Elsewhere, theta: Tensor, of: str) -> float | None:
    """Return the quantity that must rise: the risk, or the share of errors; None if it is not defined."""
    found = elsewhere.outcomes(theta)
    if of == "loss" or not math.isfinite(found.risk):  # NaN outputs have no class
        return found.risk if math.isfinite(found.risk) else math.inf
    return None if found.correct is None else 1 - float(found.correct.nanmean())
