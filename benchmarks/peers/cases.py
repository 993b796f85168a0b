"""The networks and data of every contestant, and accurate references made without any of them.

Data are ten clusters, x = c_y / 2 + noise. Networks are measured with initial weights, and after training on the data
by SGD with momentum 0.9, for some epochs or until the risk is below 0.01. Far below that, 1 - p is only rounding in
float32, and so is every contestant's answer. Everything is float32. References are computed in float64, except for
LeNet's derivatives, which are about ten times slower in torch's float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.timed import NETWORKS, OUTPUTS


@dataclass(frozen=True, eq=False)
class Case:
    """A network and its data; the loss is the mean cross-entropy."""

    name: str
    net: nn.Sequential
    x: Tensor
    y: Tensor
    smooth: bool  #: whether activations are curved, so that Hessian and Gauss-Newton traces differ

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the network's parameters."""
        return list(self.net.parameters())

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return f"{self.name}.pt"

    @property
    def convolves(self) -> bool:
        """Return whether the network has a convolution."""
        return any(isinstance(m, nn.Conv2d) for m in self.net)

    def double(self) -> Case:
        """Return the same case in float64."""
        return Case(self.name, copy.deepcopy(self.net).double(), self.x.double(), self.y, self.smooth)


def _drawn(name: str) -> tuple[nn.Module, Tensor]:
    timed = NETWORKS[name]
    return timed.build(), torch.randn(N_SAMPLES, *timed.shape)


def _with(activation: type[nn.Module]) -> Callable[[], tuple[nn.Module, Tensor]]:
    def build() -> tuple[nn.Module, Tensor]:
        net, x = _drawn("MLP 784-512-512-10")
        assert isinstance(net, nn.Sequential)
        return nn.Sequential(*[activation() if isinstance(m, nn.ReLU) else m for m in net]), x

    return build


N_SAMPLES = 2000
BUILDERS = {"MLP": partial(_drawn, "MLP 784-512-512-10"), "LeNet": partial(_drawn, "LeNet 3x32x32")}
BUILDERS |= {"tanh MLP": _with(nn.Tanh), "GELU MLP": _with(nn.GELU)}
EPOCHS = {"MLP": 40, "LeNet": 30, "tanh MLP": 40, "GELU MLP": 40}
DEEP_ENOUGH = 0.01


def build(kinds: list[str]) -> Iterator[Case]:
    """Yield each kind with initial weights, then trained; the smooth ones only trained."""
    for kind in kinds:
        torch.manual_seed(0)
        net, like = BUILDERS[kind]()
        centres, y = torch.randn(OUTPUTS, *like.shape[1:]), torch.randint(0, OUTPUTS, (N_SAMPLES,))
        x = 0.5 * centres[y] + torch.randn(like.shape)
        smooth = kind not in ("MLP", "LeNet")
        if not smooth:
            yield Case(f"{kind}, as drawn", copy.deepcopy(net), x, y, smooth)
        for rate in (0.05, 0.02, 0.01):
            trained = copy.deepcopy(net)
            if train(trained, x, y, EPOCHS[kind], rate) < 0.5:
                break
        yield Case(f"{kind}, trained", trained, x, y, smooth)


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> float:
    """Train the network and return its risk afterwards."""
    risk = math.inf
    optimiser = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
        with torch.no_grad():
            risk = float(nn.functional.cross_entropy(net(x), y))
        if risk < DEEP_ENOUGH:
            break
    optimiser.zero_grad()
    return risk


def save(case: Case, folder: Path) -> Path:
    path = folder / case.file
    torch.save(case, path)
    return path


def load(path: str | Path) -> Case:
    case: Case = torch.load(path, weights_only=False)
    return case


def top_eigenvalue(case: Case, most: int = 60, tol: float = 1e-3) -> float:
    """Return the largest eigenvalue: Lanczos with full reorthogonalisation, the larger of two random starts.

    It stops once the residual is below `tol` times the value; the error of the value is then of order tol^2.
    """
    case = case if case.convolves else case.double()
    gradient = torch.autograd.grad(
        nn.functional.cross_entropy(case.net(case.x), case.y), case.params, create_graph=True
    )
    sizes = [p.numel() for p in case.params]

    def product(v: Tensor) -> Tensor:
        parts = [part.view_as(p).to(p) for part, p in zip(v.split(sizes), case.params, strict=True)]
        out = torch.autograd.grad(gradient, case.params, parts, retain_graph=True)
        return torch.cat([part.flatten() for part in out]).double()

    return max(_lanczos(product, sum(sizes), seed, most, tol) for seed in (0, 1))


def _lanczos(product: Callable[[Tensor], Tensor], size: int, seed: int, most: int, tol: float) -> float:
    v = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis = torch.zeros(most + 1, size, dtype=torch.float64)
    basis[0] = v / v.norm()
    T = torch.zeros(most + 1, most + 1, dtype=torch.float64)
    value = math.nan
    for k in range(most):
        w = product(basis[k])
        T[k, k] = w @ basis[k]
        for _ in range(2):
            w = w - basis[: k + 1].T @ (basis[: k + 1] @ w)
        T[k, k + 1] = T[k + 1, k] = w.norm()
        values, vectors = torch.linalg.eigh(T[: k + 1, : k + 1])
        value = float(values[-1])
        if k > 4 and float(T[k, k + 1] * vectors[-1, -1].abs()) < tol * value:
            break
        basis[k + 1] = w / w.norm()
    return value


def loss_factor(f: Tensor) -> Tensor:
    """Return (n, N, N), rows s_k = sqrt(p_k) (e_k - p): the softmax loss's output Hessian is sum_k s_k s_k^T."""
    p = f.softmax(1)
    return p.sqrt()[:, :, None] * (torch.eye(f.shape[1], dtype=f.dtype) - p[:, None])


@cache
def hessian_trace(case: Case) -> float:
    """Return the Hessian's trace.

    For two smooth hidden layers in closed form, with the activations' curvature; else the Gauss-Newton trace, which is
    the same for ReLU networks.
    """
    return _ggn_trace(case) if case.convolves else _mlp_trace(case.double())


def _mlp_trace(case: Case) -> float:
    """Return the sum over layers of mean_i (||x_i||^2 + 1) sum_r d2 loss / dz_r^2, z being the layer's outputs."""
    first, act1, second, act2, last = case.net
    z1 = first(case.x).detach()
    a1, d1, c1 = _derivatives(act1, z1)
    z2 = second(a1).detach()
    a2, d2, c2 = _derivatives(act2, z2)
    f = last(a2).detach()
    slope = f.softmax(1) - nn.functional.one_hot(case.y, f.shape[1])
    S, W2, W3 = loss_factor(f), second.weight.detach(), last.weight.detach()
    back2 = slope @ W3
    s2, F2 = c2 * back2, (S @ W3) * d2[:, None]
    s1, F1 = c1 * ((back2 * d2) @ W2), F2 @ W2
    at_2 = F2.square().sum((1, 2)) + s2.sum(1)
    at_1 = (d1.square() * (F1.square().sum(1) + s2 @ W2.square())).sum(1) + s1.sum(1)
    per_sample = (case.x.square().sum(1) + 1) * at_1 + (a1.square().sum(1) + 1) * at_2
    return float((per_sample + (a2.square().sum(1) + 1) * S.square().sum((1, 2))).mean())


def _derivatives(act: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return value, slope and curvature of an activation."""
    z = z.clone().requires_grad_()
    a = act(z)
    (slope,) = torch.autograd.grad(a.sum(), z, create_graph=True)
    curvature = torch.autograd.grad(slope.sum(), z)[0] if slope.requires_grad else torch.zeros_like(z)
    return a.detach(), slope.detach(), curvature


def _ggn_trace(case: Case, chunk: int = 50) -> float:
    """Return the Gauss-Newton trace by one gradient for each sample and each factor."""
    params = {name: p.detach() for name, p in case.net.named_parameters()}

    def along(params: dict[str, Tensor], x: Tensor, s: Tensor) -> Tensor:
        return functional_call(case.net, params, x[None])[0] @ s

    def norm2(x: Tensor, s: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in grad(along)(params, x, s).values()]).sum()

    every = vmap(vmap(norm2, (None, 0)))
    total = 0.0
    for x in case.x.split(chunk):
        factor = loss_factor(case.net(x).detach().double()).to(x)
        total += float(every(x, factor).double().sum())
    return total / len(case.x)


def relative_flatness(case: Case) -> float:
    """Return the value for a ReLU network's last layer but one, in closed form: mean_i ||x_i||^2 tr(W^T H_z W)."""
    case = case.double()
    *below, layer, act, last = case.net
    a = nn.Sequential(*below)(case.x).detach()
    _, slope, _ = _derivatives(act, layer(a).detach())
    F = (loss_factor(case.net(case.x).detach()) @ last.weight.detach()) * slope[:, None]
    return float((a.square().sum(1) * (F @ layer.weight.detach()).square().sum((1, 2))).mean())
