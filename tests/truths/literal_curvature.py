"""Second derivatives of the risk as explicit matrices, and what is read off them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from builders import cross_entropy, half_squared
from literal import LINEAR
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LossOf = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,)


def mse(f: Tensor, y: Tensor) -> Tensor:
    return (f - F.one_hot(y, f.shape[1]).to(f)).square().mean(1)


LOSSES: dict[str, LossOf] = {"cross_entropy": cross_entropy, "half_squared_error": half_squared, "mse": mse}


@contextmanager
def twice_differentiable() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def slices(net: nn.Module) -> dict[str, slice]:
    """Where each parameter lies in the flat vector of all."""
    found, start = {}, 0
    for name, p in net.named_parameters():
        found[name] = slice(start, start + p.numel())
        start += p.numel()
    return found


def places(net: nn.Module, names: list[str]) -> Tensor:
    """Positions in the flat vector of some parameters, in the network's order."""
    return torch.cat([torch.arange(at.start, at.stop) for name, at in slices(net).items() if name in names])


def flat_parameters(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def with_parameters(net: nn.Module, flat: Tensor, x: Tensor) -> Tensor:
    """Outputs of the network with other parameters."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    named = {name: flat[at].reshape(shapes[name]) for name, at in slices(net).items()}
    return functional_call(net, named, (x,))


def hessian_of(net: nn.Module, risk: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Hessian of risk(outputs on x) in all parameters, (P, P)."""
    with twice_differentiable():
        return hessian(lambda flat: risk(with_parameters(net, flat, x.clone())), flat_parameters(net))


def jacobian_of(net: nn.Module, x: Tensor) -> Tensor:
    """df/dtheta in all parameters, (n, N, P)."""
    with twice_differentiable():
        return jacobian(lambda flat: with_parameters(net, flat, x.clone()), flat_parameters(net))


def output_derivatives(loss: LossOf, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dl_i/df (n, N) and d2 l_i/df2 (n, N, N)."""

    def one(i: int) -> Callable[[Tensor], Tensor]:
        return lambda o: loss(o[None], y[i : i + 1])[0]

    return (
        torch.stack([jacobian(one(i), f[i]) for i in range(len(f))]),
        torch.stack([hessian(one(i), f[i]) for i in range(len(f))]),
    )


def operator_matrix(module: nn.Module, size: tuple[int, ...]) -> Tensor:
    """The layer as a matrix on one flattened input: columns layer(e_j) - layer(0)."""
    x = torch.zeros(size, dtype=torch.float64).numel()
    units = torch.eye(x, dtype=torch.float64).reshape(x, *size)
    with torch.no_grad():
        return (module(units) - module(torch.zeros(1, *size, dtype=torch.float64))).flatten(1).T


def block_matrix(module: nn.Module) -> Tensor:
    """The weight as one matrix, block-diagonal where there are groups."""
    groups = getattr(module, "groups", 1)
    return torch.block_diag(*module.weight.detach().flatten(1).chunk(groups))


def norm2(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A, 2))


def largest(A: Tensor) -> float:
    return float(torch.linalg.eigvalsh(A)[-1])


def bare_inputs(net: nn.Module, name: str, x: Tensor) -> Tensor:
    """What a projection of an nn.MultiheadAttention reads, (n, M): its input, or its output without the projection."""
    owner = name.removesuffix(".out_proj.weight").removesuffix(".in_proj_weight")
    attention, rows = net.get_submodule(owner), []
    for i in range(len(x)):
        seen: list[Tensor] = []
        handle = attention.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach()))
        net(x[i : i + 1].clone())
        handle.remove()
        if name.endswith("out_proj.weight"):
            plain = copy.deepcopy(attention)
            with torch.no_grad():
                plain.out_proj.weight.copy_(torch.eye(len(plain.out_proj.weight)))
                plain.out_proj.bias.zero_()
                seen[0] = plain(seen[0], seen[0], seen[0])[0]
        rows.append(seen[0].flatten())
    return torch.stack(rows)


def call_inputs(net: nn.Module, name: str, x: Tensor) -> list[Tensor]:
    """What one module reads at each of its calls, sample by sample, (n, M) each."""
    module, rows = net.get_submodule(name), []
    for i in range(len(x)):
        seen: list[Tensor] = []
        handle = module.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].detach().clone().flatten())
        )
        with torch.no_grad():
            net(x[i : i + 1].clone())
        handle.remove()
        rows.append(seen)
    return [torch.stack(call) for call in zip(*rows, strict=True)]


def jacobian_above(net: nn.Module, name: str, x: Tensor) -> Tensor:
    """df/dz from the output of a module called once up, (n, N, size)."""
    module, per_sample = net.get_submodule(name), []
    for i in range(len(x)):
        sizes: list[torch.Size] = []
        handle = module.register_forward_hook(lambda m, a, z, sizes=sizes: sizes.append(z.shape))
        with torch.no_grad():
            net(x[i : i + 1].clone())
        handle.remove()

        def nudged(step: Tensor, i: int = i, size: torch.Size = sizes[0]) -> Tensor:
            handle = module.register_forward_hook(lambda m, a, z: z + step.reshape(size))
            try:
                return net(x[i : i + 1].clone())[0]
            finally:
                handle.remove()

        per_sample.append(jacobian(nudged, x.new_zeros(sizes[0].numel())))
    return torch.stack(per_sample)


def linear_layers(net: nn.Module) -> list[str]:
    """Linear layers that are called as modules."""
    return [n for n, m in net.named_modules() if isinstance(m, LINEAR) and "self_attn" not in n]


def along_columns(H: Tensor, module: nn.Module) -> Tensor:
    """w_j^T H_jj w_j for every column j of each group's block; H of the weight, (size, size)."""
    groups = getattr(module, "groups", 1)
    W = module.weight.detach().flatten(1)
    d, m = W.shape
    blocks, rows = H.reshape(d, m, d, m), d // groups
    found = []
    for g in range(groups):
        mine = slice(g * rows, (g + 1) * rows)
        found += [W[mine, j] @ blocks[mine, j, mine, j] @ W[mine, j] for j in range(m)]
    return torch.stack(found)


def row_blocks(H: Tensor, module: nn.Module) -> list[Tensor]:
    """H_ss of each row s of the weight."""
    d = len(module.weight)
    blocks = H.reshape(d, -1, d, H.shape[0] // d)
    return [blocks[s, :, s, :] for s in range(d)]


def least(h: Tensor, w: Tensor) -> float:
    """inf of sum_ij h_ij u_i v_j + w_ij / (u_i v_j) over positive u, v: by scipy, in their logarithms."""
    d, m = h.shape
    H, Q = h.numpy(), w.numpy()
    scale = float(np.sqrt(H.max() * Q.max()))
    if scale == 0:
        return 0.0

    def terms(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = z[:d, None] + z[None, d:]
        return H * np.exp(t) / scale, Q * np.exp(-t) / scale

    def value(z: np.ndarray) -> float:
        p, q = terms(z)
        return float(p.sum() + q.sum())

    def gradient(z: np.ndarray) -> np.ndarray:
        p, q = terms(z)
        return np.concatenate([(p - q).sum(1), (p - q).sum(0)])

    def second(z: np.ndarray) -> np.ndarray:
        p, q = terms(z)
        k = p + q
        return np.block([[np.diag(k.sum(1)), k], [k.T, np.diag(k.sum(0))]])

    start = np.zeros(d + m) + 0.25 * np.log(Q.sum() / H.sum())
    found = minimize(value, start, jac=gradient, hess=second, method="trust-exact", options={"gtol": 1e-10})
    return float(found.fun) * scale
