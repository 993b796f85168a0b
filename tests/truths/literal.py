"""The definitions themselves, written out in float64: explicit Jacobians, explicit Hessians, loops.

Nothing here is shared with the library but the outputs' second derivative, which `test_losses` checks by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def matrices(net: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """(parameter, a layer with this weight) of every matrix that multiplies features, by its row, in order.

    The linear layers that are called as modules, and attention's projections, which are bare parameters to the network.
    """
    found = {}
    for name, p in net.named_parameters():
        owner, _, last = name.rpartition(".")
        module = net.get_submodule(owner)
        if isinstance(module, nn.MultiheadAttention) or (isinstance(module, LINEAR) and "self_attn" in owner):
            if p.ndim == 2:
                held = nn.Linear(p.shape[1], p.shape[0], bias=False)
                held.weight = p
                found[name] = (name, held)
        elif isinstance(module, LINEAR) and last == "weight":
            found[owner] = (name, module)
    return found


def risk(net: nn.Module, loss, x: Tensor, y: Tensor):
    """parameters by name -> mean loss."""
    return lambda named: loss(functional_call(net, named, (x,)), y).mean()


def parameter_jacobian(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """df/dtheta for each parameter, (n, N, size)."""
    named = {name: p.detach() for name, p in net.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        J = jacrev(lambda values: functional_call(net, values, (x,)))(named)
    return {name: block.flatten(2) for name, block in J.items()}


def input_jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """df/dx to the network's input, (n, N, M), one sample at a time."""
    rows = [torch.autograd.functional.jacobian(lambda one: net(one)[0], x[i : i + 1]) for i in range(len(x))]
    return torch.stack([row.flatten(1) for row in rows])


def call_jacobians(net: nn.Module, name: str, x: Tensor) -> list[Tensor]:
    """df/dx^l through each call of one module, (n, N, M) per call: its input alone is nudged, inside the forward
    pass."""
    module = net.get_submodule(name)
    result = []
    for call in range(count_calls(net, module, x)):
        per_sample = []
        for i in range(len(x)):

            def nudged(step: Tensor, i: int = i, call: int = call) -> Tensor:
                seen = 0

                def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                    nonlocal seen
                    seen += 1
                    return (args[0] + step.reshape(args[0].shape),) if seen == call + 1 else args

                handle = module.register_forward_pre_hook(hook)
                try:
                    return net(x[i : i + 1])[0]
                finally:
                    handle.remove()

            size = input_sizes(net, module, x[i : i + 1])[call]
            per_sample.append(torch.autograd.functional.jacobian(nudged, x.new_zeros(size)))
        result.append(torch.stack(per_sample))
    return result


def input_sizes(net: nn.Module, module: nn.Module, x: Tensor) -> list[int]:
    """Entries of the module's input at each of its calls."""
    sizes: list[int] = []
    handle = module.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    net(x)
    handle.remove()
    return sizes


def count_calls(net: nn.Module, module: nn.Module, x: Tensor) -> int:
    """How often a forward pass calls the module."""
    return len(input_sizes(net, module, x[:1]))


def weight_hessian(net: nn.Module, loss, x: Tensor, y: Tensor, name: str) -> Tensor:
    """The risk's Hessian in one tensor, (size, size)."""
    named = {key: p.detach() for key, p in net.named_parameters()}
    value = named[name]

    def along(flat: Tensor) -> Tensor:
        return risk(net, loss, x, y)({**named, name: flat.reshape(value.shape)})

    with sdpa_kernel(SDPBackend.MATH):  # torch differentiates the others once
        return hessian(along, value.flatten())


def full_hessian_trace(net: nn.Module, loss, x: Tensor, y: Tensor) -> float:
    """Tr H over all parameters: the trace of each tensor's diagonal block."""
    return sum(float(weight_hessian(net, loss, x, y, name).trace()) for name, _ in net.named_parameters())


def definition_3(H: Tensor, weight: Tensor, groups: int) -> float:
    """sum_{s,s'} <w_s, w_s'> Tr H_{s,s'}; rows of different groups are orthogonal, as in the matrix they form."""
    d = weight.shape[0]
    W = weight.detach().reshape(d, -1)
    m = W.shape[1]
    blocks = H.reshape(d, m, d, m)
    total = 0.0
    for s in range(d):
        for t in range(d):
            if s // (d // groups) == t // (d // groups):
                total += float(W[s] @ W[t]) * float(blocks[s, :, t, :].trace())
    return total


def gauss_newton(J: Tensor, C: Tensor) -> Tensor:
    """mean_i J_i^T C_i J_i, (size, size)."""
    return torch.einsum("nka,nkl,nlb->ab", J, C, J) / len(J)
