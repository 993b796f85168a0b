"""From one number per sample to one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatlens.curvature.probes import mean_of_forms
from flatlens.estimate import Kind


@dataclass(frozen=True, eq=False)
class Reduced:
    """The number, the per-sample values as a user wants them, and what has to be said of it."""

    value: float
    samples: Tensor | None
    note: str = ""
    kind: Kind = "exact"
    stderr: float = 0.0
    probes: Tensor | None = None  #: what each of a sketch's probes gives, (probes,): their mean is the value
    largest: float | None = None  #: of the terms of a sum, where the measure has a `.max` of its own at a layer
    largest_probes: Tensor | None = None
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


def mean(values: Tensor) -> Reduced:
    """Over samples."""
    return Reduced(float(values.mean()), values)


def largest(values: Tensor) -> Reduced:
    """Over samples."""
    return Reduced(float(values.max()), values)


def by_probes(reduce: Callable[[Tensor], Reduced], values: Tensor) -> Reduced:
    """The mean over a sketch's probes, (probes, ...), reduced; with the probes' own error.

    By the jackknife: a probe's share is what leaving it out changes. Of a measure linear in the probes that is its own
    value; of a root or a minimum the bias of first order drops out, too.
    """
    k = len(values)
    whole, total = reduce(values.mean(0)), values.sum(0)
    if whole.kind == "undefined":
        return whole
    left_out = [reduce((total - value) / (k - 1)) for value in values]

    def shares(of: Callable[[Reduced], float | None]) -> Tensor:
        each = [k * (of(whole) or 0.0) - (k - 1) * (of(part) or 0.0) for part in left_out]
        return torch.tensor(each, dtype=torch.float64)

    probes = shares(lambda reduced: reduced.value)
    value, stderr = mean_of_forms(probes)
    found = replace(whole, value=float(value), stderr=float(stderr), kind="estimate", probes=probes, arrays={})
    if whole.largest is None:
        return found
    largest = shares(lambda reduced: reduced.largest)
    return replace(found, largest=float(largest.mean()), largest_probes=largest)


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
