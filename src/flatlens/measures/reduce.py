"""Reductions from one number per sample to one number."""

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
    """A number reduced from samples, with their values and a note."""

    value: float
    samples: Tensor | None
    note: str = ""
    kind: Kind = "exact"
    stderr: float = 0.0
    probes: Tensor | None = None  #: the value from each of a sketch's probes, (probes,); their mean is the value
    largest: float | None = None  #: largest term of the sum, for measures with a `.max` at each layer
    largest_probes: Tensor | None = None
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


def mean(values: Tensor) -> Reduced:
    """Return the mean over samples."""
    return Reduced(float(values.mean()), values)


def largest(values: Tensor) -> Reduced:
    """Return the maximum over samples."""
    return Reduced(float(values.max()), values)


def by_probes(reduce: Callable[[Tensor], Reduced], values: Tensor) -> Reduced:
    """Return the reduced mean over a sketch's probes, (probes, ...), with the probes' own error.

    The error is a jackknife: a probe's share is the change when it is left out. For a measure linear in the probes that
    is the probe's own value; for a root or a minimum it also removes the bias of first order.
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
    """Return the mean of exp(values), computed in logarithms so that nothing overflows."""
    value = float((torch.logsumexp(logs, 0) - math.log(len(logs))).exp())  # inf where it exceeds float64
    note = _missing(logs, "rank-deficient within rounding, their volume counted as 0")
    return Reduced(value, logs.exp(), note, "lower bound" if note else "exact")


def mean_of_finite(values: Tensor, why: str = "rank-deficient within rounding") -> Reduced:
    """Return the mean over the samples with a value; the note counts the others."""
    there = torch.isfinite(values)
    if not bool(there.any()):
        return Reduced(math.nan, values, f"every sample is {why}", "undefined")
    return Reduced(float(values[there].mean()), values, _missing(values, f"{why}, left out"))


def _missing(values: Tensor, what: str) -> str:
    missing = int((~torch.isfinite(values)).sum())
    return f"{missing} of {len(values)} samples {what}" if missing else ""
