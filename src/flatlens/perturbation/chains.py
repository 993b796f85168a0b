"""Markov chains: the mean with an interval, the effective sample size, and whether the chains agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flatlens.curvature.probes import student

BATCHES = 5  #: largest number of batches that a chain is cut into
DRAWS_OF_A_BATCH = 10.0  #: effective draws that a batch must hold


@dataclass(frozen=True)
class ChainMean:
    """The mean of a function of the draws of several Markov chains.

    >>> rows = torch.tensor([[0.0, 2.0, 0.0, 2.0], [2.0, 0.0, 2.0, 0.0]])
    >>> mean_of_chains(rows).value, mean_of_chains(rows).rhat < 1
    (1.0, True)
    """

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
    """Split R-hat of chains, (chains, draws): 1 where the halves of all chains have one distribution.

    Gelman et al. 2013, Eq. 11.4: the root of the pooled variance over that within half chains. 1 for constant chains.

    >>> split_rhat(torch.zeros(4, 10)), split_rhat(torch.arange(2.0)[:, None] + torch.zeros(2, 10))
    (1.0, inf)
    """
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

    >>> round(effective_sample_size(torch.randn(4, 500, generator=torch.Generator().manual_seed(0))) / 2000, 1)
    1.0
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
