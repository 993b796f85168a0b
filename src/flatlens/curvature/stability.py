"""The edge of stability: the curvature above which an optimiser's steps on a quadratic grow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flatlens.curvature.optimiser_geometry import leading_rate, uniform_groups

WITH_EDGE = ("sharpness", "preconditioned_sharpness", "critical_sharpness", "batch_sharpness")
"""The measures that are compared with an edge."""


@dataclass(frozen=True)
class Edge:
    """A learning rate and its edge of stability; NaN where there is none, or more than one.

    >>> Edge(lr=0.1, value=20.0, formula="2 / lr").value
    20.0
    """

    lr: float = math.nan  #: the largest one, if groups of parameters have their own
    value: float = math.nan  #: the edge, in the unit of the measure `of`
    formula: str = ""
    of: str = "sharpness"  #: or "preconditioned_sharpness"; where it is the sharpness, the two are the same
    batches: float = math.nan  #: the edge of `batch_sharpness`; NaN where it is a range, or not known

    def beside(self, measure: str) -> float:
        """Return the edge that belongs beside a measure; NaN beside a sharpness that has none.

        >>> Edge(0.1, 380.0, "2(1+beta1)/((1-beta1)lr)", "preconditioned_sharpness").beside("sharpness")
        nan
        """
        if measure == "critical_sharpness":  # above it the next step raises the loss, whatever the optimiser
            return 2 / self.lr if self.lr > 0 else math.nan
        if measure == "batch_sharpness":
            return self.batches
        return math.nan if measure == "sharpness" != self.of else self.value


def edge_of(optimiser: torch.optim.Optimizer | None) -> Edge:
    r"""Return the largest curvature h of the loss at which an optimiser of torch still converges on a quadratic.

    Let the learning rate of SGD be a, the momentum b, the dampening t and the weight decay w. A step on 0.5 (h + w) x^2
    is linear in x and the velocity. Its matrix has the determinant b and the trace 1 + b - a (1 - t) (h + w); with
    Nesterov's rule the determinant b (1 - a (h + w)) and the trace 1 + b - a (1 + b) (h + w). Its eigenvalues stay
    inside the unit circle while 1 + trace + determinant > 0:

        h < 2 (1 + b) / (a (1 - t)) - w,    Nesterov:  h < 2 (1 + b) / (a (1 + 2 b)) - w

    (Cohen et al. 2021, Gradient descent on neural networks typically occurs at the edge of stability, Appendix B).

    Adam, AdamW, RMSprop and Adagrad, and SGD whose groups have learning rates or weight decays of their own, divide the
    gradient by a diagonal matrix P. While P changes slowly, the same holds for the measure `preconditioned_sharpness`,
    which contains P and all decay, at the largest learning rate a. Adam's mean of gradients, with beta1 = b, makes it

        h < 2 (1 + b) / (a (1 - b)),    38 / a for b = 0.9

    (Cohen et al. 2022, Adaptive gradient methods at the edge of stability). For Muon it is 2 / a, without its momentum.
    There is no such number for other optimisers, for a momentum of 1 or more, or if groups differ in more than these
    two.

    >>> w = [torch.nn.Parameter(torch.zeros(1))]
    >>> edge_of(torch.optim.SGD(w, lr=0.05)).value, round(edge_of(torch.optim.Adam(w, lr=0.05)).value, 9)
    (40.0, 760.0)
    """
    if optimiser is None:
        return Edge()
    lr, kind = leading_rate(optimiser), type(optimiser)
    groups = optimiser.param_groups
    # the settings that all groups must share
    settings = {
        tuple(float(group["betas"][0] if name == "betas" else group[name]) for name in _SHARED.get(kind, ()))
        for group in groups
    }
    climbs = any(group.get("maximize") for group in groups)
    if kind not in _SHARED or len(settings) != 1 or not 0 < lr < math.inf or climbs:
        return Edge(lr)
    (setting,) = settings
    value, formula = _threshold(dict(zip(_SHARED[kind], setting, strict=True)))
    if kind is not torch.optim.SGD or not uniform_groups(optimiser):
        return Edge(lr, value / lr, formula, "preconditioned_sharpness")
    decay = float(groups[0]["weight_decay"])
    value = value / lr - decay
    batches = math.nan if groups[0]["momentum"] else value
    return Edge(lr, value, f"{formula} - weight decay" if decay else formula, batches=batches)


def edge_of_batches(optimiser: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the range in which the edge of `batch_sharpness` lies; NaN where none is known.

    For SGD it is 2 / lr without momentum; with momentum b between 2(1-b) / lr, for small batches, and 2(1+b) / lr, for
    large ones (Andreyev and Beneventano 2024). Weight decay, which the measured loss does not have, lowers both.

    >>> edge_of_batches(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    (20.0, 20.0)
    """
    edge, group = edge_of(optimiser), optimiser.param_groups[0]
    if edge.batches == edge.batches:
        return edge.batches, edge.batches
    heavy_ball = type(optimiser) is torch.optim.SGD and not (group["nesterov"] or group["dampening"])
    if not heavy_ball or edge.of != "sharpness":
        return math.nan, math.nan
    return edge.value - 4 * float(group["momentum"]) / edge.lr, edge.value


_SHARED: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "dampening", "nesterov"),
    torch.optim.Adam: ("betas",),
    torch.optim.AdamW: ("betas",),
    torch.optim.RMSprop: ("momentum",),
    torch.optim.Adagrad: (),
    **({torch.optim.Muon: ()} if hasattr(torch.optim, "Muon") else {}),
}
"""The settings on which an edge depends, and which all groups must share, by kind of optimiser."""


def _threshold(of: Mapping[str, float]) -> tuple[float, str]:
    """Return the edge times the learning rate, and its formula."""
    if beta1 := of.get("betas", 0.0):
        return 2 * (1 + beta1) / (1 - beta1), "2(1+beta1)/((1-beta1)lr)"
    momentum = of.get("momentum", 0.0)
    if momentum >= 1:  # the velocity alone grows
        return math.nan, ""
    dampening = of.get("dampening", 0.0) if momentum else 0.0  # torch never applies it without momentum
    value = 2 * (1 + momentum) / (1 - dampening) if dampening < 1 else math.nan
    if of.get("nesterov"):
        return value / (1 + 2 * momentum), "2(1+momentum)/(lr(1+2momentum))"
    if not momentum:
        return value, "2/lr"
    return value, "2(1+momentum)/lr" if not dampening else "2(1+momentum)/(lr(1-dampening))"
