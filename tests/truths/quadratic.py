"""A network with a quadratic risk, and its gradient and Hessian written out."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear(n: int = 200, noise: float = 1.0) -> tuple[nn.Module, Tensor, Tensor]:
    """A linear network under the half squared error: the risk is quadratic."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(6, 2).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 3, 6, dtype=torch.float64)
    y = x[:, :2] + noise * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return net, x, y


def half_squared(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (net(x) - y).square().sum(1).mean()


def gradient_and_hessian(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    parameters = list(net.parameters())
    grads = torch.autograd.grad(half_squared(net, x, y), parameters, create_graph=True)
    g = torch.cat([one.flatten() for one in grads])
    rows = [torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True) for one in g]
    H = [
        torch.cat([(torch.zeros_like(p) if r is None else r).flatten() for r, p in zip(row, parameters, strict=True)])
        for row in rows
    ]
    return g.detach(), torch.stack(H)
