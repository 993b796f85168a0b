"""The edge of stability: the sharpness above which an optimiser's steps on a quadratic grow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Edge:
    """A learning rate and its edge of stability; NaN where there is none, or more than one."""

    lr: float = math.nan
    value: float = math.nan  #: the edge, in the unit of `sharpness`
    formula: str = ""


def edge_of(optimiser: torch.optim.Optimizer | None) -> Edge:
    r"""Return the largest curvature h of the loss at which `torch.optim.SGD` still converges on a quadratic.

    Let the learning rate be a, the momentum b, the dampening t and the weight decay w. A step on 0.5 (h + w) x^2 is
    linear in x and the velocity. Its matrix has the determinant b and the trace 1 + b - a (1 - t) (h + w); with
    Nesterov's rule the determinant b (1 - a (h + w)) and the trace 1 + b - a (1 + b) (h + w). Its eigenvalues stay
    inside the unit circle while 1 + trace + determinant > 0:

        h < 2 (1 + b) / (a (1 - t)) - w,    Nesterov:  h < 2 (1 + b) / (a (1 + 2 b)) - w

    (Cohen et al. 2021, Gradient descent on neural networks typically occurs at the edge of stability, Appendix B).
    There is no such number for other optimisers, or if groups of parameters have different settings.

    >>> w = [torch.nn.Parameter(torch.zeros(1))]
    >>> edge_of(torch.optim.SGD(w, lr=0.05))
    Edge(lr=0.05, value=40.0, formula='2/lr')
    >>> edge_of(torch.optim.Adam(w, lr=0.05))
    Edge(lr=0.05, value=nan, formula='')
    """
    if optimiser is None:
        return Edge()
    rates = {float(group["lr"]) for group in optimiser.param_groups}
    lr = rates.pop() if len(rates) == 1 else math.nan
    settings = {_setting(group) for group in optimiser.param_groups} if type(optimiser) is torch.optim.SGD else set()
    if len(settings) != 1 or not lr > 0:
        return Edge(lr)
    momentum, dampening, decay, nesterov, maximised = settings.pop()
    if maximised:
        return Edge(lr)
    dampening = dampening if momentum else 0.0  # torch never applies it without momentum
    formula, value = "2/lr", 2 * (1 + momentum) / (lr * (1 - dampening)) if dampening < 1 else math.nan
    if nesterov:
        formula, value = "2(1+momentum)/(lr(1+2momentum))", value / (1 + 2 * momentum)
    elif momentum:
        formula = "2(1+momentum)/lr" if not dampening else "2(1+momentum)/(lr(1-dampening))"
    return Edge(lr, value - decay, f"{formula} - weight decay" if decay else formula)


def _setting(group: dict[str, Any]) -> tuple[float, float, float, bool, bool]:
    momentum, dampening, decay = (float(group[key]) for key in ("momentum", "dampening", "weight_decay"))
    return momentum, dampening, decay, bool(group["nesterov"]), bool(group["maximize"])
