"""The updates of torch's optimisers, on rows of many networks at once: each row has its own coefficients.

The same operations in the same order as torch's own (`torch/optim/sgd.py` and so on, their `foreach` forms); numbers
that are the same for all rows there are columns (L, 1) here. torch multiplies and adds in one rounding, in
`add(alpha=...)` as in `addcmul`: the trial (`trial.py`) shows whether it does on this machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from flatlens.training.optimisers import SGD, Adam, RMSProp, Stepping

_Columns: TypeAlias = Mapping[str, Tensor]
Numbers: TypeAlias = dict[str, list[float]]


class Update(Protocol):
    """A kind of optimiser on rows."""

    names: tuple[str, ...]
    """Names of the tensors that torch keeps for each parameter, in its shape."""
    fresh: float
    """Their values before the first step."""
    counts: bool
    """Whether torch counts the steps, and the coefficients depend on the count."""

    def numbers(self, each: Sequence[Any], rates: Sequence[float], steps: Sequence[int]) -> Numbers:
        """Return the coefficients of every lane's next step, from learning rates and numbers of steps taken."""

    def step(self, theta: Tensor, grad: Tensor, state: _Columns, c: _Columns) -> None:
        """Move `theta`, (L, size), in place; `grad` is used up."""


def kind_of(settings: Stepping) -> tuple[Hashable, ...]:
    """Return what optimisers must share to take their steps together."""
    flags = [settings.weight_decay > 0, getattr(settings, "momentum", 0.0) > 0]
    flags += [getattr(settings, name, False) for name in ("nesterov", "decoupled")]
    return (type(settings).__name__, *flags)


def update_of(settings: Stepping) -> Update:
    """Return the update rule for an optimiser."""
    if isinstance(settings, SGD):
        return _SGD(settings)
    return _Adam(settings) if isinstance(settings, Adam) else _RMSProp(settings)


class _SGD:
    counts = False
    fresh = -0.0  # the first gradient itself is what torch keeps: -0.0 + g is g, also where g is -0.0

    def __init__(self, settings: SGD) -> None:
        self.decays, self.remembers, self.nesterov = settings.weight_decay > 0, settings.momentum > 0, settings.nesterov
        self.names: tuple[str, ...] = ("momentum_buffer",) if self.remembers else ()

    def numbers(self, each: Sequence[Any], rates: Sequence[float], steps: Sequence[int]) -> Numbers:
        return {
            "decay": [one.weight_decay for one in each],
            "momentum": [one.momentum for one in each],
            "rate": [-rate for rate in rates],
        }

    def step(self, theta: Tensor, grad: Tensor, state: _Columns, c: _Columns) -> None:
        if self.decays:
            grad.addcmul_(theta, c["decay"])
        if self.remembers:
            kept = state["momentum_buffer"].mul_(c["momentum"]).add_(grad)
            grad = grad.addcmul_(kept, c["momentum"]) if self.nesterov else kept
        theta.addcmul_(grad, c["rate"])


class _Adam:
    counts = True
    fresh = 0.0
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, settings: Adam) -> None:
        self.decays, self.decoupled = settings.weight_decay > 0, settings.decoupled

    def numbers(self, each: Sequence[Any], rates: Sequence[float], steps: Sequence[int]) -> Numbers:
        at = [float(step + 1) for step in steps]
        decay = [one.weight_decay for one in each]
        if self.decoupled:
            decay = [1 - rate * d for d, rate in zip(decay, rates, strict=True)]
        return {
            "decay": decay,
            "first": [1 - one.beta1 for one in each],
            "second": [one.beta2 for one in each],
            "new": [1 - one.beta2 for one in each],
            "root": [(1 - one.beta2**t) ** 0.5 for one, t in zip(each, at, strict=True)],
            "eps": [one.eps for one in each],
            "rate": [r / (1 - one.beta1**t) * -1 for one, r, t in zip(each, rates, at, strict=True)],
        }

    def step(self, theta: Tensor, grad: Tensor, state: _Columns, c: _Columns) -> None:
        if self.decays:
            theta.mul_(c["decay"]) if self.decoupled else grad.addcmul_(theta, c["decay"])
        mean = state["exp_avg"].lerp_(grad, c["first"])
        square = state["exp_avg_sq"].mul_(c["second"]).addcmul_(grad * c["new"], grad)
        theta.addcdiv_(mean * c["rate"], square.sqrt().div_(c["root"]).add_(c["eps"]))


class _RMSProp:
    counts = True
    fresh = 0.0

    def __init__(self, settings: RMSProp) -> None:
        self.decays, self.remembers = settings.weight_decay > 0, settings.momentum > 0
        self.names: tuple[str, ...] = ("square_avg", *(("momentum_buffer",) if self.remembers else ()))

    def numbers(self, each: Sequence[Any], rates: Sequence[float], steps: Sequence[int]) -> Numbers:
        return {
            "decay": [one.weight_decay for one in each],
            "old": [one.alpha for one in each],
            "new": [1 - one.alpha for one in each],
            "eps": [one.eps for one in each],
            "momentum": [one.momentum for one in each],
            "rate": [-rate for rate in rates],
        }

    def step(self, theta: Tensor, grad: Tensor, state: _Columns, c: _Columns) -> None:
        if self.decays:
            grad.addcmul_(theta, c["decay"])
        root = state["square_avg"].mul_(c["old"]).addcmul_(grad * c["new"], grad).sqrt().add_(c["eps"])
        if self.remembers:
            theta.addcmul_(state["momentum_buffer"].mul_(c["momentum"]).addcdiv_(grad, root), c["rate"])
        else:
            theta.addcdiv_(grad * c["rate"], root)
