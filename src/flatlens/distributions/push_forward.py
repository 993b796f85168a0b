"""The distribution of a generator's outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from flatlens.distributions.covering import THEOREM, Rule
from flatlens.distributions.distribution import Distribution, drawable
from flatlens.distributions.lipschitz import lipschitz_product
from flatlens.errors import BadInput, one_line
from flatlens.estimate import Estimate
from flatlens.problem import measuring
from flatlens.problem.copies import copy_on_same_weights

BATCH = 4096  #: samples that the network runs at a time


@final
class PushForward(Distribution):
    """The distribution of g(z), z ~ base, g a network: a generator (sharpening Thm 4.2, last part).

    `lipschitz` is an upper bound of ||g(z) - g(z')|| / ||z - z'|| on the base's support. Without it, the product of the
    layers' norms is used and computed anew at each use (`lipschitz_product`). The network runs in eval mode and is put
    back as it was. It maps (n, base.dimension) to (n, ...), which is flattened.

    >>> from flatlens.distributions import Cube
    >>> double = nn.Linear(2, 2, bias=False)
    >>> _ = double.weight.data.copy_(2 * torch.eye(2))
    >>> image, cube = PushForward(Cube(2), double), Cube(2)
    >>> round(image.covering_radius(1000, 0.05).value / cube.covering_radius(1000, 0.05).value, 6)
    2.0
    """

    def __init__(self, base: Distribution, network: nn.Module, lipschitz: float | None = None) -> None:
        if not isinstance(base, Distribution) or not isinstance(network, nn.Module):
            got = f"{type(base).__name__} and {type(network).__name__}"
            raise BadInput(f"PushForward(base, network): a Distribution and an nn.Module are needed, got {got}")
        if lipschitz is not None and not 0 <= lipschitz < float("inf"):
            raise BadInput(f"PushForward(lipschitz={lipschitz!r}): a finite number is needed, not negative")
        self.base = base
        self.network = network
        self._declared = lipschitz
        self._outputs = self._image(torch.zeros(2, base.dimension, dtype=torch.float64)).shape[1]
        _ = self.lipschitz  # raises now if the network's constant cannot be bounded

    def __repr__(self) -> str:
        return f"PushForward({self.base!r}, {type(self.network).__name__}, lipschitz={self.lipschitz:.6g})"

    @property
    def lipschitz(self) -> float:
        """Return Lip(g), or an upper bound of it."""
        if self._declared is not None:
            return self._declared
        return lipschitz_product(self.network, (self.base.dimension,))

    @property
    def dimension(self) -> int:
        """Return the number of entries of the network's output."""
        return self._outputs

    @property
    def intrinsic(self) -> int:
        """Return the base's, or less: a Lipschitz map adds no dimension."""
        return min(self.base.intrinsic, self._outputs)

    @property
    def diameter(self) -> float:
        """Return at most Lip(g) times the base's."""
        return self.lipschitz * self.base.diameter if self.lipschitz else 0.0

    @property
    def support_is_convex(self) -> bool:
        """Return False: it is not known, whatever the base's is."""
        return False

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return g of independent samples of the base, (n, dimension) float64."""
        drawable(n, generator, "PushForward.sample")
        return self._image(self.base.sample(n, generator))

    def log_density(self, x: Tensor) -> Tensor:
        """Raise: the density of a generator's samples is unknown, and mostly there is none."""
        raise BadInput(
            "PushForward.log_density: the density of a push-forward is not known: use a Cube, a Sphere or a "
            "GaussianMixture"
        )

    def covering_radius(self, samples: int, failure: float, *, rule: Rule = "exact") -> Estimate:
        """Return Lip(g) delta_base(N, eps): points within delta of each other have images within Lip(g) delta."""
        base = self.base.covering_radius(samples, failure, rule=rule)
        how = "declared" if self._declared is not None else "product of the layers' norms"
        note = f"base: {base.note}; Lip(g) = {self.lipschitz:.6g}, {how}"
        if base.kind == "undefined":
            return replace(base, note=note)
        source = f"{THEOREM}, push-forward of {base.source}"
        return replace(base, value=self.lipschitz * base.value, note=note, source=source)

    def extreme_points(self, most: int, generator: torch.Generator) -> Tensor:
        """Return the images of the base's extreme points."""
        z = self.base.extreme_points(most, generator)
        return self._image(z) if len(z) else z.new_zeros(0, self._outputs)

    def _image(self, z: Tensor) -> Tensor:
        """Return g(z), (n, dimension) float64, on z's device."""
        like = next((p for p in self.network.parameters() if p.is_floating_point()), z)
        network = copy_on_same_weights(self.network) or self.network
        with measuring(network), torch.no_grad():
            try:
                parts = [network(part.to(like)) for part in torch.split(z, BATCH)]
            except RuntimeError as error:
                raise BadInput(
                    f"PushForward(network=...): the network fails on inputs of shape {(*z.shape,)} ({one_line(error)})"
                ) from error
        if any(not isinstance(y, Tensor) for y in parts) or sum(len(y) for y in parts) != len(z):
            raise BadInput(f"PushForward(network=...): for {len(z)} samples it must return a tensor with {len(z)} rows")
        x = torch.cat(parts).flatten(1).to(z)
        if not bool(torch.isfinite(x).all()):
            raise BadInput("PushForward(network=...): some outputs are NaN or inf")
        return x
