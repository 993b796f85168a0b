"""Petzka, Kamp et al.: relative flatness is, to leading order, how far moved features move the risk.

phi -> (I + delta A) phi at a layer is W -> W + delta W A (the key equation), so that a second order in the weight
speaks of features. Labels are kept, as the theorems suppose; where they may move by O(delta^3) for all A (Cor. 10), the
same holds with that in the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.expansion import RESOLVED, Expansion, Order, averaged, first_step, looked_at_twice, orders, series
from flatlens.bounds.kinks import smooth
from flatlens.curvature import Hessian, eigenpairs
from flatlens.grams import Weight, row_factor
from flatlens.perturbation.features import RotatedFeatures, unmovable

HAAR_ORDER = 3.5  #: smallest accepted order; the theory gives 4
FIXED_ORDER = 2.8  #: smallest accepted order; the theory gives 3
RESTARTS, CLIMBS = 3, 200  #: restarts and steps of the search for the worst A
SMALLEST = 0.002  #: delta of that search


def mean_term(kappa: float, delta: float, m: int) -> float:
    """Return Theorem 5's term: delta^2 kappa_Tr / (2 m)."""
    return delta**2 * kappa / (2 * m)


def uniform_term(kappa: float, delta: float, d: int) -> float:
    """Return Theorem 14's term: delta^2 d kappa^phi / 2."""
    return delta**2 * d * kappa / 2


def spectral_term(norm2: float, top: float, delta: float) -> float:
    """Return the term of reparam2019 C.1: delta^2 ||W||_F^2 lmax(H) / 2."""
    return delta**2 * norm2 * top / 2


@bound(
    id="B12",
    symbol=r"E_A[\mathcal{E}_F(f, S, \delta A)] \leq \frac{\delta^2}{2m} \kappa_{Tr} + O(\delta^3)",
    source="relative2021 Thm 5, Cor. 10",
    cost="6 forward passes per rotation, about 2 m N rotations per layer; relative flatness",
    on_request=True,
)
def feature_robustness_bound(context: Context) -> Iterator[Claim]:
    r"""Relative flatness bounds the mean change under rotated features: delta^2/(2m) kappa_Tr + O(delta^4).

    The left side is |mean of E_F(delta A)| over A of Haar's law, drawn in pairs A and -A such that a quadratic form is
    averaged exactly. The right side is the theorem's term plus the observed rest: the part of the change at delta,
    delta/2 and delta/4, with the same A, that is no multiple of delta^2; its sign turned where the change is negative.
    So the claim compares the extrapolated leading terms, and the note gives the share of the rest. The pairs leave no
    odd order: the rest is O(delta^4), and no minimum is needed. If a layer is too wide for balanced draws, there is a
    standard error, which is doubled: both sides have the same leading term, and within 4 standard errors nothing is
    decided.

    `.order` claims that the observed order of the rest is at least 3.5 (the theory gives 4). `.fixed_order` claims at
    least 2.8 (the theory gives 3) for A of one sign, after its first-order term is removed. |E| <= eps needs kappa >=
    0.
    """
    for layer, weight in context.layers.items():
        if why := unmovable(weight):
            yield Claim(math.nan, math.nan, layer, assumptions=(Assumption("movable_features", False, why),))
            continue
        features = RotatedFeatures(context.lens.problem, context.lens.model, weight)
        found, smoothly = averaged(context, features), smooth(context, layer)
        kappa = context.measured("relative_flatness", layer).value
        sign = Assumption("nonnegative_flatness", kappa >= 0, "" if kappa >= 0 else f"kappa_Tr is {kappa:.3g}")
        yield Claim(
            abs(found.change),
            mean_term(kappa, found.delta, features.m) + math.copysign(1.0, found.change) * found.rest,
            layer,
            "",
            (smoothly, sign, found.resolved),
            stderr=2 * found.stderr,
            rounding=_rounding(found),
            note=f"delta = {found.delta:.3g}, labels kept; {_share(found.rest, found.change)}",
        )
        paired, single = orders(context, features)
        yield _order("order", HAAR_ORDER, paired, layer, smoothly)
        yield _order("fixed_order", FIXED_ORDER, single, layer, smoothly)


def _order(part: str, least: float, order: Order, layer: str, smoothly: Assumption) -> Claim:
    note = "no rest beyond rounding" if math.isinf(order.value) else ""
    return Claim(least, order.value, layer, part, (smoothly, order.settled), note=note)


def _rounding(found: Expansion) -> float:
    return max(1e-6, 2 * found.error)


def _share(rest: float, whole: float) -> str:
    return f"{abs(rest / whole):.2g} of it beyond the leading term" if whole else "nothing moves"


@dataclass(frozen=True, eq=False)
class Worst:
    """The worst A found at a layer, with the sides of Theorem 14 and C.1."""

    change: float  #: E_F(delta A)
    gradient: float  #: delta ||W^T G||_*, the largest first-order term: 0 at a minimum
    rest: float  #: the change without its first and second order, along this A
    uniform: float  #: delta^2 d kappa^phi / 2
    spectral: float  #: delta^2 ||W||_F^2 lmax(H) / 2
    dip: float  #: the part of a negative smallest eigenvalue in the uniform term
    expansion: Expansion
    assumptions: tuple[Assumption, ...]  #: those of both theorems
    semidefinite: Assumption

    @property
    def note(self) -> str:
        """Return delta and the term that is not the theorem's own, in words."""
        own, beyond = self.uniform, self.gradient + self.dip + self.rest
        return f"delta = {self.expansion.delta:.3g}, labels kept; slope and rest are {_part(beyond, own)} of the term"


def _part(beyond: float, own: float) -> str:
    return f"{beyond / own:.2g}" if own else "all"


@bound(
    id="B13",
    symbol=r"\max_{\|A\| \leq 1} \mathcal{E}_F(f, S, \delta A) \leq \frac{\delta^2 d}{2} \kappa^\phi + O(\delta^3)",
    source="relative2021 Thm 14; reparam2019 C.1",
    cost="a search of about 100 gradients per layer; Lanczos",
    on_request=True,
)
def uniform_robustness_bound(context: Context) -> Iterator[Claim]:
    r"""Maximal relative flatness bounds the worst change under moved features: delta^2 d/2 kappa^phi + O(delta^3).

    The left side is the largest E_F(delta A) with ||A|| <= 1 that a search finds: a lower bound of the largest, which
    is sound on this side. d is the number of rows. The right side is the theorem's term plus the terms that O(delta^3)
    stands for: the observed rest of the change along that A; delta ||W^T G||_*, the largest contribution of the
    gradient G, which is 0 at a minimum; and (d - 1) eps delta^2/2 ||W||_F^2 if the layer's Hessian is only known to be
    >= -eps. `.spectral` is the form of 2019, delta^2/2 ||W||_F^2 lmax(H). It needs no positive semidefinite H, and may
    be smaller or larger than the other.
    """
    for layer, weight in context.layers.items():
        if why := unmovable(weight):
            yield Claim(math.nan, math.nan, layer, assumptions=(Assumption("movable_features", False, why),))
            continue
        found = worst_of(context, layer, weight)
        beyond, error = found.gradient + found.rest, _rounding(found.expansion)
        premises = (*found.assumptions, found.semidefinite)
        yield Claim(
            found.change,
            found.uniform + found.dip + beyond,
            layer,
            "",
            premises,
            rounding=error,
            note=found.note,
        )
        yield Claim(found.change, found.spectral + beyond, layer, "spectral", found.assumptions, rounding=error)


def worst_of(context: Context, layer: str, weight: Weight) -> Worst:
    """Return the worst A found at a layer, with the terms of its change."""
    assert weight.parameter is not None
    features = RotatedFeatures(context.lens.problem, context.lens.model, weight)
    operator = Hessian(context.lens.problem, [weight.parameter], model=context.lens.model)
    pairs = eigenpairs(operator, top_k=1, bottom_k=1, rtol=1e-6, generator=context.generator)
    A, expansion = _settled(context, features, pairs.vectors[0].to("cpu", torch.float64).reshape(features.W.shape))
    delta, value = expansion.delta, features.change(expansion.delta * A)
    G = features.slope(torch.zeros_like(A))[1]
    top = float(pairs.values[0] + pairs.residuals[0])
    eps = max(0.0, float(pairs.residuals[-1] - pairs.values[-1]))
    g, d, _ = features.W.shape
    norm2, kappa = float(features.W.square().sum()), context.measured("maximal_relative_flatness", layer)
    missed = 1.0 if kappa.kind == "exact" else 1.001  # the tolerance of kappa
    return Worst(
        change=value,
        gradient=delta * _nuclear(features.W, G),
        rest=value - delta * float((G * A).sum()) - delta**2 * expansion.leading,
        uniform=uniform_term(kappa.value * missed, delta, g * d),
        spectral=spectral_term(norm2, max(0.0, top), delta),
        dip=spectral_term(norm2, eps, delta) * (g * d - 1),
        expansion=expansion,
        assumptions=(smooth(context, layer), context.local_minimum, expansion.resolved),
        semidefinite=_semidefinite(layer, top, float(pairs.values[-1])),
    )


def _settled(context: Context, features: RotatedFeatures, top: Tensor) -> tuple[Tensor, Expansion]:
    """Return (W A, the series along it) of the worst A, at a delta small enough for its series."""
    delta, best = first_step(context) / 2, None
    while best is None or (best[1].error > RESOLVED / 10 and delta > SMALLEST):
        A = _search(context, features, top, delta)
        along = series(context, features, A[None], delta, exact=True)
        found = A, looked_at_twice(context, features, A[None], along)
        best = found if best is None or found[1].error < best[1].error else best
        delta /= 2
    return best


def _search(context: Context, features: RotatedFeatures, top: Tensor, delta: float) -> Tensor:
    """Return W A of the worst A found; searches start along the top eigenvector in both directions, and at random."""
    ahead = features.steepest(top)
    drawn = [features.draw(1.0, "rotations", 1.0, context.generator) for _ in range(RESTARTS - 1)]
    best, where = -math.inf, ahead
    for start in (ahead, -ahead, *drawn):
        A, highest, stalled = start, -math.inf, 0
        for _ in range(CLIMBS):
            value, G = features.slope(delta * A)
            stalled = stalled + 1 if value <= highest * (1 + 1e-9) else 0
            if value > best:
                best, where = value, A
            highest = max(highest, value)
            if stalled == 3:
                break
            A = features.steepest(G)
    return where


def _semidefinite(layer: str, top: float, low: float) -> Assumption:
    holds = low >= -1e-3 * max(top, 0.0)
    why = "" if holds else f"a Ritz value of the Hessian of {layer} is {low:.2g}, the largest {top:.2g}"
    return Assumption("positive_semidefinite", holds, why)


def _nuclear(W: Tensor, G: Tensor) -> float:
    """Return ||W^T G||_*, the largest <W A, G> over ||A|| <= 1; summed over groups."""
    return float(torch.linalg.svdvals(row_factor(W) @ row_factor(G).mT).sum())
