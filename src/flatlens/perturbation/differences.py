"""The Hessian by differences of gradients, where autograd gives no second derivative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from flatlens.perturbation.steps import Landscape, in_one_piece


@final
class DifferencedHessian:
    """Products with R H R + S, R and S diagonal (without them: with H), each from gradients at four points.

    H u is the limit of D(h) = (g(theta + h u) - g(theta - h u)) / (2 h), extrapolated from D(h) and D(2h). The error is
    D(h) - D(2h): three times that of D(h) by its length, and about that of the product by rounding. Vectors are (P,) in
    float64, as are the sums of the gradients.

    >>> from flatlens.problem import Problem
    >>> net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
    >>> DifferencedHessian(Landscape(problem))(torch.tensor([1.0, 0.0])).round(decimals=6)  # x x^T
    tensor([ 9., 12.], dtype=torch.float64)
    """

    def __init__(self, landscape: Landscape, root: Tensor | None = None, shift: Tensor | None = None) -> None:
        self.landscape = landscape
        self.root, self.shift = root, shift
        self.products = 0
        space = landscape.space
        size = sum(float(in_one_piece(p.detach()).to(torch.float64).square().sum()) for p in space.tensors) ** 0.5
        self.distance = torch.finfo(space.dtype).eps ** 0.2 * 1e-2 * max(size, 1.0)

    @property
    def size(self) -> int:
        """Return P, the number of rows and columns."""
        return self.landscape.space.size

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return one vector (P,) float64 from whole tensors by parameter; a missing one is zero."""
        return torch.cat([
            torch.zeros(p.numel(), dtype=torch.float64, device=p.device)
            if name not in named
            else in_one_piece(named[name].detach()).to(torch.float64).flatten()
            for name, p in self.landscape.space.parameters.items()
        ])  # fmt: skip

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
        near, far = self._difference(w / length, 1.0), self._difference(w / length, 2.0)
        product, error = (4 * near - far) * (length / 3), (near - far) * length
        if self.root is not None:
            product, error = self.root * product, self.root * error
        return product if self.shift is None else product + self.shift * v, error

    def _difference(self, unit: Tensor, times: float) -> Tensor:
        step, direction = times * self.distance, self.landscape.space.named(unit)
        with self.landscape.walk(direction) as move:
            move(-step)
            ahead = self.landscape.summed_gradient()
            move(step)
            behind = self.landscape.summed_gradient()
        return (ahead - behind).div_(2 * step)
