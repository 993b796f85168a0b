"""The largest curvature over a ball of Muon: max <D, H D> over matrices D whose spectral norms are bounded.

Muon moves each matrix W by lr s U V^T, where U S V^T is a mean of its gradients and s depends on the shape of W. These
steps are the corners of the ball ||D_l||_2 <= s_l, and the dual norm of the gradient is sum_l s_l ||G_l||_*. Without
momentum, a step changes a quadratic loss by -lr ||G||_* + lr^2 <D, H D> / 2. So it falls whenever the largest curvature
over the ball, divided by ||G||_*, is below 2 / lr (Islamov et al. 2026, Non-Euclidean gradient descent operates at the
edge of stability).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatlens.curvature.operators import Operator
from flatlens.curvature.preconditioned import rate_of_a_step
from flatlens.curvature.space import dot
from flatlens.errors import BadInput
from flatlens.estimate import Progress
from flatlens.progress import SEARCH

_SETTLED = 1e-4  #: relative rise at which a climb ends
_STEPS = 40  #: largest number of steps of a climb


@dataclass(frozen=True, eq=False)
class BallPeak:
    """The largest <D, H D> that climbs over the ball found."""

    value: float
    restarts: Tensor  #: the value of each climb
    products: int


def ball_of(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, float]:
    """Return s of each matrix that a `torch.optim.Muon` moves, in units of its largest learning rate."""
    names = {id(p): name for name, p in model.named_parameters()}
    largest = rate_of_a_step(optimiser)
    found = {}
    for group in optimiser.param_groups:
        for p in group["params"]:
            if id(p) in names and float(group["lr"]) > 0:
                found[names[id(p)]] = _adjusted(group, *p.shape) * float(group["lr"]) / largest
    if not found:
        raise BadInput("the Muon holds none of the network's parameters: give the one that trains it")
    return found


def _adjusted(group: Mapping[str, Any], rows: int, columns: int) -> float:
    """Return torch's factor on the learning rate of a matrix."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def dual_norm(gradient: Mapping[str, Tensor], radius: Mapping[str, float]) -> float:
    """Return sum_l s_l ||G_l||_*, the largest <G, D> over the ball.

    >>> dual_norm({"w": torch.diag(torch.tensor([3.0, 4.0]))}, {"w": 2.0})
    14.0
    """
    nuclear = {name: float(torch.linalg.svdvals(gradient[name].to(torch.float64)).sum()) for name in radius}
    return sum(s * nuclear[name] for name, s in radius.items())


def corner(along: Mapping[str, Tensor], radius: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the point of the ball with the largest inner product: s_l U V^T for each matrix."""
    found = {}
    for name, s in radius.items():
        U, _, Vh = torch.linalg.svd(along[name].to(torch.float64), full_matrices=False)
        found[name] = (s * (U @ Vh)).to(along[name])
    return found


def climb_in_ball(
    operator: Operator,
    radius: Mapping[str, float],
    starts: Iterable[Tensor],
    *,
    progress: Progress | None = None,
) -> BallPeak:
    """Return the largest <D, H D> over the ball that climbs from these directions, (P,), reach.

    From D a climb goes to the best point between D and the corner along H D, on which <D, H D> is a parabola: it
    never falls. The largest value is at least the one found; the problem is not convex, and no climb proves more.
    """
    before, values = operator.products, []
    starts = list(starts)
    for number, start in enumerate(starts):
        D = _corner(operator, start, radius)
        HD = operator(D)
        value = dot([D], [HD])
        for step in range(_STEPS):
            if progress is not None:
                progress(SEARCH, number * _STEPS + step, len(starts) * _STEPS)
            E = _corner(operator, HD, radius)
            HE = operator(E)
            across, there = dot([E], [HD]), dot([E], [HE])
            bend = value - 2 * across + there  # along D + t (E - D): value + 2 t (across - value) + t^2 bend
            t = 1.0 if bend >= 0 else min(1.0, max(0.0, (value - across) / bend))
            D, HD = D + t * (E - D), HD + t * (HE - HD)
            rise, value = dot([D], [HD]) - value, dot([D], [HD])
            if rise <= _SETTLED * abs(value):
                break
        values.append(value)
    return BallPeak(max(values), torch.tensor(values, dtype=torch.float64), operator.products - before)


def _corner(operator: Operator, v: Tensor, radius: Mapping[str, float]) -> Tensor:
    return operator.space.flat(corner(operator.space.named(v), radius))
