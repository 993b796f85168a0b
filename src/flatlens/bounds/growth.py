"""MacDonald et al.: as the loss falls, the Jacobian must grow to reach different targets at near inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context
from flatlens.bounds.covered import Covered, convex_support, covered, spread, steepest
from flatlens.measures.sensitivity import jacobian_norm
from flatlens.problem.loss import Loss
from flatlens.problem.losses import CrossEntropy, SquaredError

_PAIRED = 4096  #: samples of which all pairs are compared
BENT = math.sqrt(2) / (3 * math.sqrt(3))
"""No third derivative of log-sum-exp along unit vectors is larger: it is a third central moment of numbers within
sqrt(2) of one another, and such a moment is at most (range)^3 / (6 sqrt 3)."""


@dataclass(frozen=True, eq=False)
class Goal:
    """The sides of c(f, f*) >= alpha ||f - f*||^2, for outputs or probabilities."""

    target: Tensor  #: f*(x_i), (n, N)
    cost: Tensor  #: c(f(x_i), f*(x_i)), (n,), with minimum 0
    alpha: float
    sharp: float  #: the largest valid alpha
    outputs: Tensor  #: the logits, (n, N)


@bound(
    id="B10",
    symbol=r"\max_i \|Jf(x_i)\|_2 \geq \max_{i \neq j} \frac{\|f^*_i - f^*_j\|_2 - 2\ell}{\|x_i - x_j\|_2}"
    r" - \max_i V_{B(x_i, \delta)}(Jf)",
    source="sharpening Thm 5.1, Eq. 9",
    cost="one pass, variation by intervals",
    on_request=True,
)
def jacobian_growth(context: Context) -> Iterator[Claim]:
    """The lower the loss, the steeper the network must be somewhere: Theorem 5.1, lower bound on the left.

    max_{i != j} (||f*_i - f*_j|| - 2 l) / ||x_i - x_j|| - max_i V_{B(x_i, delta)}(Jf) <= max_i ||Jf(x_i)||_2, with
    l^2 = max_i c(f(x_i), f*_i) / alpha. The theorem fixes l beforehand, but its only event is that the balls cover the
    support, so that the l reached serves. Squared losses: alpha = 1/2, and 1/N for "mse". Cross-entropy: f is the
    softmaxed network, f* the label's distribution, c the loss without the label's entropy, alpha = 1/2 by Pinsker;
    `.sharp` has alpha = 1, the largest that serves: ||p - q||_1^2 >= 2 ||p - q||_2^2, as the entries of p - q sum to 0.
    Negative where the network may be as flat as it likes.
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
    premises = (*seen.premises, seen.certified, convex_support(context))
    at = spread(seen.x, _PAIRED)
    for part, alpha in (("", goal.alpha), ("sharp", goal.sharp)):
        reach = math.sqrt(float(goal.cost.max()) / alpha)
        left = steepest(seen.x[at], goal.target[at].to(seen.x), 2 * reach) - float(V.max())
        vacuous = "vacuous: below 0" if left <= 0 else ""
        note = "; ".join(told for told in (seen.note, f"l = {reach:.4g}", vacuous) if told)
        if part == "" or alpha != goal.alpha:
            yield Claim(left, float(slopes.max()), None, part, premises, note=note)


def _goal(context: Context) -> Goal | Assumption:
    """Return targets and costs, for losses whose alpha is known."""
    problem = context.lens.problem
    loss = problem.loss
    if not isinstance(loss, SquaredError | CrossEntropy):
        return Assumption("quadratic_growth", False, f"no alpha is known for the loss {loss.name}")
    if isinstance(loss, CrossEntropy) and loss.weight is not None:
        return Assumption("quadratic_growth", False, "weighted by class, the loss is no divergence of distributions")
    parts: list[tuple[Tensor, ...]] = []
    for raw in problem.data.chunks(1024):
        f, y = problem.run(context.lens.model, problem.place(raw))
        if bool((loss.mass(f, y) == 0).any()):
            return Assumption("all_labelled", False, "some samples' labels are ignored")
        parts.append(_targets(loss, f.detach().to(torch.float64), y))
    target, cost, f = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    if isinstance(loss, CrossEntropy):
        apart = float((target.sum(1) - 1).abs().max()) + float(target.clamp(max=0).abs().max())
        if apart > 1e-6:
            return Assumption(
                "labels_are_distributions", False, f"a label's entries are no distribution by {apart:.2g}"
            )
        return Goal(target, cost, 0.5, 1.0, f)
    alpha = 0.5 if loss.name == "half_squared_error" else 1 / problem.outputs
    return Goal(target, cost, alpha, alpha, f)


def _targets(loss: Loss, f: Tensor, y: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return (f*, c, f) of one chunk, the target from the loss's gradient: f - C^-1 dl/df or softmax(f) - dl/df."""
    leaf = f.requires_grad_()
    values = loss.values(leaf, y)
    (slope,) = torch.autograd.grad(values.sum(), leaf)
    f, values = f.detach(), values.detach()
    if isinstance(loss, CrossEntropy):
        return f.softmax(1) - slope, (values - loss.least(f, y)).clamp(min=0), f
    return f - slope / loss.output_hessian(f[:1], y[:1] if isinstance(y, Tensor) else y)[0, 0, 0], values, f


def of_softmax(f: Tensor, slopes: Tensor, variation: Tensor, delta: float) -> Tensor:
    """Return upper bounds of V_{B(x_i, delta)}(J softmax(f)) from those of f: (n,).

    J softmax(f) = P Jf, P = diag(p) - p p^T. In the ball ||Jf|| <= S = ||Jf(x_i)|| + V, the outputs move by up to
    delta S from the centre's, P by BENT times that, and ||P|| <= a = ||P(x_i)|| + BENT delta S, or 1/2. So

        ||P(u) Jf(u) - P(v) Jf(v)|| <= a V + min(2 delta S BENT, a) S,    and <= 2 a S.

    The second min because two positive semidefinite matrices differ by no more than the larger one's norm.
    """
    p = f.softmax(1)
    S = slopes + variation
    a = ((2 * p * (1 - p)).max(1).values + BENT * delta * S).clamp(max=0.5)  # Gershgorin: row sums of |P|
    return torch.minimum(a * variation + torch.minimum(2 * delta * S * BENT, a) * S, 2 * a * S)
