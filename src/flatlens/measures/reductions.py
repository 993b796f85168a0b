"""Reductions from one number per sample to one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatlens.curvature.probes import mean_of_forms
from flatlens.estimate import Kind

STATED = 1e-3
"""Smallest relative error of a volume by rounding that is told."""
DEFICIENT = "rank-deficient within rounding"
WITHOUT = "without that many directions behind the closing softmax"
IS_ROUNDING = "its error is rounding, which moves small singular values"
TAKEN_OFF = "less the error by rounding"
BEHIND_SOFTMAX = "the network ends in a softmax, so its outputs move in fewer directions than there are outputs"


@dataclass(frozen=True, eq=False)
class Reduced:
    """A number reduced from samples, with their values and a note."""

    value: float
    samples: Tensor | None
    note: str = ""
    kind: Kind = "exact"
    stderr: float = 0.0
    probes: Tensor | None = None  #: the value from each of a sketch's probes, (probes,); their mean is the value
    terms: Tensor | None = None  #: the terms of the sum, for measures with a `.max` at each layer
    terms_probes: Tensor | None = None  #: the terms from each of a sketch's probes, (probes, terms)
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

    probes = torch.tensor([k * whole.value - (k - 1) * part.value for part in left_out], dtype=torch.float64)
    value, stderr = mean_of_forms(probes)
    found = replace(whole, value=float(value), stderr=float(stderr), kind="estimate", probes=probes, arrays={})
    if whole.terms is None:
        return found
    each = [k * whole.terms - (k - 1) * part.terms for part in left_out if part.terms is not None]
    return replace(found, terms_probes=torch.stack(each))


def mean_of_dimensions(values: Tensor) -> Reduced:
    """Return the mean over samples; NaN stands for no response, inf for one that is rounding, -inf for one unknown."""
    if bool((values == -math.inf).any()):
        return Reduced(math.nan, values)
    lost, finite = values.isinf(), values.isfinite()
    samples = values.where(~lost, torch.nan)
    if int(lost.sum()) > int(finite.sum()):
        why = f"the response of {int(lost.sum())} of {len(values)} samples is rounding"
        return Reduced(math.nan, samples, why, "undefined")
    return mean_of_finite(samples, f"without any response ({'rounding, or ' if lost.any() else ''}G = 0)")


def mean_of_volumes(logs: Tensor, moved: Tensor) -> Reduced:
    """Return the mean of exp(logs), computed in logarithms so that nothing overflows.

    `moved`, (n,), is how far rounding may move each logarithm: infinite where it hides the rank, and the volume counts
    as 0; 0 with a logarithm of -inf where the volume is known to be 0.
    """
    total, volumes = logs.logsumexp(0), logs.exp()
    log, value = float(total) - math.log(len(logs)), float((total - math.log(len(logs))).exp())
    if _known(logs, moved):
        return Reduced(0.0, volumes, BEHIND_SOFTMAX)
    beyond = f"float64, its logarithm is {log:.6g}: see log_volume"
    if math.isfinite(log) and math.isinf(value):
        return Reduced(math.nan, volumes, f"above {beyond}", "undefined")
    error = float(torch.where(logs.isfinite(), (logs - total).exp() * moved, 0.0).sum())  # relative
    hidden = _count(moved.isinf(), f"{DEFICIENT}, their volume counted as 0")
    none = _count((logs == -math.inf) & (moved == 0), f"{WITHOUT}, their volume is 0")
    if math.isfinite(log) and value < torch.finfo(torch.float64).tiny:
        return Reduced(0.0, volumes, _joined(f"below {beyond}", hidden, none), "lower bound")
    if hidden:
        less = max(1 - error, 0.0) if error > STATED else 1.0
        return Reduced(value * less, volumes, _joined(hidden, none, TAKEN_OFF if less < 1 else ""), "lower bound")
    if error > STATED:
        return Reduced(value, volumes, _joined(none, IS_ROUNDING), "estimate", value * error / 1.96)
    return Reduced(value, volumes, none)


def mean_of_logs(logs: Tensor, moved: Tensor) -> Reduced:
    """Return the mean over the samples with a volume above 0; `moved` is that of `mean_of_volumes`."""
    there = logs != -math.inf
    if not bool(there.any()):
        why = BEHIND_SOFTMAX if _known(logs, moved) else f"every sample is {DEFICIENT}"
        return Reduced(math.nan, logs, why, "undefined")
    value, error = float(logs[there].mean()), float(moved[there].mean())
    left_out = _joined(
        _count(moved.isinf(), f"{DEFICIENT}, left out"),
        _count(~there & (moved == 0), f"{WITHOUT}, left out"),
    )
    if error > STATED:
        return Reduced(value, logs, _joined(left_out, IS_ROUNDING), "estimate", error / 1.96)
    return Reduced(value, logs, left_out)


def _known(logs: Tensor, moved: Tensor) -> bool:
    """Return whether every volume is known to be 0."""
    return bool(((logs == -math.inf) & (moved == 0)).all())


def mean_of_finite(values: Tensor, why: str) -> Reduced:
    """Return the mean over the samples with a value; the note counts the others."""
    there = torch.isfinite(values)
    if not bool(there.any()):
        return Reduced(math.nan, values, f"every sample is {why}", "undefined")
    return Reduced(float(values[there].mean()), values, _count(~there, f"{why}, left out"))


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _count(chosen: Tensor, what: str) -> str:
    return f"{int(chosen.sum())} of {len(chosen)} samples {what}" if bool(chosen.any()) else ""
