"""Data as points that cover a support: the network as their function, and its Jacobian's variation around each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatlens.bounds.claim import Assumption
from flatlens.bounds.context import Context
from flatlens.bounds.target import Target
from flatlens.distributions import Distribution, PushForward, Sphere
from flatlens.errors import BadInput
from flatlens.perturbation.certified import certified_variation
from flatlens.perturbation.inputs import Inputs, Refused, in_float64

FAILURE = 0.05  #: eps of Def. 4.1: probability with which the covering may fail
AT_ONCE = 4096  #: largest number of points in one call of the network
DETOUR = math.pi / 2  #: largest ratio of the path along a sphere to the straight line between its ends
ROUNDING = 1e-13  #: rounding error in float64, relative to the size of the outputs


@final
@dataclass(frozen=True, eq=False)
class Covered:
    """The common part of Theorems 4.3, 5.1 and 6.1 of sharpening."""

    network: Inputs  #: the data, (n, M), and the outputs as a function of any points, in float64
    shape: tuple[int, ...]  #: shape of one input of the network
    delta: float  #: NaN if not known
    variation: Tensor  #: upper bounds of V_{B(x_i, delta)}(Jf), (n,); NaN if not certified
    premises: tuple[Assumption, ...]
    certified: Assumption
    note: str

    def told(self, target: Target, points: Tensor) -> Tensor:
        """Return f* at points (k, M), (k, N) float64."""
        y = target(points.reshape(-1, *self.shape))
        with torch.no_grad():
            N = self.network.outputs(self.x[:1]).shape[1]
        if y.shape[1] != N or not bool(torch.isfinite(y).all()):
            got = f"{y.shape[1]} values" if y.shape[1] != N else "NaN or inf"
            raise BadInput(
                f"check_bounds(target=...): the target must return {N} finite values for each input, got {got}"
            )
        return y

    @property
    def x(self) -> Tensor:
        """Return the data, (n, M) float64."""
        return self.network.x


def covered(context: Context) -> Covered | Assumption:
    """Return the data as a cover of its support; or a failing assumption that says why there is none."""
    try:
        network, shape = _read(context)
    except Refused as why:
        return Assumption("one_floating_input", False, str(why))
    premises, delta, note = _radius(context, network.x)
    variation, certified = _certified(context, delta, network.x)
    return Covered(network, shape, delta, variation, premises, certified, note)


def _read(context: Context) -> tuple[Inputs, tuple[int, ...]]:
    """Return a float64 copy of the network as a function of flat points, and the shape of its input."""
    problem = context.lens.problem
    exact, x = in_float64(problem, context.lens.model, "a covering bound")
    shape = tuple(x.shape[1:])

    def outputs(points: Tensor) -> Tensor:
        parts = torch.split(points.to(torch.float64), AT_ONCE)
        return torch.cat([problem.run(exact, (part.reshape(-1, *shape).clone(), None))[0] for part in parts])

    chunks = problem.data.chunks(AT_ONCE)
    return Inputs(torch.cat([problem.place(raw)[0].to(torch.float64).flatten(1) for raw in chunks]), outputs), shape


def _radius(context: Context, x: Tensor) -> tuple[tuple[Assumption, ...], float, str]:
    """Return (the assumption that the balls cover the support, their radius, how it is known)."""
    law = context.distribution
    inside = () if law is None else (in_support(law, x),)
    if context.delta is not None:
        return (*inside, Assumption("covering_radius", True, declared=True)), context.delta, ""
    if law is None:
        why = "give distribution= (the law of the data) or delta= (its covering radius)"
        return (Assumption("covering_radius", None, why),), math.nan, ""
    radius = law.covering_radius(context.n, FAILURE, rule=context.rule)
    if radius.kind == "undefined":
        return (*inside, Assumption("covering_radius", False, radius.note)), math.nan, ""
    note = f"delta = {radius.value:.4g}, with probability {1 - FAILURE:g} over the samples"
    return (*inside, Assumption("covering_radius", True), context.declare("iid_samples")), radius.value, note


def in_support(law: Distribution, x: Tensor) -> Assumption:
    """Return the assumption that all samples lie in the distribution's support."""
    if x.shape[1] != law.dimension:
        raise BadInput(
            f"check_bounds(distribution={law!r}): its samples have {law.dimension} entries, the data's {x.shape[1]}"
        )
    if isinstance(law, PushForward):
        return Assumption("samples_in_support", True)  # no sample is known to lie outside the image
    outside = int(torch.isinf(law.log_density(x)).sum())
    return Assumption("samples_in_support", outside == 0, f"{outside} of {len(x)} lie outside" if outside else "")


def convex_support(context: Context) -> Assumption:
    """Return whether the support is convex: known from the distribution, or else declared; a sphere never is."""
    law = context.distribution
    if law is not None and law.support_is_convex:
        return Assumption("convex_support", True)
    if isinstance(law, Sphere):
        return Assumption("convex_support", False, "a sphere is not convex")
    return context.declare("convex_support")


def _certified(context: Context, delta: float, x: Tensor) -> tuple[Tensor, Assumption]:
    """Return upper bounds of V_{B(x_i, delta)}(Jf)."""
    why = "no radius"
    if not math.isnan(delta):
        try:
            lens = context.lens
            bound = certified_variation(lens.problem, lens.model, delta, progress=context.progress)
            return bound, Assumption("certified_variation", True)
        except Refused as refusal:
            why = str(refusal)
    return torch.full((len(x),), math.nan, dtype=torch.float64), Assumption("certified_variation", False, why)


def steepest(x: Tensor, y: Tensor, less: float = 0.0) -> float:
    """Return max over pairs of (||y_i - y_j|| - less) / ||x_i - x_j||, without equal points; -inf if there are none.

    >>> x = torch.tensor([[0.0], [1.0], [3.0], [3.0]])
    >>> steepest(x, torch.tensor([[0.0], [1.0], [7.0], [7.0]])), steepest(x[2:], x[2:])
    (3.0, -inf)
    """
    best = -math.inf
    for rows in torch.split(torch.arange(len(x)), 512):
        apart, rise = (torch.cdist(t[rows], t, compute_mode="donot_use_mm_for_euclid_dist") for t in (x, y))
        best = max(best, float(torch.where(apart > 0, (rise - less) / apart, -math.inf).max()))
    return best


def spread(x: Tensor, most: int) -> Tensor:
    """Return indices of at most `most` samples, evenly spaced."""
    return torch.linspace(0, len(x) - 1, min(len(x), most)).round().long()
