"""Dense chains with random weights, and lenses on them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from flatlens import Lens, Problem


def lens_on(net: nn.Module, x: Tensor, loss: str = "half_squared_error", **more) -> Lens:
    with torch.no_grad():
        f = net(x)
    y = torch.zeros(len(f), dtype=torch.long) if loss == "cross_entropy" else torch.zeros_like(f)
    return Lens(Problem(net, loss, (x, y), **more))


def chain(widths: list[int], seed: int, act: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for m, d in pairwise(widths):
        modules += [nn.Linear(m, d, bias=bias, dtype=torch.float64), act()]
    net = nn.Sequential(*modules[:-1])
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 1.5)
    return net


def data(n: int, m: int, seed: int = 0) -> Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
