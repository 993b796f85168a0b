"""From one number per sample to one number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatlens.estimate import Kind


@dataclass(frozen=True, eq=False)
class Reduced:
    """The number, the per-sample values as a user wants them, and what has to be said of it."""

    value: float
    samples: Tensor | None
    note: str = ""
    kind: Kind = "exact"
    largest: float | None = None  #: of the terms of a sum, where the measure has a `.max` of its own at a layer
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


def mean(values: Tensor) -> Reduced:
    """Over samples."""
    return Reduced(float(values.mean()), values)


def largest(values: Tensor) -> Reduced:
    """Over samples."""
    return Reduced(float(values.max()), values)


def mean_of_exp(logs: Tensor) -> Reduced:
    """Mean of exp(values), worked in logs so that nothing overflows on the way."""
    value = float((torch.logsumexp(logs, 0) - math.log(len(logs))).exp())  # inf where it is beyond float64
    return Reduced(value, logs.exp(), _missing(logs, "rank-deficient, their volume counted as 0"))


def mean_of_finite(values: Tensor, why: str = "rank-deficient") -> Reduced:
    """Mean over the samples where the value exists; how many do not is said."""
    there = torch.isfinite(values)
    if not bool(there.any()):
        return Reduced(math.nan, values, f"every sample is {why}", "undefined")
    return Reduced(float(values[there].mean()), values, _missing(values, f"{why}, left out"))


def _missing(values: Tensor, what: str) -> str:
    missing = int((~torch.isfinite(values)).sum())
    return f"{missing} of {len(values)} samples {what}" if missing else ""
