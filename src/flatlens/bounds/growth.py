"""MacDonald et al.: as the loss falls, the Jacobian must grow, because near inputs have different targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.covered import DETOUR, Covered, convex_support, covered, spread, steepest
from flatlens.distributions import Sphere
from flatlens.measures.sensitivity import jacobian_norm
from flatlens.problem.loss import Loss
from flatlens.problem.losses import CrossEntropy, SquaredError
from flatlens.problem.outcomes import forwards

_PAIRED = 4096  #: samples of which all pairs are compared
BENT = math.sqrt(2) / (3 * math.sqrt(3))
"""Upper bound of the third derivatives of log-sum-exp along unit vectors. Each is the third central moment of numbers
whose range is at most sqrt(2), and a third central moment is at most range^3 / (6 sqrt 3)."""


@dataclass(frozen=True, eq=False)
class Goal:
    """The terms of c(f, f*) >= alpha ||f - f*||^2, where f are the outputs, or the probabilities for cross-entropy."""

    target: Tensor  #: f*(x_i), (n, N)
    cost: Tensor  #: c(f(x_i), f*(x_i)), (n,), with minimum 0
    alpha: float  #: the alpha of the paper
    sharp: float  #: largest valid alpha
    outputs: Tensor  #: outputs of the network, the logits for cross-entropy, (n, N)


@bound(
    id="B10",
    symbol=r"\max_i \|Jf(x_i)\|_2 \geq \max_{i \neq j} \frac{\|f^*_i - f^*_j\|_2 - 2\ell}{\|x_i - x_j\|_2}"
    r" - \max_i V_{B(x_i, \delta)}(Jf)",
    source="sharpening Thm 5.1, Eq. 9",
    cost="one pass, variation by intervals",
    on_request=True,
)
def jacobian_growth(context: Context) -> Iterator[Claim]:
    """Lower loss needs a network that is steeper somewhere: Theorem 5.1, lower bound on the left.

    max_{i != j} (||f*_i - f*_j|| - 2 l) / ||x_i - x_j|| - max_i V_{B(x_i, delta)}(Jf) <= max_i ||Jf(x_i)||_2, with
    l^2 = max_i c(f(x_i), f*_i) / alpha. The theorem fixes l beforehand. Here l comes from the trained network, which is
    allowed: the theorem's probability is only that of the balls covering the support, and that does not depend on l.

    For squared losses alpha = 1/2, and 1/N for "mse". For cross-entropy f is the network with softmax, f* the
    distribution of the label, c the loss minus the label's entropy, and alpha = 1/2 by Pinsker's inequality. `.sharp`
    has alpha = 1, the largest valid one: ||p - q||_1^2 >= 2 ||p - q||_2^2, because the entries of p - q sum to 0.

    The proof needs straight lines between samples, so a convex support. `.geodesic`, for spheres, takes the path along
    the sphere: the quotient is divided by pi/2, with the largest alpha.

    A left side below 0 says nothing about the network; the note then calls the bound vacuous.
    """
    seen = context.once(covered)
    goal = _goal(context)
    refusal = next((found for found in (seen, goal) if isinstance(found, Assumption)), None)
    if refusal is not None:
        yield Claim(math.nan, math.nan, assumptions=(refusal,))
        return
    assert isinstance(seen, Covered)
    assert isinstance(goal, Goal)
    softmaxed = isinstance(context.lens.problem.loss, CrossEntropy)
    slopes = context.each(jacobian_norm(softmax=softmaxed))
    V = seen.variation
    if softmaxed:
        V = of_softmax(goal.outputs, context.each(jacobian_norm), V, seen.delta)
    premises, convex = (*seen.premises, seen.certified), convex_support(context)
    at = spread(seen.x, _PAIRED)

    def claim(part: str, quotient: float, reach: float, *shape: Assumption) -> Claim:
        left = quotient - float(V.max())
        vacuous = "vacuous: below 0" if left <= 0 else ""
        note = "; ".join(told for told in (seen.note, f"l = {reach:.4g}", vacuous) if told)
        return Claim(left, float(slopes.max()), None, part, (*premises, *shape), note=note)

    alphas = [("", goal.alpha)] if goal.sharp == goal.alpha else [("", goal.alpha), ("sharp", goal.sharp)]
    for part, alpha in alphas:  # the last is the largest
        reach = math.sqrt(float(goal.cost.max()) / alpha)
        quotient = steepest(seen.x[at], goal.target[at].to(seen.x), 2 * reach)
        yield claim(part, quotient, reach, convex)
    if isinstance(context.distribution, Sphere):
        yield claim("geodesic", quotient / DETOUR, reach)


def _goal(context: Context) -> Goal | Assumption:
    """Return targets and costs if alpha is known for the loss, otherwise the assumption that fails."""
    problem = context.lens.problem
    loss = problem.loss
    if not isinstance(loss, SquaredError | CrossEntropy):
        return Assumption("quadratic_growth", False, f"no alpha is known for the loss {loss.name}")
    if isinstance(loss, CrossEntropy) and loss.weight is not None:
        return Assumption("quadratic_growth", False, "with class weights the loss is not a divergence")
    parts: list[tuple[Tensor, ...]] = []
    with closing(forwards(problem, context.lens.model)) as found:
        for f, y in found:
            if bool((loss.mass(f, y) == 0).any()):
                return Assumption("all_labelled", False, "some samples' labels are ignored")
            parts.append(_targets(loss, f.to(torch.float64), y))
    target, cost, f = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    if isinstance(loss, CrossEntropy):
        apart = float((target.sum(1) - 1).abs().max()) + float(target.clamp(max=0).abs().max())
        if apart > 1e-6:
            return Assumption(
                "labels_are_distributions",
                False,
                f"a label is not a distribution: it is off by {apart:.2g}",
            )
        return Goal(target, cost, 0.5, 1.0, f)
    alpha = 0.5 if loss.name == "half_squared_error" else 1 / problem.outputs
    return Goal(target, cost, alpha, alpha, f)


def _targets(loss: Loss, f: Tensor, y: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return (f*, c, f) of one chunk. The target comes from the gradient: f - C^-1 dl/df, or softmax(f) - dl/df."""
    leaf = f.requires_grad_()
    values = loss.values(leaf, y)
    (slope,) = torch.autograd.grad(values.sum(), leaf)
    f, values = f.detach(), values.detach()
    if isinstance(loss, CrossEntropy):
        return f.softmax(1) - slope, (values - loss.least(f, y)).clamp(min=0), f
    return f - slope / loss.output_hessian(f[:1], y[:1] if isinstance(y, Tensor) else y)[0, 0, 0], values, f


def of_softmax(f: Tensor, slopes: Tensor, variation: Tensor, delta: float) -> Tensor:
    """Return upper bounds of V_{B(x_i, delta)}(J softmax(f)) from those of f: (n,).

    J softmax(f) = P Jf with P = diag(p) - p p^T. In the ball, ||Jf|| <= S = ||Jf(x_i)|| + V. So the outputs differ from
    those at the centre by at most delta S, and P by at most BENT delta S. Hence ||P|| <= a, where a is the smaller of
    ||P(x_i)|| + BENT delta S and 1/2. This gives

        ||P(u) Jf(u) - P(v) Jf(v)|| <= a V + min(2 delta S BENT, a) S,    and <= 2 a S.

    The minimum holds because the difference of two positive semidefinite matrices has at most the norm of the larger.

    Args:
        f: outputs at the samples, (n, N).
        slopes: ||Jf(x_i)||_2, (n,).
        variation: V_{B(x_i, delta)}(Jf), (n,).
        delta: radius of the balls.
    """
    p = f.softmax(1)
    S = slopes + variation
    a = ((2 * p * (1 - p)).max(1).values + BENT * delta * S).clamp(max=0.5)  # Gershgorin: row sums of |P|
    return torch.minimum(a * variation + torch.minimum(2 * delta * S * BENT, a) * S, 2 * a * S)
