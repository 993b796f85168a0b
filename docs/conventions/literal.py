"""Rival conventions that are no option of flatlens, written out: explicit Hessians and Jacobians, plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from conventions.networks import BATCHES, Network


def seeded() -> torch.Generator:
    """The random numbers of a row."""
    return torch.Generator().manual_seed(0)


def parts() -> list[slice]:
    """The samples of each batch."""
    edges = np.cumsum([0, *BATCHES]).tolist()
    return [slice(a, b) for a, b in pairwise(edges)]


@lru_cache
def batch_hessian(network: Network, batch: int) -> Tensor:
    """Of the mean loss over one batch, in all parameters: (P, P)."""
    part, values = parts()[batch], list(network.parameters.values())
    slope = torch.autograd.grad(network.losses(network.model(network.x[part]), part).mean(), values, create_graph=True)
    flat = torch.cat([s.flatten() for s in slope])
    rows = []
    for basis in torch.eye(len(flat), dtype=flat.dtype).split(256):
        bent = torch.autograd.grad(flat, values, basis, retain_graph=True, is_grads_batched=True)
        rows.append(torch.cat([b.flatten(1) for b in bent], 1))
    return torch.cat(rows)


@lru_cache
def hessian(network: Network, weights: tuple[float, ...] = BATCHES) -> Tensor:
    """Of the risk; with other weights of the batches, what other averages make of it."""
    return sum(w * batch_hessian(network, b) for b, w in enumerate(weights)) / sum(BATCHES)


def weight_hessian(network: Network, name: str) -> Tensor:
    """Of the risk in one parameter alone: (d m, d m)."""
    value = network.parameters[name]
    (slope,) = torch.autograd.grad(network.losses(network.model(network.x)).mean(), value, create_graph=True)
    basis = torch.eye(value.numel(), dtype=value.dtype).view(-1, *value.shape)
    return torch.autograd.grad(slope, value, basis, is_grads_batched=True)[0].flatten(1)


def top(H: Tensor) -> float:
    """Largest eigenvalue."""
    return float(eigsh(H.numpy(), k=1, which="LA", v0=np.ones(len(H)))[0][0])


def power_iteration(H: Tensor, generator: torch.Generator, most: int = 100, tol: float = 1e-3) -> float:
    """The eigenvalue of largest size, stopped when it changes by less than a share `tol`."""
    v, last = torch.randn(len(H), generator=generator, dtype=H.dtype), None
    for _ in range(most):
        v = v / v.norm()
        Hv = H @ v
        value = float(v @ Hv)
        if last is not None and abs(value - last) / (abs(last) + 1e-6) < tol:
            break
        v, last = Hv, value
    return value


def signs(size: int, generator: torch.Generator) -> Tensor:
    """A Rademacher vector."""
    return torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1


def hutchinson(H: Tensor, generator: torch.Generator, most: int = 100, tol: float = 1e-3) -> float:
    """The trace by random signs, stopped when the running mean changes by less than a share `tol`."""
    seen, last = [], 0.0
    for _ in range(most):
        v = signs(len(H), generator)
        seen.append(float(v @ (H @ v)))
        mean = sum(seen) / len(seen)
        if abs(mean - last) / (abs(last) + 1e-6) < tol:
            break
        last = mean
    return mean


@lru_cache
def slopes(network: Network) -> Tensor:
    """The gradient of each sample's loss: (n, P)."""
    losses = network.losses(network.model(network.x))
    basis = torch.eye(len(losses), dtype=losses.dtype)
    each = torch.autograd.grad(losses, list(network.parameters.values()), basis, is_grads_batched=True)
    return torch.cat([g.flatten(1) for g in each], 1)


@lru_cache
def input_jacobian(network: Network) -> Tensor:
    """df/dx of each sample: (n, N, M)."""
    x = network.x.clone().requires_grad_()
    f = network.model(x)
    return torch.stack([torch.autograd.grad(f[:, k].sum(), x, retain_graph=True)[0] for k in range(f.shape[1])], 1)


def mean_of_batch_means(values: Tensor) -> float:
    """Each batch counts alike, whatever its size."""
    return sum(float(values[part].mean()) for part in parts()) / len(BATCHES)


def product(values: Sequence[float]) -> float:
    """Of all."""
    return float(np.prod(values))


def searched(network: Network, box: float = 0.1, steps: int = 30) -> Tensor:
    """‖f(x + d) - f(x)‖² / ‖d‖ of each sample, d found by Adam in a box of inputs."""
    x = network.x
    d = (box * torch.randn(x.shape, generator=seeded(), dtype=x.dtype)).requires_grad_()
    optimiser, base = torch.optim.Adam([d], lr=0.1), network.model(x).detach()
    for _ in range(steps):
        d.data.clamp_(-box, box)
        change = (network.model(x + d) - base).square().sum(1)
        torch.autograd.backward(-change.sum(), inputs=[d])
        optimiser.step()
        optimiser.zero_grad()
    d.data.clamp_(-box, box)
    return change.detach() / d.detach().norm(dim=1)
