"""A network that rounds inside, seen at weights and inputs moved by less than one unit in the last place.

Where a kernel computes in a half type, and `problem.op_overrides.plain_casts` does not see it, a repetition gives the
same digits, and the same error. At a nudge every operation inside rounds anew: the spread over nudges is the rounding.
The square of a rounded gradient holds the square of its rounding, a bias; the product of the gradients of two nudges
does not. What rounds alike at all nudges moves the mean of gradients by some 2%, where one nudge moves them by 4%: so
the error of a mean is not taken below that of one nudge.

What is below 6e-8 in float16 is 0 at every nudge, and below 6e-5 has fewer digits. A backward pass is linear: that of
2^k times the loss has the same digits, except where numbers underflow. `loss_scaled` chooses k by this, as
`product_with` does for the vector of a Hessian product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.curvature.probes import student
from flatlens.errors import Overflows
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.perturbation.weights import Landscape
from flatlens.problem import Problem
from flatlens.problem.eval_context import moved_in_place
from flatlens.problem.forward import nudged
from flatlens.problem.op_overrides import HALF

NUDGES = 8  #: times that weights and inputs are moved by less than one rounding, where a network rounds inside
STEP, TRIES = 2.0**6, 6  #: factor from one multiple of a loss, or of a vector, to the next; number of these
UNLOST = 2.0**-13  #: relative distance below which two derivatives have lost nothing: an eighth of float16's rounding
UNDERFLOWS = "numbers underflow or overflow in half precision inside, at any scale of the loss: compute in float32"
LEAST_ALIKE = 0.5  #: mean cosine of the directions at two nudges below which they are mostly rounding


def rounds(problem: Problem, model: nn.Module) -> bool:
    """Return whether operations inside the network compute in a half type, and round as `nudges` shows."""
    return not problem.sharded and coarsest_inside(problem, model) in HALF


@contextmanager
def nudges(problem: Problem, model: nn.Module, seed: int) -> Iterator[Problem]:
    """Give the problem with weights and inputs moved at random by less than a unit in the last place inside."""
    share = torch.finfo(coarsest_inside(problem, model)).eps / 2
    draw = torch.Generator().manual_seed(seed)
    tensors: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    with problem.measuring(model), moved_in_place(tensors) as (here, put):
        put([nudged(p, draw, share) for p in here])
        yield problem.changed(nudge=(seed, share), seen=None)


def loss_scaled(problem: Problem, model: nn.Module) -> Problem | str:
    """Return the problem with the `scale` at which no parameter's gradient underflows inside, or why there is none."""

    def at(scale: float) -> dict[str, Tensor] | None:
        try:
            return Landscape(problem.changed(scale=scale), model=model).risk_and_gradient()[1]
        except Overflows:
            return None

    found = _complete(at, 1.0)
    return f"the gradient is lost: {UNDERFLOWS}" if found is None else problem.changed(scale=found[1])


def product_at(apply: Callable[[Tensor], Tensor], u: Tensor, factor: float) -> Tensor | None:
    """Return the product with u, from that with a multiple of it; None where this overflows."""
    found = apply(u * factor).to("cpu", torch.float64) / factor
    return found if bool(found.isfinite().all()) else None


def product_with(apply: Callable[[Tensor], Tensor], u: Tensor, factor: float) -> tuple[Tensor, float] | str:
    """Return (the product with u, the factor of u, from `factor` on, without underflow), or why there is none."""

    def at(factor: float) -> dict[str, Tensor] | None:
        found = product_at(apply, u, factor)
        return None if found is None else {"": found}

    found = _complete(at, factor)
    return f"the Hessian product is lost: {UNDERFLOWS}" if found is None else (found[0][""], found[1])


def _complete(at: Callable[[float], dict[str, Tensor] | None], factor: float) -> tuple[dict[str, Tensor], float] | None:
    """Return (tensors from a multiple, its factor) that lose nothing to underflow; None if each multiple loses some.

    `at`: what a multiple gives, divided by its factor; None where it overflows. The factor is the smallest one tried
    whose tensors are those of 64 times that factor, or the largest one without an overflow, if a 64th of it is near.
    """
    # down to a factor without an overflow
    here, tries = at(factor), TRIES
    while here is None and tries:
        factor, tries = factor / STEP, tries - 1
        here = at(factor)
    if here is None:
        return None
    # up, as long as a larger one shows more, or shows nothing of a tensor
    best, last, off = here, factor, math.nan
    for _ in range(tries):
        if (above := at(STEP * factor)) is None:
            break
        off, factor, here = _apart(here, above), STEP * factor, above
        if off > UNLOST:
            best, last = above, factor
        elif all(bool(part.any()) for part in above.values()):
            break
    # the largest one's own error is a share of its distance from the one below
    if last == factor and math.isnan(off):
        below = at(factor / STEP)
        off = math.inf if below is None else _apart(below, best)
    return (best, last) if last < factor or off <= STEP * UNLOST else None


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the distance of some tensors from others, by the others' lengths; the largest of them."""
    pairs = [(one[name].to(torch.float64), part.to(torch.float64)) for name, part in other.items()]
    return max((float((a - b).norm() / b.norm()) for a, b in pairs if bool(b.any())), default=0.0)


@dataclass(frozen=True, eq=False)
class Nudged:
    """Directions u_k, (K, P) of length 1, and products H u_k, found at K nudges of weights and inputs."""

    directions: Tensor
    products: Tensor

    @property
    def alike(self) -> float:
        """Return the mean cosine of two directions: 1 / (1 + their squared rounding)."""
        K = len(self.directions)
        return float((self.directions @ self.directions.mT).sum() - K) / (K * (K - 1))

    def bias(self, eps: float) -> float:
        """Return how far rounding that is alike at all nudges may move the form: as far as it moves one of them."""
        forms = (self.directions * self.products).sum(1)
        return math.hypot(float(forms.std()), eps / 2 * float(forms.abs().mean()))

    def form(self, keep: slice | Tensor = slice(None)) -> float:
        """Return u^T H u / ||u||^2 by products over two different nudges: none has the square of its own rounding."""
        u, Hu = self.directions[keep], self.products[keep]
        forms, squares = u @ Hu.mT, u @ u.mT
        return float((forms.sum() - forms.trace()) / (squares.sum() - squares.trace()))

    def with_error(self, eps: float) -> tuple[float, float]:
        """Return the form, and its error: a jackknife over nudges, and the bias."""
        K, whole = len(self.directions), self.form()
        without = [self.form(torch.arange(K) != k) for k in range(K)]
        _, stderr = student(K * whole - (K - 1) * torch.tensor(without, dtype=torch.float64))
        return whole, math.hypot(float(stderr), self.bias(eps))

    def lost(self, eps: float) -> str:
        """Return in words that the direction is mostly rounding; empty if not so."""
        if self.alike >= LEAST_ALIKE:
            return ""
        noise = math.sqrt(1 / max(self.alike, 1e-4) - 1)
        return (
            f"the direction is rounding: operations inside round to {eps:.1g}, and this moves it by {noise:.2g} of its "
            "length; compute inside in float32"
        )
