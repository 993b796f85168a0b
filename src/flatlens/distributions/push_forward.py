"""The distribution of a generator's outputs, and an upper bound of a network's Lipschitz constant, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from flatlens.distributions.distribution import THEOREM, Distribution, Rule, drawable
from flatlens.errors import BadInput, one_line
from flatlens.estimate import Estimate
from flatlens.operations.layers import is_linear
from flatlens.operations.operator_norm import operator_norm
from flatlens.operations.table import Operation, hooked, operation_of
from flatlens.problem import measuring
from flatlens.problem.eval_context import copy_on_same_weights

_SLACK = 1e-9  #: relative margin: operator norms are found from below, to 1e-10 of the value


def lipschitz_product(network: nn.Module, size: tuple[int, ...]) -> float:
    """Return prod_l Lip(layer l) >= Lip(network), for one input of shape `size`; in eval mode.

    The network is an nn.Sequential, nested or not, of Linear and Conv layers, which stretch by their operator norms,
    and of maps that move entries or act on each alone with a known slope. Each norm is raised by 1e-9 of itself, so
    the product is never below the constant. It equals the constant if the layers' steepest directions meet; it can be
    far above.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid())
    >>> _ = nn.init.ones_(net[0].weight)
    >>> round(lipschitz_product(net, (2,)) ** 2, 6)  # sqrt 6 / 4
    0.375
    """
    product, network = 1.0, copy_on_same_weights(network) or network
    with measuring(network), torch.no_grad():
        x = torch.zeros(1, *size)
        for called, module, found in _steps(network, ""):
            if is_linear(module):
                if not bool(torch.isfinite(module.weight).all()):
                    raise BadInput(f"lipschitz_product(network=...): {called} has weights that are not finite")
                norm, converged = operator_norm(module, x.shape[1:])
                if not converged:
                    raise _refused(f"the search of the operator norm of {called} did not converge")
                product *= norm * (1 + _SLACK)
                x = x.to(module.weight)
            else:
                constant = found.lipschitz(module)
                if constant is None:
                    raise _refused(f"the constant of {called} is not known here")
                if math.isnan(constant):
                    raise _refused(f"{called} jumps at its threshold, so that it has no constant")
                product *= constant
            # The shape that the next layer reads
            try:
                x = module(x)
            except RuntimeError as error:
                fails = f"{called} fails on inputs of shape {(*x.shape,)} ({one_line(error)})"
                raise BadInput(fails, argument="size", call="lipschitz_product") from error
    return product


def _steps(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, Operation]]:
    # The parts of an nn.Sequential in order, with their names
    called = f"{name or 'the network'} ({type(module).__name__})"
    if hooked(module):
        raise _refused(f"{called} has forward hooks, which may change its output")
    if type(module).forward is nn.Sequential.forward:
        for part in module._modules:  # named_children would omit a module's second use
            yield from _steps(module.get_submodule(part), f"{name}.{part}" if name else part)
    elif (found := operation_of(module)) is None:
        raise _refused(f"the constant of {called} is not known here")
    else:
        yield called, module, found


def _refused(why: str) -> BadInput:
    return BadInput(f"lipschitz_product(network=...): {why}: give the constant: PushForward(..., lipschitz=...)")


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
            raise BadInput(f"PushForward(base, network): expected a Distribution and an nn.Module, got {got}")
        if lipschitz is not None and not 0 <= lipschitz < float("inf"):
            raise BadInput(f"PushForward(lipschitz={lipschitz!r}): expected a finite number, not negative")
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

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return g of independent samples of the base, (n, dimension) float64."""
        drawable(n, generator, "PushForward.sample")
        return self._image(self.base.sample(n, generator))

    def log_density(self, x: Tensor) -> Tensor:
        """Raise: the density of a generator's samples is unknown, and mostly there is none."""
        unknown = "the density of a push-forward is not known: use a Cube, a Sphere or a GaussianMixture"
        raise BadInput(f"PushForward.log_density: {unknown}")

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
        # g(z), (n, dimension) float64, on z's device
        like = next((p for p in self.network.parameters() if p.is_floating_point()), z)
        network = copy_on_same_weights(self.network) or self.network
        with measuring(network), torch.no_grad():
            try:
                parts = [network(part.to(like)) for part in torch.split(z, BATCH)]
            except RuntimeError as error:
                fails = f"the network fails on inputs of shape {(*z.shape,)} ({one_line(error)})"
                raise BadInput(fails, argument="network", call="PushForward") from error
        if any(not isinstance(y, Tensor) for y in parts) or sum(len(y) for y in parts) != len(z):
            raise BadInput(f"PushForward(network=...): for {len(z)} samples it must return a tensor with {len(z)} rows")
        x = torch.cat(parts).flatten(1).to(z)
        if not bool(torch.isfinite(x).all()):
            raise BadInput("some outputs are NaN or inf", argument="network", call="PushForward")
        return x
