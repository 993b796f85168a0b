"""The function that a network should compute, if known: f* in sharpening's theorems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from flatlens.distributions import lipschitz_product
from flatlens.errors import BadInput


@final
@dataclass(frozen=True, eq=False)
class Target:
    """f*, from inputs as the network takes them to (n, N), and a bound of ||f*(x) - f*(y)|| / ||x - y|| on the support.

    For a network of known layers the bound is computed: the product of the norms of the layers (`lipschitz_product`).

    >>> Target(lambda x: x.sum(1, keepdim=True), lipschitz=2**0.5)(torch.ones(3, 2)).flatten()
    tensor([2., 2., 2.], dtype=torch.float64)
    """

    function: Callable[[Tensor], Tensor]
    lipschitz: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise BadInput(
                f"Target(function=...): a function of a batch of inputs is needed, got {type(self.function).__name__}"
            )
        if self.lipschitz is None and not isinstance(self.function, nn.Module):
            raise BadInput(
                "Target(lipschitz=None): only a network's Lipschitz constant is computed; for another function give "
                "lipschitz=..."
            )
        if self.lipschitz is not None and not 0 <= self.lipschitz < float("inf"):
            raise BadInput(f"Target(lipschitz={self.lipschitz!r}): a finite number is needed, not negative")

    def steepness(self, shape: tuple[int, ...]) -> float:
        """Return ||f*||_Lip or an upper bound, for one input of this shape."""
        if self.lipschitz is not None:
            return self.lipschitz
        assert isinstance(self.function, nn.Module)
        try:
            return lipschitz_product(self.function, shape)
        except BadInput as why:
            raise BadInput(
                f"Target(lipschitz=None): the Lipschitz constant of this network is not known ({why}): give "
                f"lipschitz=..."
            ) from why

    def __call__(self, x: Tensor) -> Tensor:
        """Return f*(x), (n, N) float64."""
        parameters = self.function.parameters() if isinstance(self.function, nn.Module) else iter(())
        with torch.no_grad():
            y = self.function(x.to(next((p for p in parameters if p.is_floating_point()), x)))
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != len(x):
            got = f"{(*y.shape,)}" if isinstance(y, Tensor) else type(y).__name__
            raise BadInput(
                f"Target(...): for inputs of shape {(*x.shape,)} the function must return shape ({len(x)}, N), got "
                f"{got}"
            )
        return y.to(x.device, torch.float64)
