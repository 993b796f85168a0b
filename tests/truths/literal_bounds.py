"""Both sides of the bounds of dense chains, written out in float64 through torch.func."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap


@dataclass(frozen=True, eq=False)
class Seen:
    """One linear layer of a chain, per sample."""

    x: Tensor  #: (n, m)
    W: Tensor  #: (d, m)
    J: Tensor  #: df/dz, (n, N, d)
    dx: Tensor  #: df/dx, (n, N, m)
    dw: Tensor  #: df/dW, (n, N, d, m)

    @property
    def norm(self) -> Tensor:
        return self.x.norm(dim=1)

    @property
    def spectral(self) -> Tensor:
        return torch.linalg.matrix_norm(self.dx, 2)

    @property
    def frobenius(self) -> Tensor:
        return self.dx.flatten(1).norm(dim=1)

    @property
    def slope(self) -> Tensor:
        return self.dw.flatten(1).norm(dim=1)

    @property
    def W2(self) -> Tensor:
        return torch.linalg.matrix_norm(self.W, 2)

    @property
    def volume(self) -> Tensor:
        return torch.linalg.svdvals(self.dx)[:, : self.dx.shape[1]].prod(1)


def layers(net: nn.Sequential, x: Tensor) -> dict[str, Seen]:
    """By name, in order."""
    found = {}
    for k, module in enumerate(net):
        if isinstance(module, nn.Linear):
            phi = net[:k](x).detach()
            W = module.weight.detach()

            def behind(W: Tensor, one: Tensor, k: int = k) -> Tensor:
                return net[k + 1 :](functional_call(net[k], {"weight": W}, (one,)))

            found[str(k)] = Seen(
                phi,
                W,
                vmap(jacrev(net[k + 1 :]))(net[k](phi).detach()).detach(),
                vmap(jacrev(net[k:]))(phi).detach(),
                vmap(jacrev(behind), (None, 0))(W, phi).detach(),
            )
    return found


def slopes(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """df/dtheta of every parameter, (n, N, size)."""
    named = {name: p.detach() for name, p in net.named_parameters()}
    J = vmap(jacrev(lambda values, one: functional_call(net, values, (one,))), (None, 0))(named, x)
    return {name: block.flatten(2).detach() for name, block in J.items()}


def sharpness(net: nn.Module, x: Tensor) -> Tensor:
    """||df/dtheta||_F^2 per sample."""
    return sum(block.square().sum((1, 2)) for block in slopes(net, x).values())


def adaptive(net: nn.Module, x: Tensor) -> Tensor:
    """sum_j theta_j^2 ||df/dtheta_j||^2 per sample."""
    values = {name: p.detach().flatten() for name, p in net.named_parameters()}
    return sum((block.square().sum(1) * values[name] ** 2).sum(1) for name, block in slopes(net, x).items())
