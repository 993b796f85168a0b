"""The Hessian of a network whose parameters are spread over processes: by double backward, or by differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from flatlens.curvature.space import as_one_vector
from flatlens.errors import NotDifferentiable, out_of_memory
from flatlens.operations.table import operation_of
from flatlens.perturbation.steps import Landscape
from flatlens.problem.shards import in_one_piece

_ROUNDED = 1e-9
"""Relative difference of two products that is rounding in float64, where the error by differences happens to be 0."""

_NARROW, _JUMPS = 1 / 16, 0.05
"""A difference over this part of the distance is another by less than this: by 0.006 for smooth networks in float32, by
about 1 where the gradient of a few samples jumps."""
_FEW = 8  #: samples on which double backward is checked
_FOUND = "how products with the Hessian are taken"
"""A fact about a problem: a tracker would find it out at every moment."""

By: TypeAlias = Literal["double backward", "central differences of gradients"]


@final
class ShardedHessian:
    """Products with R H R + S, R and S diagonal (without them: with H). Vectors are (P,) in float64.

    By double backward, where the wrappers that spread the parameters have one. Else from gradients at four points: H u
    is the limit of D(h) = (g(theta + h u) - g(theta - h u)) / (2 h), extrapolated from D(h) and D(2h). The error is
    D(h) - D(2h): three times that of D(h) by its length, and about that of the product by rounding.

    Which of the two is found out once for a problem, unless `by` says it. Double backward has to be symmetric on a few
    samples, and within three times the error of the differences there. Where gradients jump between the points of a
    difference even there, as in wide ReLU networks, every operation has to be torch's own instead. Under FSDP2 each
    process holds the parameters whole for it.

    Raises:
        NotDifferentiable: there is no double backward, and gradients jump. Differences then measure the jumps, too: in
            the mean over many samples they do not even depend on their distance.

    >>> from flatlens.problem import Problem
    >>> net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
    >>> H = ShardedHessian(Landscape(problem))
    >>> H(torch.tensor([1.0, 0.0])).round(decimals=6), H.by  # x x^T
    (tensor([ 9., 12.], dtype=torch.float64), 'double backward')
    """

    def __init__(
        self,
        landscape: Landscape,
        root: Tensor | None = None,
        shift: Tensor | None = None,
        *,
        by: By | None = None,
    ) -> None:
        self.landscape = landscape
        self.root, self.shift = root, shift
        self.products = 0
        space = landscape.space
        size = sum(float(in_one_piece(p.detach()).to(torch.float64).square().sum()) for p in space.tensors) ** 0.5
        self.distance = torch.finfo(space.dtype).eps ** 0.2 * 1e-2 * max(size, 1.0)
        self.by: By = self._found_out() if by is None else by  #: how the products are taken

    def _found_out(self) -> By:
        facts = self.landscape.problem.facts
        if _FOUND not in facts:
            facts[_FOUND] = self._tried()
        found: By | None = facts[_FOUND]
        if found is None:
            raise NotDifferentiable(
                "double backward fails or is wrong here, and the network's gradient jumps, as that of a ReLU does: "
                "differences of gradients would measure the jumps, too"
            )
        return found

    def _tried(self) -> By | None:
        """Return how products are taken; None where neither way is right."""
        one = self.landscape
        few = Landscape(one.problem, model=one.model, few=[next(iter(one.problem.batches(_FEW)))])
        kinds, foreign = few.operations()
        if self._right_on(few, foreign):
            return "double backward"
        known = [operation_of(kind) for kind in kinds]
        bends = any(op is not None and op.kinks and op.role == "piecewise linear" for op in known)
        return None if bends or self._jumps(self._drawn(0)) else "central differences of gradients"

    def _right_on(self, few: Landscape, foreign: list[str]) -> bool:
        """Return whether double backward is right on a few samples; `foreign`: operations not torch's own."""
        u, v = self._drawn(0), self._drawn(1)
        try:
            Hu, Hv = (few.second_derivative(self.landscape.space.named(w)) for w in (u, v))
        except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError) as failed:
            if out_of_memory(failed):
                raise
            return False
        asymmetry = abs(float(u @ Hv - v @ Hu))
        if asymmetry > torch.finfo(few.coarsest).eps ** 0.5 * float(Hu.norm() + Hv.norm()):
            return False
        small = ShardedHessian(few, by="central differences of gradients")
        if few.coarsest != self.landscape.space.dtype or small._jumps(u):
            return not foreign
        length = float(u.norm())
        differenced, error = small._differenced(u / length)
        most = 3 * float(error.norm()) + _ROUNDED * float(Hu.norm()) / length
        return float((Hu / length - differenced).norm()) <= most

    def _drawn(self, seed: int) -> Tensor:
        """Return a standard normal vector, the same in every process."""
        drawn = torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(self.landscape.space.device)

    def _jumps(self, along: Tensor) -> bool:
        """Return whether the gradient jumps between the points of a difference."""
        unit = along / along.norm()
        wide, narrow = self._difference(unit, 1.0), self._difference(unit, _NARROW)
        return float((wide - narrow).norm()) > _JUMPS * float(wide.norm())

    @property
    def exact(self) -> bool:
        """Return whether the last product had no error but the rounding of its vectors' type."""
        return self.by == "double backward" and self.landscape.coarsest == self.landscape.space.dtype

    @property
    def size(self) -> int:
        """Return P, the number of rows and columns."""
        return self.landscape.space.size

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return one vector (P,) float64 from whole tensors by parameter; a missing one is zero."""
        rows = [named.get(name) for name in self.landscape.space.parameters]
        return as_one_vector(self.landscape.whole(rows))

    def __call__(self, v: Tensor) -> Tensor:
        """Return the product with a vector."""
        return self.with_error(v)[0]

    def with_error(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the product with a vector, the error of each entry)."""
        self.products += 1
        v = v.to(torch.float64)
        w = v if self.root is None else self.root * v
        length = float(w.norm())
        if length == 0:
            return torch.zeros_like(v), torch.zeros_like(v)
        if self.by == "double backward":
            product = self.landscape.second_derivative(self.landscape.space.named(w))
            error = product * (0.0 if self.exact else torch.finfo(self.landscape.coarsest).eps)
        else:
            product, error = (part * length for part in self._differenced(w / length))
        if self.root is not None:
            product, error = self.root * product, self.root * error
        return product if self.shift is None else product + self.shift * v, error

    def _differenced(self, unit: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the product with a vector of length 1, the error of each entry)."""
        near, far = self._difference(unit, 1.0), self._difference(unit, 2.0)
        return (4 * near - far) / 3, near - far

    def _difference(self, unit: Tensor, times: float) -> Tensor:
        step, direction = times * self.distance, self.landscape.space.named(unit)
        with self.landscape.walk(direction) as move:
            move(-step)
            ahead = self.landscape.summed_gradient()
            move(step)
            behind = self.landscape.summed_gradient()
        return (ahead - behind).div_(2 * step)
