"""The local learning coefficient: the mean rise of the loss under a posterior around the weights, by Monte Carlo."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace

import torch

from flatlens.errors import BadOption
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.measures.definition import PERMUTATION, Parts, Run, on_lens, require_count, require_positive
from flatlens.measures.lens import Lens
from flatlens.perturbation.localised_posterior import (
    ChainMean,
    Counted,
    Draws,
    Posterior,
    descended,
    mean_of_chains,
    run_chains,
    slope_of,
)
from flatlens.perturbation.weights import Elsewhere

RHAT = 1.05  #: split R-hat above which the chains disagree
EFFECTIVE = 100  #: effective draws of all chains below which there is no value
DRIFT = 4.0  #: difference of the chains' halves, in its standard errors, above which they have not converged
_DRAWS, _BURN_IN = 300, 100
_BURNT = _BURN_IN / (_DRAWS + _BURN_IN)  #: share of a budget that burns in
_FEWEST = 20  #: draws of a chain
_DESCENT = 100  #: largest number of gradients of a descent
AWAY = 4.0  #: standard errors by which chains may lie farther from w* than the localisation alone would take them


@on_lens(
    id="P7",
    family="perturbation",
    symbol=r"\lambda",
    source="learning2025",
    unit="dimensions / 2",
    cost="chains x (burn_in + draws) x leapfrogs gradients: 8,000 by default; up to 500 more for its checks",
    invariant_under={PERMUTATION},
    works_coupled=True,
    on_request=True,
    by_name=True,  # 8,000 gradients
    differentiates=False,
)
def local_learning_coefficient(
    lens: Lens,
    run: Run,
    *,
    beta: float | None = None,
    gamma: float = 1.0,
    chains: int = 4,
    draws: int = _DRAWS,
    burn_in: int = _BURN_IN,
    leapfrogs: int = 5,
    gradients: int | None = None,
) -> Estimate | Parts:
    """Local learning coefficient: n beta (E[L(w)] - L(w*)), E over a posterior around the network's weights w*.

    The posterior is proportional to exp(-n beta L(w) - gamma / 2 ||w - w*||^2), L the mean of the loss over all n
    samples, taken as a negative log likelihood. `beta` is 1 / log n if not given; `gamma` localises. The value is that
    of this posterior: another n, beta or gamma has another one, and so have rescaled weights. As n grows, it tends to
    the learning coefficient at w*: half the number of parameters in a regular model, less in a singular one.

    Hamiltonian Monte Carlo on the full loss: `chains` start at w*, tune their steps in `burn_in` transitions to an
    acceptance of 0.8, and keep `draws` transitions of `leapfrogs` gradients each (1 is MALA). Each transition takes a
    random share of the step, and is accepted or rejected by Metropolis: the step leaves no bias. The error comes from
    batch means of the chains. There is no value where the chains disagree (split R-hat above 1.05, fewer than 100
    effective draws, drift), or leave the basin: where a descent from their ends finds a deeper minimum than a descent
    from w*, or where they lie farther from w* than the localisation alone would take them.

    `gradients` is a budget instead of `draws` and `burn_in`: the chains take at most that many gradients of all
    samples, a quarter of them to burn in. Descents, which check the basin, take up to 100 (chains + 1) more, and the
    search for a first step some. The note counts all. With a budget that is too small there is no value.

    `.fall` is n beta (L(w*) - L(mode)), the mode found by a descent from w*: 0 at a minimum. Where it exceeds the
    error, w* is not a minimum, and the note says so. `arrays` has each chain's draws of n beta (L(w) - L(w*)),
    acceptance and step, and `effective`, `rhat`.
    """
    require_positive(gamma=gamma, **({} if beta is None else {"beta": beta}))
    require_count(1, leapfrogs=leapfrogs, burn_in=burn_in)
    require_count(2, chains=chains)
    require_count(_FEWEST, draws=draws)
    if gradients is not None:
        if (draws, burn_in) != (_DRAWS, _BURN_IN):
            raise BadOption(f"option gradients={gradients!r}: give it, or draws and burn_in, not both")
        require_count(math.ceil(_FEWEST / (1 - _BURNT)) * chains * leapfrogs, gradients=gradients)
        transitions = gradients // (chains * leapfrogs)
        burn_in = int(_BURNT * transitions)
        draws = transitions - burn_in
    n = lens.samples
    if n < 2 and beta is None:
        return undefined("beta = 1 / log n needs at least two samples: give beta")
    strength = n / math.log(n) if beta is None else n * beta
    total = chains * (burn_in + draws) * leapfrogs
    elsewhere = Elsewhere(lens.problem, model=lens.model)
    slope = Counted(slope_of(elsewhere))
    posterior = Posterior(slope, elsewhere.here.double(), strength, gamma)
    with lens.problem.measuring(lens.model):
        # a trial on a few samples: the time of some gradients stands for that of all
        if lens.samples > lens.problem.n:
            return Estimate(0.0, seconds=(total + _DESCENT * (chains + 1)) * _seconds(posterior, chains))
        here = float(posterior.slope(posterior.centre[None])[0])
        lowest, at_mode, _ = descended(posterior, posterior.centre, _DESCENT)

        def told(done: int) -> None:
            if run.progress is not None:
                run.progress("gradients", chains * done, total)

        drawn = run_chains(posterior, chains, burn_in, draws, leapfrogs, run.generator, told)
        deepest = min(descended(posterior, end, _DESCENT)[0] for end in drawn.ends)
    # the chains' rises, in units of the value, and the error of the loss itself
    rises = strength * (drawn.losses - here)
    mean = mean_of_chains(rises)
    stderr = math.hypot(mean.stderr, strength * elsewhere.rounding())
    fall = max(0.0, strength * (here - at_mode))
    arrays = {
        "draws": rises.cpu(), "accepted": drawn.accepted.cpu(), "steps": drawn.steps.cpu(),
        "effective": torch.tensor(mean.effective), "rhat": torch.tensor(mean.rhat),
    }  # fmt: skip
    told_how = (
        f"n beta = {strength:.4g}, gamma = {gamma:g}; {mean.effective:.0f} effective draws, "
        f"R-hat {mean.rhat:.3f}, acceptance {float(drawn.accepted.mean()):.2f}, {slope.taken:,} gradients"
    )
    value = Estimate(mean.value, stderr, "estimate", told_how, arrays=arrays)
    if why := disagreement(mean) or _left(drawn, posterior, lowest - deepest, value.margin):
        value = replace(undefined(f"{why} ({told_how})"), arrays=arrays)
    elif fall > value.margin:
        lower = f"a descent lowers the loss by {here - at_mode:.2g}, {fall:.2g} in units of this value"
        mend = "train further, or add .fall for the rise above the minimum"
        value = with_note(value, f"the weights are not a minimum: {lower}: {mend}")
    return {("", None): value, ("fall", None): Estimate(fall, kind="lower bound")}


def _seconds(posterior: Posterior, chains: int, repeats: int = 7) -> float:
    """Return the seconds of a gradient, where all chains take theirs together: the median; the first warms up."""
    rows, took = posterior.centre.expand(chains, -1), []
    clock = time.perf_counter if rows.is_cuda else time.thread_time  # which other work on the processor does not move
    for _ in range(1 + repeats):
        start = clock()
        posterior.slope(rows)
        took.append(clock() - start)
    return statistics.median(took[1:]) / chains


def disagreement(mean: ChainMean) -> str:
    """Return why the chains' mean is not that of the posterior; empty if nothing speaks against it."""
    mend = "give more draws= or leapfrogs=, or a larger gamma="
    if mean.rhat > RHAT:
        return f"the chains disagree: {mend}"
    if mean.effective < EFFECTIVE:
        return f"fewer than {EFFECTIVE} effective draws: {mend}"
    return "the chains still drift: give a longer burn_in= or a larger gamma=" if abs(mean.drift) > DRIFT else ""


def _left(drawn: Draws, posterior: Posterior, deeper: float, margin: float) -> str:
    """Return how the chains have left the basin of w*, `deeper`: by how much descents from their ends reach deeper."""
    if deeper > max(margin, 1e-6):
        return (
            f"the chains left the basin: descents from their ends reach a minimum that is deeper by {deeper:.2g} in "
            f"units of this value: train further, or give a larger gamma="
        )
    # where no loss falls along rays from w*, ||w - w*||^2 is at most that of the localisation, P / gamma
    distance = mean_of_chains(posterior.gamma * drawn.distances)
    if distance.value - len(posterior.centre) > AWAY * distance.stderr:
        return "the loss falls away from the weights: the chains lie farther away than gamma alone would take them"
    return ""
