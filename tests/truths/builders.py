"""What many tests are built from: seeded random numbers, dense networks in float64, and lenses on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from flatlens import Estimate, Lens, Problem, measure, measures

NET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

x = torch.linspace(-1, 1, 80).reshape(20, 4).sin().double()
def samples(): return x, torch.arange(20) % 3
"""
"""The text of a user's file: a small ReLU network, and samples."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def symmetric(spectrum: Tensor, seed: int = 0) -> Tensor:
    """Return a random symmetric matrix with these eigenvalues."""
    Q = torch.linalg.qr(normal(len(spectrum), len(spectrum), seed=seed)).Q
    A = Q * spectrum.to(torch.float64) @ Q.T
    return (A + A.T) / 2


def mlp(widths: Sequence[int], act: Callable[[], nn.Module], seed: int = 0) -> nn.Sequential:
    """Return a dense network with torch's initial weights; `act` makes the activation between two layers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        modules = [module for m, d in pairwise(widths) for module in (nn.Linear(m, d), act())]
    return nn.Sequential(*modules[:-1]).double()


def redrawn(net: nn.Module, seed: int = 0, scale: float = 1.0) -> nn.Module:
    """Return the network itself, every parameter drawn anew from a normal distribution."""
    generator = seeded(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net


def chain(widths: Sequence[int], seed: int, act: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    """Return a dense network with normal weights of standard deviation 1 / 1.5."""
    modules = [
        module for m, d in pairwise(widths) for module in (nn.Linear(m, d, bias=bias, dtype=torch.float64), act())
    ]
    net = nn.Sequential(*modules[:-1])
    generator = seeded(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 1.5)
    return net


def lens_on(net: nn.Module, x: Tensor, loss: str = "half_squared_error", **more) -> Lens:
    """Return a lens on the network, with targets 0 (class 0 for cross-entropy)."""
    with torch.no_grad():
        f = net(x)
    y = torch.zeros(len(f), dtype=torch.long) if loss == "cross_entropy" else torch.zeros_like(f)
    return Lens(Problem(net, loss, (x, y), **more))


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each sample."""
    return nn.functional.cross_entropy(f, y, reduction="none")


def half_squared(f: Tensor, y: Tensor) -> Tensor:
    """Return half the squared distance of each sample's outputs from its class."""
    return 0.5 * (f - nn.functional.one_hot(y, f.shape[1]).to(f)).square().sum(1)


def estimated(problem: Problem, key: str, part: str = "", seed: int = 0) -> Estimate:
    """Return the estimate of one measure, or of a part of it, with probes of a seed."""
    one = measures.named(key)[0]
    return measure(Lens(problem), one, generator=seeded(seed))[f"{one.key}.{part}" if part else one.key]


def trace_of_hessian(net: nn.Module, risk: Tensor) -> float:
    """Return the trace of the risk's Hessian in all parameters, by an explicit double backward for each direction."""
    parameters = list(net.parameters())
    slopes = torch.autograd.grad(risk, parameters, create_graph=True)
    return sum(
        float(torch.autograd.grad(slope.flatten()[k], p, retain_graph=True)[0].flatten()[k])
        for slope, p in zip(slopes, parameters, strict=True)
        for k in range(p.numel())
    )


MIB = 2**20


class Gauge:
    """A machine on which work takes 10 MiB, and 2 MiB for each sample of a chunk."""

    def __init__(self, left: float) -> None:
        self.room, self.most = int(left), 0

    def used(self):
        return 50 * MIB

    def begin(self):
        self.most = 0
        return True

    def peak(self):
        return self.most

    def left(self):
        return self.room


def lens_in_chunks() -> Lens:
    """Return a lens whose memory takes a part of its 200 samples at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return Lens(Problem(net, "cross_entropy", (torch.randn(200, 4), torch.arange(200) % 3), memory="100KB"))
