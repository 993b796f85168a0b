"""The posterior around a network's weights: draws by Hamiltonian Monte Carlo, and the nearest mode by descent.

Its density is proportional to exp(-strength (L(w) - L(w*)) - gamma / 2 ||w - w*||^2). Every proposal is accepted or
rejected by Metropolis, so that the step leaves no bias. Chains are rows, each with a step of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from flatlens.curvature.probes import student
from flatlens.perturbation.weights import Elsewhere

BATCHES = 5  #: largest number of batches that a chain is cut into
DRAWS_OF_A_BATCH = 10.0  #: effective draws that a batch must hold


@dataclass(frozen=True)
class ChainMean:
    """The mean of a function of the draws of several Markov chains."""

    value: float
    stderr: float  #: value +- 1.96 stderr is a 95% interval
    effective: float  #: effective sample size of all chains together
    rhat: float  #: split R-hat
    drift: float  #: mean of the second halves less that of the first halves, in its own standard errors


def mean_of_chains(values: Tensor) -> ChainMean:
    """Mean over chains of equal length, (chains, draws), with an interval by batch means.

    Each chain is cut into at most `BATCHES` batches of at least `DRAWS_OF_A_BATCH` effective draws. The batch means are
    taken as independent, and the interval is Student's. A chain with fewer effective draws is one batch. Where draws
    are skewed, an interval of few is too narrow by the share 1.08 g^2 / m, g the skewness and m the effective draws
    (Hall 1992, section 2.6); the error is wider by three times that share: draws are correlated, and their skewness
    underestimates g.
    """
    values = values.to(torch.float64)
    chains, draws = values.shape
    effective = effective_sample_size(values)
    # whole batches: draws that do not fill the last one are added to it
    batches = min(BATCHES, max(1, int(effective / chains / DRAWS_OF_A_BATCH)))
    ends = [round(draws * number / batches) for number in range(batches + 1)]
    means = torch.stack([values[:, a:b].mean(1) for a, b in pairwise(ends)], 1).flatten()
    centred = values - values.mean()
    spread = float(centred.square().mean())
    g = float(centred.pow(3).mean()) / spread**1.5 if spread else 0.0
    stderr = student(means)[1] * (1 + 3.24 * g**2 / effective)
    plain = float(means.std()) / math.sqrt(len(means))
    # both halves together have half of the draws each, so that their difference has twice the error of the mean
    half = draws // 2
    difference = float(values[:, -half:].mean() - values[:, :half].mean())
    drift = difference / (2 * plain) if plain else 0.0
    return ChainMean(float(values.mean()), float(stderr), effective, split_rhat(values), drift)


def split_rhat(values: Tensor) -> float:
    """Split R-hat of chains, (chains, draws), 1 where all halves are alike (Gelman et al. 2013, Eq. 11.4)."""
    half = values.shape[1] // 2
    halves = torch.cat([values[:, :half], values[:, -half:]]).to(torch.float64)
    within, between = float(halves.var(1).mean()), float(halves.mean(1).var())
    if within == 0:
        return 1.0 if between == 0 else math.inf
    return math.sqrt((half - 1) / half + between / within)


def effective_sample_size(values: Tensor) -> float:
    """Effective sample size of chains, (chains, draws), from their autocorrelations.

    Sums of two neighbouring autocorrelations, pooled over the chains, are added until one is negative, and none may
    exceed the one before (Geyer 1992; Gelman et al. 2013, section 11.5). At most chains x draws.
    """
    values = values.to(torch.float64)
    chains, draws = values.shape
    centred = values - values.mean(1, keepdim=True)
    # autocovariances by a Fourier transform of twice the length
    spectrum = torch.fft.rfft(centred, n=2 * draws)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * draws)[:, :draws].mean(0) / draws
    within = float(covariance[0]) * draws / (draws - 1)
    between = float(values.mean(1).var()) if chains > 1 else 0.0
    pooled = float(covariance[0]) + between
    if pooled == 0:
        return float(chains * draws)
    correlation = 1 - (within - covariance * draws / (draws - 1)) / pooled
    correlation[0] = 1.0
    pairs = correlation[: draws // 2 * 2].reshape(-1, 2).sum(1)
    negative = (pairs < 0).nonzero()
    kept = pairs[: int(negative[0])] if len(negative) else pairs
    time = -1 + 2 * float(torch.cummin(kept, 0).values.sum()) if len(kept) else 1.0
    return chains * draws / max(time, 1.0)


Slope: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(chains, P) float64 -> losses, (chains,), and their gradients, (chains, P), both float64."""


@dataclass(eq=False)
class Counted:
    """A slope that counts the gradients it has taken, one for each row."""

    slope: Slope
    taken: int = 0

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses and their gradients at rows of weights."""
        self.taken += len(rows)
        return self.slope(rows)


ACCEPTANCE = 0.8  #: mean acceptance that the burn-in aims at
_HALVINGS = 60  #: of the first step


@dataclass(frozen=True, eq=False)
class Posterior:
    """The posterior that is sampled: a loss around a point, its strength n beta, and the localisation's precision."""

    slope: Slope
    centre: Tensor  #: w*, (P,) float64
    strength: float
    gamma: float

    def energy(self, w: Tensor, losses: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the log density, less a constant, and its gradient, from the losses at w, (chains, P)."""
        away = w - self.centre
        energy = self.strength * losses + self.gamma / 2 * away.square().sum(1)
        return energy, self.strength * slopes + self.gamma * away


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws after the burn-in, (chains, draws) float64, and how they were made."""

    losses: Tensor
    distances: Tensor  #: squared, ||w - w*||^2
    ends: Tensor  #: where each chain ends, (chains, P)
    accepted: Tensor  #: mean acceptance of each chain after the burn-in, (chains,)
    steps: Tensor  #: step of each chain, (chains,)


def slope_of(elsewhere: Elsewhere) -> Slope:
    """Return the risk and its gradient at rows of weights, inside `problem.measuring`."""
    problem, here = elsewhere.problem, elsewhere.here

    def slope(rows: Tensor) -> tuple[Tensor, Tensor]:
        losses, slopes = torch.zeros_like(rows[:, 0]), torch.zeros_like(rows)
        for number, row in enumerate(rows):
            for raw in elsewhere.chunks():
                at = row.detach().to(here).requires_grad_()
                f, y = elsewhere.run(at, problem.place(raw))
                part = problem.loss.total(f, y) / problem.mass
                slopes[number] += torch.autograd.grad(part, at)[0]
                losses[number] += part.detach()
        return losses, slopes

    return slope


def run_chains(
    posterior: Posterior,
    chains: int,
    burn_in: int,
    draws: int,
    leapfrogs: int,
    generator: torch.Generator,
    told: Callable[[int], object] | None = None,
) -> Draws:
    """Draws of chains that start at the centre, after `burn_in` transitions that tune the steps to `ACCEPTANCE`.

    A transition has `leapfrogs` steps; 1 is MALA. `told` is called with the number of gradients of each chain so far.
    """
    w = posterior.centre.expand(chains, -1).clone()
    losses, slopes = posterior.slope(w)
    energy, force = posterior.energy(w, losses, slopes)

    def normal() -> Tensor:
        return torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device)

    def uniform() -> Tensor:
        return torch.rand(chains, generator=generator, dtype=w.dtype).to(w.device)

    def trajectory(step: Tensor, momentum: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the end of a trajectory: w, losses, energies, forces; and the probabilities to accept it."""
        at, f, p, step = w, force, momentum, step[:, None]
        for _ in range(length):
            p = p - step / 2 * f
            at = at + step * p
            found, slope = posterior.slope(at)
            e, f = posterior.energy(at, found, slope)
            p = p - step / 2 * f
        change = energy + momentum.square().sum(1) / 2 - e - p.square().sum(1) / 2
        accept = change.clamp(max=0).exp().nan_to_num(nan=0.0)  # a loss that is NaN or inf is rejected
        return at, found, e, f, accept

    # the first step: halved until half of single leapfrog steps are accepted (Hoffman and Gelman 2014, algorithm 4)
    step = torch.full((chains,), posterior.gamma**-0.5, dtype=w.dtype, device=w.device)
    momentum = normal()
    for _ in range(_HALVINGS):
        small = trajectory(step, momentum, 1)[4] >= 0.5
        if bool(small.all()):
            break
        step = torch.where(small, step, step / 2)
    # dual averaging of the step's logarithm (their section 3.2, with their constants)
    towards, deviation, average = (10 * step).log(), torch.zeros_like(step), step.log()
    kept: list[tuple[Tensor, Tensor]] = []
    accepted = torch.zeros_like(step)
    for number in range(burn_in + draws):
        # any share of the step: trajectories of one length could be periods, and narrow places need short steps
        at, found, e, f, accept = trajectory(step * uniform(), normal(), leapfrogs)
        move = uniform() < accept
        w, force = torch.where(move[:, None], at, w), torch.where(move[:, None], f, force)
        losses, energy = torch.where(move, found, losses), torch.where(move, e, energy)
        if number < burn_in:
            m = number + 1
            deviation = (1 - 1 / (m + 10)) * deviation + (ACCEPTANCE - accept) / (m + 10)
            log_step = towards - math.sqrt(m) / 0.05 * deviation
            average = m**-0.75 * log_step + (1 - m**-0.75) * average
            step = (average if m == burn_in else log_step).exp()
        else:
            kept.append((losses, (w - posterior.centre).square().sum(1)))
            accepted += accept / draws
        if told is not None:
            told((number + 1) * leapfrogs)
    rows = [torch.stack(each, 1) for each in zip(*kept, strict=True)]
    return Draws(rows[0], rows[1], w, accepted, step)


def descended(posterior: Posterior, start: Tensor, most: int = 100) -> tuple[float, float, Tensor]:
    """Return (energy, loss, weights) where a descent of the energy by L-BFGS ends, (P,) to (P,)."""
    w = start.detach().clone().requires_grad_()
    best = (math.inf, math.nan, start)

    def closure() -> Tensor:
        nonlocal best
        at = w.detach().clone()
        losses, slopes = posterior.slope(at[None])
        energy, w.grad = (part[0] for part in posterior.energy(at[None], losses, slopes))
        if float(energy) < best[0]:
            best = float(energy), float(losses[0]), at
        return energy

    search = torch.optim.LBFGS([w], max_iter=most, max_eval=most, tolerance_change=1e-12, line_search_fn="strong_wolfe")
    search.step(closure)  # type: ignore[no-untyped-call]
    return best
