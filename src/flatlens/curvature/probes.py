"""Means over few random probes, with an error that few probes deserve."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor


def student(values: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, standard error) over the first axis: m probes.

    The error is scaled by t_{.975, m-1} / 1.96, so that mean +- 1.96 stderr is a 95% interval at any m >= 2. NaN at m
    = 1.

    >>> mean, stderr = student(torch.tensor([1.0, 3.0, 2.0, 2.0]))
    >>> float(mean), round(float(stderr), 3)
    (2.0, 0.663)
    """
    m = len(values)
    if m < 2:
        return values.mean(0), torch.full_like(values.mean(0), torch.nan)
    return values.mean(0), values.std(0) / m**0.5 * quantile(m)


def quantile(m: int) -> float:
    """How many standard errors of a normal 95% interval one of Student's with m probes is worth."""
    return float(stats.t.ppf(0.975, m - 1)) / 1.959963984540054
