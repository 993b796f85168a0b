"""The edge of stability: the curvature above which an optimiser's steps on a quadratic grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatlens.curvature.frozen_steps import name_of
from flatlens.curvature.optimiser_geometry import is_plain, leading_rate, leading_step, without_ascent
from flatlens.errors import BadInput

WITH_EDGE = ("sharpness", "preconditioned_sharpness", "critical_sharpness", "batch_sharpness")
"""The measures that are compared with an edge."""


@dataclass(frozen=True)
class Edge:
    """A learning rate and its edge of stability; NaN where there is none, with the reason in `note`.

    >>> Edge(lr=0.1, value=20.0, formula="2 / lr").value
    20.0
    """

    lr: float = math.nan  #: the largest one, if groups of parameters have their own
    value: float = math.nan  #: the edge, in the unit of the measure `of`
    formula: str = ""  #: where there is a short one
    of: str = "sharpness"  #: or "preconditioned_sharpness"; where it is the sharpness, the two are the same
    batches: float = math.nan  #: the edge of `batch_sharpness`; NaN where it is a range, or not known
    note: str = ""  #: why there is none

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


def edge_of(optimiser: torch.optim.Optimizer | None, *, gradient_norm: float = math.nan) -> Edge:
    r"""Return the largest curvature h of the loss at which an optimiser still converges on a quadratic.

    Its adaptive state (second moments, step counters) is frozen: then a step is a linear map of the weights and
    buffers, and the edge is the least h at which its spectral radius exceeds 1 (`frozen_steps` has the map of each
    optimiser). For SGD with learning rate a, momentum b, dampening t and weight decay w

        h < 2 (1 + b) / (a (1 - t)) - w,    Nesterov:  h < 2 (1 + b) / (a (1 + 2 b)) - w

    (Cohen et al. 2021, Gradient descent on neural networks typically occurs at the edge of stability, Appendix B).

    Adaptive optimisers, and SGD whose groups have settings of their own, divide the gradient by a matrix P. While P
    changes slowly, the same holds for the measure `preconditioned_sharpness`, which contains P and all decay, at the
    largest learning rate a. For Adam with beta1 = b it is

        h < 2 (1 + b) / (a (1 - b)),    38 / a for b = 0.9

    (Cohen et al. 2022, Adaptive gradient methods at the edge of stability). For Muon it is 2 / a, without its momentum.

    SAM with radius r on SGD with the edge E needs the norm of the gradient g, which is frozen, too. Its step follows
    the gradient at x + r g / ||g||, which is h (1 + r h / ||g||) x, so that

        h < (||g|| / 2r) (sqrt(1 + 4 r E / ||g||) - 1)

    (Long and Bartlett 2024, Sharpness-aware minimization and the edge of stability, for E = 2 / a).

    Where the step is not linear (Lion, Adafactor) or not known, the value is NaN and `note` says why. For all,
    `beside("critical_sharpness")` is 2 / a, above which the next step raises the loss.

    >>> w = [torch.nn.Parameter(torch.zeros(1))]
    >>> edge_of(torch.optim.SGD(w, lr=0.05)).value, round(edge_of(torch.optim.Adam(w, lr=0.05)).value, 9)
    (40.0, 760.0)
    """
    if optimiser is None:
        return Edge()
    lr, base = leading_rate(optimiser), without_ascent(optimiser)
    if not 0 < lr < math.inf:
        return Edge(lr, note=f"the learning rate is {lr:g}")
    if base is not optimiser:
        return _with_ascent(edge_of(base), optimiser.param_groups, gradient_norm)
    if name_of(base) == "torch.Muon":
        return Edge(lr, 2 / lr, "2/lr", "preconditioned_sharpness")
    try:
        plain = is_plain(base)
        step = leading_step(base, **({} if plain else {"weight_decay": 0.0}))
    except BadInput as error:
        return Edge(lr, note=str(error))
    value = step.edge
    if not value > 0:
        return Edge(lr, note="its steps grow at any curvature, or it makes none")
    if not plain:
        return Edge(lr, value, step.formula, "preconditioned_sharpness")
    value, formula = value - step.decay, f"{step.formula} - weight decay" if step.decay else step.formula
    return Edge(lr, value, formula, batches=value if step.formula == "2/lr" else math.nan)


def _with_ascent(edge: Edge, groups: Sequence[Mapping[str, Any]], gradient_norm: float) -> Edge:
    """Return the edge of SAM over an optimiser with an edge."""
    radii = {(float(group.get("rho", math.nan)), bool(group.get("adaptive"))) for group in groups}
    (rho, adaptive), *others = radii
    if edge.of != "sharpness" or not edge.value > 0:
        return Edge(edge.lr, note=edge.note or "the edge of SAM over an optimiser with a preconditioner is unknown")
    if adaptive or others or not rho > 0:
        return Edge(edge.lr, note="the edge of SAM is known for one radius above 0, and not for its adaptive form")
    if not gradient_norm > 0:
        return Edge(edge.lr, note="the edge of SAM depends on the gradient: edge_of(optimiser, gradient_norm=...)")
    reach = gradient_norm / (2 * rho)
    return Edge(edge.lr, reach * (math.sqrt(1 + 2 * edge.value / reach) - 1))


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
